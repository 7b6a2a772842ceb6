"""What torch compiles of a training loop, or can't look into, trains as it does without; or the run stops in JAGG's words."""

import models
import pytest
import torch
from torch.testing import assert_close

from jagg_patch import JaggConfig, JaggError, install

FORWARD = "def grpo_one_step", "@torch.compile(backend='eager')\ndef grpo_one_step"
ROLLOUT = "def run_sample_step", "@torch.compile(backend='eager')\ndef run_sample_step"
SOLVER = "def flux_step", "@torch.compile(backend='eager')\ndef flux_step"


@pytest.fixture
def trains(load_loop):
    """`trains(model, pieces of the loop, settings)`: the gradient of one training step."""

    def run(model, pieces=(), **settings):
        module = load_loop("train_grpo_flux", *pieces)
        install(vars(module), config=JaggConfig(**{"frac": 1, "schedule": "joint"} | settings))
        torch.manual_seed(1)
        module.train_one_step(module.make_args(sampling_steps=9), model, torch.optim.SGD(model.parameters(), lr=0.0))
        return torch.cat([weight.grad.flatten() for weight in model.parameters()])

    return run


@pytest.mark.parametrize(
    ("pieces", "settings"),
    [
        (FORWARD + SOLVER, dict(schedule="sequential")),
        (FORWARD, dict(schedule="sequential", group_size=5)),
        (ROLLOUT, dict(skip_forwards=True)),
    ],
    ids=["forward and solver", "forward", "rollout"],
)
def test_functions_of_the_trainer_may_be_compiled(trains, pieces, settings):
    """By the backend that leaves the operations as they are."""
    torch._dynamo.reset()
    assert_close(trains(models.Plain(), pieces, **settings), trains(models.Plain(), **settings), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("group_size", [2, 4])
def test_a_compiled_backward_is_refused(trains, group_size):
    from torch._dynamo import compiled_autograd

    enable = getattr(compiled_autograd, "_enable", None) or compiled_autograd.enable  # of torch 2.5
    with enable(torch.compile(backend="eager")), pytest.raises(JaggError) as error:
        trains(models.Plain(), group_size=group_size)
    assert str(error.value).startswith("the backward is compiled (compiled autograd)") and len(str(error.value).splitlines()) == 2


class Sparse(models.Plain):
    """Saves a sparse tensor for its backward."""

    def forward(self, x):
        return torch.sparse.mm(torch.eye(len(x)).to_sparse(), self.net(x))


def test_graphs_with_sparse_tensors_are_measured_without_them(trains):
    assert torch.equal(trains(Sparse(), schedule="auto"), trains(Sparse(), schedule="sequential"))
