"""Run the cells of every engine, or of those named, and print the table of README.md, which says what its columns are.

usage: python tests/engines/report.py OUT [ENGINE...], with the Python that the tests use
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[number]) for number in (1, 2)]
from matrix import ENGINES, by_group, launch, relative_error  # noqa: E402

HEADER = """\
| engine | cell | joint | sequential | grouping | all-gathers | reductions |
|---|---|---|---|---|---|---|"""


def calls(runs, cell, *kinds):
    groups = [by_group(runs[run], cell) for run in ("unpatched", "joint", "sequential")]
    first, *others = [sum(counted[0][kind] for kind in kinds) for counted in groups]
    if not first:
        return "one a window" if any(groups[0][-1][kind] for kind in kinds) else "none"
    return " / ".join(f"{3 * count / first:.3g}" for count in (first, *others))


def main(out, *engines):
    unknown = [engine for engine in engines if engine not in ENGINES]
    if unknown:
        raise SystemExit(f"no engine {', '.join(unknown)}: there are {', '.join(ENGINES)}")
    print(HEADER)
    n_failed = 0
    for engine in engines or ENGINES:
        folder = Path(out).resolve() / engine.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        records = launch([engine], folder)[engine]
        if isinstance(records, Exception):
            raise records
        for name, runs in records[0].items():
            failed = [f"{run}: {record['failed'].strip().splitlines()[-1]}" for run, record in runs.items() if "failed" in record]
            if failed:
                print(f"| {engine} | {name} | {failed[0]} |")
                n_failed += 1
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
    return f"{n_failed} cells could not be run: tests/run.sh installs what they need" if n_failed else None


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    sys.exit(main(*sys.argv[1:]))
