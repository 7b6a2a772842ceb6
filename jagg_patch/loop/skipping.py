"""Whether the rollout's records can stand for training forwards, so that a group's intermediate ones are skipped.

That is checked, and agreed by all ranks, since one rank that ran its forwards alone would deadlock.
"""

import torch

from ..method.plan import least_forwards
from ..method.quality import SAME
from ..ranks import gathered, least
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
        self.doubts(why_other(recorded, output, self.policy_has_moved))

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
        doubts = gathered(self._doubt)
        for rank, doubt in enumerate(doubts):
            if doubt is not None:
                self.is_on = False
                self._say(f"JAGG: no forwards are skipped from here on: rank {rank}: {doubt}")
                return False
        return True


def why_other(recorded, output, policy_has_moved):
    """Why `recorded`, the rollout's output or None, isn't the training forward's under the same policy; None where it is."""
    if recorded is None:
        return "the update has samples or steps that the rollout hadn't"
    if recorded.shape != output.shape:
        shapes = f"{list(recorded.shape)} there, {list(output.shape)} here"
        return f"the rollout calls the model with other inputs: its outputs are {shapes}"
    if policy_has_moved:
        return None
    error, size = ((rows.detach().float().flatten(1).norm(dim=1)) for rows in (recorded.to(output) - output, output))
    if not torch.isfinite(size).all():
        return "a model output isn't finite (NaN or inf)"
    if (error <= SAME * size).all():
        return None
    difference = (error / size).max().item()
    return (
        f"the rollout's model outputs differ by {difference:.0%} from the training forward's before the policy moved "
        "(other guidance, a cached or approximate rollout?)"
    )
