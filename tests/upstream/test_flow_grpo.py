"""Flow-GRPO's real accelerate trainers on a CPU: the whole unedited `main`, DDP over gloo, one epoch of sampling and training.

What a CPU box can't have is stood in for in flow_standins.py.
"""

import os
import shutil
import subprocess

import pytest
import torch
from checkouts import HERE, paths, require_flow_grpo, require_trainer
from flow_records import check_self_checks, pairs
from launch import ROOT, torchrun
from observe import relative_error
from probes import check_epochs, check_log, check_passes, wandb_history
from skips import check_refused, check_skipped

from jagg_patch import __version__

require_flow_grpo()

# (trainer, ranks, a diffusers class that it imports)
RUNS = [
    ("train_sd3", 1, "StableDiffusion3Pipeline"),
    ("train_sd3", 2, "StableDiffusion3Pipeline"),
    ("train_sd3_fast", 2, "StableDiffusion3Pipeline"),
    ("train_sd3_GRPO_Guard", 2, "StableDiffusion3Pipeline"),
    ("train_flux", 2, "FluxPipeline"),
    ("train_flux_fast", 2, "FluxPipeline"),
    ("train_flux_kontext", 2, "FluxKontextPipeline"),
    ("train_wan2_1", 2, "WanPipeline"),
]
N_BATCHES = 2  # a rank and epoch
MODEL_CALLS = {"train_wan2_1": 2}  # a step; else one
# cell: (steps whose backward reaches the model in a sample, autograd calls in which they do)
PASSES = {
    "unpatched": (9, 9),
    "W=2": (9, 5),
    "W=3": (6, 3),
    "W=4": (4, 2),
    "knots": (4, 4),
    "default": (6, 6),
}
WINDOW_PASSES = {
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
    "window 0 default": (6, 6),
}


def skipped_forwards(cell, ranks):
    """In a batch: all but two of a group, sequentially all but three.

    With more than one rank also all but three of a joint group with the last step, the only one in which DDP then reduces.
    """
    if cell == "default":  # 5, then 4 exact
        return 2
    if cell.startswith("window 4"):
        return 1
    return 3 + (1 if len(ranks) > 1 else 2)  # 5 + 4


# -- (a) the real main, in process


@pytest.fixture(scope="module", params=RUNS, ids=lambda param: f"{param[0].removeprefix('train_')}, {param[1]} ranks")
def ranks(request, flow_grpo, tmp_path_factory):
    """What flow_cells.py wrote, one a rank, with the trainer's name and where it wrote."""
    name, n_ranks, diffusers_class = request.param
    require_trainer(flow_grpo / "scripts", name, diffusers_class)
    out = tmp_path_factory.mktemp("flow_cells")
    # Cells without settings go by the environment, and count passes, of which the self-check has its own.
    env = {"WANDB_MODE": "disabled", "JAGG_SELF_CHECK": "0"}
    env |= paths(flow_grpo, flow_grpo / "scripts", ROOT, ROOT / "tests", HERE)
    torchrun(n_ranks, HERE / "flow_cells.py", flow_grpo, name, out, cwd=out, env=env, timeout=1800)
    return [torch.load(out / f"rank{rank}.pt") | {"trainer": name, "folder": out} for rank in range(n_ranks)]


@pytest.mark.parametrize("cell", ["off", "frac 0", "frac 0 probed"])
def test_off_is_bit_identical(ranks, cell):
    for _, record, unpatched in pairs(ranks, cell):
        for what in ("gradients", "weights"):
            assert all(map(torch.equal, record[what], unpatched[what]))
        assert torch.equal(record["rng"], unpatched["rng"]) and record["random"] == unpatched["random"]
        assert record["logged"] == unpatched["logged"]


def test_the_gradient_is_group_backward_s(ranks):
    errors = {cell: max(record["oracle_errors"]) for cell, record, _ in pairs(ranks, "W=2", "W=3", "W=4", "knots", "default")}
    assert len(errors) >= 6 and max(errors.values()) <= 1e-6, errors


def test_the_self_check_agrees_and_changes_nothing(ranks):
    check_self_checks(ranks)


