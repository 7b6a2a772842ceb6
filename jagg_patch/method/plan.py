"""Which visited steps form groups, which of them are knots, and the weights α between two knots."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from ..config import AUTO
from ..errors import JaggError
from .placement import best_knots

START_FRAC = 0.6  # of frac=auto, the published setting

# Forwards of a group whose intermediate ones are skipped: both endpoints at its first step, or the last one twice, without a
# graph at the first step and with one in its own turn.
ENDPOINTS_FIRST, LOOK_AHEAD = 2, 3


class Steps(NamedTuple):
    """The denoising steps of one trained sample."""

    sampled: float  # forwards that the rollout takes for it; more than its own where only some samples are trained
    trainable: int  # how many could be trained
    visited: int  # how many are


@dataclass(frozen=True)
class Group(Sequence):
    """Visited steps that are trained together: the positions from the first of its `knots` to the last, as a `range` has them.

    knots: ascending positions among the visited steps, whose backward passes are their own. The others' upstream gradients are
        split onto the two around them. The published group has two; with one it is an exact step.
    """

    knots: tuple

    @property
    def positions(self):
        return range(self.knots[0], self.knots[-1] + 1)

    @property
    def gaps(self):
        """From each knot to the next, both included: a list of ranges."""
        return [range(one, next_ + 1) for one, next_ in pairwise(self.knots)]

    @property
    def start(self):
        return self.positions.start

    @property
    def stop(self):
        return self.positions.stop

    def __len__(self):
        return len(self.positions)

    def __getitem__(self, index):
        return self.positions[index]


class Place(NamedTuple):
    """Where a visited step stands among the knots, which are the visited steps with a backward pass of their own.

    position: which of a sample's visited steps it is.
    is_knot: an exact step, or a knot of its group; the steps between two run without a graph.
    before, after: positions of the nearest knots of its group on either side, between which upstream gradients are split; None
        where the group has none there. An exact step is a knot alone.
    """

    position: int
    is_knot: bool = True
    before: int | None = None
    after: int | None = None

    @property
    def is_exact(self):
        return self.is_knot and self.before is None and self.after is None

    @property
    def opens(self):
        """Whether it is a knot with steps after it in its group, for which its backward pass waits."""
        return self.is_knot and self.after is not None

    @property
    def closes(self):
        """Whether it is a knot with steps before it in its group, whose gradients it has got a share of."""
        return self.is_knot and self.before is not None

    @property
    def is_first(self):
        """Of its group."""
        return self.opens and not self.closes

    @property
    def is_last(self):
        return self.closes and not self.opens


def plan_groups(n_steps, config, sigmas=None, sizes=None):
    """Split the routed steps of a trajectory into groups.

    Args:
        n_steps: how many steps of the trajectory are visited (trained), k.
        config: a `JaggConfig`; `enabled`, `frac`, `group_size` and `cuts` count, or `knots` and `knots_at` in their place.
        sigmas, sizes: of each visited step, as `best_knots` takes them, where `knots` are to be placed; a run knows them at its
            first update. Without, noise levels are taken to fall evenly.

    Returns:
        A tuple of `Group`s, in trajectory order. Positions in no group are exact.
        The first `r = int(frac * k)` steps are routed and split as evenly as possible, larger groups first, into
        `max(1, floor(r / group_size + 1/2))` groups; with r < 2 there are none. A group of one (group_size 2, odd r) is
        an exact step. At each of `cuts` a new group begins: what lies between two of them is split by itself. Under `frac=auto`
        all steps are split so, and the groups are those routed before the first probe. A set of knots comes apart into the
        groups of `groups_of`; as many knots as steps leave none.

    Raises:
        JaggError: `knots_at` names a step that isn't visited, or not the last one.

    The rule uses count and position only, so all ranks take the same decisions.
    """
    if not config.enabled:
        return ()
    if config.has_knots:
        return groups_of(_knots(n_steps, config, sigmas, sizes))
    if config.frac == AUTO:
        return whole_groups(n_steps, config)[: groups_at_start(n_steps, config)]
    return whole_groups(int(config.frac * n_steps + 1e-9), config)


def whole_groups(n_steps, config, start=0):
    """Groups of all of `n_steps` positions from `start` on, as `plan_groups` splits them; `group_size` and `cuts` count."""
    stop = start + n_steps
    bounds = [start, *(cut for cut in config.cuts if start < cut < stop), stop]
    return tuple(group for one, next_ in pairwise(bounds) for group in _split(one, next_, config.group_size))


def _split(start, stop, group_size):
    n_steps = stop - start
    if n_steps < 2:
        return ()
    n_groups = max(1, math.floor(n_steps / group_size + 0.5))
    size, n_larger = divmod(n_steps, n_groups)
    groups = []
    for number in range(n_groups):
        stop = start + size + (number < n_larger)
        groups.append(Group(tuple(sorted({start, stop - 1}))))
        start = stop
    return groups


def _knots(n_steps, config, sigmas, sizes):
    if n_steps < 2:
        return tuple(range(n_steps))
    if config.knots_at:
        if config.knots_at[-1] != n_steps - 1:
            raise JaggError(
                f"JAGG_KNOTS_AT ends with {config.knots_at[-1]}, and the last of the {n_steps} visited steps is {n_steps - 1}\n"
                f"name that one, counted from 0 among the visited steps, or set JAGG_KNOTS={len(config.knots_at)}"
            )
        return config.knots_at
    n_knots = knots_at_start(n_steps) if config.knots == AUTO else config.knots
    return best_knots(min(n_knots, n_steps), sigmas or range(n_steps, 0, -1), sizes)


def knots_at_start(n_steps):
    """How many there are under `knots=auto` before the first probes: a third of the steps."""
    return max(2, math.floor(n_steps / 3 + 0.5))


def groups_of(knots):
    """The `Group`s of a set of knots, ascending: it comes apart between neighbours, where nothing is left to split."""
    groups, own = [], []
    for knot, next_ in zip(knots, [*knots[1:], None], strict=True):
        own.append(knot)
        if next_ is None or next_ == knot + 1:
            groups.append(Group(tuple(own)))
            own = []
    return tuple(group for group in groups if len(group) > 1)


def with_exact_groups(n_steps, groups):
    """`groups`, and such of knots alone for the steps that they leave out; a step alone goes to its neighbours' group."""
    found = [place.position for place in places(n_steps, groups) if place.is_exact]
    runs = [Group(tuple(run)) for run in _runs(found)]  # those of one step are in there
    whole = []
    for group in sorted((*(group for group in groups if len(group) > 1), *runs), key=lambda group: group.start):
        if whole and 1 in (len(group), len(whole[-1])):
            group = Group(whole.pop().knots + group.knots)
        whole.append(group)
    return tuple(whole)


