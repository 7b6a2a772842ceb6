"""The claims of jagg_patch/method/THEOREM.md that test_joint.py doesn't check already, in float64; and the page's links."""

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.func import functional_call, jacrev

from jagg_patch import JaggConfig, alphas, group_backward

PAGE = Path(__file__).parents[2] / "jagg_patch/method/THEOREM.md"
W, B, C = 5, 3, 4
EXACT = 1e-12


class Affine(torch.nn.Module):
    """v(z, t) = z A + t b: its Jacobian in the parameters is affine in (z, t)."""

    def __init__(self):
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.randn(C, C, dtype=torch.float64))
        self.slope = torch.nn.Parameter(torch.randn(C, dtype=torch.float64))

    def forward(self, z, t):
        return z @ self.matrix + t[:, None] * self.slope


class Smooth(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(C + 1, 16), torch.nn.Tanh(), torch.nn.Linear(16, C)).double()

    def forward(self, z, t):
        return self.net(torch.cat([z, t[:, None]], 1))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def group(span=0.5, noise=0.0):
    """Timesteps `[W, B]` that span `span`, and states `[W, B, C]` on a line of slope 1 to 2 in t, moved off it by `noise`."""
    generator = torch.Generator().manual_seed(1)
    alpha = torch.rand(W, B, dtype=torch.float64, generator=generator).sort(0).values
    alpha[0], alpha[-1] = 0, 1
    start, direction = torch.randn(2, B, C, dtype=torch.float64, generator=generator)
    off = torch.randn(W, B, C, dtype=torch.float64, generator=generator)
    off[0] = off[-1] = 0
    return 0.9 - span * alpha, start - span * alpha[..., None] * direction + noise * off


def losses(n_steps=W):
    """A smooth loss per step, nonlinear in the model output."""
    target = normal(n_steps, B, C)
    return lambda j, v: (torch.exp(-0.1 * (v - target[j]).square().mean(1))).mean()


def gradient(model, backward):
    model.zero_grad()
    backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def exact(model, loss, t, z):
    return gradient(model, lambda: sum(loss(j, model(z[j], t[j])) for j in range(len(t))).backward())


def jagg(model, loss, t, z, aggregation="interpolate"):
    config = JaggConfig(aggregation=aggregation)
    return gradient(model, lambda: group_backward(lambda j: model(z[j], t[j]), loss, t, config))


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def slopes(sizes, errors):
    """Log-log slope between each two neighbours."""
    points = list(zip(sizes, errors, strict=True))
    return [math.log(e / f) / math.log(h / g) for (h, e), (g, f) in zip(points[:-1], points[1:], strict=True)]


def test_the_order_of_the_intermediate_steps_and_the_direction_of_the_group_do_not_matter():
    t, z = group(noise=0.3)
    model, loss = Smooth(), losses()
    expected = jagg(model, loss, t, z)
    assert relative_error(expected, exact(model, loss, t, z)) > 1e-4
    for order in ([0, 3, 1, 2, 4], [4, 3, 2, 1, 0]):
        found = jagg(model, lambda j, v, order=order: loss(order[j], v), t[order], z[order])
        assert relative_error(found, expected) <= EXACT


def test_clipping_and_kl_enter_exactly():
    """Where the interpolation is exact, so is the sum of a clipped policy loss and a KL term to another model's outputs."""
    t, z = group()
    model, reference = Affine(), Affine()
    advantage, old = normal(W, B), normal(W, B, C)
    clipped = []

    def loss(j, v):
        ratio = torch.exp(0.2 * (v * old[j]).mean(1))
        bounded = ratio.clamp(0.9, 1.1)
        clipped.append(-advantage[j] * bounded > -advantage[j] * ratio)
        kl = (v - reference(z[j], t[j]).detach()).square().mean()
        return torch.maximum(-advantage[j] * ratio, -advantage[j] * bounded).mean() + 0.1 * kl

    found, expected = jagg(model, loss, t, z), exact(model, loss, t, z)
    assert 0 < torch.stack(clipped).double().mean() < 1
    assert relative_error(found, expected) <= EXACT


def test_a_path_of_constant_velocity_lies_on_the_chord():
    t, _ = group()
    velocity, z = normal(B, C), [normal(B, C)]
    for now, then in zip(t[:-1], t[1:], strict=True):
        z.append(z[-1] + (then - now)[:, None] * velocity)
    chord = torch.lerp(z[0], z[-1], alphas(t)[..., None])
    assert (torch.stack(z) - chord).abs().max() <= EXACT


def test_the_noise_of_the_sde_is_a_brownian_bridge_around_the_chord():
    """Variance eta² (t_0 - t_{W-1}) α(1-α); its estimate from n draws has a relative standard error of sqrt(2/n)."""
    n, velocity = 40_000, 0.7
    t = torch.tensor([0.9, 0.8, 0.55, 0.5, 0.3], dtype=torch.float64)
    alpha = alphas(t)
    deviations = []
    for eta in (0.3, 0.6):
        torch.manual_seed(0)
        z = [normal(n)]
        for now, then in zip(t[:-1], t[1:], strict=True):
            z.append(z[-1] + (then - now) * velocity + eta * (now - then).sqrt() * normal(n))
        z = torch.stack(z)
        deviation = z - torch.lerp(z[0], z[-1], alpha[:, None])
        variance = eta**2 * (t[0] - t[-1]) * alpha * (1 - alpha)
        assert deviation[[0, -1]].abs().max() <= EXACT
        assert torch.allclose(deviation.var(1)[1:-1], variance[1:-1], rtol=4 * math.sqrt(2 / n))
        deviations.append(deviation)
    assert relative_error(deviations[1], 2 * deviations[0]) <= EXACT


