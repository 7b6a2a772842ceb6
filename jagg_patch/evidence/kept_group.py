"""A group of training that is kept, so that its gradient can be computed once more: each backward right after its forward."""

import math
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import torch

from ..engines.gradients import gradients_of
from ..errors import JaggError
from ..loop.weights import weights_reached
from ..method.quality import added, sums
from ..ranks import gathered
from .local_gradient import LocalGradient
from .replay import KeptForward, backward_as_trained, copies, is_low, reach

ROUNDING, ROUNDING_LOW = 1e-3, 1e-2  # of float32, and of bfloat16 or float16
OF_ONE_WEIGHT = 5  # times that, where it is more than `LOST` of it in the whole gradient, which has less rounding
LOST = 1 / 30
REPEATED = 0.01  # of these: what a forward that is run again may differ


@dataclass(eq=False)
class KeptGroup:
    """What training has run of an open `group`, whose first training forward is at `where`.

    way: as the self-check counts it. parameters: the model's.
    forwards: of its steps. folded: by knot, the gradient that its pass was given, `[B, ...]`.
    reached: by the knots' graphs. goes_through: whether the losses reach weights through the model's outputs, and no other way.
    own: this rank's part of the group's gradient, by parameter, as training's own passes left it; None where that can't be told.
    local: what they have brought to the weights, where the graphs are the rollout's; else None.
    """

    group: object
    where: str
    way: tuple
    model: torch.nn.Module
    parameters: list
    had_gradients: bool
    forwards: list
    folded: dict = field(default_factory=dict)
    reached: dict = field(default_factory=dict)
    goes_through: bool = False
    own: dict | None = None
    local: LocalGradient | None = None

    @classmethod
    def of(cls, session, visit, way):
        parameters = session.group.engine.parameters()
        had_gradients = any(parameter.grad is not None for parameter in parameters)
        local = LocalGradient(is_counting=False) if way.is_retained else None
        first = KeptForward.of(visit)
        return cls(session.group, visit.where, way, visit.step.model, parameters, had_gradients, [first], local=local)

    def step_begins(self, visit):
        self.forwards.append(KeptForward.of(visit))

    def model_output(self, visit, output):
        if visit.place.is_knot:
            self.reached |= reach(output, self.group.engine)
            if self.local is not None:
                self.local.watch(output)

    def proxy_given(self, value):
        self.forwards[-1].output = value.detach().clone()

    def step_ends(self, result):
        self.forwards[-1].result = copies(result)

    def gradient_comes(self, place, goes_through):
        self.goes_through = goes_through and (place.is_first or self.goes_through)

    def passes_begin(self, knots, gradients):
        self.folded |= {knot: gradient.clone() for knot, gradient in zip(knots, gradients, strict=True)}
        if self.local is not None:  # to the end of this backward: the loop may have others, of a penalty, say
            self.local.is_counting = True
            torch.autograd.Variable._execution_engine.queue_callback(self._pass_ends)

    def _pass_ends(self):
        self.local.is_counting = False

    def group_ends(self):
        self.release()
        if self.goes_through and not self.had_gradients and self.group.engine.leaves_whole_gradients():
            # The engine's own callbacks are still to come, and with them its reduction.
            torch.autograd.Variable._execution_engine.queue_callback(self._keep_gradient)

    def _keep_gradient(self):
        self.own = gradients_of(dict.fromkeys(self.parameters) | self.reached, "cpu")

    def release(self):
        """It isn't kept any more."""
        if self.local is not None:
            self.local.close()

    @property
    def is_done(self):
        return all(knot.is_done for knot in self.group.knots.values())

    def name(self, place):
        """Of the gradient at a place of `squares_by_weight`."""
        names = {id(weight): name for name, weight in self.model.named_parameters()}
        of_others = place == len(self.parameters)
        return f"the gradient of {'another network' if of_others else names.get(id(self.parameters[place]), 'a weight')}"

    def compared(self, session, own, aside):
        """How far the group's gradient, as training got it or would, is from the one at once; and what is wrong, on any rank.

        What may fail is between the exchanges: a rank that fails says so in the next, and no rank waits for it, but in the
        collectives of an engine's forward.
        """
        plan, folded = self.group.plan, [self.folded[knot] for knot in self.group.knots.values()]
        knots = [self.forwards[self.group.index(position)] for position in plan.knots]
        between = [forward for forward in self.forwards if forward not in knots]
        outputs, weights, total = [], [], {}  # total: the gradient at once
        sizes = [0.0] * (len(self.parameters) + 1)
        low, is_same = self.group.engine.rounds_gradients, True

        def run_forward(forward):
            outputs.append(forward.run(session))

        def run_backward(forward, gradient, local):
            nonlocal low, is_same, sizes
            output = outputs.pop()
            weights.append(weights_reached(output))
            if self.local is not None:
                local.watch(output)
            low |= is_low(output)
            is_same &= forward.backward_from(output, gradient, aside, REPEATED * rounding(low))
            part = aside.take("cpu")
            sizes = [size + more for size, more in zip(sizes, squares_by_weight({}, part, self.parameters), strict=True)]
            for parameter, grad in part.items():
                total[parameter] = total[parameter] + grad if parameter in total else grad.float()

        def compare_with_own():
            apart = None if own is None else squares_by_weight(own, total, self.parameters)
            return apart, sizes, low, is_same

        def run_as_trained():
            backward_as_trained(session, self.forwards, plan, folded, aside)
            return squares_by_weight(aside.take("cpu"), total, self.parameters)

        def compare_local():
            """Where a loss reaches weights by another way as well, that isn't in there."""
            if self.local is None or not self.goes_through:
                return None
            apart, sizes = self.local.squares(local)
            if not apart:
                return None
            if not math.isfinite(sum(apart)):  # the exact one is finite, or nothing is judged
                return math.inf
            whole, of_one = errors(apart, sizes, rounding(low))
            return max([whole] * (sum(sizes) > 0) + ([of_one[1]] if of_one else []), default=0.0)

        with closing(LocalGradient()) as local:
            for forward, gradient in zip(knots, folded, strict=True):
                _exchanged(partial(run_forward, forward))
                _exchanged(partial(run_backward, forward, gradient, local))
        aparts, sizes, lows, same = zip(*_exchanged(compare_with_own), strict=True)
        sizes, low = added(sizes), any(lows)
        error, of_one = errors(added(aparts), sizes, rounding(low)) if own is not None else (math.inf, None)
        own_error = error
        if not error <= rounding(low) or of_one:  # the loop's own gradients may be among training's
            error, of_one = errors(added(_exchanged(run_as_trained)), sizes, rounding(low))
        if not all(same):
            raise CannotCheck("a forward gives something else when it is run again: it goes by what is set elsewhere")
        local_errors = _exchanged(compare_local)
        graph_error = None if None in local_errors else max(local_errors)
        found = {"error": error, "of_one": of_one, "own_error": own_error, "is_low": low, "graph_error": graph_error}
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


class CannotCheck(Exception):
    """On every rank."""


def _exchanged(run):
    """What `run()` returns on each rank. Raises `CannotCheck` on all where it fails on one."""
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
            raise CannotCheck(why)
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
