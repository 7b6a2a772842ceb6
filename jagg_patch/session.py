"""The state machine of one trainer: which step is being visited, what it is in the plan, and the group that is open.

It knows nothing of upstream's names; `trainers/` calls it from the wrapped functions, in this order:

    training_step( plan, order × trajectories, ( run_step( solver_input ), the trainer's backward ) × steps )

A trainer whose loop can't be told from the rest of its `main` has all of it inside one `training_step`, plans once, and says with
`rollout_begins` where one training step ends and the next begins; one that visits the steps in trajectory order by itself draws
no order.
"""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from .engines import (
    drop_gradients,
    hold_micro_step,
    link_parameter,
    looks_for_unused_parameters,
    prepares_sync_in_forward,
    require_gradients_in_place,
    syncs_gradients,
)
from .errors import JaggError
from .joint import endpoint_weights, joint_output, linked, reached_leaves, weighted_sum
from .log import Stopwatch
from .plan import ENDPOINTS_FIRST, Role, alphas, forwards_a_group, step_roles, whole_groups
from .probe import Probe
from .routing import Routing
from .schedule import Schedule
from .skip import Skipping, StandIn, estimated_output, watched


class Step(NamedTuple):
    """A training forward that the loop is about to run, as an adapter reads it off the call.

    index: the step's place in the trajectory, or a list of them, one for each sample of the batch.
    timesteps: `[B]`, what the model is fed.
    model: what runs the forward, as its engine wraps it.
    timesteps_at: `timesteps_at(indices)` is what the model would be fed, `[B]`, at those places in the trajectory, one a sample.
    latents, next_latents: `[B, ...]`, the samples at this step, and at the next one where the call has them.
    at: `at(indices, latents)` is how the forward's arguments would differ at those places, by name.
    """

    index: int | list
    timesteps: torch.Tensor
    model: torch.nn.Module
    timesteps_at: Callable
    latents: torch.Tensor | None = None
    next_latents: torch.Tensor | None = None
    at: Callable | None = None

    @property
    def indices(self):
        return [int(i) for i in self.index] if isinstance(self.index, list) else [int(self.index)]


@dataclass
class Stats:
    """Counts since `install`, on this rank. A step counts once, however many samples are in its batch."""

    training_steps: int = 0
    exact_steps: int = 0
    grouped_steps: int = 0
    groups: int = 0
    skipped_forwards: int = 0

    @property
    def backward_passes(self):
        """Transformer backward passes that were run: one an exact step, two a group."""
        return self.exact_steps + 2 * self.groups

    @property
    def backward_passes_unpatched(self):
        return self.exact_steps + self.grouped_steps

    def as_dict(self):
        return asdict(self) | {
            "backward_passes": self.backward_passes,
            "backward_passes_unpatched": self.backward_passes_unpatched,
        }