def test_groups_of_two_are_exact_and_larger_ones_are_not(ranks):
    """Two inner epochs are two optimizer steps; in the second the unpatched trainer was given the patched one's weights."""
    for cell, record, _ in pairs(ranks, "W=2", "window 2 default"):
        assert max(record["exact_errors"]) <= 1e-6, cell
    for cell, record, _ in pairs(ranks, "W=3", "W=4", "default"):
        assert cell == "window 2 default" or min(record["exact_errors"]) > 1e-3, cell


def test_backward_passes_are_the_planned_ones(ranks):
    calls = MODEL_CALLS.get(ranks[0]["trainer"], 1)
    planned = WINDOW_PASSES if ranks[0]["trainer"].endswith("fast") else PASSES
    for cell, record, _ in pairs(ranks, *planned):
        passes, autograd_calls = planned[max((name for name in planned if cell.endswith(name)), key=len)]
        visits = N_BATCHES * (2 if cell.startswith("inner") else 1)
        assert record["passes"] == visits * passes * calls, cell
        assert record["reaching"] == visits * autograd_calls, cell
        assert record["stats"] is None or record["stats"]["backward_passes"] == visits * passes, cell


def test_the_random_numbers_are_the_unpatched_run_s(ranks):
    for _, record, unpatched in pairs(ranks, ""):
        assert torch.equal(record["rng"], unpatched["rng"]) and record["random"] == unpatched["random"]


def test_ratios_and_losses_are_the_unpatched_run_s_and_the_ratio_is_one(ranks):
    """Upstream logs means over all steps before an optimizer step, approx_kl of half the squared logarithm of the ratio."""
    for cell, record, unpatched in pairs(ranks, ""):
        assert record["logged"][0] == unpatched["logged"][0], cell
        assert 0 <= record["logged"][0]["approx_kl"] <= 1e-12, cell


def test_ranks_take_the_same_optimizer_step(ranks):
    for cell, record in ranks[0]["cells"].items():
        for other in ranks[1:]:
            for what in ("gradients", "weights"):
                assert all(map(torch.equal, record[what], other["cells"][cell][what])), cell
        assert not torch.equal(record["weights"][0], record["weights"][-1])


def test_a_second_inner_epoch_trains_from_other_ratios(ranks):
    for cell, record, _ in pairs(ranks, "inner unpatched", "inner W=2", "inner W=4"):
        assert len(record["gradients"]) == 2 and record["logged"][1]["approx_kl"] > record["logged"][0]["approx_kl"], cell


def test_the_kl_term_is_in_the_gradient(ranks):
    for rank in ranks:
        with_kl, without = (rank["cells"][cell]["gradients"][0] for cell in ("unpatched", "no KL unpatched"))
        assert relative_error(without, with_kl) > 1e-3


def test_skipped_forwards_leave_the_gradient_and_are_the_planned_ones(ranks):
    """The first batch runs its own, to compare them with the rollout's. In an SDE window the group begins anywhere."""
    calls = MODEL_CALLS.get(ranks[0]["trainer"], 1)
    for rank in ranks:
        assert len(rank["skips"]) >= 2
        for cell, found in rank["skips"].items():
            if cell != "no guidance":
                n_batches = N_BATCHES * len(found["errors"])
                check_skipped(found, (n_batches - 1) * skipped_forwards(cell, ranks), calls)
                assert all(map(torch.equal, found["gradients"], ranks[0]["skips"][cell]["gradients"])), cell


def test_when_the_policy_has_moved_less_is_lost_than_by_grouping(ranks):
    for rank in ranks:
        if "inner W=4" in rank["skips"]:
            assert 0 < rank["skips"]["inner W=4"]["errors"][1] < rank["cells"]["inner W=4"]["exact_errors"][1]


def test_a_rollout_with_guidance_and_training_without_ends_skipping(ranks):
    if "no guidance" not in ranks[0]["skips"]:
        pytest.skip("tried on Stable Diffusion 3")
    check_refused([rank["skips"]["no guidance"] for rank in ranks], "rank 0: the rollout's model outputs differ by ")


