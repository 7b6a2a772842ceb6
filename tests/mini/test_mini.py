"""The mini trainer end to end: real FSDP processes, its own training step, one launch (see cells.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import forked, torchrun
from observe import relative_error

from jagg_patch import __version__

CELLS = Path(__file__).with_name("cells.py")
BATCHES = 3  # micro-batches a training step
N_BLOCKS = 3  # FSDP units under the root, each gathered once in a backward


N_RANKS = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The records of all cells, one dict per rank."""
    out = tmp_path_factory.mktemp("cells")
    forked(N_RANKS, CELLS, out, cwd=out)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(N_RANKS)]


@pytest.mark.parametrize(
    ("patched", "plain"),
    [
        ("off", "unpatched"),
        ("frac 0", "unpatched"),
        ("fraction off", "fraction"),
        ("windows off", "windows"),
        ("default clip off", "default clip"),
    ],
)
def test_off_is_bit_identical_after_two_training_steps(ranks, patched, plain):
    for records in ranks:
        assert torch.equal(records[patched]["weights"], records[plain]["weights"])
        assert torch.equal(records[patched]["rng"], records[plain]["rng"])
        assert [m["reward"] for m in records[patched]["metrics"]] == [m["reward"] for m in records[plain]["metrics"]]
    assert not torch.equal(ranks[0][plain]["weights"], ranks[0]["W=4"]["weights"])


def test_the_random_numbers_are_the_unpatched_run_s(ranks):
    for records in ranks:
        for patched, plain in (("windows W=2", "windows W=4"), ("W=2", "W=4"), ("W=3", "endpoints"), ("sequential", "W=4")):
            assert torch.equal(records[patched]["rng"], records[plain]["rng"])


@pytest.mark.parametrize(("cell", "autograd_calls"), [("W=2", 5), ("windows W=2", 5), ("sequential W=2", 9)])
def test_groups_of_two_are_exact(ranks, cell, autograd_calls):
    """Four groups and a single step: as many transformer backward passes as the exact run, joint in half the autograd calls."""
    record = ranks[0][cell]
    assert record["exact_error"] <= 1e-6
    assert record["passes"] == BATCHES * 9
    assert record["reaching"] == BATCHES * autograd_calls


@pytest.mark.parametrize(
    "cell",
    [
        "W=2",
        "W=3",
        "W=4",
        "W=4 frac 0.6",
        "sequential W=2",
        "sequential W=3",
        "sequential",
        "endpoints",
        "fraction W=4",
        "W=4 skipped",
        "sequential skipped",
    ],
)
def test_the_gradient_is_group_backward_s(ranks, cell):
    assert ranks[0][cell]["oracle_error"] <= 1e-6


@pytest.mark.parametrize(
    ("cell", "full", "saved"), [("W=4 skipped", "W=4", (5 - 2) + (4 - 2)), ("sequential skipped", "sequential", 5 - 3)]
)
def test_skipped_forwards_leave_the_gradient_and_the_metrics_as_they_were(ranks, cell, full, saved):
    """The first micro-batch runs all of its forwards, to compare them."""
    for records in ranks:
        skipped, expected = records[cell], records[full]
        assert relative_error(skipped["gradients"][0], expected["gradients"][0]) <= 1e-6
        for name in ("reward", "loss", "grad_norm"):
            assert skipped["metrics"][0][name] == pytest.approx(expected["metrics"][0][name], rel=1e-5, abs=1e-6)
        assert expected["forwards"] - skipped["forwards"] == skipped["stats"]["skipped_forwards"] == (BATCHES - 1) * saved
        assert skipped["passes"] == expected["passes"] and skipped["reaching"] == expected["reaching"]
        assert torch.equal(skipped["rng"], expected["rng"])


def test_the_approximation_is_as_good_as_the_readme_says(ranks):
    """Relative error of a whole training step's gradient: 6 % at the demo's settings, 26 % without interpolation.

    Above zero, too: the oracle test would pass for an interception that grouped nothing.
    """
    assert 0.01 < ranks[0]["script W=4"]["exact_error"] < 0.1
    assert 0.2 < ranks[0]["script endpoints"]["exact_error"]
    assert 0.01 < ranks[0]["W=3"]["exact_error"] < ranks[0]["W=4"]["exact_error"] < 0.3


