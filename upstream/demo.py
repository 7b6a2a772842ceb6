"""`./apply.sh --demo`: patch a copy of the mini trainer, run its own script with JAGG off and on, and past the paper, compare.

The third run trains all 15 steps instead of 9, with 4 backward passes a sample, and its update runs no forward.

Writes to the output folder: `comparison.json`, `reward.png`, `samples.png`, and each run's metrics, rewards, checkpoint and log.
"""

import argparse
import json
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
sys.path[:0] = [str(HERE), str(HERE / "mini"), str(HERE / "mini/fastvideo"), str(HERE.parent)]
import digits  # noqa: E402
import make_base  # noqa: E402
from results import made_by  # noqa: E402
from runs import train_in_turn  # noqa: E402

from jagg_patch import JaggConfig, plan_groups  # noqa: E402
from jagg_patch.method.cost import update_cost  # noqa: E402

RUNS = {"off": "JAGG off", "on": "JAGG on", "retained": "4 knots, retained"}
SETTINGS = {"off": {"JAGG_ENABLED": "0"}, "on": {}, "retained": {"JAGG_KNOTS": "4", "JAGG_RETAIN": "1"}}
FLAGS = {"off": [], "on": [], "retained": ["--timestep_fraction", "1.0"]}
AS_LATER = {"JAGG_SELF_CHECK": "0"}  # the trainer counts every backward pass, and those of a check aren't the update's
# The script trains 9 of 15 steps with every block checkpointed, and takes one optimizer step a rollout.
UPDATE = {
    "off": update_cost(9),
    "on": update_cost(9, plan_groups(9, JaggConfig())),
    "retained": update_cost(15, plan_groups(15, JaggConfig(knots=4)), retained=1.0),
}
SECONDS = {"seconds_per_training_step": "seconds", "update_seconds": "update_seconds"}  # in the results: in the metrics
LABELS = {"seconds_per_training_step": "training step", "update_seconds": "its update"}
WARM_UPS = 2  # training steps: from then on graphs are retained
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


def quartiles(values):
    return [float(x) for x in np.percentile(values, [25, 50, 75])]


def mean_reward(metrics):
    """Mean reward over the training steps in `metrics`, and its standard error from the samples' spread."""
    errors = np.array([row["reward_sem"] for row in metrics])
    return float(np.mean([row["reward"] for row in metrics])), float(np.sqrt((errors**2).sum()) / len(errors))


def paired_ratios(off, on, key):
    """`off / on` of each training step, having run in turn; without the first ones, which warm up."""
    return [before[key] / after[key] for before, after in zip(off[WARM_UPS:], on[WARM_UPS:], strict=True)]


def compare(metrics):
    """Everything that the table and the JSON say, from `{name: metrics}`."""
    results = {}
    for name, rows in metrics.items():
        first, last = mean_reward(rows[:LAST]), mean_reward(rows[-LAST:])
        results[name] = {
            **{key: quartiles([row[seconds] for row in rows[WARM_UPS:]]) for key, seconds in SECONDS.items()},
            "backward_passes_per_training_step": rows[-1]["backward_passes"],
            "reward_first": first,
            "reward_last": last,
            "gain_in_standard_errors": (last[0] - first[0]) / np.hypot(first[1], last[1]),
            "first_ratio_error": max(row["first_ratio_error"] for row in rows),
        }
    off = results["off"]
    for name in list(RUNS)[1:]:
        run, rows = results[name], metrics[name]
        ratios = {key: quartiles(paired_ratios(metrics["off"], rows, seconds)) for key, seconds in SECONDS.items()}
        run["times_faster"] = ratios | {"update_by_arithmetic": UPDATE["off"] / UPDATE[name]}
        difference = run["reward_last"][0] - off["reward_last"][0]
        error = np.hypot(run["reward_last"][1], off["reward_last"][1])
        run["reward_difference_in_standard_errors"] = difference / error
    return results