def _runs(positions):
    """Of consecutive ones."""
    runs = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs


def passes(group, holds_two_graphs):
    """`{position: knots}`: in the backward of which step's loss the passes of which of the `group`'s knots run.

    A knot has its whole gradient at the step before the next knot; the last one at its own. Alone a pass runs then, so that one
    graph is alive at a time; two by two, they run when the second of them has its gradient.
    """
    ready = [next_ - 1 for _, next_ in pairwise(group.knots)] + [group.knots[-1]]
    at_a_time = 2 if holds_two_graphs else 1
    starts = range(0, len(ready), at_a_time)
    together = [(ready[start : start + at_a_time], group.knots[start : start + at_a_time]) for start in starts]
    return {positions[-1]: knots for positions, knots in together}


def are_together(gap, ready):
    """Whether the passes of the knots at both ends of a gap run in the same backward; `ready` as `passes` returns it."""
    return any(gap[0] in knots and gap[-1] in knots for knots in ready.values())


def forwards_a_group(skips, schedule):
    """How many a group takes at most, for predictions; None if none are skipped.

    Under `auto` that of its first updates. Under `joint`, a sample's last group takes one more where DDP syncs its gradients.
    """
    if not skips:
        return None
    return ENDPOINTS_FIRST if schedule == "joint" else LOOK_AHEAD


def least_forwards(schedule):
    """How many a group may come to take under `schedule`: only larger ones can skip any."""
    return LOOK_AHEAD if schedule == "sequential" else ENDPOINTS_FIRST


def groups_at_start(n_steps, config):
    """How many of `whole_groups` are routed at first under `frac=auto`: 0.6 of them, rounded."""
    return math.floor(START_FRAC * len(whole_groups(n_steps, config)) + 0.5)


def places(n_steps, groups):
    """The `Place` of each of `n_steps` positions under `groups`, as `plan_groups` returns them."""
    found = [Place(position) for position in range(n_steps)]
    for group in groups:
        for knot, before, after in zip(group.knots, [None, *group.knots], [*group.knots[1:], None], strict=False):
            found[knot] = Place(knot, before=before, after=after)
        for before, *between, after in group.gaps:
            for position in between:
                found[position] = Place(position, is_knot=False, before=before, after=after)
    return tuple(found)


def knots_of(n_steps, groups):
    """The positions with a backward pass of their own, exact steps included, under `groups`."""
    return tuple(place.position for place in places(n_steps, groups) if place.is_knot)


def alphas(timesteps):
    """Interpolation weights `α_j = (t_0 - t_j) / (t_0 - t_{W-1})` of a group.

    Args:
        timesteps: `[W]`, or `[W, B]` when the samples of a batch have timesteps of their own; any unit that is affine in t.

    Returns:
        α of the same shape, 0 at the first step and 1 at the last; float64 for float64 timesteps, else float32.

    Raises:
        JaggError: of three steps or more, a sample's two endpoints share a timestep, so that α isn't defined, or don't have
            the others between them, so that α would leave [0, 1].
    """
    t = timesteps.to(torch.promote_types(timesteps.dtype, torch.float32))
    if len(t) == 2:
        return torch.stack([torch.zeros_like(t[0]), torch.ones_like(t[0])])
    span = t[0] - t[-1]
    if (span == 0).any():
        raise JaggError(
            f"the endpoints of a group share a timestep ({timesteps[0].tolist()} and {timesteps[-1].tolist()})\n"
            "interpolation in t isn't defined there: use fewer sampling steps, another shift, or run with JAGG_ENABLED=0"
        )
    weights = (t[0] - t) / span
    if not ((0 <= weights) & (weights <= 1)).all():
        raise JaggError(
            f"a group's timesteps aren't all between those of its endpoints: {timesteps.tolist()}\n"
            "interpolation in t isn't one there: give the steps in the order of the trajectory, or run with JAGG_ENABLED=0"
        )
    return weights
