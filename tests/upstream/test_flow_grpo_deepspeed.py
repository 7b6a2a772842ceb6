"""Flow-GRPO's real Flux trainer on DeepSpeed, ZeRO stages 1 and 2 as upstream's configurations have them, on a CPU over gloo.

The whole unedited `main`, one epoch; what a CPU box can't have is stood in for in flow_standins.py.
"""

from importlib.util import find_spec

import pytest
import torch
import yaml
from checkouts import HERE, paths, require_flow_grpo, require_trainer
from flow_records import pairs
from launch import ROOT, torchrun
from skips import check_skipped

require_flow_grpo()
if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

N_BATCHES = 2  # a rank and epoch
# cell: (steps whose backward reaches the model in a sample, autograd calls in which they do)
PASSES = {
    "unpatched": (9, 9),
    "off": (9, 9),
    "W=2": (9, 5),
    "default": (6, 6),
    "W=3 joint": (6, 3),
    "knots joint": (4, 3),
    "knots sequential": (4, 4),
    "W=3 sequential": (6, 6),
}


def launcher_settings(path):
    """What accelerate's launcher exports for a configuration with DeepSpeed."""
    config = yaml.safe_load(path.read_text())["deepspeed_config"]
    settings = {f"ACCELERATE_DEEPSPEED_{name.upper()}": str(value).lower() for name, value in config.items()}
    return settings | {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}


@pytest.fixture(scope="module", params=[1, 2], ids=lambda stage: f"zero{stage}")
def ranks(request, flow_grpo, tmp_path_factory):
    """What flow_deepspeed_cells.py wrote, one a rank."""
    require_trainer(flow_grpo / "scripts", "train_flux", "FluxPipeline")
    out = tmp_path_factory.mktemp("flow_deepspeed_cells")
    env = launcher_settings(flow_grpo / f"scripts/accelerate_configs/deepspeed_zero{request.param}.yaml")
    env |= paths(flow_grpo, flow_grpo / "scripts", ROOT, ROOT / "tests", HERE) | {"WANDB_MODE": "disabled"}
    torchrun(2, HERE / "flow_deepspeed_cells.py", "train_flux", out, cwd=out, env=env, timeout=1200)
    ranks = [torch.load(out / f"rank{rank}.pt") for rank in range(2)]
    assert [rank["stage"] for rank in ranks] == [request.param] * 2
    return ranks


def test_off_is_bit_identical(ranks):
    for _, record, unpatched in pairs(ranks, "off"):
        assert torch.equal(record["gradients"][0], unpatched["gradients"][0])
        assert torch.equal(record["update"], unpatched["update"])


def test_the_gradient_is_group_backward_s_in_each_optimizer_step(ranks):
    """The second one's too, which nothing that DeepSpeed keeps of the first may reach."""
    errors = {cell: max(record["oracle_errors"]) for cell, record, _ in pairs(ranks, "W=2", "joint", "sequential", "default")}
    assert len(errors) == 8 and max(errors.values()) <= 1e-6, errors
    for cell, record, _ in pairs(ranks, ""):
        assert len(record["gradients"]) == 1 + cell.startswith("twice"), cell


def test_groups_of_two_take_the_unpatched_trainer_s_optimizer_step(ranks):
    """Gradient and weights; larger groups approximate the gradient."""
    for cell, record, unpatched in pairs(ranks, "W=2"):
        change = (record["update"] - unpatched["update"]).norm() / unpatched["update"].norm()
        assert max(*record["exact_errors"], change) <= 1e-6, cell
    for cell, record, _ in pairs(ranks, "W=3 joint", "W=3 sequential", "default"):
        assert min(record["exact_errors"]) > 1e-3, cell


def test_backward_passes_are_the_planned_ones(ranks):
    for cell, record, _ in pairs(ranks, ""):
        passes, autograd_calls = PASSES[cell.removeprefix("twice ").removeprefix("full ")]
        visits = N_BATCHES * len(record["gradients"])
        assert (record["passes"], record["reaching"]) == (visits * passes, visits * autograd_calls), cell


def test_the_random_numbers_are_the_unpatched_run_s(ranks):
    for cell, record, unpatched in pairs(ranks, ""):
        assert torch.equal(record["rng"], unpatched["rng"]), cell


@pytest.mark.parametrize(
    ("cell", "forwards"), [("full W=3 joint", 3), ("twice W=4 joint", 3 + 2), ("twice W=4 sequential", 2 + 1)]
)
def test_skipped_forwards_leave_the_gradient_and_are_the_planned_ones(ranks, cell, forwards):
    """All but two of a group, sequentially all but three; the first batch runs its own, to compare. No step here moves far."""
    for found in (rank["skips"][cell] for rank in ranks):
        check_skipped(found, (N_BATCHES * len(found["errors"]) - 1) * forwards)
        assert max(found["errors"]) <= 1e-6
        assert all(map(torch.equal, found["gradients"], ranks[0]["skips"][cell]["gradients"]))


def test_ranks_take_the_same_optimizer_step(ranks):
    for cell, record in ranks[0]["cells"].items():
        assert torch.equal(record["update"], ranks[1]["cells"][cell]["update"]), cell
        assert cell.startswith("twice") or record["update"].any(), cell


def test_the_probe_is_refused_at_the_first_training_step(ranks):
    for rank in ranks:
        assert rank["refusal"].startswith("the probe can't run: DeepSpeed") and "unset JAGG_PROBE_EVERY" in rank["refusal"]
