"""Counts, and the record of each training step."""

from dataclasses import asdict, dataclass

from ..loop.watcher import Watcher
from ..method.plan import forwards_a_group, knots_of
from .log import Stopwatch


@dataclass
class Stats(Watcher):
    """Counts since `install`, on this rank. A step counts once, however many samples are in its batch."""

    training_steps: int = 0
    exact_steps: int = 0
    grouped_steps: int = 0
    groups: int = 0
    knots: int = 0  # of groups
    skipped_forwards: int = 0
    retained_forwards: int = 0

    def step_ends(self, session, visit, result):
        if visit.place.is_exact:
            self.exact_steps += 1
        else:
            self.grouped_steps += 1

    def passes_begin(self, session, group, knots, gradients):
        self.knots += len(knots)

    def group_ends(self, session, group):
        self.groups += 1

    def forwards_skipped(self, session, n):
        self.skipped_forwards += n

    def forwards_retained(self, session, n):
        self.retained_forwards += n

    def update_ends(self, session):
        self.training_steps += 1

    @property
    def backward_passes(self):
        """Transformer backward passes that were run: one an exact step, and one for each knot of a group."""
        return self.exact_steps + self.knots

    @property
    def backward_passes_unpatched(self):
        return self.exact_steps + self.grouped_steps

    def as_dict(self):
        return asdict(self) | {
            "backward_passes": self.backward_passes,
            "backward_passes_unpatched": self.backward_passes_unpatched,
        }


class Recorder(Watcher):
    """Calls `write` with a record of each training step, a dict; `waits` for the GPU where somebody will read the seconds.

    measuring: the probe and the self-check, whose seconds aren't the update's.
    """

    def __init__(self, stats, measuring, write, waits):
        self._stats, self._write, self._waits = stats, write, waits
        self._probe, self._check = measuring
        self._before = {}

    def forget(self, session):
        self._stopwatch = Stopwatch(self._waits)

    def rollout_begins(self, session):
        self._stopwatch.rollout_begins()

    def evaluation_ends(self, session):
        if not session.in_update:
            self.forget(session)

    def update_begins(self, session, step):
        self._stopwatch.update_begins()
        self._before = self._stats.as_dict()

    def update_ends(self, session):
        order, schedule, probe = session.order, session.schedule.name, self._probe
        rollout_seconds, update_seconds = self._stopwatch.seconds()
        self.forget(session)
        now = self._stats.as_dict()
        counts = {name: now[name] - self._before[name] for name in now}
        visited, grouped = order.n_visited, [len(group) for group in order.planned if len(group) > 1]
        self._write(
            {
                "training_step": self._stats.training_steps,
                "frac": sum(grouped) / visited if visited else 0,
                "trajectory": order.n_trajectory,
                "visited": visited,
                "groups": grouped,
                "knots": knots_of(visited, order.planned),
                "schedule": schedule,
                "forwards_a_group": forwards_a_group(session.skipping.is_on, schedule),
                "backward_passes": counts["backward_passes"],
                "backward_passes_saved": counts["backward_passes_unpatched"] - counts["backward_passes"],
                "forward_passes_saved": counts["skipped_forwards"],
                "forwards_retained": counts["retained_forwards"],
                "rollout_seconds": rollout_seconds,
                "update_seconds": update_seconds - probe.seconds - self._check.seconds,
                "probe_seconds": probe.seconds,
                "self_check_seconds": self._check.seconds,
                "probe": probe.result,
            }
        )
