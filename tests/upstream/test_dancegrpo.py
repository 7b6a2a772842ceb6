"""DanceGRPO's real trainers on a CPU, nothing in them edited but the hook.

What a CPU box can't have is stood in for in standins.py. The trainer of Stable Diffusion is in test_dancegrpo_sd.py.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkouts import HERE, paths, require_dancegrpo, require_trainer
from launch import ROOT, torchrun
from probes import check_log, check_passes, probe_passes, read_log, wandb_history
from skips import check_refused, check_skipped

from jagg_patch import __version__
from jagg_patch.method.placement import best_knots

require_dancegrpo()

N_SAMPLES = 4
SCRIPT = "scripts/finetune/finetune_flux_grpo_8gpus.sh"
# name: (diffusers class, ranks to run, FSDP units under the root: the blocks; with LoRA each trainable adapter layer is one more)
TRAINERS = {
    "train_grpo_flux": ("FluxTransformer2DModel", (1, 2), 4),
    "train_grpo_flux_lora": ("FluxTransformer2DModel", (2,), 60),
    "train_grpo_qwenimage": ("QwenImageTransformer2DModel", (2,), 2),
    "train_grpo_qwenimage_edit": ("QwenImageTransformer2DModel", (2,), 2),
    "train_grpo_hunyuan": ("AutoencoderKLHunyuanVideo", (2,), 2),
    "train_grpo_skyreels_i2v": ("AutoencoderKLHunyuanVideo", (2,), 2),
    "train_grpo_wan_2_1": ("WanTransformer3DModel", (2,), 0),  # neither sharded nor replicated
}

# -- (a) the real train_one_step, in process


@pytest.fixture(
    scope="module",
    params=[(name, n_ranks) for name, (_, ranks, _) in TRAINERS.items() for n_ranks in ranks],
    ids=lambda param: f"{param[0].removeprefix('train_grpo_')}, {param[1]} ranks",
)
def cells(request, dancegrpo, tmp_path_factory):
    name, n_ranks = request.param
    require_trainer(dancegrpo / "fastvideo", name, TRAINERS[name][0])
    out = tmp_path_factory.mktemp("cells")
    (out / "images").mkdir()
    torchrun(
        n_ranks, HERE / "cells.py", dancegrpo, name, out, cwd=out, env=paths(dancegrpo, ROOT, ROOT / "tests", HERE), timeout=1800
    )
    return name, [torch.load(out / f"rank{rank}.pt") for rank in range(n_ranks)]


@pytest.mark.parametrize("cell", ["off", "frac 0"])
def test_off_is_bit_identical(cells, cell):
    for records in cells[1]:
        for what in ("weights", "gradient", "rng"):
            assert torch.equal(records[cell][what], records["unpatched"][what])


def test_the_order_of_steps_does_not_matter_to_the_exact_gradient(cells):
    """Not by a bit, where the sums of bfloat16 gradients fit into float32: LoRA's, on some processors."""
    for records in cells[1]:
        exact, ordered = records["unpatched"], records["sorted"]
        samples = [exact["visited"][start : start + 9] for start in range(0, len(exact["visited"]), 9)]
        assert ordered["visited"] == sum(map(sorted, samples), []) != exact["visited"]
        assert ordered["exact_error"] <= 1e-6


@pytest.mark.parametrize("cell", ["W=2", "W=3", "W=4", "knots", "default", "fraction W=4"])
def test_the_gradient_is_group_backward_s(cells, cell):
    assert cells[1][0][cell]["oracle_error"] <= 1e-6


def test_the_self_check_agrees_and_changes_nothing(cells):
    for records in cells[1]:
        ((error, _),) = records["default, checked"]["checks"]
        assert error <= 1e-6
        for what in ("weights", "gradient", "rng"):
            assert torch.equal(records["default, checked"][what], records["default"][what])


def test_groups_of_two_are_exact_and_larger_ones_are_not(cells):
    records = cells[1][0]
    assert records["W=2"]["exact_error"] <= 1e-6
    assert 1e-3 < records["W=3"]["exact_error"] < records["W=4"]["exact_error"] < 0.5


