"""Measure on the mini trainer's model how near grouped gradients are to the exact ones.

Rollouts, advantages and losses are the mini trainer's own, in one process without FSDP. The gradient of each prompt group's
samples is compared with the exact one, over noise levels eta, time shifts, choices of visited steps and group sizes W. Writes
probe.json and probe.png.
"""

import json
import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from quality_measure import FRACS, VISITED, VISITED_SHARE, demo_setting, group_mean, measure, select, splits  # noqa: E402
from quality_plot import plot  # noqa: E402
from quality_probe import AGGREGATIONS, Probe, needs  # noqa: E402
from results import add_with_default, command_line, made_by, make_folder  # noqa: E402

from jagg_patch.errors import JaggError  # noqa: E402

SETTINGS = ("etas", "shifts", "group_sizes", "prompts", "samples", "sampling_steps", "seed")


def table(results, args):
    size = demo_setting(args)["group_size"]
    lines = [
        "mean cosine over groups, interpolate and endpoints; relative error of the whole update (interpolate and endpoints) at "
        f"W={size}",
        f"{'shift':>5} {'eta':>5} {'visited':8}"
        + "".join(f"{f'W={W}':>14}" for W in args.group_sizes)
        + "".join(f"{f'frac {frac:g}':>16}" for frac in FRACS),
    ]
    for shift, eta, visited in product(args.shifts, args.etas, VISITED):
        cell = dict(eta=eta, shift=shift, visited=visited)
        line = f"{shift:>5g} {eta:>5g} {visited:8}"
        for W in args.group_sizes:
            pair = [group_mean(select(results["groups"], **cell, group_size=W, aggregation=a)) for a in AGGREGATIONS]
            line += f"{'{:.3f} {:.3f}'.format(*pair):>14}"
        for frac in FRACS:
            rows = [select(results["updates"], **cell, group_size=size, frac=frac, aggregation=a)[0] for a in AGGREGATIONS]
            line += f"{'{:.3f} {:.3f}'.format(*(row['relative_error']['mean'] for row in rows)):>16}"
        lines.append(line)
    for n_steps in (args.sampling_steps - 1, int((args.sampling_steps - 1) * VISITED_SHARE)):
        sizes = (
            f"{label}: {' '.join(str(len(group)) for group in groups)}"
            for groups, label in splits(args.group_sizes, n_steps).items()
        )
        lines.append(f"groups of all {n_steps} steps: {'; '.join(sizes)}")
    return "\n".join(lines)


def add_arguments(parser):
    parser.add_argument("--out", type=Path, required=True, help="a folder that gets probe.json and probe.png")
    add_with_default(parser, "--etas", [0.1, 0.3, 0.7, 1.0], "noise levels of the SDE", type=float, nargs="+")
    add_with_default(parser, "--shifts", [1.0, 3.0], "time shifts of the noise schedule", type=float, nargs="+")
    add_with_default(parser, "--group-sizes", [3, 4, 5, 6, 8], "steps per group, W", type=int, nargs="+")
    add_with_default(parser, "--prompts", 10, "prompt groups, a digit each", type=int)
    add_with_default(parser, "--samples", 12, "samples per prompt group", type=int)
    add_with_default(parser, "--sampling-steps", 16, "steps of a trajectory; the last is never trained", type=int)
    add_with_default(parser, "--seed", 0, "of the rollouts", type=int)
    mini = Path(__file__).resolve().parent / "mini"
    parser.add_argument("--mini", type=Path, default=mini, help="the mini trainer's folder, with data/flux")


def run(args):
    least = (args.prompts, 1), (args.samples, 2), (args.sampling_steps, 5), (min(args.group_sizes), 2)
    if any(given < needed for given, needed in least) or min(args.etas + args.shifts) <= 0:
        raise JaggError("the probe needs 1 prompt group, 2 samples, 5 sampling steps and W=2 at least, and eta and shift above 0")
    probe = Probe(args.mini, args.sampling_steps)
    try:
        import matplotlib  # noqa: F401  before the minutes of measuring
        import tqdm  # noqa: F401
    except ImportError as error:
        raise needs(error) from error
    make_folder(args.out)
    torch.set_num_threads(1)  # the model is too small for more to help, and on a busy machine they hinder a lot
    results = measure(probe, args)
    settings = {name: vars(args)[name] for name in SETTINGS}
    results = {"made_by": made_by("python upstream/quality.py --out OUT"), "settings": settings} | results
    (args.out / "probe.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, args, args.out / "probe.png")
    print(f"{table(results, args)}\n\nin {args.out}: probe.json, probe.png")


if __name__ == "__main__":
    command_line(__doc__, add_arguments, run)
