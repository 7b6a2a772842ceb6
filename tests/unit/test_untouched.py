"""Gradients that are changed while a part of a group's is still to come, in places that the text doesn't show."""

import models
import pytest
import torch

from jagg_patch import JaggConfig, JaggError, install

FLUX = "train_grpo_flux"
BACKWARD = "            loss.backward()"
HELPER = "            model.help(model)"


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


OTHER = torch.nn.Linear(2, 1)
CHANGES = {
    "clipped": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "set to zero": lambda model: model.zero_grad(set_to_none=False),
    "clamped past torch's counting": lambda model: [p.grad.data.clamp_(-1e-5, 1e-5) for p in trained(model)],
    "before a backward of others": lambda model: [CHANGES["clipped"](model), (OTHER(torch.ones(2)).sum()).backward()],
    "replaced": lambda model: [setattr(p, "grad", p.grad / 2) for p in trained(model)],
    "scaled by next to nothing": lambda model: [p.grad.mul_(0.9999) for p in trained(model)],
    "scaled by hand": lambda model: [p.grad.mul_(0.5) for p in trained(model)],
}


@pytest.fixture
def train(load_loop):
    """`train(change, settings)`: the gradient of a training step, after each of whose backwards `change(model)` is called.

    Or wherever `lines` have it.
    """

    def run(change, pieces=(), lines=(BACKWARD, HELPER), **settings):
        module = load_loop(FLUX, BACKWARD, "\n".join(lines), *pieces)
        model, seen = models.Plain(), []
        model.help = change
        if settings:
            install(vars(module), config=JaggConfig(**settings))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in trained(model)))
        torch.manual_seed(1)
        module.train_one_step(module.make_args(), model, optimizer)
        return seen

    return run


@pytest.mark.parametrize("settings", [{"group_size": 2, "schedule": "joint"}, {"group_size": 3}, {"group_size": 4, "frac": 0.5}])
@pytest.mark.parametrize("lines", [(BACKWARD, HELPER), (HELPER, BACKWARD)], ids=["after", "before"])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_that_a_helper_changes_inside_a_group_stop_the_run(train, change, lines, settings):
    with pytest.raises(JaggError, match=r"gradients were changed since the group that began at sample \d") as error:
        train(CHANGES[change], lines=lines, **{"frac": 1} | settings)
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize("change", CHANGES)
def test_in_a_group_of_two_that_is_sequential_nothing_is_still_to_come(train, change):
    in_order = "            torch.randperm(n)\n", "            torch.randperm(n).sort().values\n"
    expected = train(CHANGES[change], in_order)
    for found, one in zip(train(CHANGES[change], schedule="sequential", group_size=2, frac=1), expected, strict=True):
        assert torch.allclose(found, one, rtol=1e-5, atol=1e-9)


HARMLESS = {
    "looked at": lambda model: [p.grad.norm() for p in trained(model)],
    "clipped far above their norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9),
    "mended where they are no numbers": lambda model: [p.grad.nan_to_num_() for p in trained(model)],
    "detached": lambda model: [setattr(p, "grad", p.grad.detach()) for p in trained(model)],
}


@pytest.mark.parametrize("settings", [{}, {"group_size": 2, "cuts": "3"}], ids=["", "steps alone between groups"])
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize("look", HARMLESS)
def test_gradients_may_be_looked_at_and_left_as_they_are(train, look, schedule, settings):
    found, expected = (train(how, schedule=schedule, frac=1, **settings) for how in (HARMLESS[look], lambda model: None))
    assert all(map(torch.equal, found, expected))


def test_norms_are_taken_where_weights_get_gradients_and_nowhere_else(train, monkeypatch):
    """After a sample's first loss, then before and after each joint backward but the last; other losses bring none."""
    taken = []
    norms = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda *args: taken.append(args) or norms(*args))
    train(lambda model: None, knots="4", schedule="joint", self_check=False)
    n_samples, n_joint = 2, 2
    assert len(taken) == n_samples * 2 * n_joint - 2  # the first sample finds no gradients to compare


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_gradients_may_be_added_up_elsewhere(train, schedule):
    found = []
    for settings in ({}, {"schedule": schedule, "group_size": 2, "frac": 1}, {"schedule": schedule, "knots": "15"}):
        sums = {}

        def move(model, sums=sums):
            for name, p in model.named_parameters():
                if p.grad is not None:
                    sums[name], p.grad = sums.get(name, 0) + p.grad, None

        assert train(move, **settings) == []
        found.append(torch.cat([sums[name].flatten() for name in sorted(sums)]))
    assert torch.allclose(found[1], found[0], rtol=1e-5, atol=1e-8) and torch.allclose(found[2], found[0], rtol=1e-5, atol=1e-8)


def test_gradients_that_are_no_numbers_are_what_they_were(train):
    """One sample's advantage is NaN, as a reward that has failed: unpatched the loop trains on."""
    broken = "            loss = -(advantages[i]", "            loss = -(advantages[i] * torch.where(step == 2, torch.nan, 1.0)"
    assert any(gradient.isnan().any() for gradient in train(lambda model: None, broken, schedule="joint", frac=1))