def test_evaluations_are_not_recorded_and_find_nothing_kept(ranks):
    """Two epochs with one before each, and two optimizer steps in each.

    On a CPU upstream's evaluation leaves the averaged weights in the model, here those that it began with, so both epochs do.
    """
    if not ranks[0]["epochs"]:
        pytest.skip("tried on Stable Diffusion 3")
    for found in (rank["epochs"] for rank in ranks):
        check_skipped(found, (2 * 2 * N_BATCHES - 1) * skipped_forwards("epochs", ranks))
        assert found["errors"][2] <= 1e-6
        assert found["evaluations"] == [(0, 0)] * 2 and found["recorded"] == 2 * N_BATCHES * 10


@pytest.mark.parametrize("settings", ["exact", "groups"])
def test_retained_graphs_give_the_gradients_of_own_forwards(ranks, settings):
    """In the third epoch, of a batch that comes before the first optimizer step and isn't the one that syncs.

    A single rank syncs at every step, so it retains none.
    """
    calls, n_steps = MODEL_CALLS.get(ranks[0]["trainer"], 1), 3 if ranks[0]["trainer"].endswith("fast") else 9
    n_retained = n_steps * (len(ranks) > 1)
    for found in (rank["retained"][settings] for rank in ranks):
        assert (found["retained"], found["fewer"]) == (n_retained, n_retained * calls)
        assert len(found["errors"]) == 6 and max(found["errors"]) <= 1e-6 and found["alike"]


def test_the_order_of_samples_is_kept_to_batches_of_the_rollout_and_begins_with_a_retained_one(ranks):
    if not any(rank["retained"]["exact"]["orders"] for rank in ranks):
        pytest.skip("this trainer takes a rollout's samples as they come")
    for rank in ranks:
        orders = rank["retained"]["exact"]["orders"][: 1 if len(ranks) == 1 else 3]  # a single rank gives up after the first
        for order in orders:
            assert sorted(order[::2]) == [0, 2, 4, 6] and order[1::2] == [number + 1 for number in order[::2]]
        assert len(ranks) == 1 or orders[2][0] == 6


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("MEGATRON_LM", "accelerate runs MEGATRON_LM here"),
        ("XLA", "accelerate runs XLA here"),
        ("accumulation", "accelerate syncs gradients every 2 steps"),
    ],
)
def test_what_is_not_shown_to_be_right_is_refused_at_start(ranks, what, message):
    for rank in ranks:
        assert rank["refusals"][what].startswith(message)


@pytest.fixture
def probes(ranks):
    """`[(the run with the probe, that without, and the trainer's name)]`, one a rank."""
    return [(rank["probes"]["probed"], rank["probes"]["plain"], rank["trainer"]) for rank in ranks]


def test_the_probe_changes_nothing(probes):
    """In two epochs of two optimizer steps, of the second of which nothing is probed."""
    for probed, plain, _ in probes:
        for what in ("gradients", "weights"):
            assert len(plain[what]) >= 4 and all(map(torch.equal, probed[what], plain[what]))
        assert torch.equal(probed["rng"], plain["rng"]) and probed["random"] == plain["random"]
        assert probed["logged"] == plain["logged"]


def test_the_log_has_a_line_an_epoch(probes):
    for probed, _, name in probes:
        visited, groups = (3, [3]) if name.endswith("fast") else (9, [5])
        check_log(probed["log"], probed["stats"], name, trajectory=visited, visited=visited, groups=groups)


def test_rollout_and_update_are_told_from_evaluation_and_from_each_other(probes):
    check_epochs(probes[0][0])


def test_the_probe_s_cosines_are_group_backward_s(probes):
    """Of the first batch, averaged over the ranks, with the KL term."""
    for probed, _, _ in probes:
        for expected, measured in probed["agreements"]:
            assert measured == pytest.approx(expected, abs=1e-6)


def test_wandb_has_the_log_and_the_trainer_s_own_values_at_their_steps(ranks, probes):
    """The trainer's steps are the optimizer's; its values are there but for pictures, which are files."""
    if probes[0][2] == "train_wan2_1":
        pytest.skip("accelerate's tracker has this trainer's wandb run, which leaves no offline file here")
    history = {name: wandb_history(ranks[0]["folder"] / name) for name in ("probed", "plain")}
    own = [
        {
            step: {key: value for key, value in row.items() if not key.startswith("jagg/") and isinstance(value, (int, float))}
            for step, row in rows.items()
        }
        for rows in history.values()
    ]
    assert own[0] == own[1] and all("policy_loss" in own[0][step] for step in range(4))
    found = [row for row in history["probed"].values() if "jagg/training_step" in row]
    for row, line in zip(found, probes[0][0]["log"], strict=True):
        for key in ("training_step", "update_seconds", "backward_passes_saved"):
            assert row[f"jagg/{key}"] == line[key]
        assert row[f"jagg/cosine_W{line['group_size']}/0"] == line["probe"][0]["groups"][0]["cosine"]


