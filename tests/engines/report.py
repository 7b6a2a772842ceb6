"""Run the cells of every engine, or of those named, and print what came out as a Markdown table.

usage: python tests/engines/report.py OUT [ENGINE...]
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[number]) for number in (1, 2)]
from matrix import ENGINES, by_group, launch, relative_error  # noqa: E402

HEADER = """\
Relative error of the update against two exact backwards a group, and of grouping itself; then what the backwards of a group of
three called, exact / joint / sequential, in units of one exact backward's calls.

| engine | cell | joint | sequential | grouped or not | all-gathers | reductions |
|---|---|---|---|---|---|---|"""


def calls(runs, cell, *kinds):
    groups = [by_group(runs[run], cell) for run in ("unpatched", "joint", "sequential")]
    first, *others = [sum(counted[0][kind] for kind in kinds) for counted in groups]
    if not first:
        return "one a window" if any(groups[0][-1][kind] for kind in kinds) else "none"
    return " / ".join(f"{3 * count / first:.3g}" for count in (first, *others))


def main(out, *engines):
    print(HEADER)
    for engine in engines or ENGINES:
        folder = Path(out) / engine.replace(" ", "-")
        folder.mkdir(parents=True)
        for name, runs in launch(engine, folder)[0].items():
            failed = [f"{run}: {record['failed'].strip().splitlines()[-1]}" for run, record in runs.items() if "failed" in record]
            if failed:
                print(f"| {engine} | {name} | {failed[0]} |")
                continue
            cell = ENGINES[engine].cells[name]
            errors = [relative_error(runs[schedule], runs["reference"]) for schedule in ("joint", "sequential")]
            errors.append(relative_error(runs["reference"], runs["unpatched"]))
            cells = (
                *(f"{error:.1e}" for error in errors),
                calls(runs, cell, "allgather"),
                calls(runs, cell, "reducescatter", "allreduce"),
            )
            print(f"| {engine} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
