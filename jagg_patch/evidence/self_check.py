"""The self-check: whether a group's gradient is what its model gives with each backward right after its forward.

A group's backward passes come later than the unpatched trainer's. A model that keeps something from one forward to the next, and
reads it in the backward, wouldn't notice. So a group's gradient is computed once more, right before the optimizer step: each
knot's forward and its backward, with what training gave to its pass. The two must agree to rounding, for every model. That is
done for each group of the plan, one before an optimizer step, since what a model does may go by the timestep; and once more where
the schedule changes, where forwards begin to be skipped, and where an optimizer has stepped since the rollout. The run's first
check comes before anything has been trained, when an adapter may do nothing yet: it is made again after the others.
"""

import math
from collections import Counter
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch.utils.weak import WeakIdKeyDictionary

from ..engines import engine_of
from ..errors import JaggError
from ..loop.between import compares
from ..loop.watcher import Watcher
from ..loop.weights import is_of, new_group
from ..method.plan import Group
from ..ranks import gathered
from .kept_group import CannotCheck, KeptGroup, rounding
from .log import now
from .replay import nothing_changed, why_no_replay


class Way(NamedTuple):
    """How a group of the plan runs, and which it is: the same on every rank."""

    group: Group
    is_joint: bool
    skips: bool
    is_retained: bool
    has_moved: bool


