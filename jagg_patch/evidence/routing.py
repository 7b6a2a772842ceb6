"""Which groups of the next update are routed: those of `plan_groups`, or, under `frac=auto`, as many as the probe finds good.

Both bounds lie around the published cosines of routed groups, 0.74 to 0.85. Two probes in a row must agree, so that one unlucky
sample moves nothing.
"""

from ..config import AUTO
from ..errors import JaggError
from ..loop.watcher import Watcher
from ..method.plan import groups_at_start, plan_groups, whole_groups

GROW = 0.85  # the first group that isn't routed must reach this to be
SHRINK = 0.75  # a routed group below this isn't any more, nor those after it


class Routing(Watcher):
    """The routed groups of a trajectory, for an `Order`; `say` is called with the line that tells of a change.

    Raises `JaggError` under `frac=auto` without a probe.
    """

    def __init__(self, config, say=lambda line: None, probe=None):
        if config.enabled and config.frac == AUTO and not config.probe_every:
            raise JaggError("frac=auto follows the probe, and probe_every is 0\nset JAGG_PROBE_EVERY too, to 10 say")
        self._config = config
        self._say = say
        self._probe = probe
        self._n_routed = None  # groups, under auto
        self._wish = None  # how many the probe before would have routed

    def groups(self, n_steps):
        """Routed groups among `n_steps` visited ones, as `plan_groups` returns them."""
        if not self.is_auto:
            return plan_groups(n_steps, self._config)
        if self._n_routed is None:
            self._n_routed = groups_at_start(n_steps, self._config)
        return whole_groups(n_steps, self._config)[: self._n_routed]

    def all_groups(self, n_steps):
        """The routed groups, and what would be groups among the other steps; those of one step, which are exact, left out."""
        routed = () if self.is_auto else self.groups(n_steps)
        n_routed = sum(map(len, routed))
        groups = routed + whole_groups(n_steps - n_routed, self._config, start=n_routed)
        return tuple(group for group in groups if len(group) > 1)

    def comes_to(self, session, step):
        """An update that begins with `step`: where groups are goes by their number alone."""

    def largest(self, n_steps):
        """How many steps the largest group has that there is or can be."""
        groups = whole_groups(n_steps, self._config) if self.is_auto else self.groups(n_steps)
        return max(map(len, groups), default=0)

    @property
    def is_auto(self):
        return self._config.enabled and self._config.frac == AUTO

    def update_ends(self, session):
        if self._probe.result:
            self.after_probe([group["cosine"] for group in self._probe.result[0]["groups"]])

    def after_probe(self, cosines):
        """Follow a probe: `cosines` of `all_groups`, the same on every rank; None where unknown."""
        if not self.is_auto or None in cosines:
            return
        n_good = next((n for n, cosine in enumerate(cosines[: self._n_routed]) if cosine < SHRINK), self._n_routed)
        if n_good == self._n_routed < len(cosines) and cosines[n_good] >= GROW:
            n_good += 1
        before, self._wish = self._wish, n_good
        # Two in a row that want more, or less; of these the one that changes less.
        if before is None or (before - self._n_routed) * (n_good - self._n_routed) <= 0:
            return
        n_good = min(before, n_good, key=lambda n: abs(n - self._n_routed))
        measured = " ".join(f"{cosine:.3f}" for cosine in cosines)
        self._say(f"JAGG: {n_good} of {len(cosines)} groups are routed from here on, {self._n_routed} before: cosines {measured}")
        self._n_routed, self._wish = n_good, None
