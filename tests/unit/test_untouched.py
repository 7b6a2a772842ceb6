"""Gradients that are changed while a part of a group's is still to come, in places that the text doesn't show."""

import models
import pytest
import torch

from jagg_patch import JaggConfig, JaggError, install

FLUX = "train_grpo_flux"
BACKWARD = "            loss.backward()"
CHANGES = {
    "clipped": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "set to zero": lambda model: model.zero_grad(set_to_none=False),
    "replaced": lambda model: [setattr(p, "grad", p.grad / 2) for p in model.parameters() if p.grad is not None],
    "scaled by hand": lambda model: [p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None],
}


@pytest.fixture
def train(load_loop):
    """`train(change, settings)`: the gradient of a training step after each of whose backwards `change(model)` is called."""

    def run(change, pieces=(), **settings):
        module = load_loop(FLUX, BACKWARD, f"{BACKWARD}\n            model.after_backward(model)", *pieces)
        model, seen = models.Plain(), []
        model.after_backward = change
        if settings:
            install(vars(module), config=JaggConfig(**settings))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
        torch.manual_seed(1)
        module.train_one_step(module.make_args(), model, optimizer)
        return seen

    return run


@pytest.mark.parametrize("settings", [{"group_size": 2, "schedule": "joint"}, {"group_size": 3}, {"group_size": 4, "frac": 0.5}])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_that_a_helper_changes_inside_a_group_stop_the_run(train, change, settings):
    with pytest.raises(JaggError, match=r"gradients were changed since the group that began at sample \d") as error:
        train(CHANGES[change], **{"frac": 1} | settings)
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize("change", CHANGES)
def test_in_a_group_of_two_that_is_sequential_nothing_is_still_to_come(train, change):
    in_order = "            torch.randperm(n)\n", "            torch.randperm(n).sort().values\n"
    expected = train(CHANGES[change], in_order)
    for found, one in zip(train(CHANGES[change], schedule="sequential", group_size=2, frac=1), expected, strict=True):
        assert torch.allclose(found, one, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_gradients_may_be_looked_at(train, schedule):
    norms = []

    def look(model):
        norms.append([p.grad.norm() for p in model.parameters() if p.grad is not None])

    found, expected = (train(how, schedule=schedule, frac=1) for how in (look, lambda model: None))
    assert all(map(torch.equal, found, expected)) and len(norms) == 30
