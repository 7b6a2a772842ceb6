"""Which visited steps form groups, which of them are knots, and the weights α between two knots."""

import math
from itertools import pairwise
from typing import NamedTuple

import torch

from ..config import AUTO
from ..errors import JaggError

START_FRAC = 0.6  # of frac=auto, the published setting

# Forwards of a group whose intermediate ones are skipped: both endpoints at its first step, or the last one twice, without a
# graph at the first step and with one in its own turn.
ENDPOINTS_FIRST, LOOK_AHEAD = 2, 3


class Steps(NamedTuple):
    """The denoising steps of one trained sample."""

    sampled: float  # forwards that the rollout takes for it; more than its own where only some samples are trained
    trainable: int  # how many could be trained
    visited: int  # how many are


class Place(NamedTuple):
    """Where a visited step stands among the knots, which are the visited steps with a backward pass of their own.

    position: which of a sample's visited steps it is.
    is_knot: an exact step, a group's first step or its last; the steps between a group's two run without a graph.
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
        """Whether its backward pass waits for steps after it."""
        return self.is_knot and self.after is not None

    @property
    def closes(self):
        return self.is_knot and self.before is not None


def plan_groups(n_steps, config):
    """Split the routed steps of a trajectory into groups.

    Args:
        n_steps: how many steps of the trajectory are visited (trained), k.
        config: a `JaggConfig`; `enabled`, `frac`, `group_size` and `cuts` count.

    Returns:
        A tuple of `range`s over positions among the visited steps, in trajectory order. Positions in no group are exact.
        The first `r = int(frac * k)` steps are routed and split as evenly as possible, larger groups first, into
        `max(1, floor(r / group_size + 1/2))` groups; with r < 2 there are none. A group of one (group_size 2, odd r) is
        an exact step. At each of `cuts` a new group begins: what lies between two of them is split by itself. Under `frac=auto`
        all steps are split so, and the groups are those routed before the first probe.

    The rule uses count and position only, so all ranks take the same decisions.
    """
    if not config.enabled:
        return ()
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
        groups.append(range(start, stop))
        start = stop
    return groups


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
    """The `Place` of each of `n_steps` positions under `groups` (as `plan_groups` returns them): a group is two knots."""
    found = [Place(position) for position in range(n_steps)]
    for group in groups:
        if len(group) > 1:
            first, *between, last = group
            found[first] = Place(first, after=last)
            found[last] = Place(last, before=first)
            for position in between:
                found[position] = Place(position, is_knot=False, before=first, after=last)
    return tuple(found)


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
            "interpolation in t isn't defined there: use fewer sampling steps, another shift, or group nothing (frac 0)"
        )
    weights = (t[0] - t) / span
    if not ((0 <= weights) & (weights <= 1)).all():
        raise JaggError(
            f"a group's timesteps aren't all between those of its endpoints: {timesteps.tolist()}\n"
            "interpolation in t isn't one there: give the steps in the order of the trajectory, or group nothing (frac 0)"
        )
    return weights