@pytest.mark.parametrize(
    ("cell", "passes", "autograd_calls"),
    [("unpatched", 9, 9), ("W=2", 9, 5), ("W=3", 6, 3), ("W=4", 4, 2), ("default", 6, 6), ("fraction W=4", 2, 1)]
    + [("knots", 4, 3)],  # the first two together
)
def test_backward_passes_and_all_gathers_are_the_planned_ones(cells, cell, passes, autograd_calls):
    name, ranks = cells
    gathers = TRAINERS[name][2] if len(ranks) > 1 else 0  # FSDP doesn't shard over one rank
    for records in ranks:
        assert records[cell]["passes"] == N_SAMPLES * passes
        assert records[cell]["gathers"] == [gathers] * N_SAMPLES * autograd_calls


def test_the_random_numbers_are_the_unpatched_run_s(cells):
    for records in cells[1]:
        for cell in ("W=2", "W=3", "W=4", "knots", "default", "sorted"):
            assert torch.equal(records[cell]["rng"], records["unpatched"]["rng"])


@pytest.mark.parametrize(
    ("cell", "forwards"),
    [("W=4 skip", 5), ("default skip", 2), ("fraction W=4 skip", 3), ("windows W=4 skip", 5)]
    + [("knots skip", 3 + 1)],  # all but the two of the first gap, and of the second one's four all but three
)
def test_skipped_forwards_leave_the_gradient_and_are_the_planned_ones(cells, cell, forwards):
    """Of groups of five and four: all but two, sequentially all but three. The first sample runs its own to compare.

    Samples of a prompt begin alike here (init_same_noise, use_same_noise), and Wan and SkyReels are guided.
    """
    for records in cells[1]:
        if cell in records:
            check_skipped(records[cell]["skips"], (N_SAMPLES - 1) * forwards)
            assert records[cell]["gathers"] == records[cell.removesuffix(" skip")]["gathers"]


def test_forwards_are_skipped_on_when_the_policy_has_moved(cells):
    """The second optimizer step on a rollout: less is lost than by grouping."""
    for records in cells[1]:
        if "windows W=4 skip" in records:
            _, error = records["windows W=4 skip"]["skips"]["errors"]
            assert 0 < error < records["W=4"]["exact_error"]


def test_a_cached_rollout_on_one_rank_ends_skipping_on_all(cells):
    if len(cells[1]) == 1 or "cached W=4 skip" not in cells[1][0]:
        pytest.skip("tried on Flux with two ranks")
    found = [records["cached W=4 skip"]["skips"] for records in cells[1]]
    check_refused(found, "rank 1: the rollout's model outputs differ by ")


@pytest.mark.parametrize("cell", ["thrice", "thrice W=4"])
def test_retained_graphs_give_the_gradients_of_own_forwards(cells, cell):
    """Exact ones are added up in another order. In the third training step no forward runs, in the two before it all do."""
    for records in cells[1]:
        retained, own = records[f"{cell} retained"], records[cell]
        if cell == "thrice":
            assert max(retained["errors"]) <= 1e-6
        else:
            assert all(map(torch.equal, retained["gradients"], own["gradients"]))
        assert len(retained["gradients"]) == 3 and own["forwards"] == 3 * N_SAMPLES * 9
        assert own["forwards"] - retained["forwards"] == retained["stats"]["retained_forwards"] == N_SAMPLES * 9
        assert retained["passes"] == own["passes"] and retained["returned"] == own["returned"]
        assert torch.equal(retained["rng"], own["rng"])


def probed(cells):
    """`(cell, its record, that without the probe)` of every rank."""
    for records in cells[1]:
        for cell, other in {"twice probed": "twice", "W=2 probed": "W=2", "frac 0 probed": "unpatched"}.items():
            if cell in records:
                yield cell, records[cell], records[other]


def test_the_probe_changes_nothing(cells):
    for cell, record, other in probed(cells):
        for what in ("weights", "gradient", "rng"):
            assert torch.equal(record[what], other[what]), cell
        assert record["returned"] == other["returned"], cell  # losses and gradient norms


