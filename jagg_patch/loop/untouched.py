"""Nobody changes gradients while a part of a group's is still to come: what clips or scales them would miss that part."""

from ..errors import JaggError
from .watcher import Watcher


class Untouched(Watcher):
    """Compares the gradients that a backward has left with those at the group's next step, by identity and version."""

    def __init__(self):
        self.forget(None)

    def forget(self, session):
        self._where = None  # the group's first step
        self._parameters, self._left = (), []  # None where a backward has run whose end wasn't told

    def group_begins(self, session, visit):
        engine = session.group.engine
        self._where, self._parameters = visit.where, engine.parameters() if engine.leaves_gradients else ()
        self._left = self._now()

    def group_ends(self, session, group):
        self.forget(session)

    def gradient_comes(self, session, group, place, ready):
        self._left = None

    def backward_ends(self, session):
        self._left = self._now()

    def step_begins(self, session, visit):
        if visit.place.before is None or self._left in (None, self._now()):
            return
        if session.group.is_exact and session.group.knots[session.group.plan.knots[0]].is_done:
            return  # all of its gradient that this could be about is there
        raise JaggError(
            f"{visit.where}: gradients were changed since the group that began at {self._where} (clipped, scaled, set to zero?)\n"
            "a part of the group's is still to come: change them after whole samples only, or run with JAGG_ENABLED=0"
        )

    def _now(self):
        gradients = [parameter.grad for parameter in self._parameters]
        return [gradient if gradient is None else (id(gradient), gradient._version) for gradient in gradients]
