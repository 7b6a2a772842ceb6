"""Measure on the mini trainer's model how near the gradient of a whole update is to the exact one with n knots.

As upstream/quality.py, for n = 2 to 10: knots placed by the rule, with and without measured sizes; the best set, by trying all;
and the best of the published plans with as many backward passes. Writes knots.json and knots.png.
"""

import json
import math
import sys
from collections import defaultdict
from itertools import combinations, product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from quality_measure import VISITED_SHARE, Setting, select, summary, visited_steps  # noqa: E402
from quality_probe import Probe, needs  # noqa: E402
from results import add_with_default, command_line, made_by, make_folder  # noqa: E402

from jagg_patch.config import JaggConfig  # noqa: E402
from jagg_patch.errors import JaggError  # noqa: E402
from jagg_patch.method.folding import fold, shares  # noqa: E402
from jagg_patch.method.placement import best_knots, expected_sigmas  # noqa: E402
from jagg_patch.method.plan import knots_of, plan_groups  # noqa: E402
from jagg_patch.method.quality import agreement, sums  # noqa: E402

NUMBERS = range(2, 11)  # of knots
VISITED = ("all", "random")
RULES = {"rule": True, "rule, unmeasured": False}  # whether it knows the sizes
WAYS = (*RULES, "best", "published")
SETTINGS = ("etas", "shifts", "prompts", "samples", "sampling_steps", "seed")


def published(n_steps):
    """`{number of backward passes: sets}`: what JAGG_GROUP_SIZE and JAGG_FRAC can come to, as sets of knots."""
    found = defaultdict(set)
    for size, n_routed in product(range(3, n_steps + 1), range(3, n_steps + 1)):
        knots = knots_of(n_steps, plan_groups(n_routed, JaggConfig(group_size=size, frac=1)))
        found[len(knots)].add(knots)
    return found


def all_sets(n_steps, n_knots):
    return [(0, *between, n_steps - 1) for between in combinations(range(1, n_steps - 1), n_knots - 2)]


class Pairs:
    """Of a prompt group whose samples visit the same steps: the gradient of any set of knots, by its products with others.

    A set's gradient is `Σ φ_k(t_p) J_kᵀ s_p` over its knots k and all steps p, with the hat functions φ (THEOREM.md).
    """

    def __init__(self, vjp, timesteps, upstream_grads):
        self._timesteps = timesteps.double()
        n = self.n_steps = len(timesteps)
        vectors = torch.stack([vjp(k, upstream_grads[p]) for k in range(n) for p in range(n)]).double()
        self._products = vectors @ vectors.T
        self._exact = torch.eye(n, dtype=torch.float64).flatten()  # J_pᵀ s_p

    def near(self, sets):
        """The `Agreement` of each of the sets."""
        weights = torch.stack([self._weights(knots) for knots in sets])
        difference = weights - self._exact
        with_exact = weights @ self._products @ self._exact
        size, error = ((rows @ self._products * rows).sum(1) for rows in (weights, difference))
        exact = self._exact @ self._products @ self._exact
        return [agreement((a.item(), b.item(), exact.item(), c.item())) for a, b, c in zip(with_exact, size, error, strict=True)]

    def _weights(self, knots):
        weights = torch.zeros(self.n_steps, self.n_steps, dtype=torch.float64)
        weights[list(knots)] = shares(self._timesteps, knots)
        return weights.flatten()


def vjps(probe, rollout, steps, setting):
    """`vjp(k, grads)` is the gradient `[P]` of the output of the k-th visited steps; and timesteps, s_p, each `[k, B, ...]`."""
    timesteps, outputs, upstream_grads = probe.steps(rollout, steps, setting.eta, setting.shift)

    def vjp(k, grads):
        return probe.vjp([outputs[k]], [grads])

    return vjp, timesteps, upstream_grads


def near_by_folding(vjp, timesteps, upstream_grads, sets):
    """As `Pairs.near`, where each sample has steps of its own."""
    exact = sum(vjp(p, grad) for p, grad in enumerate(upstream_grads))
    found = []
    for knots in sets:
        folded = fold(upstream_grads, shares(timesteps, knots))
        found.append(agreement(sums([sum(map(vjp, knots, folded))], [exact])))
    return found


def measure(probe, args):
    """Rows by setting, way and number of knots."""
    from tqdm.auto import tqdm

    n_trainable = args.sampling_steps - 1
    rows = []
    settings = [Setting(*cell) for cell in product(args.etas, args.shifts, VISITED)]
    with tqdm(total=2 * len(settings) * args.prompts, desc="settings x prompt groups") as progress:

        def each_prompt(setting):
            for prompt in range(args.prompts):
                torch.manual_seed(args.seed * 1000 + prompt)  # the same noise at every eta and shift
                rollout = probe.roll_out(prompt % 10, args.samples, setting.eta, setting.shift)
                yield vjps(probe, rollout, visited_steps(setting.visited, n_trainable, args.samples), setting)
                progress.update()

        for setting in settings:
            sizes = sum(torch.stack([s.double().square().sum() for s in grads]) for *_, grads in each_prompt(setting)).tolist()
            sigmas = probe.sigmas(setting.shift)[:n_trainable].tolist()
            sigmas = sigmas if setting.visited == "all" else expected_sigmas(sigmas, int(n_trainable * VISITED_SHARE))
            rows += measured(setting, sigmas, sizes, each_prompt(setting))
    return rows