class SelfCheck(Watcher):
    """`say` is called on every rank with the line that tells why there was none."""

    def __init__(self, config, say=lambda line: None):
        self._config = config
        self._is_on = config.enabled and config.self_check
        self._checked = WeakIdKeyDictionary()  # by `first_weight`: how often in `_way_of` groups; the same on every rank
        self._of_models = WeakKeyDictionary()  # the same, by model: which weights are trained may change within a sample
        self._why_not = None  # this rank's reason to do without
        self._say = say
        self._model = None  # as soon as one has been seen
        self._has_asked = self._has_said = False  # whether an optimizer of its weights has stepped, and that none has
        self._others_are_said = False
        self._has_moved = False  # since the rollout, from which a model may keep what is out of date then
        self.seconds = 0.0
        self.is_measuring = False
        self._kept = None  # the group that is checked next

    def forget(self, session):
        self._let_go()

    def _let_go(self):
        if self._kept is not None:
            self._kept.release()
        self._kept = None

    def rollout_begins(self, session):
        self._has_moved = False  # on every rank, also one that leaves out all its samples

    def update_begins(self, session, step):
        self._let_go()
        self.seconds = 0.0
        self._model = step.model
        if self._is_on and session.order.groups and self._why_not is None:
            self._why_not = engine_of(step.model).no_replay  # the same on every rank, also one that leaves out a whole sample

    def group_begins(self, session, visit):
        if not self._is_on or self._why_not is not None or self._kept is not None or compares(session, session.group):
            return
        if not self._is_due(session, visit.step.model, session.group.plan):
            return
        self._model = visit.step.model  # of an update's models, the first that hasn't been checked
        self._kept = KeptGroup.of(session, visit, self._way_of(session, session.group.plan))

    def step_begins(self, session, visit):
        if self._is_kept(session.group):
            self._kept.step_begins(visit)

    def forwards_skipped(self, session, n):
        if self._is_kept(session.group) and n > 0:
            self._kept.forwards[-1].was_run = False

    def _is_kept(self, group):
        return self._kept is not None and group is self._kept.group

    def model_output(self, session, visit, output):
        if self._is_kept(session.group):
            self._kept.model_output(visit, output)

    def proxy_given(self, session, visit, value):
        if self._is_kept(session.group):
            self._kept.proxy_given(value)

    def step_ends(self, session, visit, result):
        if self._is_kept(session.group):
            self._kept.step_ends(result)

    def gradient_comes(self, session, group, place, ready):
        if self._is_kept(group):
            self._kept.gradient_comes(place, session.beside.is_reached is False)

    def passes_begin(self, session, group, knots, gradients):
        if self._is_kept(group):
            self._kept.passes_begin(knots, gradients)

    def group_ends(self, session, group):
        if self._is_kept(group):
            self._kept.group_ends()

    def optimizer_steps(self, session, optimizer):
        if self.is_measuring:
            raise JaggError(
                "an optimizer stepped inside the self-check's backward passes, as one does that steps in gradient hooks\n"
                "it would train: run with JAGG_SELF_CHECK=0"
            )
        self._check_at(session, optimizer)
        self._has_moved |= self._model is not None and is_of(optimizer, self._model)

    def _check_at(self, session, optimizer):
        if not self._is_on or not self._are_left(session):
            return
        if self._model is not None and self._why_not is None and not is_of(optimizer, self._model):
            return  # another network's optimizer, which may step on one rank alone
        self._has_asked = True
        if self._kept is not None and self._why_not is None:
            self._why_not = why_no_replay(optimizer, self._model, self._kept.reached)
        # Every rank asks, also one that has left out all its samples.
        is_ready = self._kept is not None and self._kept.is_done
        has_own = is_ready and self._kept.own is not None
        ready, has_own, reasons = zip(*gathered((is_ready, has_own, self._why_not)), strict=True)
        why_not = next(filter(None, reasons), None)
        if why_not is not None:
            self._give_up(why_not)
        elif all(ready):
            start = now()
            self._measure(session, optimizer, all(has_own))
            self.seconds = now() - start
        self._let_go()

    def _times(self, model):
        if model is None:
            return Counter()
        if model not in self._of_models:
            self._of_models[model] = self._checked.setdefault(first_weight(model), Counter())
        return self._of_models[model]

    def _are_left(self, session):
        """Whether any group is; on every rank the same. Which samples are retained needn't be, where one leaves out its own."""
        ways = [self._way_of(session, group) for group in session.order.groups]
        ways += [way._replace(is_retained=True) for way in ways if session.retaining.is_on]
        return any(self._is_left(self._model, way) for way in ways)

    def _is_left(self, model, way):
        times = self._times(model)
        return times[way] < (2 if way == next(iter(times), None) else 1)

    def _is_due(self, session, model, group):
        """The first one's second time comes when all have had their first."""
        times, groups = self._times(model), [group, *session.order.groups]
        had_none, *others = [not times[self._way_of(session, one)] for one in groups]
        return had_none or (not any(others) and self._is_left(model, self._way_of(session, group)))

    def _way_of(self, session, group):
        is_retained = session.retaining.sample is not None
        return Way(group, session.schedule.name == "joint", session.skipping.is_on, is_retained, self._has_moved)

    def update_ends(self, session):
        if self._kept is not None and not self._has_asked and not self._has_said:
            self._say("JAGG: no self-check of a group so far: no torch optimizer that holds the model's own weights has stepped")
            self._has_said = True

    def _measure(self, session, optimizer, has_own):
        """Compare; all ranks at once."""
        kept = self._kept
        self.is_measuring = True
        try:
            with nothing_changed(kept.forwards, optimizer) as aside:
                found = kept.compared(session, kept.own if has_own else None, aside)
        except CannotCheck as reason:
            if not aside.are_back:
                raise JaggError(
                    f"{kept.where}: the self-check failed, and the update's gradients can't be put back: {reason}\n"
                    "run with JAGG_SELF_CHECK=0"
                ) from None
            self._give_up(str(reason))
            if kept.way.is_retained:
                session.retaining.doubts_now(f"its self-check couldn't be made: {reason}")
            return
        finally:
            self.is_measuring = False
        if math.isfinite(found["error"]):  # else there was no gradient, or no finite one: the next group's
            self._judge(**found)
            self._times(kept.model)[kept.way] += 1  # not where it fails: a loop that goes on is stopped again
            if kept.way.is_retained and found["graph_error"] is None:
                session.retaining.doubts_now(
                    "losses may reach weights by another way as well (a penalty?), and the graphs' gradient can't be told apart"
                )

    def _give_up(self, why):
        self._is_on = False
        self._say(f"JAGG: no self-check of a group: {why}")

    def _judge(self, error, own_error, of_one, is_low, graph_error, other, adds, differs):
        right_after = "the one with each backward right after its forward"
        if graph_error is not None and graph_error > rounding(is_low):
            how = f"{graph_error:.1%} off" if math.isfinite(graph_error) else "not finite, unlike"
            raise JaggError(
                f"{self._kept.where}: the group's gradient is {how} {right_after}\n"
                "the rollout's graph isn't the training forward's (a cache, something that the model keeps of a sample?): "
                "run with JAGG_RETAIN=0"
            )
        if error > rounding(is_low) or of_one:
            which, size = ("the group's gradient", error) if error > rounding(is_low) else (self._kept.name(of_one[0]), of_one[1])
            raise JaggError(
                f"{self._kept.where}: {which} is {size:.1%} off {right_after}\n"
                "the model reads in its backward what a later forward has changed (a buffer, a mask, a setting by timestep): "
                f"{'try JAGG_SCHEDULE=sequential, or ' * self._kept.way.is_joint}run with JAGG_ENABLED=0"
            )
        if rounding(is_low) < own_error < math.inf and not self._others_are_said:
            self._others_are_said = True
            self._say(
                f"JAGG: {own_error:.1%} of a group's gradient hasn't come through the model's outputs (a penalty on weights?), "
                "and hasn't been checked"
            )
        if other is not None:
            raise JaggError(
                f"{other}: the model's output depends on other weights than at the first step of its group, {self._kept.where}\n"
                f"each would get another gradient than its own: {new_group(self._config)}, or run with JAGG_ENABLED=0"
            )
        if adds is not None:
            raise JaggError(
                f"{adds}: the model's backward adds a gradient of its own to what it is given (an auxiliary loss, or a hook)\n"
                "the steps between would lose that one: leave it out, or run with JAGG_ENABLED=0"
            )
        if differs is not None:
            raise JaggError(
                f"{differs}: the training forward gives something else where no gradient is asked for (a cache for rollouts?)\n"
                "the steps between are run so, and their losses would be others: switch it off, or run with JAGG_ENABLED=0"
            )


def first_weight(model):
    """The first that is trained: models may share a frozen base."""
    weights = engine_of(model).parameters()
    return next((weight for weight in weights if weight.requires_grad), weights[0])
