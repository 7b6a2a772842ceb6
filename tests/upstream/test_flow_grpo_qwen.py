"""Flow-GRPO's real Qwen trainers on a CPU: the whole unedited `main`, FSDP by upstream's own wrapper, one epoch.

What a CPU box can't have is stood in for in flow_qwen_cells.py,
flow_standins.py and flow_setups/: a rollout's text encoder, CUDA, NCCL, reward models.
"""

import pytest
import torch
from checkouts import HERE, paths, require_flow_grpo, require_trainer
from flow_records import check_self_checks, pairs
from launch import ROOT, torchrun
from observe import relative_error
from probes import check_epochs, check_log
from skips import check_skipped

require_flow_grpo()

N_BATCHES = 2  # a rank and epoch
N_BLOCKS = 2  # FSDP units under the root
# cell: (backward passes in a sample, autograd calls that contain them)
PASSES = {
    "unpatched": (3, 3),
    "W=2": (3, 2),
    "W=3": (2, 1),
    "default": (2, 2),
    "window 4 unpatched": (4, 4),
    "window 4 W=2": (4, 2),
    "window 4 default": (2, 2),
    "window 4 knots": (3, 3),
    "window 2 unpatched": (2, 2),
    "window 2 default": (2, 2),
    "window 0 unpatched": (9, 9),
    "window 0 W=2": (9, 5),
    "window 0 W=3": (6, 3),
    "window 0 W=4": (4, 2),
    "window 0 default": (6, 6),
}


@pytest.fixture(scope="module", params=["train_qwenimage", "train_qwenimage_edit"])
def ranks(request, flow_grpo, tmp_path_factory):
    """What flow_qwen_cells.py wrote, one a rank."""
    require_trainer(flow_grpo / "scripts", request.param, "QwenImagePipeline")
    out = tmp_path_factory.mktemp("flow_qwen_cells")
    # Cells without settings go by the environment, and count passes, of which the self-check has its own.
    env = {"WANDB_MODE": "disabled", "JAGG_SELF_CHECK": "0"}
    env |= paths(flow_grpo, flow_grpo / "scripts", ROOT, ROOT / "tests", HERE)
    torchrun(2, HERE / "flow_qwen_cells.py", flow_grpo, request.param, out, cwd=out, env=env, timeout=1800)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("cell", ["off", "frac 0"])
def test_off_is_bit_identical(ranks, cell):
    for _, record, unpatched in pairs(ranks, cell):
        for what in ("gradients", "weights"):
            assert all(map(torch.equal, record[what], unpatched[what]))
        assert torch.equal(record["rng"], unpatched["rng"]) and record["random"] == unpatched["random"]
        assert record["logged"] == unpatched["logged"]


def test_the_gradient_is_group_backward_s(ranks):
    errors = {cell: record["oracle_error"] for cell, record, _ in pairs(ranks, "W=2", "W=3", "W=4", "knots", "default")}
    assert len(errors) >= 16 and max(errors.values()) <= 1e-6, errors


def test_the_self_check_agrees_and_changes_nothing(ranks):
    check_self_checks(ranks)


def test_groups_of_two_are_exact_and_larger_ones_are_not(ranks):
    """At the first optimizer step: the second one's forwards see the first one's rounding. In bf16 FSDP rounds each pass's."""
    for cell, record, _ in pairs(ranks, "W=2", "window 2 default"):
        assert record["exact_errors"][0] <= (record["passes"] * 2**-9 if cell.startswith("bf16") else 1e-6), cell
    for cell, record, _ in pairs(ranks, "W=3", "W=4", "default"):
        assert cell == "window 2 default" or record["exact_errors"][0] > 1e-2, cell


def test_backward_passes_and_all_gathers_are_the_planned_ones(ranks):
    for cell, record, _ in pairs(ranks, *PASSES):
        passes, autograd_calls = PASSES[max((name for name in PASSES if cell.endswith(name)), key=len)]
        visits = N_BATCHES * (2 if cell.startswith("inner") else 1)
        assert record["passes"] == visits * passes, cell
        assert record["gathers"] == [N_BLOCKS] * visits * autograd_calls, cell
        assert record["stats"] is None or record["stats"]["backward_passes"] == visits * passes, cell


