"""The pages' numbers are those of the committed result files, and each file says what made it."""

import json
import re
import sys
from itertools import product
from pathlib import Path
from statistics import fmean, median

import pytest

from jagg_patch.__main__ import main

ROOT = Path(__file__).parents[2]


def page(name):
    return (ROOT / name).read_text()


def result(name):
    return json.loads((ROOT / f"upstream/{name}.json").read_text())


def rows(name, **wanted):
    return [row for row in result("probe-results/probe")[name] if all(row[key] == value for key, value in wanted.items())]


def cosines(**wanted):
    """`mean over the groups (of the worst group)` of the mean cosine over prompt groups."""
    means = [row["cosine"]["mean"] for row in rows("groups", group_size=4, **wanted)]
    return f"{fmean(means):.3f} ({min(means):.3f})"


def update_errors(frac, **wanted):
    (row,) = rows("updates", group_size=4, frac=frac, **wanted)
    error = row["relative_error"]
    return f"{error['mean']:.3f} ± {error['sd'] / row['n'] ** 0.5:.3f}"


def probe_line(label, **wanted):
    interpolate, endpoints = (wanted | {"aggregation": name, "shift": 3.0} for name in ("interpolate", "endpoints"))
    numbers = [cosines(**interpolate), cosines(**endpoints)]
    numbers += [update_errors(frac, **kind) for kind in (interpolate, endpoints) for frac in (0.6, 1.0)]
    return f"| {label} | {' | '.join(numbers)} |"


PROBE_LINES = [(f"{eta:g}, all 15", dict(eta=eta, visited="all")) for eta in (0.1, 0.3, 0.7, 1.0)]
PROBE_LINES += [("0.7, random 9 of 15", dict(eta=0.7, visited="random")), ("0.7, 9 in a row", dict(eta=0.7, visited="window"))]


@pytest.mark.parametrize(("label", "wanted"), PROBE_LINES, ids=[label for label, _ in PROBE_LINES])
def test_gradient_quality(label, wanted):
    assert probe_line(label, **wanted) in page("upstream/probe-results/README.md")


KNOTS = result("knots-results/knots")["rows"]


def knot_rows(way, **wanted):
    return [row for row in KNOTS if row["way"] == way and all(row[key] == value for key, value in wanted.items())]


def knot_cell(way, **wanted):
    """`cosine (relative error)` of a whole update; nothing where there is no such row."""
    means = [[row[name]["mean"] for name in ("cosine", "relative_error")] for row in knot_rows(way, **wanted)]
    return "".join("{:.3f} ({:.3f})".format(*pair) for pair in means)


def knot_lines():
    """Of the script's own setting by number of knots, then of each setting by the rule."""
    own = dict(eta=0.7, shift=3.0, visited="all")
    for n in range(2, 11):
        cells = [knot_cell(way, passes=n, **own) for way in ("rule", "rule, unmeasured", "best", "published")]
        (row,) = knot_rows("rule", passes=n, **own)
        yield f"| {n} | {' | '.join(cells)} | {', '.join(map(str, row['knots']))} |"
    for visited, name in (("all", "all 15"), ("random", "random 9")):
        for shift, eta in product((1.0, 3.0), (0.3, 0.7, 1.0)):
            cells = [knot_cell("rule", passes=n, eta=eta, shift=shift, visited=visited) for n in (4, 5, 6, 7)]
            yield f"| {eta:g} | {shift:g} | {name} | {' | '.join(cells)} |"


def test_the_gradient_s_quality_with_knots():
    assert "\n".join(list(knot_lines())[:9]) in page("upstream/knots-results/README.md")
    assert "\n".join(list(knot_lines())[9:]) in page("upstream/knots-results/README.md")
    for n, cosine in ((4, 0.977), (5, 0.987), (6, 0.993)):
        assert knot_cell("rule", passes=n, eta=0.7, shift=3.0, visited="all").startswith(f"{cosine} ")
        assert re.search(rf"`JAGG_KNOTS={n}`.*\| {cosine} \|", page("jagg_patch/method/README.md"))


def test_the_rule_s_error_is_near_the_best_set_s():
    """Within a tenth at the script's own noise and shift, within a fourth anywhere."""
    rule, best = (
        {(row["eta"], row["shift"], row["passes"]): row["relative_error"]["mean"] for row in knot_rows(way, visited="all")}
        for way in ("rule", "best")
    )
    ratios = {cell: rule[cell] / best[cell] for cell in best}
    assert max(ratio for (eta, shift, _), ratio in ratios.items() if (eta, shift) == (0.7, 3.0)) < 1.1
    assert max(ratios.values()) < 1.25 and len(ratios) == 6 * 9


PARITY = [(name, arm) for name in ("groups", "knots", "retained") for arm in result(f"parity-results/{name}")["arms"]]


