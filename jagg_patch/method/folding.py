"""How the upstream gradients of the steps between two knots are split, and the whole method as one plain function.

The method is JAGG (Jacobian-Aggregated Group Gradient). Its names: v is the model output (velocity), s_j = dL_j/dv_j the upstream
gradient of step j, W the number of steps in a group.
"""

from itertools import pairwise

import torch

from ..config import JaggConfig
from ..errors import JaggError
from .plan import Group, alphas, passes


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


def shares(timesteps, knots, aggregation="interpolate"):
    """What each step's upstream gradient counts at each knot: a hat function of t around it.

    Args:
        timesteps: `[W]` or `[W, B]`, as `alphas` takes them.
        knots: places among the W, ascending, from 0 to W - 1.
        aggregation: as `endpoint_weights` has it.

    Returns:
        `[n, W]` or `[n, W, B]` for n knots. Raises `JaggError` as `alphas` does.
    """
    found = [torch.zeros_like(timesteps, dtype=torch.promote_types(timesteps.dtype, torch.float32)) for _ in knots]
    for n, (before, after) in enumerate(pairwise(knots)):
        steps = slice(before, after + 1)
        found[n][steps], found[n + 1][steps] = endpoint_weights(alphas(timesteps[steps]), aggregation)
    return torch.stack(found)


def fold(upstream_grads, counts):
    """The gradient of each knot's output, `[B, ...]` each: s_p `[B, ...]` of W steps, and what `shares` says that they count."""
    return [weighted_sum(upstream_grads, of_knot) for of_knot in counts]


def weighted_sum(upstream_grads, weights):
    """`Σ w_j s_j` of s_j `[B, ...]` with weights `[n]` or `[n, B]`: summed in float32 or wider, in the dtype of the first."""
    total = zeros_to_sum(upstream_grads[0])
    for grad, weight in zip(upstream_grads, weights, strict=True):
        add_weighted(total, grad, weight)
    return total.to(upstream_grads[0].dtype)


def zeros_to_sum(like):
    """Zeros of the shape of `like`, in float32 or wider, for `add_weighted`."""
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def add_weighted(total, grad, weight):
    """Add `w s` to `total` in place: `grad` is s `[B, ...]`, `weight` `[]` or `[B]`. Where w is 0, s isn't looked at: 0 * NaN."""
    weight = weight.to(total.device, total.dtype)
    weight = weight.view(-1, *[1] * (grad.ndim - 1)) if weight.ndim else weight
    # Widened first: a tensor without dimensions wouldn't widen the product.
    total += torch.where(weight == 0, 0, weight * grad.to(total.dtype))


def estimated_output(recorded, alpha, first_change, last_change):
    """A step's model output under the policy as it is now, `recorded + (1 - α) first_change + α last_change`.

    Args:
        recorded: the rollout's output at that step, `[B, ...]`.
        alpha: `[]` or `[B]`, as `alphas` has it for the step.
        first_change, last_change: how much the outputs at the knots around it have changed since the rollout, `[B, ...]`,
            in the dtype to compute in.

    Exact while the policy hasn't changed; after that it assumes what the joint backward does, that the change is linear in t.
    """
    alpha = alpha.to(first_change)
    alpha = alpha.view(-1, *[1] * (recorded.ndim - 1)) if alpha.ndim else alpha
    return recorded.to(first_change) + (1 - alpha) * first_change + alpha * last_change


def group_backward(velocity, losses, timesteps, config=None, knots=None):
    """Accumulate the gradient of one group of steps with a transformer backward pass for each knot: two, if none are named.

    This is the whole method, for a training loop of one's own; README.md beside this file has an example.

    Args:
        velocity: `velocity(j)` runs the model for step j of the group, 0 ≤ j < W, and returns its output `[B, ...]`.
        losses: `losses(j, v_hat)` is the scalar loss of step j; it may reach the model's graph through `v_hat` only.
        timesteps: tensor `[W]` or `[W, B]`.
        config: a `JaggConfig`; `aggregation` and `schedule` count (`auto` is joint here: one autograd call for two passes), and
            with `enabled=False` each step gets a backward of its own.
        knots: the steps that get a pass of their own, ascending, 0 and W - 1 among them; these two by default.

    Returns:
        The W losses, detached, `[W]`.

    Raises:
        JaggError: two knots with steps between share a timestep, or a loss does not depend on `v_hat`.
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

    group = Group((0, n_steps - 1) if knots is None else tuple(knots))
    counts = dict(zip(group.knots, shares(timesteps, group.knots, config.aggregation), strict=True))
    ready = passes(group, holds_two_graphs=config.schedule != "sequential")
    outputs, upstream_grads = {}, []
    for j in range(n_steps):
        is_knot = j in counts
        with torch.set_grad_enabled(is_knot):
            output = velocity(j)
        if is_knot:
            outputs[j] = output
        else:
            torch.clear_autocast_cache()  # as in loop/session.py
        v_hat = output.detach().requires_grad_()
        loss = losses(j, v_hat)
        loss.backward()  # reaches v_hat, and whatever else the loss depends on
        if v_hat.grad is None:
            raise JaggError(
                f"the loss of step {j} of the group does not depend on v_hat\nuse the model output that losses() is given"
            )
        upstream_grads.append(v_hat.grad)
        values.append(loss.detach())
        if j in ready:
            folded = fold(upstream_grads, [counts[knot][: j + 1] for knot in ready[j]])
            torch.autograd.backward([outputs.pop(knot) for knot in ready[j]], folded)
    return torch.stack(values)
