"""The self-check: whether a group's gradient is what its model gives with each backward right after its forward.

A group's backward passes come later than the unpatched trainer's. A model that keeps something from one forward to the next, and
reads it in the backward, wouldn't notice. So the first group's gradient is computed once more, right before the optimizer step:
each knot's forward and its backward, with what training gave to its pass. The two must agree to rounding, for every model. That
is done once a run, and once more where the schedule changes or forwards begin to be skipped.
"""

import math

import torch
import torch.distributed as dist

from ..engines.gradients import gradients_of
from ..errors import JaggError
from ..loop.watcher import Watcher
from ..loop.weights import weights_reached
from .log import now
from .replay import KeptForward, backward_as_trained, compare, leaves, nothing_changed

ROUNDING, ROUNDING_LOW = 1e-3, 1e-2  # of float32, and of bfloat16 or float16


class SelfCheck(Watcher):
    """`say` is called on every rank with the line that tells why there was none."""

    def __init__(self, config, say=lambda line: None):
        self._is_on = config.enabled and config.self_check
        self._checked = set()  # ways of running a group
        self._say = say
        self.seconds = 0.0
        self.is_measuring = False
        self._drop()

    def _drop(self):
        self._interval = self._own = None
        self._forwards = []
        self._folded = {}
        self._losses_go_through = False  # the model's outputs, and reach weights no other way

    def forget(self, session):
        self._drop()

    def update_begins(self, session, step):
        self.seconds = 0.0

    def interval_begins(self, session, visit):
        if not self._is_on or self._interval is not None or way_of(session.interval) in self._checked:
            return
        engine = session.interval.engine
        if engine.no_replay is not None:
            self._give_up(engine.no_replay)
            return
        self._interval, self._where, self._way = session.interval, visit.where, way_of(session.interval)
        self._parameters = engine.parameters()
        self._had_gradients = any(parameter.grad is not None for parameter in self._parameters)
        self._forwards.append(KeptForward.of(visit))

    def step_begins(self, session, visit):
        if self._is_ours(session):
            self._forwards.append(KeptForward.of(visit))

    def _is_ours(self, session):
        return self._interval is not None and session.interval is self._interval

    def model_output(self, session, visit, output):
        if self._is_ours(session) and visit.place.is_knot:
            self._parameters = list(dict.fromkeys(self._parameters + leaves([output], session.interval.engine)))

    def proxy_given(self, session, visit, value):
        if self._is_ours(session):
            self._forwards[-1].output = value.detach().clone()

    def gradient_comes(self, session, interval, place, ready):
        if interval is self._interval and session.weights.beside is not None:
            self._losses_go_through = not any(session.weights.beside)

    def passes_begin(self, session, interval, knots, gradients):
        if interval is self._interval:
            self._folded |= {knot: gradient.clone() for knot, gradient in zip(knots, gradients, strict=True)}

    def interval_ends(self, session, interval):
        is_own = self._losses_go_through and not self._had_gradients
        if interval is self._interval and is_own and interval.engine.leaves_whole_gradients():
            # The engine's own callbacks are still to come, and with them its reduction.
            torch.autograd.Variable._execution_engine.queue_callback(self._keep_gradient)

    def _keep_gradient(self):
        self._own = gradients_of(self._parameters, "cpu")

    def optimizer_steps(self, session, optimizer):
        if self.is_measuring:
            raise JaggError(
                "an optimizer stepped inside the self-check's backward passes, as one does that steps in gradient hooks\n"
                "it would train: run with JAGG_SELF_CHECK=0"
            )
        if self._interval is not None and self._interval.after.is_done:
            start = now()
            self._measure(session, optimizer)
            self._drop()
            self.seconds = now() - start

    def _measure(self, session, optimizer):
        """Compare; all ranks at once."""
        has_own = all(gathered(self._own is not None))
        folded = [self._folded[knot] for knot in (self._interval.before, self._interval.after)]
        self.is_measuring = True
        try:
            with nothing_changed(self._forwards, optimizer) as aside:
                mine = self._compared(session, folded, self._own if has_own else None, aside)
        finally:
            self.is_measuring = False
        everyone = gathered(mine)
        apart, size = (sum(one[name] for one in everyone) for name in ("apart", "size"))
        if not all(one["is_same"] for one in everyone):
            self._give_up("a forward gives something else when it is run again, so it depends on what is set outside of it")
        elif not (math.isfinite(apart) and math.isfinite(size)):
            self._give_up("its gradient isn't finite")
        elif size > 0:  # else the next training step's
            self._checked.add(self._way)
            self._judge(math.sqrt(apart / size), everyone)

    def _give_up(self, why):
        self._is_on = False
        self._say(f"JAGG: no self-check of a group: {why}")

    def _compared(self, session, folded, own, aside):
        first, *between, last = self._forwards
        is_same = True
        if own is None:
            is_same &= backward_as_trained(session, self._forwards, folded, aside)
            own = aside.take("cpu")
        weights = []
        parts = []
        for forward, gradient in ((first, folded[0]), (last, folded[1])):
            output = forward.run(session)
            weights.append(weights_reached(output)[-1])
            is_same &= forward.backward_from(output, gradient, aside)
            parts.append(aside.take("cpu"))
        for parameter, part in parts[0].items():
            own[parameter] = (own[parameter] if parameter in own else torch.zeros_like(part)).float() - part.float()
        found = {"is_same": is_same, "apart": compare(own, parts[1])[3], "size": sum(compare(part, part)[2] for part in parts)}
        return found | self._between(session, between, weights[0], aside)

    def _between(self, session, between, weights, aside):
        """Where the steps between use other weights, and where a backward that is given zeros adds a gradient."""
        found = {"other": None, "adds": None}
        for forward in between:
            output = forward.run(session)
            if weights_reached(output)[-1] != weights:
                found["other"] = found["other"] or forward.visit.where
            forward.backward_from(output, torch.zeros_like(output), aside)
            if any(bool((gradient.abs() > 0).any()) for gradient in aside.take().values()):
                found["adds"] = found["adds"] or forward.visit.where
        return found

    def _judge(self, error, everyone):
        other, adds = (next((one[name] for one in everyone if one[name]), None) for name in ("other", "adds"))
        is_low = any(forward.is_low for forward in self._forwards)
        if error > (ROUNDING_LOW if is_low else ROUNDING):
            raise JaggError(
                f"{self._where}: the group's gradient is {error:.1%} off the one with each backward right after its forward\n"
                "the model reads in its backward what a later forward has changed (a buffer, a mask, a setting by timestep): run "
                "with JAGG_ENABLED=0"
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


def way_of(interval):
    return type(interval.way), type(interval.outputs)


def gathered(value):
    """`value` of every rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