def test_the_log_has_a_line_a_training_step(cells):
    """From one rank alone; the planned backward passes and the probe's own are all there were."""
    for cell, record, _ in probed(cells):
        visited, groups = {"twice probed": (5, [3]), "W=2 probed": (9, [2] * 4), "frac 0 probed": (9, [])}[cell]
        check_log(record["log"], record["stats"], cells[0], trajectory=9, visited=visited, groups=groups)
        assert record["passes"] == record["stats"]["backward_passes"] + probe_passes(record["log"])


def test_the_probe_s_cosines_are_group_backward_s(cells):
    """Over the gradient of all ranks: what FSDP has reduced, or, for Wan, which never does, their own side by side."""
    for cell, record, _ in probed(cells):
        for expected, measured in record["agreements"]:
            assert measured == pytest.approx(expected, abs=1e-6), cell
        if cell == "W=2 probed":
            assert all(group["cosine"] == pytest.approx(1, abs=1e-6) for group in record["log"][0]["probe"][0]["groups"])


# -- (b) the patched file as __main__, with the command line of upstream's own script


def write_pipeline(folder):
    """A tiny Flux pipeline in diffusers' layout and a data set of prompt embeddings in upstream's."""
    import standins
    from diffusers import AutoencoderKL, FluxTransformer2DModel

    torch.manual_seed(0)
    FluxTransformer2DModel(**standins.TINY_FLUX).save_pretrained(folder / "flux/transformer")
    AutoencoderKL(**standins.TINY_VAE).save_pretrained(folder / "flux/vae")
    data, entries = folder / "rl_embeddings", []
    for number in range(8):
        entry = {"caption": f"prompt {number}"}
        *embeds, entry["caption"] = standins.make_prompt(number)
        for key, kind, embed in zip(
            ("prompt_embed_path", "pooled_prompt_embeds_path", "text_ids"),
            ("prompt_embed", "pooled_prompt_embeds", "text_ids"),
            embeds,
            strict=True,
        ):
            (data / kind).mkdir(parents=True, exist_ok=True)
            torch.save(embed, data / kind / f"{number}.pt")
            entry[key] = f"{number}.pt"
        entries.append(entry)
    (data / "videos2caption.json").write_text(json.dumps(entries))
    torch.save({"state_dict": standins.TinyReward().state_dict()}, folder / "reward.pt")


def script_arguments(script, data, out):
    """The flags of upstream's script, with the sizes and paths of a CPU run.

    Without --use_ema: it needs FSDP1's full state dict, which needs an accelerator.
    """
    text = script.read_text().replace("\\\n", " ")
    command = re.search(r"^torchrun (.*)$", text, re.MULTILINE).group(1)
    words = shlex.split(command)
    words = words[words.index("fastvideo/train_grpo_flux.py") + 1 :]
    words.remove("--use_ema")
    changed = {
        "--pretrained_model_name_or_path": data / "flux",
        "--vae_model_path": data / "flux",
        "--cache_dir": data / "cache",
        "--data_json_path": data / "rl_embeddings/videos2caption.json",
        "--output_dir": out / "outputs",
        "--h": 64,
        "--w": 64,
        "--num_generations": 2,
        "--gradient_accumulation_steps": 2,
        "--max_train_steps": 2,
        "--dataloader_num_workers": 0,
    }
    for flag, value in changed.items():
        words[words.index(flag) + 1] = str(value)
    return words


ALL_STEPS = "--timestep_fraction 1".split()
# Optimizer steps, for two prompts' samples.
TWICE_A_ROLLOUT = [*ALL_STEPS, *"--num_generations 4 --gradient_accumulation_steps 4 --max_train_steps 3".split()]
# Of the script's --shift 3, as its timesteps have them: whole numbers.
NOISE_LEVELS = [int(1000 * 3 * sigma / (1 + 2 * sigma)) for sigma in (1 - step / 16 for step in range(15))]
KNOTS = best_knots(4, NOISE_LEVELS)  # before anything has been measured


