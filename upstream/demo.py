"""`./apply.sh --demo`: patch a copy of the mini trainer, run its own script with JAGG off and on, compare.

Writes to the output folder: `comparison.json`, `reward.png`, `samples.png`, and each run's metrics, rewards and checkpoint.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from diffusers import FluxTransformer2DModel

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "mini"), str(HERE / "mini/fastvideo"), str(HERE.parent)]
import digits  # noqa: E402
import make_base  # noqa: E402

from jagg_patch import JaggConfig, plan_groups  # noqa: E402
from jagg_patch.commands import made_by  # noqa: E402
from jagg_patch.method.cost import update_cost  # noqa: E402

RUNS = {"off": "JAGG off", "on": "JAGG on"}
LAST = 10  # training steps that "first" and "last" average over


def patched_copy(out, command):
    """A copy of the mini trainer in the folder `out` of `command`, with the hook put in by apply.sh."""
    trainer = out / "trainer"
    if out.is_dir() and any(out.iterdir()) and not trainer.is_dir():
        sys.exit(f"{out} has files of others\nname an empty or a new folder: {command}")
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(trainer, ignore_errors=True)
    shutil.copytree(HERE / "mini", trainer, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([HERE.parent / "apply.sh", "--only", "train_grpo_flux", trainer], check=True, stdout=subprocess.DEVNULL)
    return trainer


def train(trainer, run, title, seed, jagg, *flags):
    """Run the trainer's own script into the folder `run`; its progress bars go to the terminal.

    Args:
        jagg: the `JAGG_*` settings, a dict.
        flags: added to the script's own.

    Returns:
        The metrics, one dict a training step.
    """
    shutil.rmtree(run, ignore_errors=True)
    settings = {key: value for key, value in os.environ.items() if not key.startswith("JAGG_")}
    settings |= jagg | {
        "OUTPUT_DIR": str(run),
        "SEED": str(seed),
        "CUDA_VISIBLE_DEVICES": "",  # two processes, whatever the machine has
        "OMP_NUM_THREADS": "1",  # torchrun's own default, said here so that it does not print a warning
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    script = ["bash", "scripts/finetune/finetune_flux_grpo.sh", *flags]
    if subprocess.run(script, cwd=trainer, env=settings, check=False).returncode:
        sys.exit(f"the training run with {title} failed; what it printed stands above\nits files are in {run}")
    return read_metrics(run)


def read_metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def quartiles(values):
    return [float(x) for x in np.percentile(values, [25, 50, 75])]


def mean_reward(metrics):
    """Mean reward over the training steps in `metrics`, and its standard error from the samples' spread."""
    errors = np.array([row["reward_sem"] for row in metrics])
    return float(np.mean([row["reward"] for row in metrics])), float(np.sqrt((errors**2).sum()) / len(errors))


def compare(metrics):
    """Everything that the table and the JSON say, from `{name: metrics}`."""
    results = {}
    for name, rows in metrics.items():
        first, last = mean_reward(rows[:LAST]), mean_reward(rows[-LAST:])
        timed = rows[1:]  # the first training step warms up
        results[name] = {
            "seconds_per_training_step": quartiles([row["seconds"] for row in timed]),
            "update_seconds": quartiles([row["update_seconds"] for row in timed]),
            "backward_passes_per_training_step": rows[-1]["backward_passes"],
            "reward_first": first,
            "reward_last": last,
            "gain_in_standard_errors": (last[0] - first[0]) / np.hypot(first[1], last[1]),
            "first_ratio_error": max(row["first_ratio_error"] for row in rows),
        }
    off, on = results["off"], results["on"]
    results["ratios"] = {key: off[key][1] / on[key][1] for key in ("seconds_per_training_step", "update_seconds")} | {
        "backward_passes": off["backward_passes_per_training_step"] / on["backward_passes_per_training_step"]
    }
    difference = on["reward_last"][0] - off["reward_last"][0]
    results["reward_difference_in_standard_errors"] = difference / np.hypot(on["reward_last"][1], off["reward_last"][1])
    # The script trains 9 of 15 steps with every block checkpointed.
    results["update_ratio_of_the_arithmetic"] = update_cost(9) / update_cost(9, plan_groups(9, JaggConfig()))
    return results


