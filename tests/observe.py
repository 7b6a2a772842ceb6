"""What the tests read off a training run: gradients, backward passes, all-gathers; and the gradient that should come out.

Used inside the processes that torchrun starts, on the mini trainer and on upstream's alike. Nothing here knows the session:
the expected gradient comes from `group_backward` on the calls that the *unpatched* trainer made.
"""

import inspect
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jagg_patch import group_backward, plan_groups
from jagg_patch.evidence.self_check import SelfCheck
from jagg_patch.method.plan import passes


class Observer:
    """Counts on one FSDP-wrapped transformer while `watching()`; attributes are reset at each entry.

    gradients: this rank's shard of the gradient at each optimizer step, flattened.
    forwards: calls of the transformer in training mode, recomputation aside.
    passes: backward passes that entered the transformer; reaching: autograd calls that contained at least one of them.
    gathers: all-gathers in each of those autograd calls (FSDP1 gathers with `dist.all_gather` on a CPU).
    """

    def __init__(self, transformer):
        self.transformer = transformer
        self._reset()
        transformer.register_forward_hook(self._watch_output)
        first_layer(transformer).register_forward_hook(self._count_forward)

    def _reset(self):
        self.gradients, self.forwards, self.passes, self.gathers = [], 0, 0, []
        self._in_backward, self._entered, self._gathered = False, False, 0

    @property
    def reaching(self):
        return len(self.gathers)

    def _count_forward(self, module, inputs, output):
        self.forwards += module.training  # not the rollout

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


def first_layer(model):
    """Of the input's embedding or the time's: each forward runs it once, and recomputation of the blocks doesn't."""
    return next(module for module in model.modules() if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d, torch.nn.Conv3d)))


def local_gradient(transformer):
    """This rank's shard of the gradient, flattened; zeros where a parameter has none."""
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten().clone() for p in transformer.parameters()]
    )


def local_weights(transformer):
    return torch.cat([p.detach().flatten().clone() for p in transformer.parameters()])


@dataclass(frozen=True)
class Loop:
    """Where a trainer's loop takes a step: its functions, and how a step's place and timesteps are read off their arguments."""

    step: str = "grpo_one_step"
    solver: str = "flux_step"
    index: Callable = lambda arguments: int(arguments["i"])
    timesteps: Callable = lambda arguments: arguments["timesteps"]


@contextmanager
def recorded_steps(module, loop=Loop()):
    """A list of the training forwards that `module` runs: bound arguments, and s = dL/d(model output) once it is known."""
    step, solver = getattr(module, loop.step), getattr(module, loop.solver)
    bind, bind_solver = inspect.signature(step).bind, inspect.signature(solver).bind
    steps = []

    def recording_step(*args, **kwargs):
        if torch.is_grad_enabled():  # not the reference model's forward
            arguments = bind(*args, **kwargs).arguments
            # The trainer may change a dictionary of samples later.
            steps.append({"arguments": {name: dict(a) if isinstance(a, dict) else a for name, a in arguments.items()}})
        return step(*args, **kwargs)

    def recording_solver(*args, **kwargs):
        model_output = bind_solver(*args, **kwargs).arguments["model_output"]
        if model_output.requires_grad:
            model_output.register_hook(partial(steps[-1].__setitem__, "grad"))
        return solver(*args, **kwargs)

    setattr(module, loop.step, recording_step)
    setattr(module, loop.solver, recording_solver)
    try:
        yield steps
    finally:
        setattr(module, loop.step, step)
        setattr(module, loop.solver, solver)


def model_output(module, loop, step):
    """What the model gives for a recorded step, up to the solver step, with its graph."""
    solver, found = getattr(module, loop.solver), []
    bind = inspect.signature(solver).bind

    def keep_model_output(*args, **kwargs):
        found.append(bind(*args, **kwargs).arguments["model_output"])
        return solver(*args, **kwargs)

    setattr(module, loop.solver, keep_model_output)
    try:
        getattr(module, loop.step)(**step["arguments"])
    finally:
        setattr(module, loop.solver, solver)
    return found[0]