@pytest.fixture(scope="module")
def main_runs(dancegrpo, tmp_path_factory):
    """`{name: (what it printed, what was seen on each rank)}` of the script: unpatched, patched and off, patched and on.

    `auto` is a training step longer.
    """
    top = tmp_path_factory.mktemp("main")
    write_pipeline(top)
    patched = top / "patched"
    shutil.copytree(dancegrpo, patched)
    subprocess.run([ROOT / "apply.sh", patched], check=True, capture_output=True)
    runs = {}
    keep = {"OBSERVE_KNOTS": ",".join(map(str, KNOTS))}
    groups = {"JAGG_FRAC": "1", "JAGG_SCHEDULE": "joint", "JAGG_SELF_CHECK": "0"}
    unmoved = [*TWICE_A_ROLLOUT, "--learning_rate", "0"]
    auto = "--jagg_frac auto --jagg_probe_every 1 --jagg_log log/auto.jsonl --max_train_steps 3".split()
    for name, tree, env, flags in (
        ("unpatched", dancegrpo, {}, []),
        ("off", patched, {"JAGG_ENABLED": "0", "JAGG_PROBE_EVERY": "1", "JAGG_LOG": "log/off.jsonl"}, []),
        ("on", patched, {}, []),
        ("auto", patched, {}, auto),
        ("all steps", dancegrpo, keep, ALL_STEPS),
        ("knots", patched, {"JAGG_KNOTS": "4", "JAGG_SELF_CHECK": "0", "JAGG_LOG": "log/knots.jsonl"}, ALL_STEPS),
        ("unmoved", dancegrpo, {}, unmoved),
        ("unmoved, retained", patched, {"JAGG_FRAC": "0", "JAGG_RETAIN": "1", "JAGG_SELF_CHECK": "0"}, unmoved),
        ("groups", patched, groups, TWICE_A_ROLLOUT),
        ("groups, retained", patched, groups | {"JAGG_RETAIN": "1"}, TWICE_A_ROLLOUT),
    ):
        out = top / name
        (out / "images").mkdir(parents=True)
        (out / "hps_ckpt").mkdir()
        shutil.copy(top / "reward.pt", out / "hps_ckpt/HPS_v2.1_compressed.pt")
        ours = [ROOT / "tests", ROOT] if env is keep else []
        env |= paths(HERE / "site", HERE, tree, *ours) | {"OBSERVE_CHECKOUT": str(tree), "OBSERVE_OUT": str(out)}
        arguments = script_arguments(tree / SCRIPT, top, out)
        printed = torchrun(2, tree / "fastvideo/train_grpo_flux.py", *arguments, *flags, cwd=out, env=env, timeout=1200)
        runs[name] = printed, [torch.load(out / f"rank{rank}.pt") for rank in range(2)]
    return patched, runs


def gradients(main_runs, name):
    """At each optimizer step before clipping, all ranks' parts."""
    ranks = [rank["gradients"] for rank in main_runs[1][name][1]]
    return [torch.cat(parts).double() for parts in zip(*ranks, strict=True)]


def test_the_hook_installs_and_the_banner_shows_once(main_runs):
    patched, runs = main_runs
    printed, seen = runs["on"]
    assert printed.count(f"JAGG {__version__} on train_grpo_flux: group_size 4, frac 0.6") == 1
    assert printed.count("9 of 15 steps visited, in trajectory order: 5 in 1 group (5), 4 exact") == 1
    assert printed.count("update 36 -> 27 (1.33x), with sampling 52 -> 43 (1.21x)") == 1
    assert runs["off"][0].count(f"JAGG {__version__} on train_grpo_flux: off") == 1
    for rank in seen:
        assert Path(rank["module"]) == patched / "fastvideo/jagg_patch/__init__.py"


def test_wandb_gets_the_settings(main_runs):
    _, runs = main_runs
    config = runs["on"][1][0]["wandb"]
    assert config["sampling_steps"] == 16 and config["timestep_fraction"] == 0.6  # upstream's own
    assert {key: value for key, value in config.items() if key.startswith("jagg_")} == {
        "jagg_enabled": True,
        "jagg_group_size": 4,
        "jagg_frac": 0.6,
        "jagg_cuts": (),
        "jagg_knots": "",
        "jagg_knots_at": (),
        "jagg_knots_cosine": 0.98,
        "jagg_schedule": "auto",
        "jagg_aggregation": "interpolate",
        "jagg_skip_forwards": False,
        "jagg_retain": False,
        "jagg_retain_on": "auto",
        "jagg_retain_gb": 0.0,
        "jagg_offload_records": False,
        "jagg_probe_every": 0,
        "jagg_self_check": True,
        "jagg_log": "",
    }
    assert runs["off"][1][0]["wandb"]["jagg_enabled"] is False
    assert not any(key.startswith("jagg") for key in runs["unpatched"][1][0]["wandb"])


