"""Knots, and when their backward passes run: one class for each way.

An `OpenGroup` is a group while the loop is among its steps. Each step's loss leaves its upstream gradient s_p `[B, ...]`, which
is split as it comes onto the knots around it: `(1 - α_p) s_p` to the one before, `α_p s_p` to the one after. A knot's own goes
to itself.
"""

from functools import partial

import torch

from ..method.folding import add_weighted, shares, zeros_to_sum
from ..method.plan import passes
from ..method.proxy import proxy
from .guards import second_backward


class AtOnce:
    """In its own loss's backward: nothing waits for it. The step is the unpatched trainer's."""

    def solver_input(self, session, visit, output):
        return output


class Waiting:
    """In the backward of a later step's loss, as `method.plan.passes` has it."""

    holds_two_graphs = False

    def solver_input(self, session, visit, output):
        """What the solver step of `visit` gets for the model's `output`: a proxy of it."""
        return session.group.proxy(session, visit, output)


class Sequential(Waiting):
    """Each knot's in the backward of the step before the next knot, the last one's in its own: one graph is alive at a time."""


class Joint(Waiting):
    """Two knots' in one autograd call, which gathers and reduces sharded weights once; with their graphs alive until then."""

    holds_two_graphs = True


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


class OpenGroup:
    """A group while the loop is among its steps.

    where: of its first step, for messages.
    engine: what the model runs on.
    plan: the `Group`.
    timesteps: `[W, B]`, what the model is to be fed.
    way: one of the above.
    knots: by position. ready: those whose passes run in the backward of the step at a position.
    outputs: one of between.py's, how the steps from the knot before to the next get theirs. stand_in: the model's, where they
        may be skipped.
    received: the last position whose upstream gradient has come.
    """

    def __init__(self, where, engine, plan, timesteps, aggregation, way):
        self.where, self.engine, self.plan, self.way = where, engine, plan, way
        self.timesteps = timesteps
        self.outputs = self.stand_in = self.received = None
        self.knots = {position: Knot(where) for position in plan.knots}
        self.ready = passes(plan, way.holds_two_graphs)
        self._shares = dict(zip(plan.knots, shares(timesteps, list(map(self.index, plan.knots)), aggregation), strict=True))
        self._link = [] if engine.link is None else [engine.link]
        self._resume_micro_step = None

    @property
    def positions(self):
        return self.plan.positions

    @property
    def is_exact(self):
        """Whether it has no step but its knots."""
        return len(self.knots) == len(self.plan)

    @property
    def has_begun(self):
        """Whether some of its backward passes have."""
        return any(knot.has_begun for knot in self.knots.values())

    def index(self, position):
        """Among the group's steps."""
        return position - self.positions[0]

    def timesteps_of(self, positions):
        return self.timesteps[self.index(positions[0]) : self.index(positions[-1]) + 1]

    def proxy(self, session, visit, output):
        """What stands for the model's `output` in a solver step."""
        place = visit.place
        if place.is_first:
            self._resume_micro_step = self.engine.hold_micro_step()
        if place.is_knot:
            # The trainer may change its own in place; the last one's pass is over before it can.
            self.knots[place.position].output = output.clone() if place.opens else output
        ready = [self.knots[position] for position in self.ready.get(place.position, ())]
        targets = [knot.output for knot in ready] or self._link
        return proxy(output, targets, partial(self._receive, session, place, ready))

    def _receive(self, session, place, ready, grad):
        """The gradients to go on with, in the backward of the step's own loss, which has come to `grad`."""
        with session.failing(self.where):
            session.tell("gradient_comes", self, place, ready)
            for position in [place.position] if place.is_knot else [place.before, place.after]:
                self.knots[position].add(grad, self._shares[position][self.index(place.position)])
            # The largest: a loss may have a second backward while its group is open, as unpatched.
            self.received = place.position if self.received is None else max(self.received, place.position)
            if not ready:
                self.engine.begin_without_pass()
                return [torch.zeros_like(parameter) for parameter in self._link]
            if not self.has_begun:
                self._resume_micro_step()
            gradients = [knot.begin() for knot in ready]
            session.tell("passes_begin", self, ready, gradients)
        # When the running backward is whole: the knots' graphs are still to come, and may fail.
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._passed, session, ready))
        return gradients

    def _passed(self, session, ready):
        with session.failing(self.where):
            for knot in ready:
                knot.is_done = True
            if all(knot.is_done for knot in self.knots.values()):
                session.close(self)

    def release(self):
        """The knots' passes have run, or the training step has ended without them."""
        for knot in self.knots.values():
            knot.has_begun = True  # for a backward that comes too late
            knot.release()
        self.outputs = None
