"""Time JAGG on this machine, in one process and in turns: exact, JAGG, JAGG with skipped forwards, JAGG's sequential schedule,
and both with graphs retained from the rollout.

The loop has DanceGRPO's shape, and JAGG's own wrappers are on it. It rolls out and trains one sample, without reward and
optimizer, on a model with random weights: by default a Flux that is small enough for two CPU cores. Beside each measured ratio
stands its limit, what the forward and backward times of the same run would give if nothing else took time, and what the cost
model predicts. Writes bench.json and bench.png.
"""

import json
import math
import shlex
import sys
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench_loop import Meter  # noqa: E402
from bench_models import ALL, ALL_KNOTS, MODELS, build  # noqa: E402
from bench_rows import MODES, NAMES, OF_EXACT, PARTS, RETAINED, Row, call_seconds, cases, describe, measure  # noqa: E402
from results import command_line, made_by, make_folder  # noqa: E402

from jagg_patch.errors import JaggError  # noqa: E402


def compared(results):
    """The rows that have a ratio."""
    return [row for row in results["rows"] if row["mode"] != "exact" and "limit" in row["update"]]


def table(results):
    heads = "".join(f"{f'{name} (quartiles)':>26}{'limit':>7}{'of it':>7}{'model':>7}" for name in ("update", "training step"))
    heads += f"{'faults':>8}" + "  peak GB" * torch.cuda.is_initialized()  # of pages of memory that are new to the process
    lines = [f"{'checkpointing, steps, grouping, mode':46}{'groups, knots':22}{heads}"]
    for row in results["rows"]:
        line = f"{row['row']:46}{','.join(map(str, row['knots'])) or '+'.join(map(str, row['groups'])):22}"
        for part in PARTS:
            if row["mode"] == "exact":
                line += f"{median(row[f'{part}_seconds'] or [math.nan]):>24.4g} s{'':21}"
            elif "limit" in row[part]:
                line += f"{'{median:.3f} ({q1:.3f}-{q3:.3f})'.format(**row[part]):>26}{row[part]['limit']:>7.3f}"
                line += f"{row[part]['median'] / row[part]['limit']:>7.1%}{row[part]['predicted']:>7.3f}"
        line += f"{row['page_faults']:>8.0f}" + (f"{row['peak_bytes'] / 1e9:>9.1f}" if row["peak_bytes"] else "")
        lines.append(line + "  out of memory" * row["out_of_memory"])
    for name, seconds in results["call_seconds"].items():
        calls = ", ".join(f"{kind} {value * 1e3:.4g} ms" for kind, value in seconds.items())
        lines.append(f"checkpointing {name}: forward {calls}")
    rows = compared(results)
    for name, other in (("the limit", "limit"), ("the cost model", "predicted")):
        off = [row[part]["median"] / row[part][other] - 1 for row in rows for part in PARTS]
        lines += [f"measured against {name}: {min(off):+.1%} to {max(off):+.1%}"] if off else []
    own = [row["own_share"] for row in results["rows"] if "own_share" in row]
    lines += [f"JAGG's own time in exact steps: at most {max(own):.2%} of an exact update"] if own else []
    return "\n".join(lines)


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = compared(results)
    names = list(dict.fromkeys(row["row"][:29] for row in rows))
    figure, axes = plt.subplots(1, 2, figsize=(13, 1.6 + 0.5 * len(names)), sharey=True, layout="constrained")
    for axis, part in zip(axes, PARTS, strict=True):
        for number, mode in enumerate(dict.fromkeys(row["mode"] for row in rows)):
            chosen = [row for row in rows if row["mode"] == mode]
            y = [names.index(row["row"][:29]) + 0.17 * (number - 2) for row in chosen]
            x, low, high, limit, model = (
                [row[part][key] for row in chosen] for key in ("median", "q1", "q3", "limit", "predicted")
            )
            bars = [[m - q for m, q in zip(x, low, strict=True)], [q - m for m, q in zip(x, high, strict=True)]]
            axis.plot(model, y, "x", color="0.5", markersize=7, label="cost model" if not number else None)
            axis.plot(limit, y, "|", color="k", markersize=11, label="limit, from measured passes" if not number else None)
            axis.errorbar(x, y, xerr=bars, fmt="o", color=f"C{number}", markersize=4, capsize=2, label=NAMES[mode])
        axis.set(xlabel=f"{part.replace('_', ' ')}: times faster than exact (bar: quartiles)")
        axis.axvline(1, color="0.8", linewidth=0.8)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(names)), names, family="monospace")
    axes[0].set(ylim=(len(names) - 0.5, -0.5), ylabel="checkpointing, steps, grouping")
    axes[1].legend(fontsize="small")
    figure.suptitle(results["title"])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def add_arguments(parser):
    parser.add_argument("--out", type=Path, required=True, help="a folder that gets bench.json and bench.png")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="float32 on the CPU, bfloat16 on one GPU")
    parser.add_argument("--model", choices=MODELS, help="flux and qwenimage at full size, 720x720 (default small, on cuda flux)")
    parser.add_argument("--all", action="store_true", help="every W, frac, number of knots, of steps, and checkpointing")
    parser.add_argument("--retained", action="store_true", help="only retained graphs, on the device and in the host's memory")
    parser.add_argument("--only", metavar="TEXT", help="only cases with this in their name, such as 'off 20', beside exact ones")
    parser.add_argument(
        "--seconds",
        type=float,
        help="for measuring, but three rounds at least (default 150); at full size rows are dropped that don't fit (300)",
    )
    parser.add_argument("--rounds", type=int, help="at most, of a training step of every row")
    size = parser.add_argument_group("the model's size, instead of its own")
    size.add_argument("--layers", type=int, help="blocks, of each kind that it has")
    size.add_argument("--heads", type=int, help="attention heads, which set the width")
    size.add_argument("--side", type=int, help="image tokens along a side")
    size.add_argument("--text", type=int, help="text tokens")


