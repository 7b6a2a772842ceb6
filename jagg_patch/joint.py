"""The joint backward: W upstream gradients fold into two, and one autograd call takes them through both endpoints.

The method is JAGG (Jacobian-Aggregated Group Gradient). Its names: v is the model output (velocity), s_j = dL_j/dv_j the upstream
gradient of step j, W the number of steps in a group.
"""

import torch
from torch.autograd.function import once_differentiable

from .config import JaggConfig
from .errors import JaggError
from .plan import alphas


def endpoint_weights(weights, aggregation="interpolate"):
    """What each step's upstream gradient counts at the first endpoint and at the last.

    Args:
        weights: α as `alphas` returns it, `[W]` or `[W, B]`: one per step, or one per step and sample.
        aggregation: `interpolate` gives `1-α_j` and `α_j`; `endpoints`, the published ablation, drops the intermediate steps.

    Returns:
        Two tensors of the shape of `weights`. The last step counts 0 at the first endpoint.
    """
    if aggregation == "endpoints":
        weights = torch.zeros_like(weights)
        weights[-1] = 1
        base = torch.zeros_like(weights)
        base[0] = 1
        return base, weights
    return 1 - weights, weights


def weighted_sum(upstream_grads, weights):
    """`Σ w_j s_j` of s_j `[B, ...]` with weights `[n]` or `[n, B]`: summed in float32 or wider, in the dtype of the first."""
    first = upstream_grads[0]
    wide = torch.promote_types(first.dtype, torch.float32)
    total = torch.zeros_like(first, dtype=wide)
    for grad, weight in zip(upstream_grads, weights.to(first.device, wide), strict=True):
        # Widened first: a tensor without dimensions wouldn't widen the product.
        total += (weight.view(-1, *[1] * (grad.ndim - 1)) if weight.ndim else weight) * grad.to(wide)
    return total.to(first.dtype)


class _EndpointBackward(torch.autograd.Function):
    """A value whose gradient goes to endpoints' graphs, folded: the loss's own backward is then that of the endpoints."""

    @staticmethod
    def forward(ctx, fold, value, *endpoints):
        ctx.fold = fold
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, grad, *ctx.fold(grad)


def joint_output(value, endpoints, fold):
    """`value`, connected to the graphs of `endpoints`.

    Args:
        value: a step's model output `[B, ...]`, detached; its `.grad` gets that of the returned tensor if it requires one.
        endpoints: model outputs with their graphs, one or two.
        fold: called once with the gradient of the returned tensor; returns one gradient for each endpoint.
    """
    return _EndpointBackward.apply(fold, value, *endpoints)


class _Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, parameter):
        ctx.save_for_backward(parameter)
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (parameter,) = ctx.saved_tensors
        return grad, torch.zeros_like(parameter)


def linked(value, parameter):
    """`value`, in whose backward `parameter` gets a gradient of zeros."""
    return _Link.apply(value, parameter)


def reached_leaves(tensors):
    """The leaf tensors that backward passes from `tensors` would reach, once each."""
    seen, nodes = set(), [tensor.grad_fn for tensor in tensors]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


def group_backward(velocity, losses, timesteps, config=None):
    """Accumulate the gradient of one group of steps with two transformer backward passes.

    This is the whole method, for a training loop of one's own; the README has an example.

    Args:
        velocity: `velocity(j)` runs the model for step j of the group, 0 ≤ j < W, and returns its output `[B, ...]`.
        losses: `losses(j, v_hat)` is the scalar loss of step j; it may reach the model's graph through `v_hat` only.
        timesteps: tensor `[W]` or `[W, B]`.
        config: a `JaggConfig`; `aggregation` and `schedule` count (`auto` is joint here: one autograd call for both passes), and
            with `enabled=False` each step gets a backward of its own.

    Returns:
        The W losses, detached, `[W]`.

    Raises:
        JaggError: the endpoints share a timestep, or a loss does not depend on `v_hat`.
    """
    config = config or JaggConfig()
    n_steps = len(timesteps)
    values = []
    if n_steps < 2 or not config.enabled:
        for j in range(n_steps):
            loss = losses(j, velocity(j))
            loss.backward()
            values.append(loss.detach())
        return torch.stack(values)

    base, corr = endpoint_weights(alphas(timesteps), config.aggregation)
    endpoints, upstream_grads = [], []
    for j in range(n_steps):
        is_endpoint = j in (0, n_steps - 1)
        with torch.set_grad_enabled(is_endpoint):
            output = velocity(j)
        if is_endpoint:
            endpoints.append(output)
        else:
            torch.clear_autocast_cache()  # as in session.py
        v_hat = output.detach().requires_grad_()
        loss = losses(j, v_hat)
        loss.backward()  # reaches v_hat, and whatever else the loss depends on
        if v_hat.grad is None:
            raise JaggError(
                f"the loss of step {j} of the group does not depend on v_hat\nuse the model output that losses() is given"
            )
        upstream_grads.append(v_hat.grad)
        values.append(loss.detach())
        if config.schedule == "sequential" and j == n_steps - 2:
            endpoints.pop().backward(weighted_sum(upstream_grads, base[:-1]))
    folded = [weighted_sum(upstream_grads, weights) for weights in (base, corr)]
    torch.autograd.backward(endpoints, folded[-len(endpoints) :])
    return torch.stack(values)
