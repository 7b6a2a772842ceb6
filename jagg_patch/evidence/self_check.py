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
from functools import partial

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..engines import engine_of
from ..engines.gradients import gradients_of
from ..errors import JaggError
from ..loop.between import compares
from ..loop.watcher import Watcher
from ..loop.weights import weights_reached
from ..method.quality import added, sums
from ..ranks import gathered
from .log import now
from .replay import KeptForward, backward_as_trained, copies, is_low, is_of, nothing_changed, reach, why_no_replay

ROUNDING, ROUNDING_LOW = 1e-3, 1e-2  # of float32, and of bfloat16 or float16
OF_ONE_WEIGHT = 5  # times that, where it is more than `LOST` of it in the whole gradient, which has less rounding
LOST = 1 / 30
REPEATED = 0.01  # of these: what a forward that is run again may differ


class SelfCheck(Watcher):
    """`say` is called on every rank with the line that tells why there was none."""

    def __init__(self, config, say=lambda line: None):
        self._is_on = config.enabled and config.self_check
        self._checked = WeakIdKeyDictionary()  # by a model's first weight: how often in `_way_of` groups; the same on every rank
        self._why_not = None  # this rank's reason to do without
        self._say = say
        self._model = None  # as soon as one has been seen
        self._has_asked = self._has_said = False  # whether an optimizer of its weights has stepped, and that none has
        self._others_are_said = False
        self._has_moved = False  # since the rollout, from which a model may keep what is out of date then
        self.seconds = 0.0
        self.is_measuring = False
        self._drop()

    def _drop(self):
        self._group = self._own = None
        self._forwards = []
        self._folded, self._reached = {}, {}
        self._losses_go_through = False  # the model's outputs, and reach weights no other way

    def forget(self, session):
        self._drop()

    def rollout_begins(self, session):
        self._has_moved = False  # on every rank, also one that leaves out all its samples

    def update_begins(self, session, step):
        self._drop()
        self.seconds = 0.0
        self._model = step.model
        if self._is_on and session.order.groups and self._why_not is None:
            self._why_not = engine_of(step.model).no_replay  # the same on every rank, also one that leaves out a whole sample

    def group_begins(self, session, visit):
        if not self._is_on or self._why_not is not None or self._group is not None or compares(session, session.group):
            return
        if not self._is_due(session, visit.step.model, session.group.plan):
            return
        self._model = visit.step.model  # of an update's models, the first that hasn't been checked
        self._group, self._where, self._way = session.group, visit.where, self._way_of(session, session.group.plan)
        self._parameters = session.group.engine.parameters()
        self._had_gradients = any(parameter.grad is not None for parameter in self._parameters)
        self._forwards.append(KeptForward.of(visit))

    def step_begins(self, session, visit):
        if self._is_ours(session):
            self._forwards.append(KeptForward.of(visit))

    def forwards_skipped(self, session, n):
        if self._is_ours(session) and n > 0:
            self._forwards[-1].was_run = False

    def _is_ours(self, session):
        return self._group is not None and session.group is self._group

    def model_output(self, session, visit, output):
        if self._is_ours(session) and visit.place.is_knot:
            self._reached |= reach(output, session.group.engine)

    def proxy_given(self, session, visit, value):
        if self._is_ours(session):
            self._forwards[-1].output = value.detach().clone()

    def step_ends(self, session, visit, result):
        if self._is_ours(session):
            self._forwards[-1].result = copies(result)

    def gradient_comes(self, session, group, place, ready):
        if group is self._group:
            goes_through = session.beside.is_reached is False
            self._losses_go_through = goes_through and (place.is_first or self._losses_go_through)

    def passes_begin(self, session, group, knots, gradients):
        if group is self._group:
            self._folded |= {knot: gradient.clone() for knot, gradient in zip(knots, gradients, strict=True)}

    def group_ends(self, session, group):
        is_own = self._losses_go_through and not self._had_gradients
        if group is self._group and is_own and group.engine.leaves_whole_gradients():
            # The engine's own callbacks are still to come, and with them its reduction.
            torch.autograd.Variable._execution_engine.queue_callback(self._keep_gradient)

    def _keep_gradient(self):
        self._own = gradients_of(dict.fromkeys(self._parameters) | self._reached, "cpu")

    def optimizer_steps(self, session, optimizer):
        if self.is_measuring:
            raise JaggError(
                "an optimizer stepped inside the self-check's backward passes, as one does that steps in gradient hooks\n"
                "it would train: run with JAGG_SELF_CHECK=0"
            )
        self._check_at(session, optimizer)
        self._has_moved |= self._model is not None and is_of(optimizer, self._model)

    def _check_at(self, session, optimizer):
        if not self._is_on or not any(self._is_left(session, self._model, group) for group in session.order.groups):
            return
        if self._model is not None and self._why_not is None and not is_of(optimizer, self._model):
            return  # another network's optimizer, which may step on one rank alone
        self._has_asked = True
        if self._group is not None and self._why_not is None:
            self._why_not = why_no_replay(optimizer, self._model, self._reached)
        # Every rank asks, also one that has left out all its samples.
        is_ready = self._group is not None and all(knot.is_done for knot in self._group.knots.values())
        ready, has_own, reasons = zip(*gathered((is_ready, self._own is not None, self._why_not)), strict=True)
        why_not = next(filter(None, reasons), None)
        if why_not is not None:
            self._give_up(why_not)
        elif all(ready):
            start = now()
            self._measure(session, optimizer, all(has_own))
            self.seconds = now() - start
        self._drop()

    def _times(self, model):
        return Counter() if model is None else self._checked.setdefault(first_weight(model), Counter())

    def _is_left(self, session, model, group):
        times, way = self._times(model), self._way_of(session, group)
        return times[way] < (2 if way == next(iter(times), None) else 1)

    def _is_due(self, session, model, group):
        """The first one's second time comes when all have had their first."""
        times, groups = self._times(model), [group, *session.order.groups]
        had_none, *others = [not times[self._way_of(session, one)] for one in groups]
        return had_none or (not any(others) and self._is_left(session, model, group))

    def _way_of(self, session, group):
        """How a group of the plan runs, and where it begins: the same on every rank."""
        return group.start, session.schedule.name == "joint", session.skipping.is_on, self._has_moved

    def update_ends(self, session):
        if self._group is not None and not self._has_asked and not self._has_said:
            self._say("JAGG: no self-check of a group so far: no torch optimizer that holds the model's own weights has stepped")
            self._has_said = True

    def _measure(self, session, optimizer, has_own):
        """Compare; all ranks at once."""
        folded = [self._folded[knot] for knot in self._group.knots.values()]
        self.is_measuring = True
        try:
            with nothing_changed(self._forwards, optimizer) as aside:
                found = self._compared(session, folded, self._own if has_own else None, aside)
        except _CannotCheck as reason:
            if not aside.are_back:
                raise JaggError(
                    f"{self._where}: the self-check failed, and the update's gradients can't be put back: {reason}\n"
                    "run with JAGG_SELF_CHECK=0"
                ) from None
            self._give_up(str(reason))
            return
        finally:
            self.is_measuring = False
        if math.isfinite(found["error"]):  # else there was no gradient, or no finite one: the next group's
            self._judge(**found)
            self._times(self._model)[self._way] += 1  # not where it fails: a loop that goes on is stopped again

    def _name(self, place):
        names = {id(weight): name for name, weight in self._model.named_parameters()}
        of_others = place == len(self._parameters)
        return f"the gradient of {'another network' if of_others else names.get(id(self._parameters[place]), 'a weight')}"

    def _give_up(self, why):
        self._is_on = False
        self._say(f"JAGG: no self-check of a group: {why}")

    def _compared(self, session, folded, own, aside):
        """How far the group's gradient, as training got it or would, is from the one at once; and what is wrong, on any rank.

        What may fail is between the exchanges: a rank that fails says so in the next, and no rank waits for it, but in the
        collectives of an engine's forward.
        """
        plan = self._group.plan
        knots = [self._forwards[self._group.index(position)] for position in plan.knots]
        between = [forward for forward in self._forwards if forward not in knots]
        outputs, weights, total = [], [], {}  # total: the gradient at once
        sizes = [0.0] * (len(self._parameters) + 1)
        low, is_same = self._group.engine.rounds_gradients, True

        def run_forward(forward):
            outputs.append(forward.run(session))

        def run_backward(forward, gradient):
            nonlocal low, is_same, sizes
            output = outputs.pop()
            weights.append(weights_reached(output))
            low |= is_low(output)
            is_same &= forward.backward_from(output, gradient, aside, REPEATED * rounding(low))
            part = aside.take("cpu")
            sizes = [size + more for size, more in zip(sizes, squares_by_weight({}, part, self._parameters), strict=True)]
            for parameter, grad in part.items():
                total[parameter] = total[parameter] + grad if parameter in total else grad.float()

        def compare_with_own():
            apart = None if own is None else squares_by_weight(own, total, self._parameters)
            return apart, sizes, low, is_same

        def run_as_trained():
            backward_as_trained(session, self._forwards, plan, folded, aside)
            return squares_by_weight(aside.take("cpu"), total, self._parameters)

        for forward, gradient in zip(knots, folded, strict=True):
            _exchanged(partial(run_forward, forward))
            _exchanged(partial(run_backward, forward, gradient))
        aparts, sizes, lows, same = zip(*_exchanged(compare_with_own), strict=True)
        sizes, low = added(sizes), any(lows)
        error, of_one = errors(added(aparts), sizes, rounding(low)) if own is not None else (math.inf, None)
        own_error = error
        if not error <= rounding(low) or of_one:  # the loop's own gradients may be among training's
            error, of_one = errors(added(_exchanged(run_as_trained)), sizes, rounding(low))
        if not all(same):
            raise _CannotCheck("a forward gives something else when it is run again: it goes by what is set elsewhere")
        found = {"error": error, "of_one": of_one, "own_error": own_error, "is_low": low}
        return found | self._between(session, between, knots, weights[0], rounding(low), aside)

    def _between(self, session, between, knots, weights, same, aside):
        """The first step between that uses other weights, adds a gradient to a backward of zeros, or goes by the grad mode.

        All ranks run the same forwards, also where one of them alone has a doubt.
        """
        doubts = {}  # by number: whether it is of the model's output, and not of what the training forward has returned alone

        def run_with_graphs():
            other = adds = None
            for number, forward in enumerate(between):
                output = forward.run(session)
                if weights_reached(output) != weights:
                    other = other or forward.visit.where
                was_same = forward.backward_from(output, torch.zeros_like(output), aside, same)
                if any(bool((gradient.abs() > 0).any()) for gradient in aside.take().values()):
                    adds = adds or forward.visit.where
                if forward.was_run and not (was_same and forward.returned_again(same)):
                    doubts[number] = not was_same
            return other, adds, set(doubts)

        def run_without(numbers):
            differs = None
            for forward in knots[1:] if session.skipping.is_on else ():  # looked at so, before their own turn
                with torch.no_grad():
                    if not forward.was(forward.run(session), same):
                        differs = differs or forward.visit.where
            for number in sorted(numbers):
                forward = between[number]
                with torch.no_grad():
                    if not forward.was(forward.run(session), same):
                        raise ValueError("it gives something else when it is run again")
                if number in doubts and (doubts[number] or forward.returned_again(same)):
                    differs = differs or forward.visit.where
            return differs

        others, adds, numbers = zip(*_exchanged(run_with_graphs), strict=True)
        found = {"other": others, "adds": adds, "differs": _exchanged(partial(run_without, set().union(*numbers)))}
        return {name: next(filter(None, of_ranks), None) for name, of_ranks in found.items()}

    def _judge(self, error, own_error, of_one, is_low, other, adds, differs):
        if error > rounding(is_low) or of_one:
            which, size = ("the group's gradient", error) if error > rounding(is_low) else (self._name(of_one[0]), of_one[1])
            _, is_joint, *_ = self._way
            raise JaggError(
                f"{self._where}: {which} is {size:.1%} off the one with each backward right after its forward\n"
                "the model reads in its backward what a later forward has changed (a buffer, a mask, a setting by timestep): "
                f"{'try JAGG_SCHEDULE=sequential, or ' * is_joint}run with JAGG_ENABLED=0"
            )
        if rounding(is_low) < own_error < math.inf and not self._others_are_said:
            self._others_are_said = True
            self._say(
                f"JAGG: {own_error:.1%} of a group's gradient hasn't come through the model's outputs (a penalty on weights?), "
                "and hasn't been checked"
            )
        if other is not None:
            raise JaggError(
                f"{other}: the model's output depends on other weights than at the first step of its group, {self._where}\n"
                "each would get another gradient than its own: begin a new group there (JAGG_CUTS), or run with JAGG_ENABLED=0"
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


class _CannotCheck(Exception):
    """On every rank."""


def _exchanged(run):
    """What `run()` returns on each rank. Raises `_CannotCheck` on all where it fails on one."""
    try:
        mine, why = run(), None
    except JaggError as error:
        mine, why = None, error
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        mine, why = None, f"its forward or backward can't be run again ({type(error).__name__}: {first})"
    everyone = gathered((mine, why))
    for _, why in everyone:
        if isinstance(why, JaggError):
            raise why
        if why is not None:
            raise _CannotCheck(why)
    return [values for values, _ in everyone]


def rounding(is_low):
    return ROUNDING_LOW if is_low else ROUNDING


def relative(squared_distance, squared_size):
    return math.sqrt(squared_distance / squared_size) if squared_size > 0 else math.nan


def squares_by_weight(approximate, exact, weights):
    """|a - e|² of each of the `weights`, then of all others together, where there is a gradient in `exact`."""
    places = {weight: place for place, weight in enumerate(weights)}
    found = [0.0] * (len(weights) + 1)
    for weight, gradient in exact.items():
        if isinstance(weight, torch.nn.Parameter):
            found[places.get(weight, -1)] += sums([approximate.get(weight)], [gradient])[3]
    return found


def errors(apart, sizes, rounding):
    """Relative, of a whole gradient; and `(place, error)` of the weight that is furthest off, if no rounding can have done that.

    `apart` and `sizes` are squares by weight. What a gradient that cancels out leaves of a weight may be rounding alone.
    """
    lost = (rounding * LOST) ** 2 * sum(sizes)
    pairs = enumerate(zip(apart, sizes, strict=True))
    off = [(math.sqrt(one / size) if size else math.inf, place) for place, (one, size) in pairs if one > lost]
    error, place = max(off, default=(0.0, None))
    return relative(sum(apart), sum(sizes)), (place, error) if error > OF_ONE_WEIGHT * rounding else None


def first_weight(model):
    return next(iter(engine_of(model).parameters()))
