"""Engines x schedules x checkpointing x weights on two CPU ranks, one launch (matrix_cells.py).

The update is that of two exact backwards a group, and the collectives are those of as many backwards as the schedule says.
"""

import pytest
import torch
from matrix import (
    ENGINES,
    GROUPS,
    KNOT_RUNS,
    KNOTS,
    N_BLOCKS,
    N_SAMPLES,
    PASSES_AT,
    PATCHED,
    by_group,
    launch,
    relative_error,
)

from jagg_patch.engines.deepspeed import NO_REPLAY


PLACES = [(engine, cell) for engine, row in ENGINES.items() for cell in row.cells]


def each(places):
    return pytest.mark.parametrize(("engine", "cell"), places, ids=[", ".join(place) for place in places], scope="module")


every_cell = each(PLACES)


@pytest.fixture(scope="module")
def launched(request, tmp_path_factory):
    """`{engine: its records, or the error}`, of those engines that tests were selected of."""
    selected = {item.callspec.params["engine"] for item in request.session.items if item.path == request.path}
    return launch([engine for engine in ENGINES if engine in selected], tmp_path_factory.mktemp("engines"))


@pytest.fixture
def ranks(engine, launched):
    """The records of all cells of an engine, one dict per rank."""
    if isinstance(launched[engine], Exception):
        raise launched[engine]
    return launched[engine]


@pytest.fixture
def records(ranks, engine, cell):
    """Those of one cell; skips where the engine itself can't run it."""
    message, known = ranks[0][cell]["unpatched"].get("failed", ""), ENGINES[engine].fails_with
    if known and known in message:
        pytest.skip(f"the unpatched {engine}: {message.splitlines()[0]}")
    found = [rank[cell] for rank in ranks]
    for runs in found:
        for run in runs.values():
            assert "failed" not in run, run["failed"]
    return found


def sizes(engine, cell):
    return [len(group) for group in GROUPS[ENGINES[engine].cells[cell].frac]] * N_SAMPLES


def n_backwards(run, size):
    """How many autograd calls that reach the model a group of `size` comes to."""
    return {"unpatched": size, "joint": 1, "sequential": min(size, 2)}[run]


@every_cell
def test_the_self_check_agrees(records, engine, cell):
    """In each window on another group, on the first with training's own gradient where the engine has that by itself.

    Not on DeepSpeed, which is said.
    """
    windows = ENGINES[engine].cells[cell].windows
    for runs in records:
        for label in PATCHED:
            check_agreement(runs[label]["checks"], engine, cell, windows)


def check_agreement(checks, engine, cell, n_checks):
    accumulates = ENGINES[engine].accumulates or ENGINES[engine].cells[cell].accumulates
    if engine.startswith("ZeRO"):
        assert checks == [NO_REPLAY]
        return
    errors, are_own = zip(*checks, strict=True)
    assert max(errors) <= 2e-7 and are_own == (not accumulates, *[False] * (n_checks - 1))


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@every_cell
def test_the_update_is_that_of_two_exact_backwards_a_group(records, schedule):
    for runs in records:
        assert relative_error(runs[schedule], runs["reference"]) <= 1e-6
        assert relative_error(runs[schedule], runs["unpatched"]) > 1e-3


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@each([(engine, cell) for engine, cell in PLACES if ENGINES[engine].cells[cell].checkpointing])
def test_groups_of_two_are_exact(records, schedule):
    for runs in records:
        assert relative_error(runs[f"{schedule}, groups of two"], runs["unpatched"]) <= 1e-6


with_knots = each([(engine, cell) for engine, cell in PLACES if ENGINES[engine].cells[cell].has_knots])


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@with_knots
def test_the_update_with_knots_is_that_of_an_exact_backward_a_knot(records, schedule):
    for runs in records:
        found = runs[f"{schedule}, knots"]
        assert relative_error(found, runs["reference, knots"]) <= 1e-6
        assert relative_error(found, runs["reference"]) > 1e-3
        assert [calls["passes"] for calls in found["backwards"]] == PASSES_AT[schedule] * N_SAMPLES
        assert found["stats"]["backward_passes"] == len(KNOTS) * N_SAMPLES


@with_knots
def test_the_self_check_agrees_on_knots(records, engine, cell):
    for runs in records:
        for label in KNOT_RUNS:  # one group has them all
            check_agreement(runs[label]["checks"], engine, cell, 1)


@every_cell
def test_the_ranks_agree_having_trained_different_steps(records):
    assert records[0]["unpatched"]["visited"] != records[1]["unpatched"]["visited"]
    for run, record in records[0].items():
        assert torch.equal(record["weights"], records[1][run]["weights"])


@every_cell
def test_two_backward_passes_a_group_enter_the_model(records, engine, cell):
    groups = sizes(engine, cell)
    for runs in records:
        for run, limit in (("unpatched", 3), ("joint", 2), ("sequential", 2)):
            counted = by_group(runs[run], ENGINES[engine].cells[cell])
            assert [calls["passes"] for calls in counted] == [min(size, limit) for size in groups]


@pytest.mark.parametrize("run", ["unpatched", "joint", "sequential"])
@every_cell
def test_a_group_s_collectives_are_those_of_its_backwards(records, engine, cell, run):
    """Joint: of one exact backward, sequential: of two, unpatched: of as many as it has steps.

    Not so: FSDP2 gathers a block for each of the two graphs, unless its input has no gradient, but reduces once; and first
    what earlier micro-steps have left. ZeRO-2 reduces something at every micro-step. ZeRO-3 gathers parameter by parameter, as
    often as its version and the checkpointing make it, and for the second graph what it has let go of since the first.
    """
    row, groups = ENGINES[engine], sizes(engine, cell)
    settings = row.cells[cell]
    for runs in records:
        exact, counted = (by_group(runs[name], settings) for name in ("unpatched", run))
        for kind in ("allgather", "reducescatter", "allreduce"):
            calls = [counts[kind] for counts in counted]
            once = row.calls_of(kind, settings)
            if (engine, kind) == ("ZeRO-3", "allgather"):
                once = exact[groups.index(1)][kind]
                assert once > 0
            expected = [once * n_backwards(run, size) for size in groups]
            if kind != "allgather" and (row.accumulates or settings.accumulates):
                expected = [0] * (len(groups) - 1) + [once]
            if (engine, run, kind) == ("FSDP2", "joint", "allgather"):
                expected = [once if size == 1 else 2 * once - settings.lora for size in groups]
            if (engine, run, kind, cell) == ("FSDP2", "joint", "reducescatter", "accumulation"):
                expected[-1] += N_BLOCKS
            if (engine, kind) == ("ZeRO-2", "allreduce"):
                expected = groups
            if (engine, run, kind) == ("ZeRO-3", "joint", "allgather"):
                assert all(n == once if size == 1 else once <= n < 2 * once for n, size in zip(calls, groups, strict=True))
            else:
                assert calls == expected