def test_the_script_s_backward_passes_are_the_planned_ones(main_runs):
    samples = 2 * 2 * 2  # prompts x generations x training steps
    n_checks = 2 * 2  # sequential and joint, with the rollout's weights and after an optimizer step
    for name, passes, checks in (("unpatched", 9, 0), ("off", 9, 0), ("on", 2 + 4, n_checks)):
        for rank in main_runs[1][name][1]:
            assert rank["passes"] == samples * passes + checks * check_passes(5, is_own=True)
        assert "no self-check" not in main_runs[1][name][0]


def test_the_script_trains_all_steps_with_four_backward_passes(main_runs):
    """The places are those of the rule by the script's own noise levels, and then by what was measured."""
    patched, runs = main_runs
    printed, seen = runs["knots"]
    assert printed.count("knots 4, aggregation interpolate, schedule auto") == 1
    assert "15 of 15 steps visited, in trajectory order: 4 with a backward pass of their own, 11 between them" in printed
    assert "update 60 -> 27 (2.22x), with sampling 76 -> 43 (1.77x)" in printed
    records = read_log(patched.parent / "knots/log/knots.jsonl")
    for rank in seen:
        assert rank["passes"] == 2 * 2 * 2 * 4
    assert records[0]["knots"] == list(KNOTS)
    assert all(len(record["knots"]) == 4 and record["knots"][0] == 0 and record["knots"][-1] == 14 for record in records)


def test_the_script_s_gradient_with_knots_is_the_fold_of_the_unpatched_one_s(main_runs):
    """Of its first optimizer step, before clipping; folded with the upstream gradients that the unpatched script had."""
    expected = torch.cat([rank["with_knots"] for rank in main_runs[1]["all steps"][1]]).double()
    exact, found = (gradients(main_runs, name)[0] for name in ("all steps", "knots"))
    assert (found - expected).norm() <= 1e-6 * expected.norm()
    assert 0.01 < (found - exact).norm() / exact.norm() < 0.5


@pytest.mark.parametrize(("own", "bound"), [("unmoved", 1e-6), ("groups", 0.0)])
def test_the_script_retains_graphs_up_to_the_first_optimizer_step(main_runs, own, bound):
    """In its third training step: no forward in the first of its two windows.

    Against the unpatched script, with weights that stay as they are, for they would drift apart; and against groups with their
    own forwards, whose weights move alike.
    """
    printed, ranks = main_runs[1][f"{own}, retained"]
    assert printed.count("JAGG: graphs of 4 samples of each rollout are retained from here on, 4 on the device and 0 in") == 1
    assert printed.count("4 of 8 samples of a rank's update come before its first optimizer step and need no forward") == 1
    for seen in ranks:
        assert seen["forwards"] == [60, 60, 60, 60, 0, 60]
    pairs = list(zip(gradients(main_runs, f"{own}, retained"), gradients(main_runs, own), strict=True))
    assert len(pairs) == 6
    for found, expected in pairs:
        assert (found - expected).norm() <= bound * expected.norm() and expected.norm() > 0


def test_off_gives_the_unpatched_script_s_weights_bit_for_bit(main_runs):
    _, runs = main_runs
    for rank in range(2):
        unpatched, off, on = (runs[name][1][rank] for name in ("unpatched", "off", "on"))
        assert torch.equal(off["weights"], unpatched["weights"]) and torch.equal(off["rng"], unpatched["rng"])
        assert not torch.equal(on["weights"], unpatched["weights"])


def test_the_printed_ratio_is_one_before_the_first_optimizer_step(main_runs):
    """Upstream prints the ratio of each sample's last step; in the first window it is 1 up to bf16's rounding."""
    _, runs = main_runs

    def first_ratios(name):
        return [abs(float(text) - 1) for text in re.findall(r"ratio tensor\(\[([\d.]+)\]", runs[name][0])[:2]]

    assert len(first_ratios("on")) == 2
    assert max(first_ratios("on")) <= max(first_ratios("unpatched"))


