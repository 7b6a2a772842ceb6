"""Reward parity on the mini trainer: JAGG, its ablation, and training fewer steps for the same cost, over several seeds.

`python upstream/parity.py OUT` runs the trainer's own script once an arm and seed, then, to time the arms side by side, in short
runs in turn: about three quarters of an hour on two otherwise idle cores; called again, it goes on where it was cut off. It
writes `groups.json` and `groups.png` to OUT. `--arms knots` compares knots with groups at as many backward passes, and takes
twice as long; `--arms retained` compares retained graphs with the trainer's own forwards.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from demo import patched_copy, quartiles
from results import made_by
from runs import read_metrics, train
from tqdm.auto import tqdm

from jagg_patch import JaggConfig
from jagg_patch.method.cost import training_step_cost
from jagg_patch.method.plan import forwards_a_group, plan_groups

SAMPLED, TRAINABLE = 16, 15  # steps of the script's trajectories
N_TRAINING_STEPS = 30  # the script's
FINAL = 10  # training steps at the end that "final reward" averages over
TRAILING = 5  # training steps that a curve is smoothed over before it is asked when it has reached something
SHARE = 0.9  # of the baseline's gain
TIMED_STEPS, ROUNDS = 6, 4  # training steps of a timed run, and timed runs of each arm
AS_LATER = {"JAGG_SELF_CHECK": "0"}  # of a timed run, so that its few steps are as those after a run's first ones


@dataclass(frozen=True)
class Arm:
    """What is compared: `JAGG_*` settings, and how many of the 15 steps are trained."""

    jagg: dict = field(default_factory=dict)
    visited: int = 9

    @property
    def flags(self):
        return ["--timestep_fraction", f"{(self.visited + 0.5) / TRAINABLE:.3f}"]  # the trainer rounds down

    @property
    def n_warm_ups(self):
        """Training steps of a timed run that don't count: from its third on it retains."""
        return 2 if "JAGG_RETAIN" in self.jagg else 1

    @property
    def cost(self):
        """Forwards of one sample, rollout included."""
        config = JaggConfig.from_env(self.jagg)
        groups, skipped = plan_groups(self.visited, config), forwards_a_group(config.skip_forwards, config.schedule)
        return training_step_cost(self.visited, SAMPLED, groups, forwards_a_group=skipped, retained=float(config.retain))


OFF = {"JAGG_ENABLED": "0"}
ALL = {"JAGG_FRAC": "1"}
GROUPS = {
    "baseline: 9 of 15 steps": Arm(OFF),
    "JAGG, frac 0.6": Arm(),
    "JAGG, frac 1": Arm(ALL),
    "endpoints only, frac 1": Arm(ALL | {"JAGG_AGGREGATION": "endpoints"}),
    "7 of 15 steps, no JAGG": Arm(OFF, 7),  # the cost of frac 0.6, to one forward
    "5 of 15 steps, no JAGG": Arm(OFF, 5),  # the cost of frac 1
    "frac 0.6, skipped forwards": Arm({"JAGG_SKIP_FORWARDS": "1", "JAGG_SCHEDULE": "joint"}),
}
KNOTS = {
    "all 15 steps, no JAGG": Arm(OFF, 15),
    "15 steps, 6 knots": Arm({"JAGG_KNOTS": "6"}, 15),
    "15 steps, 5 knots": Arm({"JAGG_KNOTS": "5"}, 15),
    "15 steps, 4 knots": Arm({"JAGG_KNOTS": "4"}, 15),
    "15 steps, groups, 8 passes": Arm(ALL, 15),
    "15 steps, groups, 4 passes": Arm(ALL | {"JAGG_GROUP_SIZE": "8"}, 15),
    "9 of 15 steps, no JAGG": Arm(OFF),
    "9 of 15 steps, 5 knots": Arm({"JAGG_KNOTS": "5"}),
    "9 of 15 steps, 4 knots": Arm({"JAGG_KNOTS": "4"}),
}
# The script takes one optimizer step a rollout, so of all samples. It trains batches of them, which have steps in common if they
# have all.
RETAIN = {"JAGG_RETAIN": "1"}
RETAINED = {
    "all 15 steps, no JAGG": Arm(OFF, 15),
    "exact, retained": Arm(RETAIN | {"JAGG_FRAC": "0"}, 15),
    "frac 0.6, retained": Arm(RETAIN, 15),
    "frac 1, retained": Arm(RETAIN | ALL, 15),
    "5 knots, retained": Arm(RETAIN | {"JAGG_KNOTS": "5"}, 15),
    "4 knots, retained": Arm(RETAIN | {"JAGG_KNOTS": "4"}, 15),
    "9 of 15 steps, no JAGG": Arm(OFF),
}
ARMS = {"groups": GROUPS, "knots": KNOTS, "retained": RETAINED}  # of each, the first is the baseline