def command(args):
    """The command line that `args` came from."""
    options = ("device", "model", "only", "seconds", "rounds", "layers", "heads", "side", "text")
    given = [f"--{name} {shlex.quote(str(getattr(args, name)))}" for name in options if getattr(args, name) is not None]
    flags = [f"--{name}" for name in ("all", "retained") if getattr(args, name)]
    return " ".join(["python upstream/bench.py --out OUT", *flags, *given])


def run(args):
    name = args.model or ("flux" if args.device == "cuda" else "small")
    sizes = args.rounds, args.layers, args.heads, args.side, args.text
    if min(size for size in (1, *sizes) if size is not None) < 1:
        raise JaggError("the bench needs 1 round, layer, head, image token and text token at least")
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        raise JaggError(f"--seconds {args.seconds:g} is no time to measure in\ngive a number above 0, or leave it away")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise JaggError("torch finds no CUDA device\nrun with --device cpu, or install a torch with CUDA")
    if args.device == "cpu" and name != "small" and not args.layers:
        raise JaggError(f"{name} at full size is for a GPU\nadd --device cuda, or --layers 1, say, to try the command")
    known = MODELS[name]
    wanted = list(cases(ALL, ALL_KNOTS) if args.all else cases(known.cases, known.knots))
    chosen = [case for case in wanted if not args.only or args.only in case.name]
    if not chosen:
        raise JaggError(f"no case has {args.only!r} in its name\nthere are {', '.join(case.name for case in wanted)}")
    torch.manual_seed(0)
    model, settings = build(name, args)
    make_folder(args.out)
    meter = Meter(model)
    planned = [
        Row(case, mode, model, meter, settings)
        for case in wanted
        for mode in (RETAINED if args.retained else MODES)
        if (mode in OF_EXACT) != bool(case.groups)
        if case in chosen or (not case.groups and case.cell in [one.cell for one in chosen])
    ]
    budget = known.seconds if args.seconds is None else args.seconds
    rows, rounds = measure(planned, budget, known.least_rounds, args.rounds or 10**6, name != "small")
    exact, seconds = {row.case.cell: row for row in rows if row.mode == "exact"}, call_seconds(rows)
    on = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.4g}M parameters, {settings['noise'].shape[1]} image tokens"
    results = {
        "made_by": made_by(command(args), on=on),
        "title": f"{name}, {size}, on {on}: {rounds} rounds",
        "rounds": rounds,
        "call_seconds": seconds,
        "rows": [describe(row, exact[row.case.cell], seconds.get(row.case.checkpointing)) for row in rows],
        "dropped": [str(row) for row in planned[len(rows) :]],
    }
    (args.out / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, args.out / "bench.png")
    for row in results["dropped"]:
        print(f"dropped, for lack of time: {row}")
    print(f"{results['title']}\n{table(results)}\n\nin {args.out}: bench.json, bench.png")


if __name__ == "__main__":
    command_line(__doc__, add_arguments, run)
