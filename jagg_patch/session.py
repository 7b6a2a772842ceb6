"""The state machine of one trainer: which step is being visited, what it is in the plan, and the group that is open.

It knows nothing of upstream's names; `trainers/` calls it from the wrapped functions, in this order:

    training_step( rollout_done, order × trajectories, ( run_step( solver_input ), the trainer's backward ) × steps )
"""

from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from .errors import JaggError
from .joint import aggregate, joint_output
from .plan import Role, alphas, plan_groups, step_roles


@dataclass
class Stats:
    """Counts since `install`, on this rank."""

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
        self.folded = False

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
    """Ties the plan and the joint backward to the step calls of a training loop, one rollout's update at a time."""

    def __init__(self, config):
        self.config = config
        self.stats = Stats()
        self._graph_is_known = False
        self._forget()

    def _forget(self):
        self._in_training_step = False
        self._failed_at = None
        self._roles = ()
        self._orders = []
        self._n_done = 0
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
            self._require_last_sample_visited()
            self.stats.training_steps += 1
        finally:
            hook.remove()
            self._forget()

    def rollout_done(self, n_trajectory, n_visited):
        """Plan the update of a rollout: of the `n_trajectory` steps of each sample, `n_visited` will be trained."""
        if not self._in_training_step:
            return
        self._require_closed("a new rollout ended")
        groups = plan_groups(n_visited, self.config)
        self._n_trajectory = n_trajectory
        self._roles = step_roles(n_visited, groups)
        self._orders, self._n_done = [], 0

    @property
    def _routes(self):
        """Whether anything of this rollout is grouped; if not, nothing of the trainer is touched."""
        return any(role is not Role.EXACT for role in self._roles)

    def order(self, permutation):
        """The same permutation `[T]` with its visited entries, the first k, sorted: same steps, in trajectory order."""
        if not self._routes:
            return permutation
        if len(permutation) != self._n_trajectory:
            raise JaggError(
                f"the trainer orders {len(permutation)} steps of a sample, but --sampling_steps gives {self._n_trajectory}\n"
                "the plan would be wrong: run with JAGG_ENABLED=0 and report this upstream version"
            )
        n_visited = len(self._roles)
        permutation = permutation.clone()
        permutation[:n_visited] = permutation[:n_visited].sort().values
        self._orders.append(permutation[:n_visited].tolist())
        return permutation

    def run_step(self, index, timesteps, forward):
        """One training forward, in the grad mode that its role asks for.

        Args:
            index: the step's place in the trajectory, checked against the order that was drawn.
            timesteps: `[B]`, what the model is fed.
            forward: called once, without arguments.

        Returns:
            What `forward` returns.
        """
        # A forward without gradients is a reference or an evaluation, not a visited step.
        if not self._in_training_step or not self._routes or not torch.is_grad_enabled():
            return forward()
        self._require_no_failure("the loop went on")
        try:
            return self._visit(int(index), timesteps, forward)
        except BaseException:
            sample, position = divmod(self._n_done, len(self._roles))
            self._failed_at = self._failed_at or f"sample {sample}, visited step {position}"
            raise

    def _visit(self, index, timesteps, forward):
        trajectory, position = divmod(self._n_done, len(self._roles))
        where = f"sample {trajectory}, visited step {position} (trajectory step {index})"
        if trajectory >= len(self._orders) or self._orders[trajectory][position] != index:
            known = trajectory < len(self._orders)
            expected = f"trajectory step {self._orders[trajectory][position]}" if known else "no further step"
            raise JaggError(
                f"{where}: the plan expected {expected}, so the loop isn't the one that JAGG knows\n"
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
            self._require_through_proxy(result, where)
        self._n_done += 1
        if role is Role.EXACT:
            self.stats.exact_steps += 1
        else:
            self.stats.grouped_steps += 1
        return result

    def _require_through_proxy(self, result, where):
        """What a grouped forward returns must depend on the model output through the solver step alone."""
        if self._solver_calls != 1:
            raise JaggError(
                f"{where}: the solver step ran {self._solver_calls} times in one training forward, not once\n"
                "the proxy can't stand for the model output here: run with JAGG_ENABLED=0"
            )
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and not tensor.requires_grad:
                raise JaggError(
                    f"{where}: the training forward returned a tensor without a graph, of shape {list(tensor.shape)}\n"
                    "a loss on it would lose its gradient: run with JAGG_ENABLED=0 and report this upstream version"
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
            group.proxies.append(proxy)
            yield proxy

    def _fold(self, group, last_grad):
        """`(s_base, s_corr)` of `group`: runs inside the last step's own backward, and closes the group when that is through."""
        try:
            if group is not self._group or group.folded:
                raise JaggError(
                    f"{group.where}: a second backward reached the group's last step (retain_graph, or a loss used twice)\n"
                    "its gradient would count double: run with JAGG_ENABLED=0"
                )
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

    def _close(self, group):
        if group is self._group:
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

    def _require_last_sample_visited(self):
        n_left = self._n_done % len(self._roles) if self._routes else 0
        if n_left:
            raise JaggError(
                f"the training step ended after {n_left} of the {len(self._roles)} steps planned for its last sample\n"
                "other steps than upstream's may have been trained: run with JAGG_ENABLED=0 and report this upstream version"
            )

    def _before_optimizer_step(self, *_):
        try:
            self._require_whole("the optimizer was about to step")
        except JaggError:
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
