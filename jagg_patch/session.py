"""The state machine of one trainer: which step is being visited, what it is in the plan, and the group that is open.

It knows nothing of upstream's names; `trainers/` calls it from the wrapped functions, in this order:

    training_step( plan, order × trajectories, ( run_step( solver_input ), the trainer's backward ) × steps )

A trainer whose loop can't be told from the rest of its `main` is one long training step, and plans once; one that visits the
steps in trajectory order by itself draws no order.
"""

from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import zip_longest

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from .errors import JaggError
from .joint import aggregate, joint_output
from .plan import Role, alphas, plan_groups, step_roles


@dataclass
class Stats:
    """Counts since `install`, on this rank. A step counts once, however many samples are in its batch."""

    training_steps: int = 0
    exact_steps: int = 0
    grouped_steps: int = 0
    groups: int = 0

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

    def __init__(self, where):
        self.where = where
        self.first = None
        self.proxies = []
        self.timesteps = []
        self.weights = None  # α, known when the last step comes
        self.constants = ()  # which tensors that the forward returns can't carry a gradient
        self.folded = False

    def release(self):
        """Let go of the gradients: a trainer that keeps its losses until it logs them keeps the graph that leads here."""
        for proxy in self.proxies:
            proxy.grad = None
        self.first, self.proxies, self.timesteps = None, [], []

    def close_with(self, where):
        """Work out α before the last forward is paid for."""
        try:
            self.weights = alphas(torch.stack(self.timesteps))
        except JaggError as error:
            raise JaggError(f"{where}: {error}") from None

    def require_backward(self):
        """Every step so far must have had its loss's backward, which leaves s_j in the proxy's `.grad`."""
        missing = [j for j, proxy in enumerate(self.proxies) if proxy.grad is None]
        if missing:
            raise JaggError(
                f"{self.where}: no gradient arrived for step {missing[0]} of the group before the group went on\n"
                "every step's loss needs its own .backward() in the loop, right after the step: run with JAGG_ENABLED=0"
            )


