"""Nobody changes gradients in the midst of a sample: what clips or scales them would miss what is still to come of a group's."""

import math
from itertools import islice

from ..engines.gradients import gradients_of, norms_of
from ..errors import JaggError
from .watcher import Watcher


SAMPLED = 4  # gradients


class Untouched(Watcher):
    """From an update's first group on, compares the norms of the gradients that a backward leaves with those at the next one.

    All of them where that backward brings weights gradients. The loss of a step between two knots mostly brings none: there a few
    at a time are compared, since what is changed is changed in all, and the norms that the backward before it left still hold.
    Not their versions: DTensors changed by `torch._foreach_*` keep theirs, and so does what is changed through `.data`.
    """

    def __init__(self):
        self._turn = 0  # which few
        self.forget(None)

    def forget(self, session):
        self._engine = self._group = self._step = None  # of the last group, where it began; of a step whose loss is to come
        self._is_open = False
        self._left = None  # norms after the last backward that brought gradients; None where they may have been changed rightly
        self._is_stale = False  # whether the running backward leaves others, or one that has failed may have

    def update_ends(self, session):
        self.forget(session)

    def group_begins(self, session, visit):
        self._group, self._is_open = visit.where, True
        has_all_at_once = session.group.is_exact and session.schedule.name != "joint"  # each step's with its own backward
        engine = session.group.engine if session.group.engine.leaves_gradients and not has_all_at_once else None
        if engine is None or self._engine is None or engine.model is not self._engine.model:
            self._left = None
        self._engine = engine

    def group_ends(self, session, group):
        self._is_open = False

    def optimizer_steps(self, session, optimizer):
        self._left = None

    def step_begins(self, session, visit):
        self._step = visit.where
        if visit.place.position == 0:
            self._left = None

    def backward_begins(self, session):
        brings_some = session.beside.is_reached is not False
        # After a sample's last step, with no group open, a backward is another model's.
        if self._step or self._is_open:
            self._require_left(all_of_them=brings_some or self._is_stale)
        self._is_stale |= brings_some

    def gradient_comes(self, session, group, place, ready):
        if session.beside.is_reached is None:
            self._left = None  # in a backward that wasn't torch.autograd's
        elif ready and not self._is_stale:
            self._require_left(all_of_them=True)
            self._is_stale = True

    def backward_ends(self, session):
        self._step = None
        if self._is_stale or not self._left:
            is_in_sample = self._is_open or session.order.position  # after its last step they may be changed
            self._left = norms_of(self._gradients()) if is_in_sample else None
        self._is_stale = False

    def _require_left(self, all_of_them):
        if not self._left:
            return
        gradients = self._gradients()
        # One that has no gradient has had it moved away: by the loop, or by FSDP1 during another forward.
        self._is_stale |= gradients.keys() != self._left.keys()
        if not all_of_them:
            every = math.ceil(len(gradients) / SAMPLED) | 1  # odd: of two in turn, as a LoRA's, one is zero at first
            gradients = dict(islice(gradients.items(), self._turn % every, None, every))
            self._turn += 1
        now = norms_of(gradients)
        if any(self._left.get(parameter, norm) != norm for parameter, norm in now.items()):
            raise JaggError(
                f"{self._step or self._group}: gradients were changed since the group that began at {self._group} "
                "(clipped, scaled, set to zero?)\n"
                "a group's come late, and together: change them after whole samples only, or run with JAGG_ENABLED=0"
            )

    def _gradients(self):
        return gradients_of(self._engine.parameters()) if self._engine is not None else {}