def parity_line(name, arm):
    arms = result(f"parity-results/{name}")["arms"]
    row = arms[arm]

    def number(pair, digits):
        mean, error = pair
        return "not reached" if mean is None else f"{mean:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")

    difference = "" if arm == next(iter(arms)) else number(row["final_reward_minus_baseline"], 4)
    cells = [f"{row['forwards_per_sample']:g}", number(row["final_reward"], 4), difference]
    for unit, digits in (("training_steps", 1), ("forwards", 0), ("seconds", 1)):
        cells.append(number(row[f"{unit}_to_level"], digits))
    return f"| {arm} | {' | '.join(cells)} | {row['seeds_that_reach_the_level']} of 5 |"


@pytest.mark.parametrize(("name", "arm"), PARITY)
def test_reward_parity(name, arm):
    assert parity_line(name, arm) in page("upstream/parity-results/README.md")


@pytest.mark.parametrize(("n_knots", "errors"), [(6, 1.2), (5, 2.1), (4, 3.5)])
def test_how_many_standard_errors_below_all_steps_exact(n_knots, errors):
    difference, error = result("parity-results/knots")["arms"][f"15 steps, {n_knots} knots"]["final_reward_minus_baseline"]
    assert round(-difference / error, 1) == errors


BENCH = result("bench-results/bench")["rows"]
BENCH_CASES = list(dict.fromkeys(row["row"][:29] for row in BENCH if row["mode"] != "exact"))


def bench_line(case, part):
    """Each mode's update or training step: median of the ratio, and in brackets its limit and what the cost model predicts."""
    found = {row["mode"]: row for row in BENCH if row["row"].startswith(case) and row["mode"] != "exact"}
    is_exact = "exact, retain" in found
    cells = [
        "{median:.2f} ({limit:.2f}, {predicted:.2f})".format(**found[mode][part]) if mode in found else ""
        for mode in ("jagg", "skip", "sequential", "exact, retain" if is_exact else "retain")
    ]
    row = next(iter(found.values()))
    placed = ",".join(map(str, row["knots"])) or "+".join(map(str, row["groups"])) or "exact"
    return f"| {' '.join(case.split())} | {placed} | {' | '.join(cells)} |".replace("  ", " ")


@pytest.mark.parametrize("case", BENCH_CASES)
def test_the_bench(case):
    update, training_step = page("upstream/bench-results/README.md").split("The whole training step")
    assert bench_line(case, "update") in update
    assert bench_line(case, "training_step") in training_step


def test_the_demo_s_table():
    sys.path.insert(0, str(ROOT / "upstream"))
    try:
        import demo
    finally:
        sys.path.remove(str(ROOT / "upstream"))
    assert demo.table(result("demo-results/comparison")) in page("README.md")


def test_flow_grpo_fast():
    table = page("jagg_patch/trainers/README.md")
    for row in result("flow-results/fast")["rows"]:
        low, middle, high = (f"{100 * (1 - 1 / ratio):.1f}%" for ratio in row["quartiles"])
        settings = [row["window"], "LoRA" if row["lora"] else "all", *("yes" if row[k] else "no" for k in ("checkpointed", "kl"))]
        predicted = f"{100 * (1 - 1 / row['predicted']):.1f}%"
        assert f"| {' | '.join(map(str, settings))} | {predicted} | {middle} ({low} to {high}) |" in table
        assert row["quartiles"][1] == pytest.approx(median(row["ratios"]))


def test_the_report_of_a_run_of_the_mini_trainer(monkeypatch, capsys):
    """The picture and the table; the log beside them has the version and the settings in every line."""
    log = "upstream/report-results/run.jsonl"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["jagg_patch", "report", log])
    main()
    assert capsys.readouterr().out.strip() in page("jagg_patch/evidence/README.md")


FILES = [
    "bench-results/bench",
    "probe-results/probe",
    "knots-results/knots",
    "parity-results/groups",
    "parity-results/knots",
    "parity-results/retained",
    "demo-results/comparison",
    "flow-results/fast",
    "report-results/made_by",
]


@pytest.mark.parametrize("name", FILES)
def test_each_result_says_what_made_it(name):
    made_by = result(name).get("made_by", result(name))
    assert {"command", "date", "machine", "jagg"} <= set(made_by)
    assert re.search(r"torch", json.dumps(made_by))
    assert name.split("/")[0] in page("upstream/README.md")


if __name__ == "__main__":  # what the pages should say
    print("\n".join(probe_line(label, **wanted) for label, wanted in PROBE_LINES))
    print("\n".join(knot_lines()))
    print("\n".join(bench_line(case, part) for part in ("update", "training_step") for case in BENCH_CASES))
    print("\n".join(parity_line(*which) for which in PARITY))