def first_reaching(rewards, level):
    """The training step, from 1, at which the mean of the last five rewards is first at `level`; None if it never is."""
    smooth = np.convolve(rewards, np.full(TRAILING, 1 / TRAILING), "valid")
    reached = np.flatnonzero(smooth >= level)
    return int(reached[0]) + TRAILING if len(reached) else None


def mean_and_error(values):
    """Mean, and standard error from the spread between seeds; None without values, and no error with one."""
    if not values:
        return None, None
    return float(np.mean(values)), float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def compare(arms, runs, timed):
    """Everything that the table says, from `{arm: {seed: metrics}}` and `{arm: [metrics of a timed run, …]}`.

    `arms` are one of `ARMS`. The base policy's reward is that of the first training step, before any update, over all runs of
    all arms.
    """
    rewards = {arm: [[row["reward"] for row in rows] for rows in seeds.values()] for arm, seeds in runs.items()}
    start = float(np.mean([curve[0] for curves in rewards.values() for curve in curves]))
    finals = {arm: [float(np.mean(curve[-FINAL:])) for curve in curves] for arm, curves in rewards.items()}
    baseline = next(iter(arms))
    level = start + SHARE * (float(np.mean(finals[baseline])) - start)
    results, n_warm_ups = {"reward_before": start, "level": level, "arms": {}}, max(arm.n_warm_ups for arm in arms.values())
    for arm, curves in rewards.items():
        low, seconds, high = quartiles([row["seconds"] for rows in timed[arm] for row in rows[n_warm_ups:]])
        reached = [step for step in (first_reaching(curve, level) for curve in curves) if step]
        steps = mean_and_error(reached)
        differences = [mine - theirs for mine, theirs in zip(finals[arm], finals[baseline], strict=True)]
        results["arms"][arm] = {
            "forwards_per_sample": arms[arm].cost,
            "seconds_per_training_step": [low, seconds, high],
            "final_reward": mean_and_error(finals[arm]),
            "final_reward_minus_baseline": mean_and_error(differences),  # same seed, same prompts and first rollout
            "seeds_that_reach_the_level": len(reached),
            "training_steps_to_level": list(steps),
            "forwards_to_level": [x if x is None else x * arms[arm].cost for x in steps],
            "seconds_to_level": [x if x is None else x * seconds for x in steps],
        }
    return results