class Session:
    """Ties the plan and the joint backward to the step calls of a training loop, one rollout's update at a time.

    `on_update` is called before every optimizer step that finds the gradient whole.
    """

    def __init__(self, config, on_update=lambda: None):
        self.config = config
        self.stats = Stats()
        self._on_update = on_update
        self._graph_is_known = False
        self._forget()

    def _forget(self):
        self._in_training_step = False
        self._failed_at = None
        self._roles = ()
        self._n_trajectory = 0
        self._orders = []  # one a sample, or None: every sample's visited steps come in trajectory order
        self._sample = 0  # the first one of the batch that is being visited
        self._position = 0  # how many of its visited steps are done
        self._batch_size = 0
        self._role = None  # of the step whose forward is running
        self._group = None
        self._solver_calls = 0

    @contextmanager
    def training_step(self):
        """Everything that is remembered lives inside this block, also when it ends in an exception."""
        if self._in_training_step:
            self._failed_at = self._failed_at or "a training step inside this one"
            raise JaggError("a training step began inside another one\none session follows one loop: run with JAGG_ENABLED=0")
        self._forget()
        self._in_training_step = True
        hook = register_optimizer_step_pre_hook(self._before_optimizer_step)
        try:
            yield
            self._require_whole("the training step ended")
            self._require_last_sample_visited("the training step ended")
            self.stats.training_steps += 1
        finally:
            hook.remove()
            self._forget()

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
        self._roles = step_roles(n_visited, plan_groups(n_visited, self.config))
        self._orders = [] if shuffled else None
        self._sample = self._position = 0

    @property
    def routes(self):
        """Whether anything of this rollout is grouped; if not, nothing of the trainer is touched."""
        return any(role is not Role.EXACT for role in self._roles)

    @property
    def visits(self):
        """Whether a forward that began now would be a visited step. One without gradients is a reference or an evaluation."""
        return self._in_training_step and self.routes and torch.is_grad_enabled()

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

    def run_step(self, index, timesteps, forward):
        """One training forward, in the grad mode that its role asks for.

        Args:
            index: the step's place in the trajectory, or a list of them, one for each sample of the batch; checked against
                what the plan expects.
            timesteps: `[B]`, what the model is fed.
            forward: called once, without arguments.

        Returns:
            What `forward` returns.
        """
        if not self.visits:
            return forward()
        self._require_no_failure("the loop went on")
        try:
            return self._visit([int(i) for i in index] if isinstance(index, list) else [int(index)], timesteps, forward)
        except BaseException:
            self._failed_at = self._failed_at or f"sample {self._sample}, visited step {self._position}"
            raise

    def _expected(self, batch_size):
        """Trajectory steps that the plan has for a batch now, one a sample; None where there are no more samples."""
        if self._orders is None:
            return [self._position] * batch_size
        orders = self._orders[self._sample : self._sample + batch_size]
        if len(orders) < batch_size or (self._position and batch_size != self._batch_size):
            return None
        return [order[self._position] for order in orders]

    def _visit(self, indices, timesteps, forward):
        position = self._position
        steps = f"step {indices[0]}" if len(indices) == 1 else f"steps {indices}"
        where = f"sample {self._sample}, visited step {position} (trajectory {steps})"
        expected = self._expected(len(indices))
        if indices != expected:
            planned = "no further step" if expected is None else f"trajectory step {', '.join(map(str, expected))}"
            raise JaggError(
                f"{where}: the plan expected {planned}, so the loop isn't the one that JAGG knows\n"
                "nothing was trained on this step: run with JAGG_ENABLED=0 and report this upstream version"
            )
        role = self._roles[position]
        if role in (Role.EXACT, Role.FIRST):
            self._require_closed(f"{where} came")
        if role is Role.FIRST:
            self._group = _Group(where)
        if role is not Role.EXACT:
            self._group.require_backward()
            self._group.timesteps.append(timesteps.detach().reshape(-1))
        if role is Role.LAST:
            self._group.close_with(where)

        self._role, self._solver_calls = role, 0
        try:
            with torch.set_grad_enabled(role is not Role.INTERMEDIATE):
                result = forward()
        finally:
            self._role = None
            if role is Role.INTERMEDIATE:
                # Under an autocast around the whole loop, torch 2.5 would hand the graphless casts to the next forward.
                torch.clear_autocast_cache()
        if role is not Role.EXACT:
            self._require_through_proxy(result, where, role)
        self._batch_size = len(indices)
        self._position += 1
        if self._position == len(self._roles):
            self._position = 0
            self._sample += self._batch_size
        if role is Role.EXACT:
            self.stats.exact_steps += 1
        else:
            self.stats.grouped_steps += 1
        return result

    def _require_through_proxy(self, result, where, role):
        """What a grouped forward returns must depend on the model output through the solver step alone."""
        if self._solver_calls != 1:
            raise JaggError(
                f"{where}: the solver step ran {self._solver_calls} times in one training forward, not once\n"
                "the proxy can't stand for the model output here: run with JAGG_ENABLED=0"
            )
        tensors = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
        if role is Role.FIRST:
            # Its forward recorded everything, so a tensor without a graph doesn't depend on the weights (the noise level, say).
            self._group.constants = [not tensor.requires_grad for tensor in tensors]
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

    @contextmanager
    def solver_input(self, model_output):
        """What the solver step gets in place of the model output `[B, ...]`; outside a grouped step, the same tensor."""
        if self._role in (None, Role.EXACT):
            yield model_output
            return
        self._solver_calls += 1
        group = self._group
        if self._role is not Role.INTERMEDIATE and not model_output.requires_grad:
            raise JaggError(
                f"{group.where}: the model output of an endpoint has no graph, so no gradient could reach the weights\n"
                "is the model frozen, or the forward under no_grad? Unfreeze it or run with JAGG_ENABLED=0"
            )
        with torch.enable_grad():
            if self._role is Role.LAST:
                yield joint_output(group.first, model_output, partial(self._fold, group))
                return
            if self._role is Role.FIRST:
                self._refuse_reentrant_checkpointing(model_output)
                group.first = model_output.clone()  # the trainer may change its own in place
            proxy = model_output.detach().requires_grad_()
            proxy.register_hook(lambda grad: self._refuse_second_backward(group))
            group.proxies.append(proxy)
            yield proxy

    def _fold(self, group, last_grad):
        """`(s_base, s_corr)` of `group`: runs inside the last step's own backward, and closes the group when that is through."""
        self._refuse_second_backward(group)
        try:
            group.require_backward()
            group.folded = True
            grads = [proxy.grad for proxy in group.proxies] + [last_grad]
            folded = aggregate(grads, group.weights, self.config.aggregation)
        except BaseException:
            self._failed_at = self._failed_at or group.where
            raise
        # Not now: the endpoints' backward passes are still to come, and if they fail the group's gradient is missing.
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._close, group))
        return folded

    def _refuse_second_backward(self, group):
        if group is not self._group or group.folded:
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

    def _refuse_reentrant_checkpointing(self, output):
        """It runs backward passes inside the backward; FSDP1 then loses gradients when two graphs are joined."""
        if self._graph_is_known:
            return
        seen, nodes = set(), [output.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            if node.name() == "CheckpointFunctionBackward":
                raise JaggError(
                    "the model recomputes activations with reentrant checkpointing, which isn't supported\n"
                    "pass use_reentrant=False (CheckpointImpl.NO_REENTRANT), or run with JAGG_ENABLED=0"
                )
            seen.add(node)
            nodes += [next_node for next_node, _ in node.next_functions]
        self._graph_is_known = True

    def _require_last_sample_visited(self, event):
        if self.routes and self._position:
            raise JaggError(
                f"{event} after {self._position} of the {len(self._roles)} steps planned for its last sample\n"
                "other steps than upstream's may have been trained: run with JAGG_ENABLED=0 and report this upstream version"
            )

    def _before_optimizer_step(self, *_):
        try:
            self._require_whole("the optimizer was about to step")
        except JaggError:
            self._failed_at = self._failed_at or "an optimizer step"
            raise
        self._on_update()

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
