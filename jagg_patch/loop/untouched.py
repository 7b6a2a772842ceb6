"""Nobody changes gradients in the midst of a sample: what clips or scales them would miss what is still to come of a group's."""

from ..engines.gradients import gradients_of, norms_of
from ..errors import JaggError
from .watcher import Watcher


class Untouched(Watcher):
    """From an update's first group on, compares the norms of the gradients that a backward leaves with those at the next one.

    Not their versions: DTensors changed by `torch._foreach_*` keep theirs, and so does what is changed through `.data`.
    """

    def __init__(self):
        self.forget(None)

    def forget(self, session):
        self._engine = self._group = self._step = None  # of the last group, where it began; of a step whose loss is to come
        self._is_open = False
        self._left = None  # norms after the last backward; None where they may have been changed rightly

    def update_ends(self, session):
        self.forget(session)

    def group_begins(self, session, visit):
        self._group, self._is_open = visit.where, True
        has_all_at_once = session.group.is_exact and session.schedule.name != "joint"  # each step's with its own backward
        self._engine = session.group.engine if session.group.engine.leaves_gradients and not has_all_at_once else None

    def group_ends(self, session, group):
        self._is_open = False

    def gradient_comes(self, session, group, place, ready):
        self._left = None  # in a backward that wasn't torch.autograd's

    def optimizer_steps(self, session, optimizer):
        self._left = None

    def step_begins(self, session, visit):
        self._step = visit.where
        if visit.place.position == 0:
            self._left = None

    def backward_begins(self, session):
        # After a sample's last step, with no group open, a backward is another model's.
        now = self._norms() if self._left and (self._step or self._is_open) else {}
        if any(now.get(parameter, norm) != norm for parameter, norm in (self._left or {}).items()):
            raise JaggError(
                f"{self._step or self._group}: gradients were changed since the group that began at {self._group} "
                "(clipped, scaled, set to zero?)\n"
                "a group's come late, and together: change them after whole samples only, or run with JAGG_ENABLED=0"
            )

    def backward_ends(self, session):
        self._step, self._left = None, self._norms()

    def _norms(self):
        """By parameter. One that has no gradient has had it moved away: by the loop, or by FSDP1 during another forward."""
        return norms_of(gradients_of(self._engine.parameters()) if self._engine is not None else {})
