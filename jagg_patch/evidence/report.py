"""What the log of a run (JAGG_LOG, with JAGG_PROBE_EVERY) says of its gradients, and what to choose.

A page for each way of planning: which W and frac (report_groups.py), or how many knots (report_knots.py).
"""

import json
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile

from .. import __version__
from ..errors import JaggError
from . import report_groups, report_knots

SAME = ("trainer", "aggregation", "trajectory", "visited", "sampled_steps", "step_cost")  # in all records of a report


def add_arguments(parser):
    parser.add_argument("logs", type=Path, nargs="+", metavar="RUN.jsonl", help="of one run, or of several runs alike")
    parser.add_argument(
        "--threshold",
        type=float,
        help=f"the least mean cosine, of a group that is routed (default {report_groups.THRESHOLD:g}), or of a whole update "
        f"with knots (default {report_knots.THRESHOLD:g})",
    )
    parser.add_argument("--out", type=Path, help="a folder that gets report.png and report.json")


def run(args):
    if args.threshold is not None and not 0 <= args.threshold <= 1:
        raise JaggError(f"a cosine of at least {args.threshold:g} can't be asked for\n--threshold takes a number from 0 to 1")
    runs = [read(log) for log in args.logs]
    records = [record for run in runs for record in run]
    forwards = [run[-1].get("forwards_a_group") for run in runs]  # which changes with the schedule; logs of 0.4.0 don't have it
    pairs = [(name, records[0][name], record[name]) for record in records for name in SAME]
    for name, one, other in pairs + [("forwards_a_group", forwards[0], other) for other in forwards]:
        if one != other:
            raise JaggError(f"the logs are of runs that aren't alike: {name} is {one} and {other}\nreport on them one at a time")
    probed = [record for record in records if record["probe"]]
    if not probed:
        raise JaggError(
            f"{', '.join(map(str, args.logs))}: {len(records)} training steps, none of them probed\n"
            "run with JAGG_PROBE_EVERY=10, say, for long enough"
        )
    try:
        pages = {report_knots if "knots" in record["probe"][0] else report_groups for record in probed}
        if len(pages) > 1:
            raise JaggError("the logs are of runs with groups and of runs with knots\nreport on them one at a time")
        (page,) = pages
        threshold = page.THRESHOLD if args.threshold is None else args.threshold
        found = page.cosines(probed)
        options = page.choices(found, probed[0], threshold, forwards[0])
        lines = [*describe(records, probed), "", *page.describe(probed[0], found, options, forwards[0], threshold)]
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise JaggError(
            f"the log isn't one of JAGG {__version__}: {type(error).__name__} {error}\nreport with the version that wrote it"
        ) from error
    print("\n".join(lines))
    if args.out is not None:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=args.out).close()
        except OSError as error:
            raise JaggError(f"the folder can't be made or written to: {error}\ngive --out another one") from None
        measured = [entry | {"cosines": values} for entry, values in found]
        report = {"threshold": threshold, "measured": measured, "choices": options}
        (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        with picture(args.out / "report.png") as axes:
            page.draw(*axes, probed, found, options, threshold)
        print(f"in {args.out}: report.png, report.json")


def read(path):
    """The records of a log. Lines that a killed run or a full disk has left unreadable are passed over, if there are others."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise JaggError(f"{path}: {error}\nname the file that JAGG_LOG named, as seen from this folder") from None
    records = []
    for line in lines:
        try:
            record = json.loads(line)
            [record[name] for name in (*SAME, "probe")]
        except (ValueError, KeyError, TypeError):
            continue
        records.append(record)
    if not records:
        raise JaggError(
            f"{path}: none of its {len(lines)} lines is a record of a training step\nname the file that JAGG_LOG named"
        )
    return records


def describe(records, probed):
    """What is said of any run, as lines."""
    first = probed[0]
    seconds = {name: median(record[f"{name}_seconds"] for record in records) for name in ("rollout", "update")}
    share = sum(record["probe_seconds"] for record in records) / sum(
        record[f"{name}_seconds"] for record in records for name in ("rollout", "update", "probe")
    )
    return [
        f"{first['trainer']}: {len(records)} training steps, {len(probed)} probed; {first['visited']} of "
        f"{first['trajectory']} steps visited, aggregation {first['aggregation']}",
        f"a training step: rollout {seconds['rollout']:.3g} s, update {seconds['update']:.3g} s (medians); "
        f"the probes took {share:.1%} of the time",
    ]


@contextmanager
def picture(path):
    """Yields two axes side by side, and saves what was drawn on them."""
    try:
        import matplotlib
    except ImportError:
        raise JaggError("the picture needs matplotlib\npip install matplotlib, or leave --out away") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    yield axes
    figure.savefig(path, dpi=120)
    plt.close(figure)