@pytest.mark.parametrize(
    ("cell", "passes", "autograd_calls"),
    [
        ("unpatched", 2 * 9, 2 * 9),  # two training steps
        ("W=3", 3 * 2, 3),
        ("W=4", 2 * 2, 2),
        ("W=4 frac 0.6", 2 + 4, 1 + 4),
        ("sequential W=3", 3 * 2, 3 * 2),
        ("sequential", 2 + 4, 2 + 4),
        ("auto", 4 * (2 + 4), 2 * (2 + 4) + 2 * (1 + 4)),  # four training steps: the last two are joint, there is memory enough
        ("fraction W=4", 2, 1),
        ("windows W=4", 2 * 2, 2),
    ],
)
def test_backward_passes_are_the_planned_ones(ranks, cell, passes, autograd_calls):
    for records in ranks:
        assert records[cell]["passes"] == BATCHES * passes
        assert records[cell]["reaching"] == BATCHES * autograd_calls
        if cell != "unpatched":
            assert records[cell]["stats"]["backward_passes"] == BATCHES * passes


def test_auto_stays_sequential_everywhere_if_one_rank_is_full(ranks):
    for records in ranks:
        assert records["auto, one rank full"]["reaching"] == BATCHES * 4 * (2 + 4)
        assert torch.equal(records["auto, one rank full"]["gradients"][1], records["auto"]["gradients"][1])


def test_a_backward_gathers_each_block_once(ranks):
    for records in ranks:
        for cell in ("unpatched", "W=2", "W=3", "W=4", "W=4 frac 0.6", "sequential W=3", "sequential", "W=4 skipped"):
            assert set(records[cell]["gathers"]) == {N_BLOCKS}


def test_each_accumulation_window_steps_the_optimizer(ranks):
    for records in ranks:
        assert len(records["windows W=4"]["gradients"]) == BATCHES
        assert len(records["W=4"]["gradients"]) == 1


def test_the_policy_ratio_is_no_further_from_one_than_unpatched(ranks):
    for records in ranks:
        limit = records["unpatched"]["metrics"][0]["first_ratio_error"]
        for cell in ("W=2", "W=3", "W=4", "W=4 frac 0.6", "sequential", "endpoints", "W=4 skipped", "sequential skipped"):
            assert records[cell]["metrics"][0]["first_ratio_error"] <= limit


def test_ranks_with_different_settings_stop_instead_of_deadlocking(ranks):
    for records in ranks:
        assert "rank 1 has {'frac': 0.5}, rank 0 has {'frac': 0.6}" in records["ranks differ in frac"]
        assert "rank 1 has {'enabled': False}, rank 0 has {'enabled': True}" in records["one rank is off"]
        assert torch.equal(records["the run after"]["weights"], records["W=4"]["weights"])


def test_a_run_with_frac_auto_logs_what_its_report_reads(patched, tmp_path):
    """The user's script with the environment alone; good cosines route the second group from the third training step on."""
    log = tmp_path / "run.jsonl"
    command = "--use_group --timestep_fraction 0.6 --num_generations 2 --train_batch_size 2"
    command += f" --micro_batch_size 2 --max_train_steps 3 --output_dir {tmp_path / 'out'}"
    settings = {"JAGG_FRAC": "auto", "JAGG_PROBE_EVERY": "1", "JAGG_LOG": str(log)}
    printed = forked(2, patched / "fastvideo/train_grpo_flux.py", *command.split(), cwd=patched, env=settings)
    assert "probe: every 1 training steps, one sample on every rank, 44 forwards for" in printed  # (9 + 2 * 2) * 3 + 3 + 2
    assert printed.count("JAGG: probe at training step") == 3
    assert printed.count("JAGG: 2 of 2 groups are routed from here on, 1 before") == 1
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["training_step"] for record in records] == [1, 2, 3]
    assert [record["groups"] for record in records] == [[5], [5], [5, 4]]
    assert [record["backward_passes_saved"] for record in records] == [2 * 3, 2 * 3, 2 * (3 + 2)]  # two micro-batches a rank
    for record in records:
        own, other = record["probe"]
        assert [(group["start"], group["steps"], group["routed"]) for group in own["groups"]] == [
            (0, 5, True),
            (5, 4, len(record["groups"]) == 2),
        ]
        assert all(0.85 < group["cosine"] < 1 for group in own["groups"])
        assert min(record[f"{part}_seconds"] for part in ("rollout", "update", "probe")) > 0
    assert [record["probe"][1]["group_size"] for record in records] == [3, 8, 3]  # 5 and 6 are 5 + 4 too

    report = [sys.executable, "-m", "jagg_patch", "report", log, "--out", tmp_path / "report"]  # from the checkout's own copy
    done = subprocess.run(report, cwd=patched / "fastvideo", capture_output=True, text=True, check=True)
    assert "recommended: JAGG_GROUP_SIZE=4 JAGG_FRAC=1" in done.stdout
    assert (tmp_path / "report/report.png").is_file()