class _Group:
    """An open group: the first endpoint's output with its graph, and each step's proxy and timesteps so far."""

    def __init__(self, where, model, positions, is_joint):
        self.where = where
        self.model = model
        self.positions = positions
        self.is_joint = is_joint
        self.syncs = syncs_gradients(model)
        self.link = link_parameter(model)
        self.resume_micro_step = None
        self.first = self.device = None
        self.proxies = []
        self.timesteps = []
        self.weights = None  # of each step at the two endpoints, known before an endpoint's backward
        self.constants = ()  # which tensors that the forward returns can't carry a gradient
        self.ends_first = False  # the step that is visited is the one whose backward is the first endpoint's, if that has its own
        self.first_folded = self.first_done = False
        self.folded = False
        self.forwards = None  # how many are run if the intermediate ones are skipped, if they may be
        self.compares = False  # all of them with the rollout's, and skips none
        self.alphas = None
        self.places = None  # of its steps in the rollout's records, `[W][B]`
        self.stand_in = None  # for the model, in what is skipped
        self.last = None  # the last endpoint's output, if its forward is run at the first step
        self.changes = None  # of the endpoints' outputs since the rollout; known means that the intermediate forwards are skipped

    def release(self):
        """Let go of the gradients: a trainer that keeps its losses until it logs them keeps the graph that leads here."""
        for proxy in self.proxies:
            proxy.grad = None
        self.first, self.proxies, self.timesteps = None, [], []
        self.last, self.changes, self.stand_in = None, None, None

    def weigh(self, timesteps, aggregation, where):
        """Work out what each step counts, before an endpoint's forward or backward is paid for."""
        try:
            self.alphas = alphas(torch.stack(timesteps))
            self.weights = endpoint_weights(self.alphas, aggregation)
        except JaggError as error:
            raise JaggError(f"{where}: {error}") from None

    def require_backward(self, proxies):
        """These steps must have had their loss's backward, which leaves s_j in the proxy's `.grad`."""
        missing = [j for j, proxy in enumerate(proxies) if proxy.grad is None]
        if missing:
            raise JaggError(
                f"{self.where}: no gradient arrived for step {missing[0]} of the group before the group went on\n"
                "every step's loss needs its own .backward() in the loop, right after the step: run with JAGG_ENABLED=0"
            )


