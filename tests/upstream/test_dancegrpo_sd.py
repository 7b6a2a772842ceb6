"""DanceGRPO's real Stable Diffusion trainer on a CPU: all of its `main`, rollout included, nothing in it edited but the hook.

What a CPU box can't have is stood in for in standins.py and sd_standins.py.
"""

import os
import shlex
import shutil
import subprocess

import pytest
import torch
from checkouts import HERE, paths, require_dancegrpo
from launch import ROOT, torchrun
from probes import check_log, check_passes, probe_passes
from safetensors.torch import load_file
from skips import check_refused, check_skipped

require_dancegrpo()

N_BATCHES = 2  # of two samples each, a pass


# -- (a) the real main, in process


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def cells(request, dancegrpo, tmp_path_factory):
    from sd_standins import write_working_directory

    out = tmp_path_factory.mktemp("cells")
    write_working_directory(out, n_prompts=4 * request.param)
    torchrun(
        request.param,
        HERE / "sd_cells.py",
        dancegrpo,
        out,
        cwd=out,
        env=paths(dancegrpo, ROOT, ROOT / "tests", HERE),
        timeout=1800,
    )
    return [torch.load(out / f"rank{rank}.pt") for rank in range(request.param)]


def of_unpatched(records, cell):
    return records[cell.split()[0]]


@pytest.mark.parametrize("cell", ["learns off", "learns frac 0", "bf16 off"])
def test_off_is_bit_identical(cells, cell):
    for records in cells:
        record, unpatched = records[cell], of_unpatched(records, cell)
        for what in ("weights", "rng", "timesteps"):
            assert torch.equal(record[what], unpatched[what])
        assert all(map(torch.equal, record["gradients"], unpatched["gradients"]))


@pytest.mark.parametrize("cell", ["all W=2", "all W=3", "all W=4", "all default", "twice W=2", "twice W=4", "bf16 W=4"])
def test_each_pass_visits_upstream_s_steps_in_trajectory_order_and_draws_its_random_numbers(cells, cell):
    for records in cells:
        ours, unpatched = records[cell], of_unpatched(records, cell)
        assert torch.equal(ours["timesteps"], unpatched["timesteps"].sort(2, descending=True).values)
        assert not torch.equal(ours["timesteps"], unpatched["timesteps"])
        assert torch.equal(ours["rng"], unpatched["rng"])


def test_the_second_pass_visits_other_steps_and_each_sample_its_own(cells):
    first, second = cells[0]["twice W=4"]["timesteps"]
    assert not torch.equal(first, second)
    assert not torch.equal(first[0, :, 0], first[0, :, 1])


@pytest.mark.parametrize("cell", ["all W=2", "twice W=2"])
def test_groups_of_two_give_upstream_s_gradient(cells, cell):
    """In another order of steps: float64 sums differ."""
    assert all(0 < error <= 1e-12 for error in cells[0][cell]["exact_errors"])


def test_the_self_check_agrees_and_changes_nothing(cells):
    for records in cells:
        checked, default = records["all default, checked"], records["all default"]
        ((error, _),) = checked["checks"]
        assert error <= 1e-6
        assert all(map(torch.equal, checked["gradients"], default["gradients"]))
        assert torch.equal(checked["weights"], default["weights"]) and torch.equal(checked["rng"], default["rng"])


def test_larger_groups_do_not(cells):
    errors = [cells[0][cell]["exact_errors"][0] for cell in ("all W=3", "all W=4")]
    assert 1e-3 < errors[0] < errors[1] < 0.5


@pytest.mark.parametrize(
    ("cell", "limit"),
    [(f"all {plan}", 1e-12) for plan in ("W=2", "W=3", "W=4", "knots", "default")]
    + [("twice W=2", 1e-12), ("twice W=4", 1e-12), ("unguided W=4", 1e-6), ("bf16 W=4", 1e-6)],
)
def test_the_gradient_is_group_backward_s_averaged_over_the_ranks(cells, cell, limit):
    assert all(error <= limit for error in cells[0][cell]["oracle_errors"])


