"""Where the knots of the next update are, and, under `knots=auto`, how many.

By `method/placement.py`: from the noise levels alone before the first update, from the measured upstream gradients as well after
it. At an update's end all ranks exchange what they have measured, so that they place alike.
"""

import math
from functools import partial
from itertools import pairwise

from ..config import AUTO
from ..errors import JaggError
from ..loop.watcher import Watcher
from ..method.placement import best_knots, cost_of, expected_sigmas
from ..method.plan import groups_of, knots_at_start, knots_of, plan_groups
from ..ranks import gathered

SLACK = 0.8  # another set takes the place of the present one where the rule has its error below this part of that one's
NEWEST = 0.3  # what an update's sizes count among those of the updates before
MARGIN = 0.25  # of what the target leaves to 1: how much better one knot less must be, to do


class Placement(Watcher):
    """The groups of a trajectory under `knots` or `knots_at`, for an `Order`; `say` is called on every rank with what changes.

    Raises `JaggError` under `knots=auto` without a probe.
    """

    def __init__(self, config, say=lambda line: None, probe=None):
        self.is_auto = config.enabled and config.knots == AUTO
        if self.is_auto and not config.probe_every:
            raise JaggError("knots=auto follows the probe, and probe_every is 0\nset JAGG_PROBE_EVERY too, to 10 say")
        self._config, self._say, self._probe = config, say, probe
        self._places = config.enabled and not config.knots_at and config.knots != 2  # which have their places
        self._n_knots = self._wish = None  # under auto; what the probe before would have had
        self._knots = ()  # of the present update; () before the first one
        self._sigmas = self._sizes = None  # of each visited step, the same on every rank
        self.forget(None)

    def forget(self, session):
        self._seen = None  # this rank's noise levels, in an update
        self._sums = {}  # |s_p|² by position

    def groups(self, n_steps):
        """As `plan_groups` returns them; before the first update there may be others of as many knots."""
        if self._knots and self._knots[-1] == n_steps - 1:
            return groups_of(self._knots)
        return plan_groups(n_steps, self._config)

    def largest(self, n_steps):
        """How many steps there are, or can be, from a knot to the next."""
        if self._places:
            return n_steps - (0 if self.is_auto else min(self._config.knots, n_steps) - 2)
        return max((len(gap) for group in self.groups(n_steps) for gap in group.gaps), default=0)

    def comes_to(self, session, step):
        """An update that begins with `step`; every rank gets here."""
        order = session.order
        if not self._places or not order.routes:
            return
        self._seen = noise_levels(step, order)
        if self._sigmas is None or len(self._sigmas) != order.n_visited:
            self._n_knots = knots_at_start(order.n_visited) if self.is_auto else min(self._config.knots, order.n_visited)
            self._sigmas, self._sizes, self._knots = same_on_all(gathered(self._seen)), None, ()
            self._place()

    def proxy_given(self, session, visit, value):
        if self._seen is not None and value.requires_grad:
            value.register_hook(partial(self._add, visit.place.position))

    def _add(self, position, grad):
        self._sums[position] = self._sums.get(position, 0) + grad.detach().float().square().sum()

    def update_ends(self, session):
        if self._seen is None:
            return
        mine = [float(self._sums.get(position, 0)) for position in range(len(self._seen))]
        seen, sums = zip(*gathered((self._seen, mine)), strict=True)
        self._sigmas = same_on_all(seen)
        total = [sum(of_ranks) for of_ranks in zip(*sums, strict=True)]
        if math.isfinite(sum(total)) and all(total):
            sizes = [size / sum(total) for size in total]
            before = self._sizes or sizes
            self._sizes = [(1 - NEWEST) * old + NEWEST * new for old, new in zip(before, sizes, strict=True)]
        if self._probe.result:
            self.after_probe(self._probe.cosines)
        self._place()
        self.forget(session)

    def after_probe(self, cosines):
        """Follow a probe under `knots=auto`: cosines of a whole update's gradient by number of knots, the same on every rank."""
        n, target = self._n_knots, self._config.knots_cosine
        if not self.is_auto or None in cosines.values():
            return
        if cosines[n] < target:
            wish = min(n + 1, len(self._sigmas))
        elif cosines.get(n - 1, 0) >= target + MARGIN * (1 - target):
            wish = n - 1
        else:
            wish = n
        before, self._wish = self._wish, wish
        if before != wish or wish == n:  # two in a row must agree, so that one unlucky sample moves nothing
            return
        self._n_knots, self._wish = wish, None

    def nearby(self, n_visited):
        """Sets of knots to measure: the present one, and the best of one knot less and of one more, where there are such."""
        present = knots_of(n_visited, self.groups(n_visited))
        # Levels may be those of another number of steps: where all are knots, nothing is placed.
        numbers = [len(present) - 1, len(present) + 1] if len(self._sigmas or ()) == n_visited else []
        others = [best_knots(n, self._sigmas, self._sizes) for n in numbers if 2 <= n < n_visited]
        return [present, *others]

    def _place(self):
        best = best_knots(self._n_knots, self._sigmas, self._sizes)
        if len(best) == len(self._knots):
            costs = [cost_of(knots, self._sigmas, self._sizes) for knots in (best, self._knots)]
            if best == self._knots or costs[0] >= SLACK**2 * costs[1]:
                return
            before = f", {named(self._knots)} before: the rule has their error at {math.sqrt(costs[0] / costs[1]):.2f} of it"
        else:
            before = f", {len(self._knots)} before" if self._knots else ""
        self._say(f"JAGG: backward passes at the visited steps {named(best)} from here on{before}")
        self._knots = best


def named(knots):
    return ", ".join(map(str, knots))


def noise_levels(step, order):
    """σ of each visited position, in the unit of the model's timesteps; its mean where samples draw their steps at random.

    Raises `JaggError` where these aren't positive and descending.
    """
    levels = [float(step.timesteps_at([index] * len(step.indices)).flatten()[0]) for index in range(order.n_trajectory)]
    if not levels[-1] > 0 or any(one <= next_ for one, next_ in pairwise(levels)):
        raise JaggError(
            f"the timesteps of a trajectory aren't positive and descending: {levels}\n"
            "knots can't be placed by them: name the visited steps that are to be knots (JAGG_KNOTS_AT=0,…)"
        )
    return expected_sigmas(levels, order.n_visited)


def same_on_all(levels):
    """What all ranks have. Raises `JaggError` on every rank where they differ."""
    other = next((rank for rank, mine in enumerate(levels) if mine != levels[0]), None)
    if other is not None:
        raise JaggError(
            f"rank {other} trains at timesteps {levels[other]}, rank 0 at {levels[0]}\n"
            "knots must be the same on all ranks: name the visited steps that are to be knots (JAGG_KNOTS_AT=0,…)"
        )
    return levels[0]