def table(results):
    off, on, ratios = results["off"], results["on"], results["ratios"]

    def time(run, key):
        low, median, high = run[key]
        return f"{median:.2f} ({low:.2f}-{high:.2f})"

    def reward(run, key):
        return "{:.3f} ± {:.3f}".format(*run[key])

    rows = [("", "JAGG off", "JAGG on", "off / on")]
    for label, key in (("seconds per training step", "seconds_per_training_step"), ("  of it the update", "update_seconds")):
        rows.append((label, time(off, key), time(on, key), f"{ratios[key]:.2f}x"))
    passes = "backward_passes_per_training_step"
    rows.append(("transformer backward passes", str(off[passes]), str(on[passes]), f"{ratios['backward_passes']:.2f}x"))
    for label, key in ((f"mean reward, first {LAST} steps", "reward_first"), (f"mean reward, last {LAST} steps", "reward_last")):
        rows.append((label, reward(off, key), reward(on, key), ""))
    lines = [f"{label:<30}{left:>20}{right:>20}{ratio:>11}".rstrip() for label, left, right, ratio in rows]
    lines += [
        "",
        "seconds: median (quartiles) after the first training step, rank 0; reward: mean ± standard error",
        f"by arithmetic the update gets {results['update_ratio_of_the_arithmetic']:.2f}x faster "
        "(9 of 15 steps trained, one group of 5);",
        "besides, a group's joint backward gathers and reduces each sharded block once instead of 5 times",
    ]
    return "\n".join(lines)


def plot_rewards(metrics, path):
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for name, rows in metrics.items():
        reward = np.array([row["reward"] for row in rows])
        error = np.array([row["reward_sem"] for row in rows])
        steps = np.arange(1, len(rows) + 1)
        for axis, x in zip(axes, (steps, np.cumsum([row["seconds"] for row in rows])), strict=True):
            axis.plot(x, reward, label=RUNS[name])
            axis.fill_between(x, reward - error, reward + error, alpha=0.25)
    axes[0].set(xlabel="training step", ylabel="mean reward (band: standard error)")
    axes[1].set(xlabel="seconds of training")
    axes[1].legend(loc="lower right")
    figure.savefig(path, dpi=120)


def plot_samples(weights, path, seed, per_digit=6):
    """A row per asked digit, a panel per model in `{title: folder}`, the same noise in every panel."""
    asked = torch.arange(10).repeat_interleave(per_digit)
    figure, axes = plt.subplots(1, len(weights), figsize=(3.2 * len(weights), 5.2), layout="constrained")
    for axis, (title, folder) in zip(axes, weights.items(), strict=True):
        model = FluxTransformer2DModel.from_pretrained(folder).eval()
        images = make_base.draw(model, asked, torch.Generator().manual_seed(seed)).clamp(-1, 1)
        right = (digits.class_probabilities(images).argmax(-1) == asked).reshape(10, per_digit)
        framed = torch.nn.functional.pad(images, (1, 1, 1, 1), value=1.0)
        side = digits.SIDE + 2
        sheet = framed.reshape(10, per_digit, side, side).transpose(1, 2).reshape(10 * side, per_digit * side)
        axis.imshow(sheet, cmap="gray", vmin=-1, vmax=1)
        for row, column in (~right).nonzero().tolist():
            axis.add_patch(plt.Rectangle((column * side, row * side), side - 1, side - 1, fill=False, edgecolor="crimson"))
        axis.set(title=f"{title}\n{right.sum()} of {right.numel()} as asked", xticks=[])
        axis.set_yticks((torch.arange(10) + 0.5) * side - 0.5, labels=range(10))
    axes[0].set_ylabel("digit asked for (red: the classifier sees another)")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    out = args.out.resolve()
    trainer = patched_copy(out, "./apply.sh --demo OUT")
    metrics = {}
    for name, title in RUNS.items():
        print(f"\n== {title}: scripts/finetune/finetune_flux_grpo.sh, seed {args.seed}", flush=True)
        metrics[name] = train(trainer, out / name, title, args.seed, {"JAGG_ENABLED": str(int(name == "on"))})
    results = compare(metrics)
    results["made_by"] = made_by("./apply.sh --demo", seed=args.seed)
    (out / "comparison.json").write_text(json.dumps(results, indent=2) + "\n")
    plot_rewards(metrics, out / "reward.png")
    n_steps = len(metrics["off"])
    weights = {"before": HERE / "mini/data/flux/transformer"}
    weights |= {f"after, {title}": out / name / f"checkpoint-{n_steps}" for name, title in RUNS.items()}
    plot_samples(weights, out / "samples.png", args.seed)
    print(f"\n{table(results)}\n\nin {out}: comparison.json, reward.png, samples.png", flush=True)


if __name__ == "__main__":
    main()
