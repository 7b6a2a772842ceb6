"""Skipped forwards on every engine, on two CPU ranks, one launch (skip_cells.py).

While the policy hasn't moved since the rollout, the update is that of the same schedule with all forwards; after an optimizer
step it is near it. Where one rank's rollout can't stand for forwards, both run them.
"""

import pytest
import torch
from launch import forked
from matrix import (
    DISAGREEING,
    ENGINES,
    HERE,
    MOVED,
    N_BLOCKS,
    N_RANKS,
    N_SAMPLES,
    N_VISITED,
    N_VISITED_SKIPPING,
    SPOILT,
    relative_error,
)

PLACES = [(engine, cell) for engine, row in ENGINES.items() for cell in row.skip_cells]
WITH_KNOTS = [(engine, "knots") for engine in MOVED]
PREPARING = ("DDP", "accelerate")  # engines whose forward prepares the reduction
GATHERING = ("FSDP1 FULL_SHARD", "FSDP1 HYBRID_SHARD", "FSDP2")
LINE = "JAGG: no forwards are skipped from here on: "


def each(places):
    return pytest.mark.parametrize(("engine", "cell"), places, ids=[", ".join(place) for place in places])


each_schedule = pytest.mark.parametrize("schedule", ["joint", "sequential"])


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The records of all engines, one dict per rank."""
    out = tmp_path_factory.mktemp("skip")
    forked(N_RANKS, HERE / "skip_cells.py", out, cwd=out, env={"DS_ACCELERATOR": "cpu"}, timeout=1800)
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(N_RANKS)]


@pytest.fixture
def ranks(launched, engine, cell):
    """The records of one cell, one dict per rank; skips where the engine itself can't run it."""
    message, known = launched[0][engine][cell]["joint"].get("failed", ""), ENGINES[engine].fails_with
    if known and known in message:
        pytest.skip(f"{engine} without skipped forwards: {message.splitlines()[-1]}")
    found = [records[engine][cell] for records in launched]
    for runs in found:
        for run in runs.values():
            assert "failed" not in run, run["failed"]
    return found


def all_and_skipping(runs, schedule):
    return runs[schedule], runs[f"{schedule}, skipping"]


@each_schedule
@each([*PLACES, *WITH_KNOTS])
def test_the_update_is_that_of_all_forwards(ranks, schedule):
    for runs in ranks:
        full, skipping = all_and_skipping(runs, schedule)
        assert relative_error(skipping, full) <= 1e-6
        assert LINE not in skipping["said"]


@each_schedule
@each(PLACES)
def test_the_plan_s_forwards_are_skipped(ranks, engine, cell, schedule):
    """Both endpoints' at the group's first step and none later, or one more in the last step's own turn: in the sequential
    schedule, and in a micro-step that syncs what its forward has prepared. The run's first sample has all forwards."""
    settings = ENGINES[engine].skip_cells[cell]
    n_exact = int(settings.frac < 1)
    syncs_at_last = not n_exact and engine in PREPARING and (settings.accumulates or ENGINES[engine].accumulates)
    group = [2, *[0] * (N_VISITED_SKIPPING - n_exact - 2), int(schedule == "sequential" or syncs_at_last)]
    n_samples = settings.windows * (1 if settings.autocast else N_SAMPLES)
    planned = [1] * N_VISITED_SKIPPING + (group + [1] * n_exact) * (n_samples - 1)
    for runs in ranks:
        full, skipping = all_and_skipping(runs, schedule)
        assert full["forwards"] == [1] * len(planned)
        assert skipping["forwards"] == planned
        assert skipping["stats"]["skipped_forwards"] == len(planned) - sum(planned) > 0


@each_schedule
@each(WITH_KNOTS)
def test_between_knots_all_forwards_are_skipped_or_all_but_the_look_ahead(ranks, schedule):
    """In joint the first two do, so that both are run at once. The last knot is looked ahead at, and run in its own turn.

    In sequential three steps from one knot to the next are the forwards that a gap needs.
    """
    sample = [2, 0, 1, 0, 0, 1] if schedule == "joint" else [1, 1, 2, 0, 0, 1]
    for runs in ranks:
        full, skipping = all_and_skipping(runs, schedule)
        assert full["forwards"] == [1] * N_VISITED * N_SAMPLES
        assert skipping["forwards"] == [1] * N_VISITED + sample * (N_SAMPLES - 1)
        assert skipping["stats"]["backward_passes"] == 3 * N_SAMPLES


