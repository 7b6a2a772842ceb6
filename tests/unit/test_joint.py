"""The joint backward against plain autograd, and the exactness theorem from both sides (README, "What is exact")."""

import pytest
import torch
from torch.testing import assert_close

from jagg_patch import JaggConfig, JaggError, alphas, group_backward
from jagg_patch.method.folding import endpoint_weights, weighted_sum
from jagg_patch.method.proxy import proxy

B, C = 3, 5


class AffineJacobianVelocity(torch.nn.Module):
    """v(z, t) = z A + b + t b': linear in (z, t), so its Jacobian in the parameters is affine in them."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(C, C, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.randn(C, dtype=torch.float64))
        self.slope = torch.nn.Parameter(torch.randn(C, dtype=torch.float64))

    def forward(self, z, t):
        return z @ self.weight + self.bias + t[:, None] * self.slope


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(C + 1, 32), torch.nn.GELU(), torch.nn.Linear(32, C)).double()

    def forward(self, z, t):
        return self.net(torch.cat([z, t[:, None]], 1))


def group(n_steps, noise=0.0):
    """Timesteps `[W, B]` of its own per sample, and states `[W, B, C]` on the chord, moved off it by `noise`."""
    t = torch.rand(n_steps, B, dtype=torch.float64).sort(0, descending=True).values
    ends = torch.randn(2, B, C, dtype=torch.float64)
    z = torch.lerp(ends[0], ends[1], alphas(t)[..., None])
    z[1:-1] += noise * torch.randn_like(z[1:-1])
    return t, z


def clipped_loss(n_steps, clip_range=0.3):
    """A PPO-like loss per step, nonlinear in the model output, with steps on both sides of the clip."""
    target = torch.randn(n_steps, B, C, dtype=torch.float64)
    advantage = torch.randn(n_steps, B, dtype=torch.float64)

    def loss(j, v):
        ratio = torch.exp(-0.1 * (v - target[j]).square().mean(1))
        clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
        return torch.maximum(-advantage[j] * ratio, -advantage[j] * clipped).mean()

    return loss


def gradient(model, backward):
    model.zero_grad()
    backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def exact_gradient(model, loss, t, z):
    def backward():
        for j in range(len(t)):
            loss(j, model(z[j], t[j])).backward()

    return gradient(model, backward)


def jagg_gradient(model, loss, t, z, **settings):
    return gradient(model, lambda: group_backward(lambda j: model(z[j], t[j]), loss, t, JaggConfig(**settings)))


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("n_steps", [2, 3, 4, 7])
def test_exact_when_the_jacobian_is_affine_and_the_states_are_collinear(n_steps):
    t, z = group(n_steps)
    model, loss = AffineJacobianVelocity(), clipped_loss(n_steps)
    assert relative_error(jagg_gradient(model, loss, t, z), exact_gradient(model, loss, t, z)) <= 1e-12


def test_not_exact_off_the_chord_and_the_error_shrinks_with_the_noise():
    errors = []
    for noise in (0.1, 0.01, 0.001):
        torch.manual_seed(0)
        t, z = group(4, noise)
        model, loss = AffineJacobianVelocity(), clipped_loss(4, clip_range=10)
        errors.append(relative_error(jagg_gradient(model, loss, t, z), exact_gradient(model, loss, t, z)))
    assert errors[-1] > 1e-6
    # The Jacobian is affine in the state, so to first order the error is proportional to the distance from the chord.
    assert errors[0] / errors[1] == pytest.approx(10, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(10, rel=0.01)


def test_the_endpoints_ablation_drops_the_intermediate_steps():
    t, z = group(4)
    model, loss = AffineJacobianVelocity(), clipped_loss(4)
    ends_only = gradient(model, lambda: (loss(0, model(z[0], t[0])) + loss(3, model(z[3], t[3]))).backward())
    found = jagg_gradient(model, loss, t, z, aggregation="endpoints")
    assert relative_error(found, ends_only) <= 1e-12
    assert relative_error(found, exact_gradient(model, loss, t, z)) > 0.1


def test_two_steps_are_exact_for_any_model():
    t, z = group(2)
    model, loss = Mlp(), clipped_loss(2)
    assert relative_error(jagg_gradient(model, loss, t, z), exact_gradient(model, loss, t, z)) <= 1e-12


@pytest.mark.parametrize("settings", [{"enabled": False}, {}])
def test_off_or_a_single_step_is_the_exact_backward(settings):
    t, z = group(4)
    if not settings:
        t, z = t[:1], z[:1]
    model, loss = Mlp(), clipped_loss(4)
    assert relative_error(jagg_gradient(model, loss, t, z, **settings), exact_gradient(model, loss, t, z)) <= 1e-12


def test_group_backward_returns_the_losses_and_accumulates():
    t, z = group(4)
    model, loss = Mlp(), clipped_loss(4)
    once = jagg_gradient(model, loss, t, z)
    losses = group_backward(lambda j: model(z[j], t[j]), loss, t)
    assert_close(losses, torch.stack([loss(j, model(z[j], t[j])) for j in range(4)]).detach())
    assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), 2 * once)


@pytest.mark.parametrize("n_steps", [2, 4])
def test_a_term_beside_the_model_output_keeps_its_gradient(n_steps):
    """A weight penalty, say: it does not go through v_hat, and counts once a step as in the exact loop."""
    t, z = group(n_steps)
    model, loss = AffineJacobianVelocity(), clipped_loss(n_steps)

    def penalized(j, v):
        return loss(j, v) + 0.1 * model.weight.square().sum()

    assert relative_error(jagg_gradient(model, penalized, t, z), exact_gradient(model, penalized, t, z)) <= 1e-12


def test_a_loss_that_ignores_the_model_output_is_refused():
    t, z = group(3)
    model = Mlp()
    with pytest.raises(JaggError, match="step 1 .* does not depend on v_hat"):
        group_backward(lambda j: model(z[j], t[j]), lambda j, v: v.sum() if j != 1 else model(z[j], t[j]).sum(), t)


def test_only_the_endpoints_record_a_graph():
    t, z = group(5)
    model, recorded = Mlp(), []

    def velocity(j):
        output = model(z[j], t[j])
        recorded.append(output.requires_grad)
        return output

    group_backward(velocity, clipped_loss(5), t)
    assert recorded == [True, False, False, False, True]


def aggregate(grads, alpha, aggregation="interpolate"):
    return [weighted_sum(grads, weights) for weights in endpoint_weights(alpha, aggregation)]


@pytest.mark.parametrize("n_steps", [2, 3, 4, 6])
@pytest.mark.parametrize("aggregation", ["interpolate", "endpoints"])
def test_the_last_loss_s_own_backward_is_the_joint_one(n_steps, aggregation):
    """The autograd function against the oracle: the way the interception runs it, one .backward() a step."""
    t, z = group(n_steps, noise=0.3)
    model, loss = Mlp(), clipped_loss(n_steps)
    expected = jagg_gradient(model, loss, t, z, aggregation=aggregation)

    def backward():
        proxies = []

        def fold(last_grad):
            return tuple(aggregate([p.grad for p in proxies] + [last_grad], alphas(t), aggregation))

        first = model(z[0], t[0])
        for j in range(n_steps):
            if j < n_steps - 1:
                proxies.append(first.detach().requires_grad_() if j == 0 else model(z[j], t[j]).detach().requires_grad_())
                loss(j, proxies[-1]).backward()
            else:
                last = model(z[j], t[j])
                output = proxy(last, [first, last], fold)
                assert torch.equal(output, last)
                loss(j, output).backward()

    assert relative_error(gradient(model, backward), expected) <= 1e-12


def test_low_precision_gradients_are_summed_in_float32():
    """In bfloat16, 1 + 2^-9 is 1: a running sum would lose every small term, the float32 sum keeps them."""
    small = torch.full((1, 1), 2.0**-9, dtype=torch.bfloat16)
    grads = [torch.ones(1, 1, dtype=torch.bfloat16), *[small] * 8, torch.zeros(1, 1, dtype=torch.bfloat16)]
    alpha = torch.tensor([0.0] * 9 + [1.0])
    s_base, _ = aggregate(grads, alpha)
    assert s_base.dtype == torch.bfloat16
    assert s_base.item() == 1 + 2.0**-6


def test_alpha_of_each_sample_weighs_its_own_gradient():
    grads = [torch.tensor([[1.0], [10.0]]), torch.tensor([[2.0], [20.0]]), torch.tensor([[4.0], [40.0]])]
    alpha = torch.tensor([[0.0, 0.0], [0.5, 0.25], [1.0, 1.0]])
    s_base, s_corr = aggregate(grads, alpha)
    assert s_base.flatten().tolist() == [1 + 0.5 * 2, 10 + 0.75 * 20]
    assert s_corr.flatten().tolist() == [0.5 * 2 + 4, 0.25 * 20 + 40]


def test_endpoints_that_share_a_timestep_cost_no_forward():
    def velocity(j):
        raise AssertionError("the model ran")

    with pytest.raises(JaggError, match="share a timestep"):
        group_backward(velocity, lambda j, v: v.sum(), torch.tensor([5.0, 4.0, 5.0]))