def test_nothing_is_logged_when_off(main_runs):
    patched, runs = main_runs
    assert not (patched.parent / "off/log").exists()
    assert "probe" not in runs["off"][0].partition("JAGG")[2]


def test_auto_routes_a_group_that_two_probes_have_found_good(main_runs):
    patched, runs = main_runs
    log = read_log(patched.parent / "auto/log/auto.jsonl")
    cosines = [[group["cosine"] for group in line["probe"][0]["groups"]] for line in log]
    assert [line["groups"] for line in log] == [[5], [5], [5, 4]] and min(cosines[0][1], cosines[1][1]) >= 0.85
    printed, seen = runs["auto"]
    assert printed.count("JAGG: 2 of 2 groups are routed from here on, 1 before: cosines") == 1
    assert all(printed.count(f"JAGG: probe at training step {number}: cosine") == 1 for number in (1, 2, 3))
    for rank in seen:
        planned = sum(line["backward_passes"] for line in log)
        # Of the first group, sequential and joint, with the rollout's weights and with others; of the second in joint alone.
        checks = 4 * check_passes(5, is_own=True) + 2 * check_passes(4, is_own=False)
        assert rank["passes"] == planned + probe_passes(log) + checks


def test_wandb_has_the_log_and_the_trainer_s_own_values_at_their_steps(main_runs):
    """The trainer logs its first step as 1. Up to where auto routes another group, it trains as by default."""
    top = main_runs[0].parent
    rows = {name: wandb_history(top / name) for name in main_runs[1]}
    own = {
        name: {
            step: {key: value for key, value in row.items() if not key.startswith("jagg/") and "time" not in key}
            for step, row in history.items()
            if step
        }
        for name, history in rows.items()
    }
    assert own["off"] == own["unpatched"] and list(own["on"]) == [1, 2] and list(own["auto"]) == [1, 2, 3]
    assert own["auto"][1] == own["on"][1] and own["auto"][2] == own["on"][2] and "grad_norm" in own["auto"][3]
    assert not any(key.startswith("jagg/") for name in ("off", "on") for row in rows[name].values() for key in row)
    found = [row for row in rows["auto"].values() if "jagg/training_step" in row]
    for row, line in zip(found, read_log(top / "auto/log/auto.jsonl"), strict=True):
        expected = {f"jagg/{name}": value for name, value in line.items() if isinstance(value, (int, float))}
        for entry in line["probe"]:
            expected |= {f"jagg/cosine_W{entry['group_size']}/{n}": g["cosine"] for n, g in enumerate(entry["groups"])}
        assert {key: value for key, value in row.items() if key.startswith("jagg/")} == expected


def test_a_bad_setting_ends_the_script_at_start_with_the_message(main_runs):
    patched, _ = main_runs
    top = patched.parent
    code = """if True:
        import os, runpy, sys
        del sys.argv[0]
        for name, value in (("JAGG_FRAC", "auto"), ("JAGG_LOG", "hps_ckpt/HPS_v2.1_compressed.pt/log.jsonl")):
            os.environ[name] = value
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                print(end)
            del os.environ[name]
    """
    script, env = patched / "fastvideo/train_grpo_flux.py", paths(HERE / "site", HERE, patched, patched / "fastvideo")
    env |= {"RANK": "0", "OBSERVE_CHECKOUT": str(patched), "OBSERVE_OUT": str(top), "PATH": ""}
    words = [sys.executable, "-c", code, script, *script_arguments(patched / SCRIPT, top, top)]
    printed = subprocess.run(list(map(str, words)), cwd=top / "on", env=env, check=True, capture_output=True, text=True).stdout
    first, second = printed.strip().split("jagg_patch: ")[1:]
    assert first == "frac=auto follows the probe, and probe_every is 0\nset JAGG_PROBE_EVERY too, to 10 say\n"
    assert second.startswith("the log can't be written: ") and second.endswith("give JAGG_LOG the path of a file, or unset it")