def table(results):
    def line(label, texts):
        return f"{label:<30}{''.join(f'{text:>20}' for text in texts)}".rstrip()

    def spread(quartiles):
        low, median, high = quartiles
        return f"{median:.2f} ({low:.2f}-{high:.2f})"

    columns = [results[name] for name in RUNS]
    lines = [line("", RUNS.values())]
    for label, key in zip(("seconds per training step", "of it the update"), SECONDS, strict=True):
        lines.append(line(label, (spread(run[key]) for run in columns)))
        lines.append(line("  times faster than off", ["", *(spread(run["times_faster"][key]) for run in columns[1:])]))
    lines.append(line("  by arithmetic", ["", *(f"{run['times_faster']['update_by_arithmetic']:.2f}" for run in columns[1:])]))
    lines.append(line("transformer backward passes", (run["backward_passes_per_training_step"] for run in columns)))
    for label, key in ((f"mean reward, first {LAST} steps", "reward_first"), (f"mean reward, last {LAST} steps", "reward_last")):
        lines.append(line(label, ("{:.3f} ± {:.3f}".format(*run[key]) for run in columns)))
    lines += [
        "",
        f"seconds: median (quartiles) after {WARM_UPS} training steps; times faster: of each step's ratio, as they ran in turn;",
        "reward: ± standard error. Of 15 steps 9 are trained, with JAGG 5 of them as a group; the last run trains all 15",
    ]
    return "\n".join(lines)


def plot_rewards(metrics, results, path):
    """Reward against training steps; and how many times faster each step was than the one without JAGG in its turn."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    steps = np.arange(1, len(metrics["off"]) + 1)
    for name, rows in metrics.items():
        reward = np.array([row["reward"] for row in rows])
        error = np.array([row["reward_sem"] for row in rows])
        left.plot(steps, reward, label=RUNS[name])
        left.fill_between(steps, reward - error, reward + error, alpha=0.25)
    left.set(xlabel="training step", ylabel="mean reward (band: standard error)")
    left.legend(loc="lower right")
    for number, name in enumerate(list(RUNS)[1:]):
        for marker, (key, seconds) in zip(".x", SECONDS.items(), strict=True):
            low, median, high = results[name]["times_faster"][key]
            style = dict(color=f"C{number + 1}", alpha=1 if marker == "." else 0.5)
            ratios = paired_ratios(metrics["off"], metrics[name], seconds)
            right.plot(steps[WARM_UPS:], ratios, marker, label=f"{RUNS[name]}, {LABELS[key]}: {median:.2f}", **style)
            right.axhline(median, **style)
            right.axhspan(low, high, color=style["color"], alpha=0.1, linewidth=0)
    right.axhline(1, color="gray", linewidth=0.8, linestyle=":")
    right.set(xlabel="training step", ylabel="times faster than off (median, quartiles)")
    right.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
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
    print(f"\n== scripts/finetune/finetune_flux_grpo.sh, seed {args.seed}, in turn: {'; '.join(RUNS.values())}", flush=True)
    wanted = {out / name: (title, SETTINGS[name] | AS_LATER, *FLAGS[name]) for name, title in RUNS.items()}
    metrics = dict(zip(RUNS, train_in_turn(trainer, wanted, args.seed), strict=True))
    results = compare(metrics)
    kept = ("reward", "reward_sem", "seconds", "update_seconds", "backward_passes", "first_ratio_error")
    results["runs"] = {name: {key: [row[key] for row in rows] for key in kept} for name, rows in metrics.items()}
    results["made_by"] = made_by("./apply.sh --demo", seed=args.seed)
    (out / "comparison.json").write_text(json.dumps(results, indent=2) + "\n")
    plot_rewards(metrics, results, out / "reward.png")
    n_steps = len(metrics["off"])
    weights = {"before": HERE / "mini/data/flux/transformer"}
    weights |= {f"after, {title}": out / name / f"checkpoint-{n_steps}" for name, title in RUNS.items()}
    plot_samples(weights, out / "samples.png", args.seed)
    print(f"\n{table(results)}\n\nin {out}: comparison.json, reward.png, samples.png", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: all trainings were ended\nthe same command begins anew")
