"""`python upstream/bench.py` on models too small to time: what is measured, counted and derived, never how long it takes."""

import argparse
import json
import subprocess
import sys
from itertools import pairwise, product
from statistics import median

import bench
import pytest
import torch
from bench_models import ALL, ALL_KNOTS, build, set_checkpointing
from bench_rows import cases
from launch import ROOT
from results import command_line

from jagg_patch import JaggError
from jagg_patch.loop import knots

SIZE = ["--layers", "1", "--heads", "1", "--side", "2", "--text", "2"]
MODES = ("jagg", "skip", "sequential", "retain")
FRACS = (0.6, 1.0)
RECOMPUTE = {"on": 1, "half": 0.5, "off": 0}
SMALL = {
    *product(["on"], [(20, 20)], [3, 4, 6, 8, 10], FRACS, MODES),
    *product(["half", "off"], [(20, 20)], [4], FRACS, MODES),
    *product(["on", "half", "off"], [(15, 9)], [4], [0.6], MODES),
    *product(["on"], [(24, 24)], [8], [1.0], MODES),
}
KNOTS = {
    (20, 4): [0, 12, 17, 19],
    (20, 5): [0, 11, 16, 18, 19],
    (20, 7): [0, 7, 12, 15, 17, 18, 19],
    (15, 4): [0, 10, 13, 14],
    (15, 5): [0, 7, 11, 13, 14],
    (15, 7): [0, 6, 9, 11, 12, 13, 14],
}
FULL_SIZE = {*product(["on"], [(20, 20)], [4], FRACS, MODES), *product(["on"], [(24, 24)], [8], [1.0], MODES)}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A function that runs `python upstream/bench.py` with the smallest model and returns its folder."""

    def run_it(*flags):
        out = tmp_path_factory.mktemp("bench")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["bench.py", "--out", str(out), *SIZE, *flags])
            command_line(bench.__doc__, bench.add_arguments, bench.run)
        return out

    return run_it


@pytest.fixture(scope="module")
def out(command):
    return command("--rounds", "2")


@pytest.fixture(scope="module")
def results(out):
    return read(out)


def read(out):
    return json.loads((out / "bench.json").read_text())


def parsed(*flags):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(flags)


def keys(rows):
    return [
        (row["checkpointing"], (row["trainable"], row["visited"]), size, row["frac"], row["mode"])
        for row in rows
        for size in row["group_sizes"]
    ]


def cell(row):
    return row["checkpointing"], row["trainable"], row["visited"]


def compared(results):
    return [row for row in results["rows"] if row["mode"] != "exact"]


def is_retained(row):
    return row["mode"].endswith("retain")


def exact(results, row):
    return next(other for other in results["rows"] if other["mode"] == "exact" and cell(other) == cell(row))


def find(results, *key):
    (row,) = (row for row in results["rows"] if key in keys([row]))
    return row


def test_every_row_is_there(results):
    found = keys(results["rows"])
    assert len(found) == len(set(found)) and set(found) == SMALL
    assert results["dropped"] == [] and results["rounds"] == 2
    assert results["made_by"]["command"] == (
        "python upstream/bench.py --out OUT --device cpu --rounds 2 --layers 1 --heads 1 --side 2 --text 2"
    )
    for mode in ("exact", "exact, retain"):
        exact_rows = [row for row in results["rows"] if row["mode"] == mode]
        assert {cell(row) for row in exact_rows} == {cell(row) for row in results["rows"]} and len(exact_rows) == 8
    with_knots = [row for row in results["rows"] if row["knots"]]
    assert [(row["trainable"], len(row["knots"]), row["mode"]) for row in with_knots] == [
        (n_steps, n_knots, mode) for n_steps in (20, 15) for n_knots in (4, 5, 7) for mode in MODES
    ]
    for row in with_knots:
        assert row["knots"] == KNOTS[row["visited"], len(row["knots"])] and row["checkpointing"] == "on"
    for row in results["rows"]:
        for name in ("rollout", "update", "training_step"):
            assert len(row[f"{name}_seconds"]) == 2 and min(row[f"{name}_seconds"]) > 0
        assert not row["out_of_memory"]


def passes(row):
    """`(recorded, unrecorded)` forwards of an update, or, if its graphs are retained, of what is recorded in the rollout.

    Between two knots that share a backward call nothing else is run when forwards are skipped, between others one is, without a
    graph; knots are paired from each group's first on, and a group ends where two are neighbours.
    """
    if row["knots"]:
        n_knots, between, is_paired = len(row["knots"]), 0, True
        for one, next_ in pairwise(row["knots"]):
            n_between = next_ - one - 1
            between += min(n_between, 0 if is_paired else 1) if row["mode"] == "skip" else n_between
            is_paired = not is_paired or not n_between
        return n_knots, between
    n_grouped = sum(row["groups"])
    ends = sum(min(size, 2) for size in row["groups"])
    return row["visited"] - n_grouped + ends, 0 if row["mode"] == "skip" else n_grouped - ends


def test_forwards_and_backward_passes_are_counted(results):
    for row in results["rows"]:
        recorded, unrecorded = passes(row)
        forwards = 0 if is_retained(row) else recorded + unrecorded
        assert (row["forwards"], row["backward_passes"]) == (forwards, recorded)
    long = [find(results, "on", (24, 24), 8, 1.0, mode) for mode in MODES]
    assert [row["groups"] for row in long] == [[8, 8, 8]] * 4
    assert [(row["forwards"], row["backward_passes"]) for row in long] == [(24, 6), (6, 6), (24, 6), (0, 6)]


def test_retained_graphs_alone_are_on_the_device_and_on_the_host(command):
    results = read(command("--rounds", "1", "--retained"))
    of_a_case = ["exact", "exact, retain", "exact, on host"], ["retain", "on host"]
    modes = {}
    for row in results["rows"]:
        modes.setdefault((*cell(row), row["frac"], tuple(row["group_sizes"]), tuple(row["knots"])), []).append(row["mode"])
        assert row["page_faults"] >= 0 and (row["mode"] == "exact" or row["forwards"] == 0)
    assert all(found in of_a_case for found in modes.values()) and len(modes) > 8
    assert results["made_by"]["command"].startswith("python upstream/bench.py --out OUT --retained --device cpu")


def test_only_named_cases_stand_beside_their_exact_ones(command):
    results = read(command("--rounds", "1", "--retained", "--only", "off 9 of 15 W=4"))
    assert [row["row"].split() for row in results["rows"]] == [
        "off 9 of 15 exact".split(),
        "off 9 of 15 exact, retained".split(),
        "off 9 of 15 exact, on host".split(),
        "off 9 of 15 W=4 frac 0.6 JAGG, retained".split(),
        "off 9 of 15 W=4 frac 0.6 on host".split(),
    ]
    assert " --only 'off 9 of 15 W=4' " in results["made_by"]["command"]


def test_the_limit_is_that_of_the_measured_calls(results):
    for row in compared(results):
        seconds = results["call_seconds"][row["checkpointing"]]
        assert set(seconds) == {"unrecorded", "recorded", "backward"} and min(seconds.values()) > 0
        recorded, unrecorded = passes(row)
        with_backward = seconds["recorded"] + seconds["backward"]
        before = row["visited"] * with_backward
        rollout = (row["trainable"] + 1) * seconds["unrecorded"]
        whole = rollout + recorded * with_backward
        if is_retained(row):
            after, whole = recorded * seconds["backward"], whole - recorded * seconds["unrecorded"]
        else:
            after = recorded * with_backward + unrecorded * seconds["unrecorded"]
            whole += unrecorded * seconds["unrecorded"]
        assert row["update"]["limit"] == pytest.approx(before / after)
        assert row["training_step"]["limit"] == pytest.approx((rollout + before) / whole)


def test_the_prediction_is_the_cost_models(results):
    for row in compared(results):
        recorded, unrecorded = passes(row)
        step = 3 + RECOMPUTE[row["checkpointing"]]
        before, rollout = row["visited"] * step, row["trainable"] + 1
        after = recorded * (step - 1) if is_retained(row) else recorded * step + unrecorded
        assert row["update"]["predicted"] == pytest.approx(before / after)
        assert row["training_step"]["predicted"] == pytest.approx((rollout + before) / (rollout + after))
    published = [find(results, "on", (20, 20), 4, frac, mode) for frac in FRACS for mode in ("jagg", "skip")]
    assert [round(row["update"]["predicted"], 2) for row in published] == [1.29, 1.43, 1.6, 2.0]
    assert find(results, "on", (24, 24), 8, 1.0, "skip")["update"]["predicted"] == 4


def test_the_ratio_is_to_the_exact_row_of_the_same_round(results):
    for row in compared(results):
        for part in ("update", "training_step"):
            before, after = exact(results, row)[f"{part}_seconds"], row[f"{part}_seconds"]
            ratios = [then / now for then, now in zip(before, after, strict=True)]
            assert row[part]["median"] == pytest.approx(median(ratios))
            assert min(ratios) <= row[part]["q1"] * 1.0001 and row[part]["q3"] <= max(ratios) * 1.0001


def test_own_time_is_that_of_exact_steps(results):
    for row in results["rows"]:
        has_exact = sum(row["groups"]) < row["visited"]  # knots that are neighbours at the end are exact
        assert ("own_share" in row) == (has_exact and not is_retained(row))
        assert row.get("own_share", 1) > 0


def test_the_table_has_the_numbers(command, capsys):
    out = command("--model", "flux", "--rounds", "1")
    results, printed = read(out), capsys.readouterr().out
    assert set(keys(results["rows"])) == FULL_SIZE
    for row in compared(results):
        (line,) = (line for line in printed.splitlines() if line.startswith(row["row"]))
        for part in ("update", "training_step"):
            assert f"{row[part]['median']:.3f}" in line and f"{row[part]['limit']:.3f}" in line


def test_qwen_and_what_does_not_fit_is_dropped(command, capsys):
    results = read(command("--model", "qwenimage", "--rounds", "1"))
    assert set(keys(results["rows"])) == FULL_SIZE
    capsys.readouterr()
    short = read(command("--model", "qwenimage", "--seconds", "1e-9"))
    rows = [row["row"] for row in results["rows"]]
    assert [row["row"] for row in short["rows"]] == rows[:2] and short["dropped"] == rows[2:] and short["rounds"] == 1
    assert capsys.readouterr().out.count("dropped, for lack of time") == len(rows) - 2


def test_out_of_memory_is_a_row(command, monkeypatch):
    def proxy(output, targets, receive):
        if len(targets) == 2:
            raise torch.cuda.OutOfMemoryError("two graphs")
        return original(output, targets, receive)

    original = knots.proxy
    monkeypatch.setattr(knots, "proxy", proxy)
    results = read(command("--model", "flux", "--rounds", "2"))
    assert set(keys(results["rows"])) == FULL_SIZE
    for row in results["rows"]:
        failed = row["mode"] in ("jagg", "skip", "retain")
        assert row["out_of_memory"] == failed and len(row["update_seconds"]) == (0 if failed else 2)
        assert ("limit" in row["update"]) == (not failed)


def test_a_row_that_does_not_skip_is_no_row(command, monkeypatch):
    monkeypatch.setattr("jagg_patch.loop.skipping.Skipping.is_agreed", lambda skipping, device: False)
    with pytest.raises(SystemExit, match=r"skipped +: an update took \(2[04], \d+\) .*planned were"):
        command("--model", "flux", "--rounds", "1")


def test_all_is_the_whole_product():
    found = [(case.checkpointing, case.steps[0], size, case.frac) for case in cases(ALL, ()) for size in case.group_sizes]
    assert sorted(found) == sorted(product(RECOMPUTE, [20, 24, 15], [3, 4, 6, 8, 10], FRACS))
    found = [(case.checkpointing, case.visited, len(case.knots)) for case in cases((), ALL_KNOTS) if case.groups]
    assert sorted(found) == sorted(product(RECOMPUTE, [20, 15], [4, 5, 7]))


@pytest.mark.parametrize("share, recomputed", [(1, 4), (0.5, 2), (0, 0)])
def test_checkpointing_is_that_share_of_the_blocks(share, recomputed):
    model, _ = build("flux", parsed("--out", ".", *SIZE[2:], "--layers", "2"))
    for before in (1, 0.5, 0):
        set_checkpointing(model, before)
        set_checkpointing(model, share)
        blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
        assert [type(block).__name__ == "CheckpointWrapper" for block in blocks] == [True] * recomputed + [False] * (
            4 - recomputed
        )


def test_it_says_what_is_missing(tmp_path, monkeypatch):
    out = ["--out", str(tmp_path / "out")]
    with pytest.raises(JaggError, match="for a GPU\nadd --device cuda"):
        bench.run(parsed(*out, "--model", "flux"))
    with pytest.raises(JaggError, match="at least"):
        bench.run(parsed(*out, "--layers", "0"))
    with pytest.raises(JaggError, match="no case has 'none' in its name\nthere are on 20, "):
        bench.run(parsed(*out, "--only", "none"))
    for seconds in ("0", "-1", "nan", "inf"):
        with pytest.raises(JaggError, match="is no time"):
            bench.run(parsed(*out, "--seconds", seconds))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(JaggError, match="no CUDA device"):
        bench.run(parsed(*out, "--device", "cuda"))
    for name in ("matplotlib", "diffusers"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(JaggError, match=f"needs {name}\npip install"):
            bench.run(parsed(*out))
    assert not (tmp_path / "out").exists()


def test_the_picture(out):
    assert (out / "bench.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_module_needs_torch_alone_until_it_runs():
    script = "import sys, bench; print(*{'diffusers', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "upstream", check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