def table(results, n_seeds):
    def number(pair, digits):
        mean, error = pair
        return "never" if mean is None else f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")

    lines = [
        f"{'':<26}{'forwards':>9}{'final reward':>17}{'minus baseline':>19}"
        f"{'to 90 % of the gain: steps':>28}{'forwards':>13}{'seconds':>14}{'seeds':>7}"
    ]
    for arm, row in results["arms"].items():
        lines.append(
            f"{arm:<26}{row['forwards_per_sample']:>9g}{number(row['final_reward'], 4):>17}"
            f"{number(row['final_reward_minus_baseline'], 4):>19}{number(row['training_steps_to_level'], 1):>28}"
            f"{number(row['forwards_to_level'], 0):>13}{number(row['seconds_to_level'], 1):>14}"
            f"{row['seeds_that_reach_the_level']:>4}/{n_seeds}"
        )
    lines += [
        "",
        f"reward before training {results['reward_before']:.4f}; 90 % of the baseline's gain is {results['level']:.4f}",
        f"± standard error over {n_seeds} seeds; forwards: of one sample a training step, rollout included, by the cost model",
        f"final reward: the last {FINAL} training steps; a level counts as reached when the mean of {TRAILING} steps is there",
    ]
    return "\n".join(lines)


def plot(runs, results, path):
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.6), sharey=True, layout="constrained")
    for arm, seeds in runs.items():
        curves = np.array([[row["reward"] for row in rows] for rows in seeds.values()])
        mean, error = curves.mean(0), curves.std(0, ddof=1) / len(curves) ** 0.5 if len(curves) > 1 else 0 * curves[0]
        steps = np.arange(1, curves.shape[1] + 1)
        for axis, x in zip(axes, (steps, steps * results["arms"][arm]["seconds_per_training_step"][1]), strict=True):
            axis.plot(x, mean, label=arm)
            axis.fill_between(x, mean - error, mean + error, alpha=0.2)
    for axis in axes:
        axis.axhline(results["level"], color="gray", linewidth=0.8, linestyle=":")
    axes[0].set(xlabel="training step", ylabel="mean reward over seeds (band: standard error)")
    axes[1].set(xlabel="seconds of training (steps times the arm's median step)")
    axes[1].legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arms", choices=ARMS, default="groups", help="what is compared (default: groups)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103, 104, 105])
    args = parser.parse_args()
    out = args.out.resolve()
    default = parser.get_default("arms")
    arms, command = ARMS[args.arms], "python upstream/parity.py OUT" + f" --arms {args.arms}" * (args.arms != default)
    trainer = patched_copy(out, command)

    def metrics(folder, arm, seed, n_steps, **settings):
        run = out / f"{args.arms}-{folder}" / f"{list(arms).index(arm)}-{seed}"
        rows = read_metrics(run) if (run / "metrics.jsonl").exists() else []
        if len(rows) < n_steps:
            rows = train(trainer, run, arm, seed, arms[arm].jagg | settings, *arms[arm].flags, "--max_train_steps", str(n_steps))
        return rows

    runs, timed = {arm: {} for arm in arms}, {arm: [] for arm in arms}
    for seed, arm in tqdm(list(product(args.seeds, arms)), desc="Runs"):
        runs[arm][seed] = metrics("runs", arm, seed, N_TRAINING_STEPS)
    # In turn, beginning with another arm each time: what else the machine does meets all of them alike.
    turns = [(number, arm) for number in range(ROUNDS) for arm in [*list(arms)[number:], *list(arms)[:number]]]
    for number, arm in tqdm(turns, desc="Timing"):
        timed[arm].append(metrics("timed", arm, number, TIMED_STEPS, **AS_LATER))

    results = compare(arms, runs, timed)

    def columns(rows, *names):
        return {name: [round(row[name], 5) for row in rows] for name in names}

    kept = ("reward", "reward_sem", "backward_passes")
    results["runs"] = {arm: {seed: columns(rows, *kept) for seed, rows in seeds.items()} for arm, seeds in runs.items()}
    results["timed"] = {arm: [columns(rows, "seconds", "update_seconds") for rows in again] for arm, again in timed.items()}
    results["made_by"] = made_by(command, seeds=args.seeds)
    (out / f"{args.arms}.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(runs, results, out / f"{args.arms}.png")
    print(f"\n{table(results, len(args.seeds))}\n\nin {out}: {args.arms}.json, {args.arms}.png", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: the same command goes on with the run that it was at, from its beginning")
