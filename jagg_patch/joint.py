"""The joint backward: W upstream gradients fold into two, and one autograd call takes them through both endpoints.

The method is JAGG (Jacobian-Aggregated Group Gradient). Its names: v is the model output (velocity), s_j = dL_j/dv_j the upstream
gradient of step j, W the number of steps in a group.
"""

import torch
from torch.autograd.function import once_differentiable

from .config import JaggConfig
from .errors import JaggError
from .plan import alphas


def aggregate(upstream_grads, weights, aggregation="interpolate"):
    """Fold a group's upstream gradients into those of its two endpoints.

    Args:
        upstream_grads: W tensors `[B, ...]`, s_j of each step in trajectory order.
        weights: α as `alphas` returns it, `[W]` or `[W, B]`: one per step, or one per step and sample.
        aggregation: `interpolate` gives `s_base = Σ (1-α_j) s_j` and `s_corr = Σ α_j s_j`; `endpoints`, the published
            ablation, drops the intermediate steps: `s_base = s_0`, `s_corr = s_{W-1}`.

    Returns:
        `(s_base, s_corr)`, each `[B, ...]` in the dtype of the upstream gradients; summed in float32 or wider.
    """
    first = upstream_grads[0]
    if aggregation == "endpoints":
        return first, upstream_grads[-1]
    wide = torch.promote_types(first.dtype, torch.float32)
    s_base = torch.zeros_like(first, dtype=wide)
    s_corr = torch.zeros_like(first, dtype=wide)
    for grad, alpha in zip(upstream_grads, weights.to(first.device, wide), strict=True):
        if alpha.ndim:
            alpha = alpha.view(-1, *[1] * (grad.ndim - 1))
        s_base += (1 - alpha) * grad
        s_corr += alpha * grad
    return s_base.to(first.dtype), s_corr.to(first.dtype)


class _JointBackward(torch.autograd.Function):
    """Stands for the last endpoint's output; its backward feeds both endpoints, so the loss's own backward is the joint one."""

    @staticmethod
    def forward(ctx, first, last, fold):
        ctx.fold = fold
        return last.view_as(last)

    @staticmethod
    @once_differentiable
    def backward(ctx, last_grad):
        return *ctx.fold(last_grad), None


def joint_output(first, last, fold):
    """The value of `last`, connected to both endpoints' graphs.

    Args:
        first, last: model outputs of the endpoints, each with its graph.
        fold: called once with s_{W-1} when the returned tensor gets its gradient; returns `(s_base, s_corr)`.
    """
    return _JointBackward.apply(first, last, fold)


def group_backward(velocity, losses, timesteps, config=None):
    """Accumulate the gradient of one group of steps with two transformer backward passes, in one autograd call.

    This is the whole method, for a training loop of one's own; the README has an example.

    Args:
        velocity: `velocity(j)` runs the model for step j of the group, 0 ≤ j < W, and returns its output `[B, ...]`.
        losses: `losses(j, v_hat)` is the scalar loss of step j; it may reach the model's graph through `v_hat` only.
        timesteps: tensor `[W]` or `[W, B]`.
        config: a `JaggConfig`; `aggregation` counts, and with `enabled=False` each step gets a backward of its own.

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

    weights = alphas(timesteps)
    endpoints, upstream_grads = [], []
    for j in range(n_steps):
        is_endpoint = j in (0, n_steps - 1)
        with torch.set_grad_enabled(is_endpoint):
            output = velocity(j)
        if not is_endpoint:
            torch.clear_autocast_cache()  # as in session.py
        if is_endpoint:
            endpoints.append(output)
        v_hat = output.detach().requires_grad_()
        loss = losses(j, v_hat)
        loss.backward()  # reaches v_hat, and whatever else the loss depends on
        if v_hat.grad is None:
            raise JaggError(
                f"the loss of step {j} of the group does not depend on v_hat\nuse the model output that losses() is given"
            )
        upstream_grads.append(v_hat.grad)
        values.append(loss.detach())
    torch.autograd.backward(endpoints, aggregate(upstream_grads, weights, config.aggregation))
    return torch.stack(values)
