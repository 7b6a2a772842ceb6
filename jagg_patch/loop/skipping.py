"""Whether the rollout's records can stand for training forwards, so that a group's intermediate ones are skipped.

That is checked, and agreed by all ranks, since one rank that ran its forwards alone would deadlock.
"""

from ..method.plan import least_forwards
from ..method.quality import SAME
from ..ranks import first_of, gathered, least
from .alike import why_other
from .memory import in_gb
from .watcher import Watcher


class Skipping(Watcher):
    """Whether the rollout's records, in `recording`, can stand for forwards. `say` is called on every rank."""

    def __init__(self, config, recording, say=lambda line: None):
        self.is_on = config.enabled and config.skip_forwards and config.frac != 0 and config.group_size > 2
        self._recording, self.records = recording, recording.records
        recording.users.append(self)
        self._compared = set()  # groups of which one sample has run all forwards, to compare
        self._say = say
        self._has_stated_memory = self._has_begun = False
        self._doubt = None  # why not

    def update_begins(self, session, step):
        if not session.order.groups:
            return
        largest, schedule = session.order.planner.largest(session.order.n_visited), session.schedule.name
        if self.is_on and largest <= least_forwards(schedule):
            self.is_on = False
            why = f"from one knot to the next are {largest} steps at most, the schedule is {schedule}"
            self._say(f"JAGG: no forwards are skipped from here on: {why}")
        if self.is_on and not self._has_stated_memory:
            self._has_stated_memory = True
            where = "in the host's memory" if self.records.is_on_host else "on the device (in the host's: JAGG_OFFLOAD_RECORDS=1)"
            self._say(f"JAGG: the rollout's recorded outputs take {in_gb(self.records.n_bytes)} on a rank, {where}")

    @property
    def policy_has_moved(self):
        return self._recording.policy_has_moved

    def must_compare(self, group):
        """Whether all forwards of this group, a range of positions, have to be compared before it skips any."""
        return group not in self._compared

    def was_compared(self, group, device):
        """All its forwards have been. Every rank must say so."""
        if self.is_agreed(device) and not self.policy_has_moved:  # after which only shapes can be compared
            self._compared.add(group)

    def compare(self, recorded, output):
        """Note it if `recorded`, the rollout's output or None, isn't what the training forward gives under the same policy."""
        self.doubts(why_other(recorded, output, None if self.policy_has_moved else SAME))

    def begins(self):
        """A group skips its forwards."""
        if not self._has_begun:
            self._has_begun = True
            self._say("JAGG: forwards are skipped from here on: what has been compared agrees with the rollout's")

    def doubts(self, why):
        self._doubt = self._doubt or why

    def is_agreed(self, device):
        """Whether no rank has a doubt; if one has, forwards aren't skipped from here on. Every rank must ask."""
        agreed, unmoved = least([self._doubt is None, not self.policy_has_moved], device)
        self._recording.policy_has_moved = not unmoved  # on one rank, where that trains another model too
        if agreed:
            return True
        rank, doubt = first_of(gathered(self._doubt))
        self.is_on = False
        self._say(f"JAGG: no forwards are skipped from here on: rank {rank}: {doubt}")
        return False