def test_the_ranks_have_the_same_gradient_and_weights(cells):
    for cell, record in cells[0].items():
        if cell != "refused":
            for other in cells[1:]:
                assert all(map(torch.equal, record["gradients"], other[cell]["gradients"]))
                assert torch.equal(record["weights"], other[cell]["weights"])


@pytest.mark.parametrize(
    ("cell", "passes"),
    [("all", [9]), ("all W=2", [9]), ("all W=3", [6]), ("all W=4", [4]), ("all knots", [4]), ("all default", [6])]
    + [("twice", [5, 5]), ("twice W=2", [5, 5]), ("twice W=4", [2, 2]), ("bf16 W=4", [4])],
)
def test_backward_passes_are_the_planned_ones_and_done_when_the_optimizer_steps(cells, cell, passes):
    for records in cells:
        record = records[cell]
        assert record["passes"] == [N_BATCHES * sum(passes[: n + 1]) for n in range(len(passes))]
        assert record["stats"] is None or record["stats"]["backward_passes"] == record["passes"][-1]


def test_gradients_that_sync_inside_a_group_are_refused(cells):
    for records in cells:
        message = records["refused"]["accumulation"]
        assert "accelerate syncs gradients every 4 steps, not a multiple of the 9 trained per sample" in message


@pytest.mark.parametrize(("cell", "groups", "syncs"), [("all W=4", 3 + 2, 1), ("all default", 2, 0), ("twice W=4", 2, 0)])
def test_skipped_forwards_leave_the_gradient_and_are_the_planned_ones(cells, cell, groups, syncs):
    """DDP looks ahead in a sample's last group, which takes a forward. The first batch runs its own to compare.

    All samples of a prompt begin alike. In a second pass nothing has been learned.
    """
    for records in cells:
        found = records[f"{cell} skip"]["skips"]
        n_batches = N_BATCHES * len(found["errors"])
        check_skipped(found, (n_batches - 1) * (groups - (syncs if len(cells) > 1 else 0)), limit=1e-12)
        assert max(found["errors"]) <= 1e-12


def test_a_rollout_with_guidance_and_training_without_ends_skipping(cells):
    found = [records["unguided W=4 skip"]["skips"] for records in cells]
    check_refused(found, "rank 0: the rollout calls the model with other inputs: its outputs are [4, 4, 64, 64] there, [2, ")


def test_the_probe_changes_nothing(cells):
    for records in cells:
        record, other = records["epochs probed"], records["epochs"]
        assert torch.equal(record["weights"], other["weights"]) and torch.equal(record["rng"], other["rng"])
        assert all(map(torch.equal, record["gradients"], other["gradients"])) and len(record["gradients"]) == 2
        assert record["logged"] == other["logged"]


def test_the_log_has_a_line_an_epoch_and_its_cosines_are_group_backward_s(cells):
    """Of the first batch, averaged over the ranks."""
    for records in cells:
        record = records["epochs probed"]
        check_log(record["log"], record["stats"], "train_grpo_sd", trajectory=9, visited=9, groups=[5])
        assert record["passes"] == [12, 24 + probe_passes(record["log"][:1])]
        for number, line in enumerate(record["log"]):
            first, second = record["rollout_seconds"][2 * number : 2 * number + 2]
            assert first + second <= line["rollout_seconds"]
        for expected, measured in record["agreements"]:
            assert measured == pytest.approx(expected, abs=1e-9)


def test_a_probe_of_samples_in_orders_of_their_own_is_refused(cells):
    for records in cells:
        assert records["refused"]["unsorted"].endswith("\nset JAGG_FRAC above 0 (or fewer JAGG_KNOTS), or unset JAGG_PROBE_EVERY")


# -- (b) the patched file as __main__, with the configuration of upstream's own script