class Session:
    """Ties the plan and the joint backward to the step calls of a training loop, one rollout's update at a time.

    `on_update` is called before every optimizer step that finds the gradient whole, `say` with what users should know,
    `on_training_step` at the end of each training step with its record, a dict.
    """

    def __init__(self, config, on_update=lambda: None, say=lambda line: None, on_training_step=lambda record: None):
        self.config = config
        self.stats = Stats()
        self.schedule = Schedule(config.schedule, say)
        self.probe = Probe(config)
        self.skipping = Skipping(config, say)
        self._routing = Routing(config, say)
        self._say = say
        self._on_update = on_update
        self._on_training_step = on_training_step
        self._spoilt_at = None  # a group of which a part is among the gradients for good
        self._joint_is_possible = False
        self._group = None
        self._forget()

    def _forget(self):
        if self._group is not None:
            self._group.release()
        self._in_training_step = False
        self._failed_at = None
        self._roles = self._groups = ()
        self._n_trajectory = 0
        self._orders = []  # one a sample, or None: every sample's visited steps come in trajectory order
        self._sample = 0  # the first one of the batch that is being visited
        self._position = 0  # how many of its visited steps are done
        self._batch_size = 0
        self._role = None  # of the step whose forward is running
        self._solver_calls = 0
        self._ahead = None  # while the last endpoint's forward runs at the first step: its model outputs
        self._group = None
        self._restart_stopwatch()
        self.probe.begin(0, 0)
        self.skipping.update_ends()

    @contextmanager
    def training_step(self):
        """Everything that is remembered lives inside this block, also when it ends in an exception."""
        if self._in_training_step:
            self._failed_at = self._failed_at or "a training step inside this one"
            raise JaggError("a training step began inside another one\none session follows one loop: run with JAGG_ENABLED=0")
        if self._spoilt_at is not None:
            raise JaggError(
                f"{self._spoilt_at}: the group failed in an earlier training step, and this engine keeps a part of its gradient\n"
                "start again from the last checkpoint"
            )
        self._forget()
        self._in_training_step = True
        hook = register_optimizer_step_pre_hook(self._before_optimizer_step)
        try:
            yield
            self._require_whole("the training step ended")
            self._require_last_sample_visited("the training step ended")
            self._end_update()
        except BaseException:
            if self._group is not None and (self._group.first_folded or self._group.folded):
                # A part of the group has reached the weights. Some trainers zero gradients after an optimizer step only.
                if not drop_gradients(self._group.model):
                    self._spoilt_at = self._group.where
            raise
        finally:
            hook.remove()
            self._forget()

    def rollout_begins(self):
        """A batch of it. The training step before, if there was one, is over."""
        if self._in_training_step and self._group is None and not self._position:
            self._end_update()
            self._stopwatch.rollout_begins()

    @contextmanager
    def rollout(self):
        """Around the rollout of a batch, in which solver steps are recorded if that is asked for."""
        self.rollout_begins()
        with self.skipping.recording():
            yield

    def _restart_stopwatch(self):
        self._stopwatch = Stopwatch(waits=bool(self.config.log or self.config.probe_every))

    @contextmanager
    def evaluation(self):
        """Around an evaluation, whose rollouts aren't trained on."""
        with self.skipping.paused():
            yield
        if not self._stopwatch.in_update:
            self._restart_stopwatch()

    def plan(self, n_trajectory, n_visited, shuffled=True):
        """Plan the update of a rollout, or of all of them.

        Args:
            n_trajectory: how many steps of each sample can be trained.
            n_visited: how many of them will be.
            shuffled: whether `order` will be asked for each sample's order; if not, the loop goes from 0 to `n_visited`.
        """
        if not self._in_training_step:
            return
        self._require_closed("a new rollout ended")
        self._require_last_sample_visited("a new rollout ended")
        self._n_trajectory = n_trajectory
        self._route(n_visited)
        self._orders = [] if shuffled else None
        self._sample = self._position = 0

    def _route(self, n_visited):
        self._groups = self._routing.groups(n_visited)
        self._roles = step_roles(n_visited, self._groups)

    def _update_begins(self, step):
        if not self._stopwatch.in_update:
            if self.config.probe_every:
                require_gradients_in_place(step.model)
                if len(step.indices) > 1 and not self.routes:
                    raise JaggError(
                        "the probe can't sort the steps of a batch whose samples have their own orders, if nothing is grouped\n"
                        "set JAGG_FRAC above 0, or unset JAGG_PROBE_EVERY"
                    )
            self._stopwatch.update_begins()
            self._route(len(self._roles))  # a probe may have changed it since it was planned
            groups = whole_groups(len(self._roles), self.config.group_size) if self._routing.is_auto else self._groups
            self.skipping.update_begins(max(map(len, groups), default=0), self.schedule.name)
            self.probe.begin(self.stats.training_steps + 1, len(self._roles))
            self._passes_before = self.stats.backward_passes, self.stats.backward_passes_unpatched
            self._skipped_before = self.stats.skipped_forwards

    def _end_update(self):
        if not self._stopwatch.in_update:
            return
        self.stats.training_steps += 1
        self.skipping.update_ends()
        rollout_seconds, update_seconds = self._stopwatch.seconds()
        self._restart_stopwatch()
        passes, unpatched = self.stats.backward_passes, self.stats.backward_passes_unpatched
        visited, grouped = len(self._roles), [len(group) for group in self._groups if len(group) > 1]
        if self.probe.is_due:
            self._say(f"JAGG: no probe at training step {self.stats.training_steps}: the optimizer didn't step in it")
        self._on_training_step(
            {
                "training_step": self.stats.training_steps,
                "frac": sum(grouped) / visited if visited else 0,
                "trajectory": self._n_trajectory,
                "visited": visited,
                "groups": grouped,
                "schedule": self.schedule.name,
                "forwards_a_group": forwards_a_group(self.skipping.is_on, self.schedule.name),
                "backward_passes": passes - self._passes_before[0],
                "backward_passes_saved": unpatched - passes - self._passes_before[1] + self._passes_before[0],
                "forward_passes_saved": self.stats.skipped_forwards - self._skipped_before,
                "rollout_seconds": rollout_seconds,
                "update_seconds": update_seconds - self.probe.seconds,
                "probe_seconds": self.probe.seconds,
                "probe": self.probe.result,
            }
        )
        if self.probe.result:
            self._routing.after_probe([group["cosine"] for group in self.probe.result[0]["groups"]])

    @property
    def routes(self):
        """Whether anything of this rollout is grouped, or could be; if not, nothing of the trainer is touched."""
        return any(role is not Role.EXACT for role in self._roles) or (self._routing.is_auto and len(self._roles) > 1)

    @property
    def trains(self):
        """Whether a forward that began now would be a planned one. One without gradients is a reference or an evaluation."""
        return self._in_training_step and bool(self._roles) and torch.is_grad_enabled()

    @property
    def n_ordered(self):
        """How many samples have an order in this pass over the rollout; a new pass begins when all of them are visited."""
        return 0 if self._sample == len(self._orders) else len(self._orders)

    def order(self, permutation):
        """The same permutation `[T]` of trajectory steps with its visited entries, the first k, sorted."""
        if not self.routes:
            return permutation
        if len(permutation) != self._n_trajectory:
            raise JaggError(
                f"the trainer orders {len(permutation)} steps of a sample, but its settings say {self._n_trajectory}\n"
                "the plan would be wrong: run with JAGG_ENABLED=0 and report this upstream version"
            )
        if not self.n_ordered:
            self._orders, self._sample = [], 0
        n_visited = len(self._roles)
        permutation = permutation.clone()
        permutation[:n_visited] = permutation[:n_visited].sort().values
        self._orders.append(permutation[:n_visited].tolist())
        return permutation

    def run_step(self, step, forward):
        """One training forward, in the grad mode that its role asks for.

        Args:
            step: a `Step`; its place is checked against what the plan expects.
            forward: called without arguments, once. With skipped forwards, also with those arguments of the training forward's
                that are to be others, by name; `model` is the model, whatever the trainer calls it.

        Returns:
            What `forward` returns.
        """
        if not self.trains:
            return forward()
        self._update_begins(step)
        if self.routes:
            self._require_no_failure("the loop went on")
        try:
            with self.probe.recording(step, forward):
                if self.routes:
                    return self._visit(step, forward)
                self.stats.exact_steps += 1
                return forward()
        except BaseException:
            if self.routes:  # else the loop may pass over it, as it does unpatched
                self._failed_at = self._failed_at or f"sample {self._sample}, visited step {self._position}"
            raise

    def _expected(self, batch_size, position):
        """Trajectory steps that the plan has for a batch at that position, one a sample; None where there are no more samples."""
        if self._orders is None:
            return [position] * batch_size
        orders = self._orders[self._sample : self._sample + batch_size]
        if len(orders) < batch_size or (position and batch_size != self._batch_size):
            return None
        return [order[position] for order in orders]

    def _visit(self, step, forward):
        position, indices = self._position, step.indices
        steps = f"step {indices[0]}" if len(indices) == 1 else f"steps {indices}"
        where = f"sample {self._sample}, visited step {position} (trajectory {steps})"
        expected = self._expected(len(indices), position)
        if indices != expected:
            planned = "no further step" if expected is None else f"trajectory step {', '.join(map(str, expected))}"
            raise JaggError(
                f"{where}: the plan expected {planned}, so the loop isn't the one that JAGG knows\n"
                "nothing was trained on this step: run with JAGG_ENABLED=0 and report this upstream version"
            )
        self._batch_size = len(indices)
        role = self._roles[position]
        if role in (Role.EXACT, Role.FIRST):
            self._require_closed(f"{where} came")
        if role is Role.FIRST:
            if looks_for_unused_parameters(step.model):
                self._rule_out_joint("DDP looks for unused parameters", "unset find_unused_parameters")
            self.schedule.before_group(step.model)
            positions = next(group for group in self._groups if group.start == position)
            self._group = _Group(where, step.model, positions, self.schedule.is_joint)
        if role is not Role.EXACT:
            self._enter_grouped_step(step, role, where)

        self._role, self._solver_calls = role, 0
        try:
            with torch.set_grad_enabled(role is not Role.INTERMEDIATE):
                result = self._run(step, role, forward)
        finally:
            self._role = None
            if role is Role.INTERMEDIATE:
                # Under an autocast around the whole loop, torch 2.5 would hand the graphless casts to the next forward.
                torch.clear_autocast_cache()
        if role is not Role.EXACT:
            self._require_through_proxy(result, where, role)
        if role is Role.FIRST and self._group.forwards and not self._group.compares:
            self._look_at_last(step, forward, where)
        if role is Role.LAST and self._group.compares:
            self.skipping.was_compared(self._group.positions, self._group.device)
        self._position += 1
        if self._position == len(self._roles):
            self._position = 0
            self._sample += self._batch_size
        if role is Role.EXACT:
            self.stats.exact_steps += 1
        else:
            self.stats.grouped_steps += 1
        return result

    def _run(self, step, role, forward):
        group = self._group
        if role is Role.FIRST:
            with (
                self.schedule.measuring(step.model),
                watched(step.model, self.model_returned) if group.forwards else nullcontext(),
            ):
                return forward()
        is_skipped = role is not Role.EXACT and (group.changes if role is Role.INTERMEDIATE else group.last) is not None
        if not is_skipped:
            return forward()
        self.stats.skipped_forwards += 1
        result = forward(model=group.stand_in)
        if not group.stand_in.is_called:
            raise JaggError(
                f"{group.where}: a training forward didn't call the model that it was given (but another name of it?)\n"
                "its forwards can't be skipped: run with JAGG_SKIP_FORWARDS=0, and report this upstream version"
            )
        return result

    def model_returned(self, output):
        """The model has given `output` in a training forward, for a group's stand-in."""
        if self._role is Role.FIRST and self._group.stand_in is not None:
            self._group.stand_in.returned(output)

    def _look_at_last(self, step, forward, where):
        """Run the last endpoint's forward at the first step, so that what lies between can be estimated, if all ranks can."""
        group, records, device = self._group, self.skipping.records, self._group.device
        first, last = [places and records.outputs(places) for places in (group.places[0], group.places[-1])]
        self.skipping.compare(None if last is None else first, group.first)
        if not group.stand_in.is_ready:
            self.skipping.doubts("the training forward doesn't call the model that it is given")
        if not self.skipping.is_agreed(device):
            group.forwards = None
            return
        is_endpoints_first = group.forwards == ENDPOINTS_FIRST
        indices = self._expected(self._batch_size, group.positions[-1])
        changed = step.at(indices, records.latents(group.places[-1]).to(device))
        self._ahead = []
        try:
            torch.clear_autocast_cache()  # casts that both endpoints' graphs shared would be added up in the lower precision
            with torch.set_grad_enabled(is_endpoints_first):
                forward(**changed)
            self._solver_calls = len(self._ahead)
            self._require_one_solver_call(where)
            (output,) = self._ahead
        finally:
            self._ahead = None
            torch.clear_autocast_cache()
        self.stats.skipped_forwards -= 1
        self.skipping.compare(last, output)
        if self.skipping.policy_has_moved or self.skipping.is_agreed(device):
            self.skipping.begins()
            group.last = output if is_endpoints_first else None
            wide = torch.promote_types(output.dtype, torch.float32)
            ends = (group.first, first), (output, last)
            group.changes = [now.detach().to(wide) - then.to(now.device, wide) for now, then in ends]

    def _enter_grouped_step(self, step, role, where):
        """Everything that can be checked and worked out before the forward is paid for."""
        group, timesteps = self._group, step.timesteps.detach().reshape(-1).clone()  # the trainer may change its own in place
        if step.model is not group.model and len(group.positions) > 2:
            raise JaggError(
                f"{where}: it is another model's than the group's first, which would get its share of the gradient\n"
                "run with JAGG_ENABLED=0 and report this upstream version"
            )
        group.require_backward(group.proxies)
        syncs = syncs_gradients(step.model)
        if syncs != group.syncs and not (role is Role.LAST and syncs and group.last is None):
            raise JaggError(
                f"{where}: whether gradients are synced between the ranks changed inside a group\n"
                "the ranks would drift apart: sync after whole samples only, or run with JAGG_ENABLED=0"
            )
        group.timesteps.append(timesteps)
        if role is Role.FIRST:
            self._plan_forwards(step)
        if group.is_joint and not group.forwards:
            if role is Role.LAST:
                group.weigh(group.timesteps, self.config.aggregation, where)
            return

        def timesteps_at(position):
            return step.timesteps_at(self._expected(len(step.indices), position)).reshape(-1).to(timesteps)

        if not torch.equal(timesteps_at(self._position), timesteps):
            raise JaggError(
                f"{where}: the model is fed timesteps {timesteps.tolist()}, its schedule says "
                f"{timesteps_at(self._position).tolist()}\n"
                "JAGG can't look ahead here: run with JAGG_SCHEDULE=joint JAGG_SKIP_FORWARDS=0, and report this upstream version"
            )
        if group.forwards:
            if role is Role.FIRST:
                group.weigh([timesteps_at(position) for position in group.positions], self.config.aggregation, where)
            elif (group.changes or group.last is not None) and not self.skipping.records.are_at(
                group.places[len(group.timesteps) - 1], step.latents
            ):
                raise JaggError(
                    f"{where}: the sample isn't the one that the group began with, by the rollout's records\n"
                    "its model outputs can't be estimated: run with JAGG_SKIP_FORWARDS=0, and report this upstream version"
                )
        if not group.is_joint and role is Role.LAST and not group.first_done:
            raise JaggError(
                f"{group.where}: the backward pass of the group's first endpoint, in that of the step before {where}, failed\n"
                "its gradient is incomplete: let the exception end the training step, or run with JAGG_ENABLED=0"
            )
        group.ends_first = not group.is_joint and role is not Role.LAST and self._roles[self._position + 1] is Role.LAST
        if group.ends_first and group.weights is None:
            group.weigh([*group.timesteps, timesteps_at(self._position + 1)], self.config.aggregation, where)

    def _plan_forwards(self, step):
        """Whether this group's intermediate forwards may be skipped, by its size, its place and the engine alone."""
        group = self._group
        is_endpoints_first = group.is_joint and (
            group.syncs or group.positions[-1] + 1 < len(self._roles) or not prepares_sync_in_forward(group.model)
        )
        group.forwards = self.skipping.forwards_of_group(len(group.positions), is_endpoints_first)
        if group.forwards:
            group.stand_in = StandIn(step.model)
            group.compares = self.skipping.must_compare(group.positions)
            first = self.skipping.records.find(step.latents, step.next_latents, self._sample)
            starts = self._expected(len(step.indices), group.positions[0])
            group.places = []
            for position in group.positions:
                moves = [index - start for index, start in zip(self._expected(len(starts), position), starts, strict=True)]
                rows = moves * (len(step.latents) // len(moves))  # one index may be that of the whole batch
                group.places.append(first and [place.moved(n) for place, n in zip(first, rows, strict=True)])

    def _require_through_proxy(self, result, where, role):
        """What a grouped forward returns must depend on the model output through the solver step alone."""
        self._require_one_solver_call(where)
        tensors = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
        if role is Role.FIRST:
            # Its forward recorded everything, so a tensor without a graph doesn't depend on the weights (the noise level, say).
            self._group.constants = [not tensor.requires_grad for tensor in tensors]
            own = [leaf for leaf in (self._group.proxies[-1], self._group.link) if leaf is not None]
            others = [leaf for leaf in reached_leaves(tensors) if not any(leaf is one for one in own)]
            if others and len(self._group.positions) > 2:
                raise JaggError(
                    f"{where}: the training forward returned what depends on weights by another way than the model's output\n"
                    "the steps between would lose that gradient: run with JAGG_ENABLED=0 and report this upstream version"
                )
            return
        for tensor, was_constant in zip_longest(tensors, self._group.constants):
            shape = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
            if tensor is None or was_constant is None or not (was_constant or tensor.requires_grad):
                raise JaggError(
                    f"{where}: the training forward returned a tensor without a graph, {shape}, unlike the group's first\n"
                    "a loss on it would lose its gradient: run with JAGG_ENABLED=0 and report this upstream version"
                )
            if role is Role.LAST and was_constant and tensor.requires_grad:
                raise JaggError(
                    f"{where}: the training forward returned a tensor with a graph, {shape}, that the group's first had without\n"
                    "the steps between may have lost its gradient: run with JAGG_ENABLED=0 and report this upstream version"
                )

    def _require_one_solver_call(self, where):
        if self._solver_calls != 1:
            raise JaggError(
                f"{where}: the solver step ran {self._solver_calls} times in one training forward, not once\n"
                "the proxy can't stand for the model output here: run with JAGG_ENABLED=0"
            )

    @contextmanager
    def solver_input(self, model_output):
        """What the solver step gets in place of the model output `[B, ...]`; outside a grouped step, the same tensor."""
        if self.probe.is_replaying:
            self.probe.replayed(model_output)
            yield model_output
            return
        if self._ahead is not None:
            self._ahead.append(model_output.clone())  # the trainer may change its own in place
            yield model_output.detach()
            return
        with self._solver_input(model_output) as value:
            self.probe.watch(value)
            yield value

    @contextmanager
    def _solver_input(self, model_output):
        if self._role in (None, Role.EXACT):
            yield model_output
            return
        self._solver_calls += 1
        group = self._group
        if group.forwards:
            model_output = self._skipped_output(group, model_output)
        if self._role is not Role.INTERMEDIATE and not model_output.requires_grad:
            raise JaggError(
                f"{group.where}: the model output of an endpoint has no graph, so no gradient could reach the weights\n"
                "is the model frozen, or the forward under no_grad? Unfreeze it or run with JAGG_ENABLED=0"
            )
        with torch.enable_grad():
            if self._role is Role.LAST:
                endpoints = [group.first, model_output] if group.is_joint else [model_output]
                yield joint_output(model_output.detach(), endpoints, partial(self._fold, group))
                return
            if self._role is Role.FIRST:
                if self.schedule.name != "sequential" and not self._joint_is_possible:
                    self._look_for_reentrant_checkpointing(model_output)
                group.first = model_output.clone()  # the trainer may change its own in place
                group.device = model_output.device
                group.resume_micro_step = hold_micro_step(group.model)
            proxy = model_output.detach().requires_grad_()
            group.proxies.append(proxy)
            if group.ends_first:
                yield joint_output(proxy, [group.first], partial(self._fold_first, group))
                return
            proxy.register_hook(lambda grad: self._refuse_second_backward(group, group.first_folded or group.folded))
            yield proxy if group.link is None else linked(proxy, group.link)

    def _skipped_output(self, group, model_output):
        """The model output of a step of a group that may skip; `model_output` is the stand-in's where it does."""
        place = len(group.timesteps) - 1
        if self._role is Role.LAST and group.last is not None:
            return group.last
        if group.changes and self._role is Role.INTERMEDIATE:
            recorded = self.skipping.records.outputs(group.places[place]).to(group.device)
            return estimated_output(recorded, group.alphas[place], *group.changes).to(group.first.dtype)
        if group.compares:
            places = group.places[place]
            self.skipping.compare(places and self.skipping.records.outputs(places), model_output)
        return model_output

    def _fold_first(self, group, grad):
        """`(s_base,)` of `group`: runs inside the own backward of the step before the last, in the sequential schedule."""
        with self._failing(group):
            self._refuse_second_backward(group, group.first_folded)
            group.require_backward(group.proxies[:-1])
            group.first_folded, group.first = True, None
            group.resume_micro_step()
            base, _ = group.weights
            folded = weighted_sum([proxy.grad for proxy in group.proxies[:-1]] + [grad], base[:-1])
        self._once_through(partial(setattr, group, "first_done", True))
        return (folded,)

    def _fold(self, group, last_grad):
        """`(s_base, s_corr)`, in the sequential schedule `(s_corr,)`: runs inside the last step's own backward."""
        with self._failing(group):
            self._refuse_second_backward(group, group.folded)
            group.require_backward(group.proxies)
            group.folded = True
            if group.is_joint:
                group.resume_micro_step()
            grads = [proxy.grad for proxy in group.proxies] + [last_grad]
            folded = [weighted_sum(grads, weights) for weights in (group.weights if group.is_joint else group.weights[1:])]
        self._once_through(partial(self._close, group))
        return folded

    @contextmanager
    def _failing(self, group):
        try:
            yield
        except BaseException:
            self._failed_at = self._failed_at or group.where
            raise

    def _once_through(self, callback):
        """Call back when the running backward is whole: the endpoints' graphs are still to come, and may fail."""
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _refuse_second_backward(self, group, is_folded):
        if group is not self._group or is_folded:
            self._failed_at = self._failed_at or group.where
            raise JaggError(
                f"{group.where}: a second backward reached the group after its last step's (retain_graph, or a loss used twice)\n"
                "its gradient would count double or be lost: run with JAGG_ENABLED=0"
            )

    def _close(self, group):
        if group is self._group:
            group.release()
            self._group = None
            self.stats.groups += 1

    def _look_for_reentrant_checkpointing(self, output):
        """It runs backward passes inside the backward; FSDP1 then loses gradients when two graphs are joined."""
        seen, nodes = set(), [output.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            if node.name() == "CheckpointFunctionBackward":
                why = "the model recomputes activations with reentrant checkpointing"
                self._rule_out_joint(why, "pass use_reentrant=False (CheckpointImpl.NO_REENTRANT)")
                return
            seen.add(node)
            nodes += [next_node for next_node, _ in node.next_functions]
        self._joint_is_possible = True

    def _rule_out_joint(self, why, remedy):
        if self.schedule.is_joint:
            raise JaggError(f"{why}, which the joint schedule can't have\n{remedy}, or run with JAGG_SCHEDULE=sequential")
        if self.schedule.name == "auto":
            self.schedule.settle("sequential", why)

    def _require_last_sample_visited(self, event):
        if self.routes and self._position:
            raise JaggError(
                f"{event} after {self._position} of the {len(self._roles)} steps planned for its last sample\n"
                "other steps than upstream's may have been trained: run with JAGG_ENABLED=0 and report this upstream version"
            )

    def _before_optimizer_step(self, optimizer, *_):
        try:
            if self.probe.is_measuring:
                raise JaggError(
                    "an optimizer stepped inside the probe's backward passes, as one does that steps in gradient hooks\n"
                    "the probe would train: run without JAGG_PROBE_EVERY"
                )
            self._require_whole("the optimizer was about to step")
            self.skipping.policy_has_moved |= self._stopwatch.in_update  # before it, another model's optimizer steps
            self.schedule.before_optimizer_step(self.stats.groups)
            self._on_update()
            if self.probe.is_ready:
                n_routed = sum(len(group) > 1 for group in self._groups)
                self.probe.measure(optimizer, n_routed, self._routing.all_groups(len(self._roles)))
        except BaseException:
            self._failed_at = self._failed_at or "an optimizer step"
            raise

    def _require_whole(self, event):
        self._require_no_failure(event)
        self._require_closed(event)

    def _require_no_failure(self, event):
        if self._failed_at is not None:
            raise JaggError(
                f"{event} although {self._failed_at} had failed: gradients of this training step are missing\n"
                "let the exception end the training step, or run with JAGG_ENABLED=0"
            )

    def _require_closed(self, event):
        if self._group is not None:
            raise JaggError(
                f"{event} while the group that began at {self._group.where} was still open: its gradient is incomplete\n"
                "does the loop end early, or step the optimizer inside a sample? Run with JAGG_ENABLED=0"
            )