def measured(setting, sigmas, sizes, prompts):
    n_steps = len(sigmas)
    numbers = [n for n in NUMBERS if n < n_steps]
    plans = published(n_steps)
    placed = {(way, n): best_knots(n, sigmas, sizes if knows else None) for way, knows in RULES.items() for n in numbers}
    tried = {knots for n in numbers for knots in plans[n]} | set(placed.values())
    if setting.visited == "all":
        tried |= {knots for n in numbers for knots in all_sets(n_steps, n)}
    tried = sorted(tried)
    near = defaultdict(list)
    for vjp, timesteps, grads in prompts:
        if setting.visited == "all":
            found = Pairs(vjp, timesteps[:, 0], grads).near(tried)
        else:
            found = near_by_folding(vjp, timesteps, grads, tried)
        for knots, one in zip(tried, found, strict=True):
            near[knots].append(one)
    found = {knots: summary(agreements) for knots, agreements in near.items()}

    def least(sets):
        return min(sets, key=lambda knots: found[knots]["relative_error"]["mean"], default=None)

    for n in numbers:
        chosen = {way: placed[way, n] for way in RULES} | {"published": least(plans[n])}
        chosen["best"] = least(all_sets(n_steps, n)) if setting.visited == "all" else None
        for way, knots in chosen.items():
            if knots is not None:
                yield setting._asdict() | {"way": way, "passes": n, "knots": knots} | found[knots]


def table(rows):
    lines = ["cosine and relative error of a whole update's gradient, means over prompt groups; and the knots by the rule"]
    lines.append(f"{'shift':>5} {'eta':>5} {'visited':8} {'n':>3}" + "".join(f"{way:>20}" for way in WAYS))
    for row in select(rows, way="rule"):
        cell = {name: row[name] for name in ("shift", "eta", "visited", "passes")}
        line = f"{row['shift']:>5g} {row['eta']:>5g} {row['visited']:8} {row['passes']:>3}"
        for way in WAYS:
            found = select(rows, **cell, way=way)
            shown = f"{found[0]['cosine']['mean']:.4f} {found[0]['relative_error']['mean']:.4f}" if found else ""
            line += f"{shown:>20}"
        lines.append(f"{line}   {','.join(map(str, row['knots']))}")
    return "\n".join(lines)


def plot(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = list(dict.fromkeys((row["eta"], row["shift"], row["visited"]) for row in rows))
    columns = max(1, math.ceil(len(settings) / 2))
    figure, axes = plt.subplots(4, columns, figsize=(3.4 * columns, 11), layout="constrained", squeeze=False)
    for number, (eta, shift, visited) in enumerate(settings):
        top, bottom = axes[2 * (number // columns)][number % columns], axes[2 * (number // columns) + 1][number % columns]
        cell = dict(eta=eta, shift=shift, visited=visited)
        for way in WAYS:
            line = select(rows, **cell, way=way)
            if line:
                points = zip(*((row["passes"], row["relative_error"]["mean"]) for row in line), strict=True)
                top.plot(*points, "o-", markersize=3, label=way)
        top.set(yscale="log", xlabel="backward passes", ylabel="relative error")
        top.set_title(f"eta {eta:g}, shift {shift:g}, {visited} steps", fontsize="medium")
        top.legend(fontsize=7)
        line = select(rows, **cell, way="rule")
        heat = torch.zeros(len(line), line[0]["knots"][-1] + 1)
        for y, row in enumerate(line):
            heat[y, list(row["knots"])] = 1
        bottom.imshow(heat.tolist(), cmap="Blues", aspect="auto", vmin=0, vmax=1.5)
        bottom.set(xlabel="visited step, noise to image", ylabel="knots by the rule")
        bottom.set_yticks(range(len(line)), [row["passes"] for row in line])
    for axis in axes.flatten():
        axis.set_visible(axis.has_data())
    figure.savefig(path, dpi=110)
    plt.close(figure)


def add_arguments(parser):
    parser.add_argument("--out", type=Path, required=True, help="a folder that gets knots.json and knots.png")
    add_with_default(parser, "--etas", [0.3, 0.7, 1.0], "noise levels of the SDE", type=float, nargs="+")
    add_with_default(parser, "--shifts", [1.0, 3.0], "time shifts of the noise schedule", type=float, nargs="+")
    add_with_default(parser, "--prompts", 10, "prompt groups, a digit each", type=int)
    add_with_default(parser, "--samples", 12, "samples per prompt group", type=int)
    add_with_default(parser, "--sampling-steps", 16, "steps of a trajectory; the last is never trained", type=int)
    add_with_default(parser, "--seed", 0, "of the rollouts", type=int)
    mini = Path(__file__).resolve().parent / "mini"
    parser.add_argument("--mini", type=Path, default=mini, help="the mini trainer's folder, with data/flux")


def run(args):
    least = (args.prompts, 1), (args.samples, 2), (args.sampling_steps, 6)
    if any(given < needed for given, needed in least) or min(args.etas + args.shifts) <= 0:
        raise JaggError("this needs 1 prompt group, 2 samples and 6 sampling steps at least, and eta and shift above 0")
    probe = Probe(args.mini, args.sampling_steps)
    try:
        import matplotlib  # noqa: F401  before the minutes of measuring
        import tqdm  # noqa: F401
    except ImportError as error:
        raise needs(error) from error
    make_folder(args.out)
    torch.set_num_threads(1)  # the model is too small for more to help
    rows = measure(probe, args)
    settings = {name: vars(args)[name] for name in SETTINGS}
    results = {"made_by": made_by("python upstream/quality_knots.py --out OUT"), "settings": settings, "rows": rows}
    (args.out / "knots.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(rows, args.out / "knots.png")
    print(f"{table(rows)}\n\nin {args.out}: knots.json, knots.png")


if __name__ == "__main__":
    command_line(__doc__, add_arguments, run)
