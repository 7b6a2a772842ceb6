"""Nobody changes gradients in the midst of a sample: what clips or scales them would miss what is still to come of a group's."""

import weakref

from ..engines.gradients import gradients_of, norms_of
from ..errors import JaggError
from .watcher import Watcher


class Untouched(Watcher):
    """From an update's first group on, compares the norms of the gradients that a backward leaves with those at the next one.

    Not their versions: DTensors changed by `torch._foreach_*` keep theirs, and so does what is changed through `.data`.
    After a backward that brings weights no gradient they are what they were before it, and aren't taken again.
    """

    def __init__(self):
        self.forget(None)

    def forget(self, session):
        self._engine = self._group = self._step = None  # of the last group, where it began; of a step whose loss is to come
        self._is_open = False
        self._left = None  # norms after the last backward; None where they may have been changed rightly
        self._versions = self._before = None  # of gradients at a backward's begin; what was left, if it brings none

    def update_ends(self, session):
        self.forget(session)

    def group_begins(self, session, visit):
        self._group, self._is_open = visit.where, True
        has_all_at_once = session.group.is_exact and session.schedule.name != "joint"  # each step's with its own backward
        self._engine = session.group.engine if session.group.engine.leaves_gradients and not has_all_at_once else None

    def group_ends(self, session, group):
        self._is_open = False

    def gradient_comes(self, session, group, place, ready):
        self._before = None if ready else self._left
        self._left = None  # in a backward that wasn't torch.autograd's, or fails

    def optimizer_steps(self, session, optimizer):
        self._left = None

    def step_begins(self, session, visit):
        self._step = visit.where
        if visit.place.position == 0:
            self._left = None

    def backward_begins(self, session):
        self._versions = self._before = None
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
            self._versions = self._versions_now()

    def backward_ends(self, session):
        self._step = None
        self._left = self._before if self._before and session.beside.is_bare and self._are_as_before() else self._norms()

    def _are_as_before(self):
        """Which gradients there are, and how often torch has changed them: hooks may bring some."""
        before, now = self._versions or (), self._versions_now()
        return len(before) == len(now) > 0 and all(
            one is other and version == other_version
            for (one, version), (other, other_version) in zip(before, now, strict=True)
        )

    def _versions_now(self):
        gradients = [parameter.grad for parameter in self._engine.parameters()]
        # Of one tensor there is one such reference, and another's is another, also where it has come to be at the same place.
        return [(weakref.ref(gradient), gradient._version) for gradient in gradients if gradient is not None]

    def _norms(self):
        """By parameter. One that has no gradient has had it moved away: by the loop, or by FSDP1 during another forward."""
        return norms_of(gradients_of(self._engine.parameters()) if self._engine is not None else {})