MOVED_OR_SPOILT = [(engine, "moved") for engine in MOVED]
MOVED_OR_SPOILT += [(engine, place) for engine in DISAGREEING for place in SPOILT]


@each([*PLACES, *WITH_KNOTS, *MOVED_OR_SPOILT])
def test_the_ranks_agree(ranks):
    for run, record in ranks[0].items():
        assert torch.equal(record["weights"], ranks[1][run]["weights"])
        assert record["log_probs"] != ranks[1][run]["log_probs"]  # having trained on other samples


@each_schedule
@each([(engine, cell) for engine in GATHERING for cell in ("full, checkpointing", "accumulation")])
def test_a_group_gathers_for_the_forwards_that_it_runs(ranks, schedule):
    """In each forward every block, and the root's weights too in one after a backward that has reached the model: the group's
    first, and in the sequential schedule the last step's own."""
    own = N_BLOCKS + 1 if schedule == "sequential" else 0
    for runs in ranks:
        full, skipping = (run["gathers"][-N_VISITED_SKIPPING:] for run in all_and_skipping(runs, schedule))
        assert full == [N_BLOCKS + 1, *[N_BLOCKS] * (N_VISITED_SKIPPING - 2), own or N_BLOCKS]
        assert skipping == [2 * N_BLOCKS + 1, *[0] * (N_VISITED_SKIPPING - 2), own]


@each_schedule
@pytest.mark.parametrize("cell", ["moved"])
@pytest.mark.parametrize("engine", MOVED)
def test_skipping_goes_on_after_an_optimizer_step(launched, ranks, engine, schedule):
    """The second sample, whose rollout the optimizer step after the first has left behind.

    Endpoints are run as they are. Between them the change since the rollout is taken to be linear in t, so that a part of it is
    missed; the rollout's outputs, taken as they are, miss all of it.
    """
    sample = slice(N_VISITED_SKIPPING, None)
    for records, runs in zip(launched, ranks, strict=True):
        full, skipping = all_and_skipping(runs, schedule)
        stale = records[engine]["moved, stale"][f"{schedule}, skipping"]
        assert skipping["forwards"][sample][:-1] == [2, 0, 0, 0] and LINE not in skipping["said"]
        assert 1e-6 < relative_error(skipping, full) < relative_error(stale, full) / 4
        endpoints = [torch.tensor(run["log_probs"][sample])[[0, -1]] for run in (full, skipping)]
        assert torch.allclose(*endpoints, rtol=0, atol=1e-6)
        drift = [torch.tensor(run["log_probs"][sample])[1:-1] for run in (full, stale)]
        assert 1e-3 < (drift[0] - drift[1]).abs().mean() < 0.1


@each_schedule
@each([(engine, place) for engine in DISAGREEING for place in SPOILT])
def test_one_rank_s_doubt_stops_skipping_on_all(ranks, cell, schedule):
    """Of three samples the first is compared, the second's group is skipped unless there is a doubt by then, and the third's has
    to run all of its forwards, after the early one in which the last endpoint was found to differ."""
    skipped = [2, 0, 0, 0, int(schedule == "sequential")]
    planned = [1] * 5 + skipped + [2, 1, 1, 1, 1] if cell == "a last endpoint" else [1] * 15
    for rank, runs in enumerate(ranks):
        full, skipping = all_and_skipping(runs, schedule)
        assert skipping["forwards"] == planned
        assert skipping["stats"]["skipped_forwards"] == 15 - sum(planned)
        assert relative_error(skipping, full) <= 1e-6
        lines = [line for line in skipping["said"].splitlines() if line.startswith(LINE)]
        assert len(lines) == (rank == 0)
        assert all("rank 1: the rollout's model outputs differ by 20% from the training forward's" in line for line in lines)
