"""What the tests read off a training run: gradients, backward passes, all-gathers; and the gradient that should come out.

Used inside the processes that torchrun starts, on the mini trainer and on upstream's alike. Nothing here knows the session:
the expected gradient comes from `group_backward` on the calls that the *unpatched* trainer made.
"""

import inspect
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jagg_patch import group_backward, plan_groups


class Observer:
    """Counts on one FSDP-wrapped transformer while `watching()`; attributes are reset at each entry.

    gradients: this rank's shard of the gradient at each optimizer step, flattened.
    passes: backward passes that entered the transformer; reaching: autograd calls that contained at least one of them.
    gathers: all-gathers in each of those autograd calls (FSDP1 gathers with `dist.all_gather` on a CPU).
    """

    def __init__(self, transformer):
        self.transformer = transformer
        self._reset()
        transformer.register_forward_hook(self._watch_output)

    def _reset(self):
        self.gradients, self.passes, self.gathers = [], 0, []
        self._in_backward, self._entered, self._gathered = False, False, 0

    @property
    def reaching(self):
        return len(self.gathers)

    def _watch_output(self, module, inputs, output):
        if output[0].requires_grad:
            output[0].register_hook(self._enter)

    def _enter(self, grad):
        self.passes += 1
        self._entered = True

    def _before_optimizer_step(self, optimizer, *_):
        self.gradients.append(local_gradient(self.transformer))

    @contextmanager
    def watching(self):
        self._reset()
        backward, all_gather = torch.Tensor.backward, dist.all_gather

        def counted_backward(*args, **kwargs):
            self._in_backward, self._entered, self._gathered = True, False, 0
            result = backward(*args, **kwargs)
            self._in_backward = False
            if self._entered:
                self.gathers.append(self._gathered)
            return result

        def counted_all_gather(*args, **kwargs):
            self._gathered += self._in_backward
            return all_gather(*args, **kwargs)

        hook = register_optimizer_step_pre_hook(self._before_optimizer_step)
        torch.Tensor.backward, dist.all_gather = counted_backward, counted_all_gather
        try:
            yield self
        finally:
            torch.Tensor.backward, dist.all_gather = backward, all_gather
            hook.remove()


def local_gradient(transformer):
    """This rank's shard of the gradient, flattened; zeros where a parameter has none."""
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten().clone() for p in transformer.parameters()]
    )


def local_weights(transformer):
    return torch.cat([p.detach().flatten().clone() for p in transformer.parameters()])


@contextmanager
def recorded_steps(module):
    """A list of the training forwards that `module` runs: bound arguments, and dL/d(log-probability) once it is known."""
    original = module.grpo_one_step
    signature, steps = inspect.signature(original), []

    def recording(*args, **kwargs):
        log_prob = original(*args, **kwargs)
        step = {"arguments": signature.bind(*args, **kwargs).arguments}
        steps.append(step)
        log_prob.register_hook(lambda grad: step.update(weight=grad.clone()))
        return log_prob

    module.grpo_one_step = recording
    try:
        yield steps
    finally:
        module.grpo_one_step = original


def oracle_gradient(module, transformer, steps, n_visited, config):
    """The gradient of one optimizer step that JAGG should give, from the `steps` of the unpatched trainer.

    A step's loss enters as `weight * log-probability`, whose gradient is the trainer's own loss's by the chain rule.
    """
    transformer.zero_grad()
    groups = plan_groups(n_visited, config)
    exact = range(sum(map(len, groups)), n_visited)
    flux_step = module.flux_step
    bind = inspect.signature(flux_step).bind

    for start in range(0, len(steps), n_visited):
        sample = sorted(steps[start : start + n_visited], key=lambda step: int(step["arguments"]["i"]))
        for group in [*groups, *([position] for position in exact)]:
            members = [sample[position] for position in group]
            solver_calls = {}

            def velocity(j, members=members, solver_calls=solver_calls):
                def keep_call(*args, **kwargs):
                    solver_calls[j] = bind(*args, **kwargs)
                    return flux_step(*args, **kwargs)

                module.flux_step = keep_call
                try:
                    module.grpo_one_step(**members[j]["arguments"])
                finally:
                    module.flux_step = flux_step
                return solver_calls[j].arguments["model_output"]

            def loss(j, v_hat, members=members, solver_calls=solver_calls):
                call = solver_calls[j]
                call.arguments["model_output"] = v_hat
                return (members[j]["weight"] * flux_step(*call.args, **call.kwargs)[2]).sum()

            timesteps = torch.stack([member["arguments"]["timesteps"] for member in members])
            group_backward(velocity, loss, timesteps, config)
    gradient = local_gradient(transformer)
    transformer.zero_grad()
    return gradient


def relative_error(found, expected):
    """Norm of the difference over the norm of `expected`, over all ranks."""
    norms = torch.stack([(found - expected).square().sum(), expected.square().sum()]).double()
    if dist.is_initialized():
        dist.all_reduce(norms)
    return float((norms[0] / norms[1]).sqrt())
