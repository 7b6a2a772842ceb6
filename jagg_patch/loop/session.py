"""One training loop as it runs: which step of which sample it is at, and what is done with it.

It knows nothing of upstream's names; `trainers/` calls it from the wrapped functions, in this order:

    training_step( plan, sort × trajectories, ( run_step( solver_input ), the trainer's backward ) × steps )

A trainer whose loop can't be told from the rest of its `main` has all of it inside one `training_step`, plans once, and says with
`rollout_begins` where one training step ends and the next begins; one that visits the steps in trajectory order by itself draws
no order.

The way of a gradient: `run_step` opens an `OpenGroup` at a knot whose backward pass will wait for later steps, `solver_input`
puts a proxy in the place of each step's model output, and the backward of the step's loss brings its upstream gradient
(knots.py).
"""

import threading
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..engines import engine_of
from ..errors import JaggError
from .beside import Beside
from .between import StandIn, outputs_between, watched
from .guards import Guards
from .knots import AtOnce, OpenGroup
from .order import Order
from .untouched import Untouched
from .weights import SameWeights

AT_ONCE = AtOnce()


class Session:
    """Ties the plan and the knots' backward passes to the step calls of a training loop, one rollout's update at a time.

    order: the plan, and how far it is. group: what is open, or None. schedule, skipping, retaining: what decides how a group
    runs. recording: what the rollout gave.
    weights, beside: what a group's graphs reach, and its losses beside them.
    watchers: whoever is told of what happens, in that order, after the guards and those that decide.
    """

    def __init__(self, config, planner, schedule, recording, skipping, retaining, watchers=()):
        self.config, self.schedule = config, schedule
        self.recording, self.skipping, self.retaining = recording, skipping, retaining
        self.order, self.weights, self.beside = Order(planner, retaining), SameWeights(config.self_check), Beside()
        deciding = Guards(), self.weights, self.beside, Untouched(), skipping, retaining.trial, retaining, recording, schedule
        self._watchers = [*deciding, *watchers]
        self._captured = None  # model outputs, while a forward runs that is no step of the loop
        self._stepping = None  # an optimizer, while it does
        self.in_training_step = self.in_update = False
        self.group = self._visit = self._thread = None

    def tell(self, event, *args):
        """Call the method `event` of everyone who watches."""
        for watcher in self._watchers:
            getattr(watcher, event)(self, *args)

    @contextmanager
    def failing(self, where):
        """An exception that leaves this block has failed what `where` names."""
        try:
            yield
        except BaseException:
            self.tell("fails", where)
            raise

    # -- training steps

    @contextmanager
    def training_step(self):
        """Everything that is remembered lives inside this block, also when it ends in an exception."""
        self.tell("training_step_begins")
        self._forget()
        self.in_training_step = True
        before = register_optimizer_step_pre_hook(self._before_optimizer_step)
        after = register_optimizer_step_post_hook(self._after_optimizer_step)
        try:
            yield
            self.tell("training_step_ends")
            self._end_update()
        except BaseException as error:
            self.tell("training_step_fails", error)
            raise
        finally:
            before.remove()
            after.remove()
            self._forget()

    def _forget(self):
        if self.group is not None:
            self.group.release()
        self.in_training_step = self.in_update = False
        self.group = self._visit = self._captured = self._stepping = None
        self.order.forget()
        self.tell("forget")

    def rollout_begins(self):
        """A batch of it. The training step before, if there was one, is over."""
        if self.in_training_step and self.group is None and not self.order.position:
            self._end_update()
            self.tell("rollout_begins")

    @contextmanager
    def rollout(self):
        """Around the rollout of a batch, in which solver steps are recorded if that is asked for."""
        self.rollout_begins()
        with self.sampling():
            yield

    @contextmanager
    def sampling(self):
        """Around what samples one batch of a rollout."""
        with self.recording.batch(), self.retaining.batch(self):
            yield

    def sampled(self, latents, model_output, is_trained=True):
        """A solver step of the rollout, with what the model was given and what it gave; returns what that step is to get."""
        if not self.recording.is_recording:
            return model_output
        output = self.retaining.solver_input(model_output, is_trained)
        self.recording.records.add(latents, output)
        return output

    def sort(self, permutation, selected=None):
        """The order of a sample's steps, `[T]`, in place of the trainer's; `selected` as `Retaining.ordered` has it."""
        return self.order.sort(self.retaining.ordered(permutation, selected))

    @contextmanager
    def evaluation(self):
        """Around an evaluation, whose rollouts aren't trained on."""
        with self.recording.paused():
            yield
        self.tell("evaluation_ends")

    def plan(self, n_trajectory, n_visited, shuffled=True):
        """Plan the update of a rollout, or of all of them.

        Args:
            n_trajectory: how many steps of each sample can be trained.
            n_visited: how many of them will be.
            shuffled: whether `sort` will be asked for each sample's order; if not, the loop goes from 0 to `n_visited`.
        """
        if self.in_training_step:
            self.tell("plan_comes")
            self.order.plan(n_trajectory, n_visited, shuffled)

    def _begin_update(self, step):
        if not self.in_update:
            self.order.planner.comes_to(self, step)
            self.order.route(self.order.n_visited)  # it may have changed since it was planned
            self.tell("update_begins", step)
            self.in_update = True

    def _end_update(self):
        if self.in_update:
            self.in_update = False
            self.tell("update_ends")

    def _before_optimizer_step(self, optimizer, *_):
        if self._stepping not in (None, optimizer):
            return  # inside that one's step, with weights of this rank's alone (ZeroRedundancyOptimizer)
        with self.failing("an optimizer step"):
            self.tell("optimizer_steps", optimizer)
        self._stepping = optimizer  # only now: of another that steps in a watcher's backward passes everyone is told

    def _after_optimizer_step(self, optimizer, *_):
        if self._stepping is optimizer:
            self._stepping = None
        if self.order.groups:
            # An autocast around several steps keeps casts of the weights as they were: a group would have some, and others.
            torch.clear_autocast_cache()

    # -- steps

    @property
    def has_whole_graphs(self):
        """Whether each training forward of the open group leaves all of its graph, beside the model's output as well."""
        return self.group.is_exact and not self.retaining.is_on

    @property
    def trains(self):
        """Whether a forward that began now would be a planned one. One without gradients is a reference or an evaluation."""
        return self.in_training_step and bool(self.order.places) and torch.is_grad_enabled()

    def run_step(self, step, forward):
        """One training forward, with or without a graph as its place in the plan asks for.

        Args:
            step: a `Step`; its place is checked against what the plan expects.
            forward: called without arguments, once. With skipped forwards, also with those arguments of the training forward's
                that are to be others, by name; `model` is the model, whatever the trainer calls it.

        Returns:
            What `forward` returns.
        """
        if not self.trains:
            return forward()
        self._stepping = None  # after one that has failed, which the loop has passed over
        self._begin_update(step)
        visit = self.order.visit(step, forward)
        with self.failing(visit.name) if self.order.routes else nullcontext():  # else the loop may pass over it, as unpatched
            self.tell("step_begins", visit)
            if visit.place.is_first:
                self._open(visit)
            self._visit, self._thread = visit, threading.get_ident()
            try:
                result = forward() if visit.place.is_exact else self._run_grouped(visit)
            finally:
                self._visit = None
            self.tell("step_ends", visit, result)
            if visit.place.closes:
                self.group.outputs.end(self)
            if visit.place.opens:
                self._go_on_from(visit)
            self.tell("step_returns", visit)
        self.order.advance()
        return result

    def _open(self, visit):
        """The steps that begin with `visit` belong together: work out how they will run."""
        plan = next(group for group in self.order.groups if group.knots[0] == visit.place.position)
        engine = engine_of(visit.step.model)
        timesteps = visit.timesteps
        expected = (self.order.expected(len(visit.indices), position) for position in plan)
        scheduled = torch.stack([visit.step.timesteps_at(indices).reshape(-1).to(timesteps) for indices in expected])
        way = self.schedule.way(engine)
        try:
            self.group = OpenGroup(visit.where, engine, plan, scheduled, self.config.aggregation, way)
        except JaggError as error:
            raise JaggError(f"{visit.where}: {error}") from None
        if self.recording.is_on:
            self.group.stand_in = StandIn(engine.model)
        self.group.outputs = outputs_between(self, visit, self.group, plan.gaps[0])
        self.tell("group_begins", visit)

    def _go_on_from(self, visit):
        """From a knot that has been run towards the next."""
        if visit.place.closes:
            gap = range(visit.place.position, visit.place.after + 1)
            self.group.outputs = outputs_between(self, visit, self.group, gap)
        self.group.outputs.begin(self, visit)

    def _run_grouped(self, visit):
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(visit.place.is_knot))
            if visit.place.is_first:
                for watcher in self._watchers:
                    stack.enter_context(watcher.around_forward(self, visit))
                if self.group.stand_in is not None:
                    stack.enter_context(watched(visit.step.model, self.group.stand_in.returned))
            if visit.place.closes:
                torch.clear_autocast_cache()  # casts that both knots' graphs shared would be added up in the lower precision
            # Under an autocast around the whole loop, torch 2.5 would hand graphless casts to the next forward, and a penalty on
            # weights would be computed from a knot's, as if it were of its model's making.
            stack.callback(torch.clear_autocast_cache)
            return self.group.outputs.run(self, visit)

    @contextmanager
    def solver_input(self, model_output):
        """What the solver step gets in place of the model output `[B, ...]`; outside a grouped step, the same tensor."""
        visit = self._visit
        if threading.get_ident() != self._thread:  # an evaluation beside the training
            yield model_output
        elif self._captured is not None:
            self._captured.append(model_output.clone())  # the trainer may change its own in place
            yield model_output
        elif visit is None:
            yield model_output
        elif visit.place.is_exact:
            value = AT_ONCE.solver_input(self, visit, model_output)
            self.tell("proxy_given", visit, value)
            yield value
        else:
            visit.n_solver_calls += 1
            output = self.group.outputs.output(self, visit, model_output)
            self.tell("model_output", visit, output)
            with torch.enable_grad():
                value = self.group.way.solver_input(self, visit, output)
                self.tell("proxy_given", visit, value)
                yield value
            # The forward may go on to a loss of its own (a KL from the solver's mean); `_run_grouped` puts back what was before.
            torch.set_grad_enabled(True)
            self.tell("solver_ends", visit)

    @contextmanager
    def capturing(self):
        """Yields a list that gets the model outputs of what runs inside: training forwards that are no steps of the loop."""
        self._captured = []
        try:
            yield self._captured
        finally:
            self._captured = None

    def model_returned(self, output):
        """The model has given `output` in a training forward."""
        if self._visit is not None and self._visit.place.is_first and self.group.stand_in is not None:
            self.group.stand_in.returned(output)

    def close(self, group):
        """The backward passes of all its knots have run."""
        if group is self.group:
            group.release()
            self.group = None
            self.tell("group_ends", group)
