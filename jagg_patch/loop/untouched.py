"""Nobody changes gradients in the midst of a sample: what clips or scales them would miss what is still to come of a group's."""

from ..engines.gradients import gradients_of, norms_of
from ..errors import JaggError
from .watcher import Watcher


class Untouched(Watcher):
    """From an update's first group on, compares the norms of the gradients that a backward leaves with those at the next one.

    Not their versions: DTensors changed by `torch._foreach_*` keep theirs, and so does what is changed through `.data`.
    A backward that brings weights no gradient leaves them as they were when it began: then its end isn't looked at.
    """

    def __init__(self):
        self.forget(None)

    def forget(self, session):
        self._engine = self._group = self._step = None  # of the last group, where it began; of a step whose loss is to come
        self._is_open = False
        self._left = None  # norms after the last backward; None where they may have been changed rightly
        self._before, self._brings_none = None, False  # of the running backward: versions, and whether weights get none

    def update_ends(self, session):
        self.forget(session)

    def group_begins(self, session, visit):
        self._group, self._is_open = visit.where, True
        has_all_at_once = session.group.is_exact and session.schedule.name != "joint"  # each step's with its own backward
        self._engine = session.group.engine if session.group.engine.leaves_gradients and not has_all_at_once else None

    def group_ends(self, session, group):
        self._is_open = False

    def gradient_comes(self, session, group, place, ready):
        self._brings_none = not ready and session.beside.is_reached is False
        if not self._brings_none:
            self._left = None  # also in a backward that isn't torch.autograd's

    def optimizer_steps(self, session, optimizer):
        self._left = None

    def step_begins(self, session, visit):
        self._step = visit.where
        if visit.place.position == 0:
            self._left = None

    def backward_begins(self, session):
        self._before, self._brings_none = None, False
        if not (self._left and (self._step or self._is_open)):
            return  # after a sample's last step, with no group open, a backward is another model's
        now = self._norms()
        if any(now.get(parameter, norm) != norm for parameter, norm in self._left.items()):
            raise JaggError(
                f"{self._step or self._group}: gradients were changed since the group that began at {self._group} "
                "(clipped, scaled, set to zero?)\n"
                "a group's come late, and together: change them after whole samples only, or run with JAGG_ENABLED=0"
            )
        if now.keys() == self._left.keys():  # of this group's engine, and none of them has been moved away
            self._before = self._versions()

    def backward_ends(self, session):
        self._step = None
        is_as_before = self._left and self._brings_none and self._before and self._versions() == self._before
        if not is_as_before:
            self._left = self._norms()

    def _versions(self):
        """Which gradients there are and how often torch has changed them, in place of norms: hooks may bring some."""
        return [(id(one.grad), one.grad._version) for one in self._engine.parameters() if one.grad is not None]

    def _norms(self):
        """By parameter. One that has no gradient has had it moved away: by the loop, or by FSDP1 during another forward."""
        return norms_of(gradients_of(self._engine.parameters()) if self._engine is not None else {})