@pytest.fixture(scope="module")
def main_runs(dancegrpo, tmp_path_factory):
    """`{name: (what it printed, what was seen, the checkpoint)}` of two epochs: unpatched, patched and off, patched and on."""
    from sd_standins import write_working_directory

    top = tmp_path_factory.mktemp("main")
    patched = top / "patched"
    shutil.copytree(dancegrpo, patched)
    subprocess.run([ROOT / "apply.sh", patched], check=True, capture_output=True)
    script = (dancegrpo / "scripts/finetune/finetune_sd_grpo.sh").read_text().replace("\\\n", " ")
    words = shlex.split(script[script.index("fastvideo/train_grpo_sd.py") :])
    changed = {
        "num_epochs": 1,
        "save_freq": 1,
        "num_generations": 2,
        "sample.num_steps": 10,
        "sample.batch_size": 2,
        "train.batch_size": 2,
        "train.gradient_accumulation_steps": 2,
    }
    words += [f"--config.{name}={value}" for name, value in changed.items()]
    runs = {}
    for name, tree, env in (
        ("unpatched", dancegrpo, {}),
        ("off", patched, {"JAGG_ENABLED": "0", "JAGG_PROBE_EVERY": "1", "JAGG_LOG": "off.jsonl"}),
        ("on", patched, {}),
    ):
        out = top / name
        write_working_directory(out, n_prompts=4)
        os.symlink(tree / "fastvideo", out / "fastvideo")
        env |= paths(HERE / "sd_site", HERE, tree) | {"OBSERVE_CHECKOUT": str(tree), "OBSERVE_OUT": str(out)}
        printed = torchrun(1, *words, cwd=out, env=env, timeout=1200)
        saved = load_file(out / "my_checkpoints/checkpoint_epoch_1/diffusion_pytorch_model.safetensors")
        runs[name] = printed, torch.load(out / "rank0.pt"), saved
    return patched, runs


def test_the_script_s_hook_installs_and_the_banner_shows_once(main_runs):
    patched, runs = main_runs
    printed, seen, _ = runs["on"]
    assert printed.count("on train_grpo_sd: group_size 4, frac 0.6") == 1
    assert printed.count("9 of 9 steps visited, in trajectory order: 5 in 1 group (5), 4 exact") == 1
    assert seen["module"] is not None and os.path.samefile(seen["module"], patched / "fastvideo/jagg_patch/__init__.py")
    assert runs["off"][0].count("on train_grpo_sd: off") == 1
    assert runs["unpatched"][1]["module"] is None
    assert not (patched.parent / "off/off.jsonl").exists()


def test_the_script_s_backward_passes_are_the_planned_ones(main_runs):
    for name, passes, checks in (("unpatched", 9, 0), ("off", 9, 0), ("on", 2 + 4, 2)):
        found = main_runs[1][name][1]["passes"]
        assert found == 2 * N_BATCHES * passes + checks * check_passes(5, is_own=True)  # two epochs
        assert "no self-check" not in main_runs[1][name][0]


def test_off_gives_the_unpatched_script_s_weights_bit_for_bit(main_runs):
    _, runs = main_runs
    unpatched, off, on = (runs[name][1] for name in ("unpatched", "off", "on"))
    assert torch.equal(off["rng"], unpatched["rng"]) and torch.equal(on["rng"], unpatched["rng"])
    assert all(torch.equal(off["weights"][name], weight) for name, weight in unpatched["weights"].items())
    assert not all(torch.equal(on["weights"][name], weight) for name, weight in unpatched["weights"].items())


def test_the_checkpoint_has_the_trained_weights_under_the_unpatched_names(main_runs):
    """The UNet whose forward JAGG follows is the one that is saved."""
    _, runs = main_runs
    for _, seen, saved in runs.values():
        assert saved.keys() == runs["unpatched"][2].keys()
        assert all(torch.equal(saved[name], weight) for name, weight in seen["weights"].items())