def test_the_random_numbers_are_the_unpatched_run_s(ranks):
    for _, record, unpatched in pairs(ranks, ""):
        assert torch.equal(record["rng"], unpatched["rng"]) and record["random"] == unpatched["random"]


def test_ratios_and_losses_are_the_unpatched_run_s_and_the_ratio_is_one(ranks):
    """Rank 0 logs means over all steps before an optimizer step, approx_kl of half the squared logarithm of the ratio."""
    for cell, record, unpatched in pairs(ranks[:1], ""):
        assert record["logged"][0] == unpatched["logged"][0], cell
        assert 0 <= record["logged"][0]["approx_kl"] <= 1e-12, cell


def test_padding_is_trimmed_at_a_sample_s_first_step(ranks):
    """Upstream changes the sample in place there, so that a group's steps get it in different lengths from the caller."""
    lengths = [record["tokens"] for _, record, _ in pairs(ranks, "window 0 unpatched")]
    batches = [tokens[start : start + 9] for tokens in lengths for start in (0, 9)]
    assert all(len(set(batch[1:])) == 1 for batch in batches)
    assert any(batch[0] > batch[1] for batch in batches)


@pytest.mark.parametrize(("cell", "forwards"), [("W=3", 1), ("window 4", 1), ("window 0 W=4", 5)])
def test_skipped_forwards_leave_the_gradient_and_are_the_planned_ones(ranks, cell, forwards):
    """All but two of a group, sequentially all but three; the first batch runs its own, to compare."""
    for rank in ranks:
        check_skipped(rank["skips"][cell], (N_BATCHES - 1) * forwards)


@pytest.mark.parametrize("settings", ["exact", "groups"])
def test_retained_graphs_give_the_gradients_of_own_forwards(ranks, settings):
    """In the third epoch, of both batches that come before the first optimizer step; windows of four steps."""
    for found in (rank["retained"][settings] for rank in ranks):
        assert found["retained"] == 2 * 4 and found["fewer"] == found["retained"]
        assert len(found["errors"]) == 6 and max(found["errors"]) <= 1e-6 and found["alike"]


def test_a_second_inner_epoch_trains_from_other_ratios(ranks):
    for cell, record, _ in pairs(ranks[:1], "inner unpatched", "inner W=2"):
        assert len(record["gradients"]) == 2 and record["logged"][1]["approx_kl"] > record["logged"][0]["approx_kl"], cell


def test_policy_and_kl_terms_are_in_the_gradient(ranks):
    for rank in ranks:
        with_kl, without = (rank["cells"][cell]["gradients"][0] for cell in ("unpatched", "no KL unpatched"))
        assert without.norm() > 0 and relative_error(without, with_kl) > 1e-3


def test_ranks_with_different_settings_are_refused_when_they_can_talk(ranks):
    for rank in ranks:
        assert rank["refusal"].startswith("rank 1 has {'group_size': 3}, rank 0 has {'group_size': 2}")


def test_the_probe_changes_nothing_and_finds_what_group_backward_gives(ranks):
    """In two epochs of two optimizer steps, with an evaluation between."""
    for rank in ranks:
        probed, plain = rank["probes"]["probed"], rank["probes"]["plain"]
        for what in ("gradients", "weights"):
            assert len(plain[what]) >= 4 and all(map(torch.equal, probed[what], plain[what]))
        assert torch.equal(probed["rng"], plain["rng"]) and probed["random"] == plain["random"]
        assert probed["logged"] == plain["logged"]
        check_log(probed["log"], probed["stats"], probed["log"][0]["trainer"], trajectory=9, visited=9, groups=[5])
        for expected, measured in probed["agreements"]:
            assert measured == pytest.approx(expected, abs=1e-6)
    check_epochs(ranks[0]["probes"]["probed"])
