"""DanceGRPO's real trainers on a CPU, nothing in them edited but the hook.

What a CPU box can't have is stood in for in standins.py. The trainer of Stable Diffusion is in test_dancegrpo_sd.py.
"""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from checkouts import HERE, paths, require_dancegrpo, require_trainer
from launch import ROOT, torchrun

from jagg_patch import __version__

require_dancegrpo()

N_SAMPLES = 4
# name: (diffusers class, ranks to run, FSDP units under the root: the blocks; with LoRA each trainable adapter layer is one more)
TRAINERS = {
    "train_grpo_flux": ("FluxTransformer2DModel", (1, 2), 4),
    "train_grpo_flux_lora": ("FluxTransformer2DModel", (2,), 60),
    "train_grpo_qwenimage": ("QwenImageTransformer2DModel", (2,), 2),
    "train_grpo_qwenimage_edit": ("QwenImageTransformer2DModel", (2,), 2),
    "train_grpo_hunyuan": ("AutoencoderKLHunyuanVideo", (2,), 2),
    "train_grpo_skyreels_i2v": ("AutoencoderKLHunyuanVideo", (2,), 2),
    "train_grpo_wan_2_1": ("WanTransformer3DModel", (1,), 0),  # neither sharded nor replicated
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
        n_ranks, HERE / "cells.py", dancegrpo, name, out, cwd=out, env=paths(dancegrpo, ROOT, ROOT / "tests", HERE), timeout=900
    )
    return name, [torch.load(out / f"rank{rank}.pt") for rank in range(n_ranks)]


@pytest.mark.parametrize("cell", ["off", "frac 0"])
def test_off_is_bit_identical(cells, cell):
    for records in cells[1]:
        for what in ("weights", "gradient", "rng"):
            assert torch.equal(records[cell][what], records["unpatched"][what])


def test_the_order_of_steps_does_not_matter_to_the_exact_gradient(cells):
    assert 0 < cells[1][0]["sorted"]["exact_error"] <= 1e-6


@pytest.mark.parametrize("cell", ["W=2", "W=3", "W=4", "default", "fraction W=4"])
def test_the_gradient_is_group_backward_s(cells, cell):
    assert cells[1][0][cell]["oracle_error"] <= 1e-6


def test_groups_of_two_are_exact_and_larger_ones_are_not(cells):
    records = cells[1][0]
    assert records["W=2"]["exact_error"] <= 1e-6
    assert 1e-3 < records["W=3"]["exact_error"] < records["W=4"]["exact_error"] < 0.5


@pytest.mark.parametrize(
    ("cell", "passes", "autograd_calls"),
    [("unpatched", 9, 9), ("W=2", 9, 5), ("W=3", 6, 3), ("W=4", 4, 2), ("default", 6, 6), ("fraction W=4", 2, 1)],
)
def test_backward_passes_and_all_gathers_are_the_planned_ones(cells, cell, passes, autograd_calls):
    name, ranks = cells
    gathers = TRAINERS[name][2] if len(ranks) > 1 else 0  # FSDP doesn't shard over one rank
    for records in ranks:
        assert records[cell]["passes"] == N_SAMPLES * passes
        assert records[cell]["gathers"] == [gathers] * N_SAMPLES * autograd_calls


def test_the_random_numbers_are_the_unpatched_run_s(cells):
    for records in cells[1]:
        for cell in ("W=2", "W=3", "W=4", "default", "sorted"):
            assert torch.equal(records[cell]["rng"], records["unpatched"]["rng"])


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


@pytest.fixture(scope="module")
def main_runs(dancegrpo, tmp_path_factory):
    """`{name: (what it printed, what was seen on each rank)}` of the script: unpatched, patched and off, patched and on."""
    top = tmp_path_factory.mktemp("main")
    write_pipeline(top)
    patched = top / "patched"
    shutil.copytree(dancegrpo, patched)
    subprocess.run([ROOT / "apply.sh", patched], check=True, capture_output=True)
    runs = {}
    for name, tree, env in (
        ("unpatched", dancegrpo, {}),
        ("off", patched, {"JAGG_ENABLED": "0"}),
        ("on", patched, {}),
    ):
        out = top / name
        (out / "images").mkdir(parents=True)
        (out / "hps_ckpt").mkdir()
        shutil.copy(top / "reward.pt", out / "hps_ckpt/HPS_v2.1_compressed.pt")
        env |= paths(HERE / "site", HERE, tree) | {"OBSERVE_CHECKOUT": str(tree), "OBSERVE_OUT": str(out)}
        arguments = script_arguments(tree / "scripts/finetune/finetune_flux_grpo_8gpus.sh", top, out)
        printed = torchrun(2, tree / "fastvideo/train_grpo_flux.py", *arguments, cwd=out, env=env, timeout=600)
        runs[name] = printed, [torch.load(out / f"rank{rank}.pt") for rank in range(2)]
    return patched, runs


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
        "jagg_schedule": "auto",
        "jagg_aggregation": "interpolate",
    }
    assert runs["off"][1][0]["wandb"]["jagg_enabled"] is False
    assert not any(key.startswith("jagg") for key in runs["unpatched"][1][0]["wandb"])


def test_the_script_s_backward_passes_are_the_planned_ones(main_runs):
    samples = 2 * 2 * 2  # prompts x generations x training steps
    for name, passes in (("unpatched", 9), ("off", 9), ("on", 2 + 4)):
        for rank in main_runs[1][name][1]:
            assert rank["passes"] == samples * passes


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
