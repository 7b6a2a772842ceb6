"""Knots, and when their backward passes run: one class for each way.

The steps from one knot to the next are an `Interval`. Each step's loss leaves its upstream gradient s_p `[B, ...]`, which is
split onto the two knots as it comes: `(1 - α_p) s_p` to the one before, `α_p s_p` to the one after. A knot's own goes to itself.
"""

from functools import partial

import torch

from ..method.folding import add_weighted, endpoint_weights, zeros_to_sum
from ..method.plan import alphas
from ..method.proxy import proxy
from .guards import second_backward


class AtOnce:
    """In its own loss's backward: nothing waits for it. The step is the unpatched trainer's."""

    def solver_input(self, session, visit, output):
        return output


class _Waiting:
    """In the backward of a later step's loss. A subclass says of which."""

    holds_two_graphs = False

    def ready(self, interval, position):
        """The knots of `interval` whose passes run in the backward of the loss of the step at `position`."""
        raise NotImplementedError

    def solver_input(self, session, visit, output):
        """What the solver step of `visit` gets for the model's `output`: a proxy of it."""
        return session.interval.proxy(session, visit, output, self.ready(session.interval, visit.place.position))


class Sequential(_Waiting):
    """The knot before's in the backward of the step before the next knot, that one's in its own: one graph is alive at a time."""

    def ready(self, interval, position):
        if position == interval.positions[-1]:
            return [interval.after]
        return [interval.before] if position == interval.positions[-2] else []


class Joint(_Waiting):
    """Both knots' in the backward of the one after: one autograd call, which gathers and reduces sharded weights once."""

    holds_two_graphs = True

    def ready(self, interval, position):
        return [interval.before, interval.after] if position == interval.positions[-1] else []


class Knot:
    """A step with a backward pass of its own.

    output: the model's, `[B, ...]` with its graph, from its forward until its pass begins.
    has_begun: it takes no more gradients: its pass has begun, or its training step has ended without.
    is_done: its pass is over.
    """

    def __init__(self, where):
        self._where = where
        self._gradient = None  # [B, ...], float32 or wider
        self._dtype = None
        self.output = None
        self.has_begun = self.is_done = False

    def add(self, grad, weight):
        """Add `weight` (`[]` or `[B]`) of an upstream gradient to what its pass will be given."""
        if self.has_begun:
            raise second_backward(self._where)
        if self._gradient is None:
            self._gradient, self._dtype = zeros_to_sum(grad), grad.dtype
        add_weighted(self._gradient, grad, weight)

    def begin(self):
        """The gradient of its output, for the pass that is about to run."""
        gradient = self._gradient.to(self._dtype)
        self.has_begun = True
        self.release()
        return gradient

    def release(self):
        """Let go of tensors: a trainer that keeps its losses until it logs them keeps the graphs that lead here."""
        self.output = self._gradient = None


class Interval:
    """The visited steps from one knot to the next, while the loop is among them.

    where: of its first step, for messages.
    engine: what the model runs on.
    positions: a range over the visited steps.
    timesteps, alphas: `[W, B]`, what the model is to be fed, and the α of it.
    way: one of the above. outputs: one of between.py's, how the steps between get theirs.
    received: the last position whose upstream gradient has come.
    """

    def __init__(self, where, engine, positions, timesteps, aggregation, way):
        self.where, self.engine, self.positions, self.way = where, engine, positions, way
        self.timesteps, self.alphas = timesteps, alphas(timesteps)
        self.outputs = self.received = None
        self.before, self.after = Knot(where), Knot(where)
        self._weights = endpoint_weights(self.alphas, aggregation)
        self._link = [] if engine.link is None else [engine.link]
        self._resume_micro_step = None

    def proxy(self, session, visit, output, ready):
        """What stands for the model's `output` in a solver step; its loss's backward runs the passes of the knots in `ready`."""
        if visit.place.opens:
            self.before.output = output.clone()  # the trainer may change its own in place
            self._resume_micro_step = self.engine.hold_micro_step()
        elif visit.place.closes:
            self.after.output = output
        targets = [knot.output for knot in ready] or self._link
        return proxy(output, targets, partial(self._receive, session, visit.place, ready))

    def _receive(self, session, place, ready, grad):
        """The gradients to go on with, in the backward of the step's own loss, which has come to `grad`."""
        with session.failing(self.where):
            session.tell("gradient_comes", self, place, ready)
            self._split(place, grad)
            # The largest: a loss may have a second backward while its group is open, as unpatched.
            self.received = place.position if self.received is None else max(self.received, place.position)
            if not ready:
                return [torch.zeros_like(parameter) for parameter in self._link]
            if self.before in ready:
                self._resume_micro_step()
            gradients = [knot.begin() for knot in ready]
            session.tell("passes_begin", self, ready, gradients)
        # When the running backward is whole: the knots' graphs are still to come, and may fail.
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._passed, session, ready))
        return gradients

    def _split(self, place, grad):
        base, corr = (weights[self.index(place)] for weights in self._weights)
        if not place.closes:
            self.before.add(grad, base)
        if not place.opens:
            self.after.add(grad, corr)

    def index(self, place):
        """Of the step at `place`, among the interval's."""
        return place.position - self.positions[0]

    def _passed(self, session, ready):
        with session.failing(self.where):
            for knot in ready:
                knot.is_done = True
            if self.after.is_done:
                session.close(self)

    def release(self):
        """The knots' passes have run, or the training step has ended without them."""
        for knot in (self.before, self.after):
            knot.has_begun = True  # for a backward that comes too late
            knot.release()
        self.outputs = None