def test_the_error_is_that_of_the_interpolated_jacobians():
    """G - G_jagg = Σ R_jᵀ s_j with the Jacobians R_j = J_j - (1-α_j) J_0 - α_j J_{W-1}, each written out."""
    t, z = group(noise=0.3)
    model, loss = Smooth(), losses()
    parameters = dict(model.named_parameters())
    alpha = alphas(t)

    def jacobian(j):
        by_name = jacrev(lambda values: functional_call(model, values, (z[j], t[j])))(parameters)
        return torch.cat([by_name[name].flatten(2) for name in parameters], -1).detach()  # [B, C, P]

    def upstream_grad(j):
        v = model(z[j], t[j]).detach().requires_grad_()
        return torch.autograd.grad(loss(j, v), v)[0]

    jacobians, error = [jacobian(j) for j in range(W)], 0
    for j in range(W):
        a = alpha[j][:, None, None]
        residual = jacobians[j] - (1 - a) * jacobians[0] - a * jacobians[-1]
        error = error + torch.einsum("bcp,bc->p", residual, upstream_grad(j))
    found = exact(model, loss, t, z) - jagg(model, loss, t, z)
    assert found.norm() > 1e-4
    assert relative_error(found, error) <= 1e-11  # the left side is a difference of gradients some 100 times its size


def test_on_the_chord_the_error_falls_with_the_square_of_the_span():
    """The error is a h² + O(h³) in the span h, so its slope is 2 + O(h): the deviation from 2 falls with h as well."""
    model, loss = Smooth(), losses()
    spans = [0.1, 0.05, 0.005, 0.0025]
    groups = [group(span) for span in spans]
    errors = [relative_error(jagg(model, loss, *one), exact(model, loss, *one)) for one in groups]
    coarse, _, fine = (abs(slope - 2) for slope in slopes(spans, errors))
    assert coarse <= 0.2
    assert fine <= 0.1 * coarse  # spans 20 times smaller: 0.05, and room for O(h²)
    ends_only = relative_error(jagg(model, loss, *groups[-1], "endpoints"), exact(model, loss, *groups[-1]))
    assert ends_only > 0.1  # what the ablation drops doesn't shrink


def many(n_steps, span, noise=0.0):
    """As `group`, of evenly spaced steps."""
    generator = torch.Generator().manual_seed(1)
    alpha = torch.linspace(0, 1, n_steps, dtype=torch.float64)[:, None].expand(n_steps, B)
    start, direction = torch.randn(2, B, C, dtype=torch.float64, generator=generator)
    off = torch.randn(n_steps, B, C, dtype=torch.float64, generator=generator)
    return 0.9 - span * alpha, start - span * alpha[..., None] * direction + noise * off


def with_knots(model, loss, t, z, knots):
    return gradient(model, lambda: group_backward(lambda j: model(z[j], t[j]), loss, t, knots=knots))


def test_the_error_of_a_set_of_knots_is_the_sum_over_its_gaps():
    t, z = many(9, span=0.5, noise=0.3)
    model, loss, knots = Smooth(), losses(9), (0, 4, 6, 8)
    found = exact(model, loss, t, z) - with_knots(model, loss, t, z, knots)
    total = 0
    for first, last in pairwise(knots):
        steps = slice(first, last + 1)
        total = total + exact(model, lambda j, v, first=first: loss(first + j, v), t[steps], z[steps])
        total = total - jagg(model, lambda j, v, first=first: loss(first + j, v), t[steps], z[steps])
    assert found.norm() > 1e-4
    assert relative_error(found, total) <= 1e-11


def test_on_the_chord_the_error_falls_with_the_square_of_the_number_of_gaps():
    """Of 65 evenly spaced steps with losses alike. Σ α(1-α) over a gap's m steps is (m² - 1) / 6m, and there are 64 / m."""
    model, one_loss, (t, z) = Smooth(), losses(), many(65, span=0.1)

    def loss(j, v):
        return one_loss(0, v)

    lengths, expected = [32, 16, 8, 4], exact(model, loss, t, z)
    errors = [relative_error(with_knots(model, loss, t, z, range(0, 65, m)), expected) for m in lengths]
    for m, error in zip(lengths, errors, strict=True):
        assert error / errors[0] == pytest.approx((m**2 - 1) / (32**2 - 1), rel=0.05)


def test_off_the_chord_the_error_of_a_smooth_model_grows_in_proportion_to_the_noise():
    """Beside the part without noise: that difference is a ε + O(ε²) in the noise ε, so its slope is 1 + O(ε)."""
    model, loss = Smooth(), losses()

    def error(noise):
        one = group(noise=noise)
        return exact(model, loss, *one) - jagg(model, loss, *one)

    curvature = error(0)
    assert curvature.norm() > 1e-4
    noises = [0.1, 0.05, 0.005, 0.0025]
    coarse, _, fine = (abs(slope - 1) for slope in slopes(noises, [(error(noise) - curvature).norm().item() for noise in noises]))
    assert coarse <= 0.2
    assert fine <= 0.1 * coarse  # noises 20 times smaller: 0.05, and room for O(ε²)


def test_the_page_s_links_lead_to_tests():
    page = PAGE.read_text()
    links = re.findall(r"\[`(\w+)`\]\(([^)#]+\.py)\)", page)
    assert len(links) == page.count("](../../tests/")
    for name, path in links:
        assert f"\ndef {name}(" in (PAGE.parent / path).read_text(), f"{path} has no {name}"
    here = re.findall(r"^def (test_\w+)\(", Path(__file__).read_text(), re.MULTILINE)
    assert set(here) - {name for name, _ in links} == {"test_the_page_s_links_lead_to_tests"}