# -- (b) the patched file as __main__, with one of upstream's own configurations


@pytest.fixture(scope="module")
def main_runs(flow_grpo, tmp_path_factory):
    """`{name: (what it printed, what was seen on each rank)}`: unpatched, off and on; to the first optimizer step."""
    from flow_standins import write_prompts

    top = tmp_path_factory.mktemp("main")
    patched = top / "patched"
    shutil.copytree(flow_grpo, patched)
    subprocess.run([ROOT / "apply.sh", patched], check=True, capture_output=True)
    changed = {
        "mixed_precision": "no",
        "resolution": 64,
        "sample.train_batch_size": 2,
        "sample.test_batch_size": 8,
        "sample.eval_num_steps": 2,
        "sample.num_image_per_prompt": 2,
        "sample.num_batches_per_epoch": N_BATCHES,
        "train.batch_size": 2,
        "train.gradient_accumulation_steps": N_BATCHES,
    }
    flags = [
        "--config",
        "config/grpo.py:pickscore_sd3_fast_nocfg",
        *(f"--config.{name}={value}" for name, value in changed.items()),
    ]
    runs = {}
    for name, tree, env in (
        ("unpatched", flow_grpo, {}),
        ("off", patched, {"JAGG_ENABLED": "0", "JAGG_PROBE_EVERY": "1", "JAGG_LOG": "off.jsonl"}),
        ("on", patched, {}),
    ):
        out = top / name
        (out / "dataset").mkdir(parents=True)
        write_prompts(out / "dataset/pickscore")
        os.symlink(tree / "config", out / "config")
        env |= paths(HERE / "flow_site", HERE, tree) | {"OBSERVE_OUT": str(out), "WANDB_MODE": "disabled"}
        printed = torchrun(2, tree / "scripts/train_sd3_fast.py", *flags, cwd=out, env=env, timeout=1200)
        runs[name] = printed, [torch.load(out / f"rank{rank}.pt") for rank in range(2)]
    return patched, runs


def test_the_script_s_hook_installs_and_the_banner_shows_once(main_runs):
    patched, runs = main_runs
    printed, seen = runs["on"]
    assert printed.count(f"JAGG {__version__} on train_sd3_fast: group_size 4, frac 1") == 1
    assert printed.count("3 of 3 steps visited, in trajectory order: 3 in 1 group (3), 0 exact") == 1
    assert printed.count("update 6 -> 5 (1.20x), with sampling 16 -> 15 (1.07x)") == 1
    assert printed.count("JAGG: first optimizer step after 4 backward passes through the model instead of 6") == 1
    assert runs["off"][0].count(f"JAGG {__version__} on train_sd3_fast: off") == 1
    assert not (patched.parent / "off/off.jsonl").exists()
    for rank in seen:
        assert os.path.samefile(rank["module"], patched / "scripts/jagg_patch/__init__.py")


def test_the_script_s_backward_passes_are_the_planned_ones(main_runs):
    for name, passes, checks in (("unpatched", 3, 0), ("off", 3, 0), ("on", 2, 1)):
        planned = N_BATCHES * passes + checks * check_passes(3, is_own=False)
        assert [rank["passes"] for rank in main_runs[1][name][1]] == [planned] * 2
        assert "no self-check" not in main_runs[1][name][0]


def test_off_gives_the_unpatched_script_s_weights_bit_for_bit(main_runs):
    for unpatched, off, on in zip(*(main_runs[1][name][1] for name in ("unpatched", "off", "on")), strict=True):
        assert torch.equal(off["weights"], unpatched["weights"]) and not torch.equal(on["weights"], unpatched["weights"])
        assert torch.equal(off["rng"], unpatched["rng"]) and torch.equal(on["rng"], unpatched["rng"])