def folded(knots, timesteps, grads):
    """What each knot's output is given, `[B, ...]`: the upstream gradients of a sample's steps between two count at both.

    JAGG's formula, written out. `timesteps` are those of the steps, `[B]` each.
    """
    t = [one.float() for one in timesteps]
    for before, knot, after in zip((None, *knots), knots, (*knots[1:], None), strict=False):
        total = torch.zeros_like(grads[knot], dtype=torch.float32)
        for p, grad in enumerate(grads):  # in their order: a sum that is rounded to bfloat16 after it has one
            if p == knot:
                weight = torch.ones_like(t[p])
            elif before is not None and before < p < knot:
                weight = (t[before] - t[p]) / (t[before] - t[knot])
            elif after is not None and knot < p < after:
                weight = 1 - (t[knot] - t[p]) / (t[knot] - t[after])
            else:
                continue
            total = total + weight.reshape(-1, *[1] * (grad.ndim - 1)) * grad.float()
        yield knot, total


def calls(groups, config):
    """Which of `knots_at` have their passes in the same autograd call: bfloat16 is rounded once in it."""
    together = [knots for group in groups for knots in passes(group, config.schedule == "joint").values()]
    alone = set(config.knots_at) - {knot for knots in together for knot in knots}
    return sorted([*together, *((knot,) for knot in alone)])


def oracle_gradient(module, transformer, steps, n_visited, config, loop=Loop()):
    """The gradient of one optimizer step that JAGG should give, from the `steps` of the unpatched trainer.

    A step's loss enters as `(s * v).sum()` with the s that the trainer's own loss had, whose gradient in v is s. `auto` is
    sequential, as it is before a run's third optimizer step; where FSDP reduces in bf16, that shows in the rounding.
    """
    config = replace(config, schedule="sequential") if config.schedule == "auto" else config
    transformer.zero_grad()
    groups = plan_groups(n_visited, config)
    exact = range(sum(map(len, groups)), n_visited)
    for start in range(0, len(steps), n_visited):
        sample = sorted(steps[start : start + n_visited], key=lambda step: loop.index(step["arguments"]))
        if config.has_knots:
            timesteps = [loop.timesteps(step["arguments"]) for step in sample]
            grads = dict(folded(config.knots_at, timesteps, [step["grad"] for step in sample]))
            for knots in calls(groups, config):
                outputs = [model_output(module, loop, sample[knot]) for knot in knots]
                torch.autograd.backward(
                    outputs, [grads[knot].to(output.dtype) for knot, output in zip(knots, outputs, strict=True)]
                )
            continue
        for group in [*groups, *([position] for position in exact)]:
            members = [sample[position] for position in group]
            group_backward(
                lambda j, members=members: model_output(module, loop, members[j]),
                lambda j, v_hat, members=members: (members[j]["grad"] * v_hat).sum(),
                torch.stack([loop.timesteps(member["arguments"]) for member in members]),
                config,
            )
    gradient = local_gradient(transformer)
    transformer.zero_grad()
    return gradient


def relative_error(found, expected):
    """Norm of the difference over the norm of `expected`, over all ranks."""
    norms = torch.stack([(found - expected).square().sum(), expected.square().sum()]).double()
    if dist.is_initialized():
        dist.all_reduce(norms)
    return float((norms[0] / norms[1]).sqrt())


@contextmanager
def self_checks():
    """Yields a list of what self-checks find inside: relative errors, each with whether it is of training's own gradient.

    A reason in words is there where a check couldn't be made.
    """
    found, judge, give_up = [], SelfCheck._judge, SelfCheck._give_up

    def watched_judge(self, error, own_error, **others):
        found.append((error, error == own_error))
        judge(self, error, own_error, **others)

    def watched_give_up(self, why):
        found.append(why)
        give_up(self, why)

    SelfCheck._judge, SelfCheck._give_up = watched_judge, watched_give_up
    try:
        yield found
    finally:
        SelfCheck._judge, SelfCheck._give_up = judge, give_up