def test_the_patched_file_runs_as_the_user_s_script_does(patched, tmp_path):
    """apply.sh on a copy, then torchrun on the patched file: banner, planned backward count, reward.txt, checkpoint."""
    out = tmp_path / "out"
    command = "fastvideo/train_grpo_flux.py --use_group --gradient_checkpointing --timestep_fraction 0.6 --num_generations 2"
    command += (
        f" --train_batch_size 2 --micro_batch_size 2 --gradient_accumulation_steps 2 --max_train_steps 2 --output_dir {out}"
    )
    printed = torchrun(2, *command.split(), "--jagg_frac", "1", cwd=patched, env={"JAGG_GROUP_SIZE": "3", "JAGG_SELF_CHECK": "0"})
    assert printed.count(f"JAGG {__version__} on train_grpo_flux: group_size 3, frac 1") == 1
    assert "9 of 15 steps visited, in trajectory order: 9 in 3 groups (3+3+3), 0 exact" in printed
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["backward_passes"] for row in metrics] == [2 * 3 * 2] * 2
    assert len((out / "reward.txt").read_text().split()) == 2
    assert (out / "checkpoint-2/diffusion_pytorch_model.safetensors").is_file()


def test_the_user_s_script_with_skipped_forwards(patched, tmp_path):
    """The first training step's numbers are those with all forwards, and the log counts what each step saves."""
    command = "--use_group --timestep_fraction 0.6 --num_generations 2 --train_batch_size 2"
    command += " --micro_batch_size 2 --gradient_accumulation_steps 2"
    settings = {
        "all": {"JAGG_SCHEDULE": "joint"},
        "joint": {"JAGG_SCHEDULE": "joint", "JAGG_SKIP_FORWARDS": "1"},
        "sequential": {"JAGG_SCHEDULE": "sequential", "JAGG_SKIP_FORWARDS": "1", "JAGG_OFFLOAD_RECORDS": "1"},
    }
    first, saved, printed = {}, {}, {}
    for name, environment in settings.items():
        log, out = tmp_path / f"{name}.jsonl", tmp_path / name
        more = ["--max_train_steps", 1 if name == "all" else 2, "--output_dir", out]
        environment |= {"JAGG_FRAC": "1", "JAGG_LOG": str(log)}
        script = patched / "fastvideo/train_grpo_flux.py"
        printed[name] = forked(2, script, *command.split(), *more, cwd=patched, env=environment)
        first[name] = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
        saved[name] = [json.loads(line)["forward_passes_saved"] for line in log.read_text().splitlines()]
    # Nine steps in groups of 5 and 4, two micro-batches a rank.
    assert saved == {"all": [0], "joint": [5, 2 * 5], "sequential": [3, 2 * 3]}
    for name in ("joint", "sequential"):
        for metric in ("reward", "loss", "grad_norm"):
            assert first[name][metric] == pytest.approx(first["all"][metric], rel=1e-5, abs=1e-6)
        assert first[name]["first_ratio_error"] <= first["all"]["first_ratio_error"]
        assert printed[name].count("JAGG: the rollout's recorded outputs take") == 1
        assert "no forwards are skipped" not in printed[name]
        assert f"8 backward passes through the model instead of 18, {saved[name][0]} forwards skipped" in printed[name]
