"""Retained graphs on every engine that can have them, on two CPU ranks, one launch (retain_cells.py).

The gradients are those of the training step's own forwards, before the first optimizer step and after it.
"""

import re

import pytest
import torch
from launch import forked
from matrix import CHECKED, ENGINES, HERE, KEEPING, LOOKED_AT, N_RANKS, N_VISITED, RETAIN_CELLS, RETAIN_RUNS, RETAIN_SAMPLES

PLACES = [(engine, cell) for engine, cells in RETAIN_CELLS.items() for cell in cells]
RETAINED = {"exact": "unpatched"} | {run: run.removesuffix(", retained") for run in RETAIN_RUNS if run.endswith(", retained")}
RETAINED |= {LOOKED_AT: "sequential", CHECKED: "joint, knots"}
LINE = "JAGG: graphs of {} samples of each rollout are retained from here on, "


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The records of all engines, one dict per rank."""
    out = tmp_path_factory.mktemp("retain")
    forked(N_RANKS, HERE / "retain_cells.py", out, cwd=out, env={"DS_ACCELERATOR": "cpu"}, timeout=1800)
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(N_RANKS)]


@pytest.fixture(params=PLACES, ids=[", ".join(place) for place in PLACES])
def place(request):
    return request.param


def require_runnable(engine, message):
    """Skip where the engine itself can't run."""
    known = ENGINES[engine].fails_with
    if known and known in message:
        pytest.skip(f"the unpatched {engine}: {known}")


@pytest.fixture
def ranks(launched, place):
    engine, cell = place
    found = [records[engine][cell] for records in launched]
    require_runnable(engine, found[0]["unpatched"].get("failed", ""))
    for runs in found:
        for run in runs.values():
            assert "failed" not in run, run["failed"]
    return found


@pytest.mark.parametrize("run", RETAINED)
def test_gradients_are_those_of_own_forwards(ranks, run):
    for runs in ranks:
        pairs = list(zip(runs[run]["gradients"], runs[RETAINED[run]]["gradients"], strict=True))
        assert pairs and all((found - own).norm() <= 1e-6 * own.norm() for found, own in pairs)


@pytest.mark.parametrize("run", RETAINED)
def test_no_forward_runs_and_nothing_is_gathered_before_the_first_optimizer_step(ranks, place, run):
    engine, cell = place
    n_samples = RETAIN_SAMPLES if cell == "accumulation" and engine != "DDP" else 2  # there the last may sync
    n_looked = int(run == LOOKED_AT)
    n_retained = n_samples * N_VISITED
    for rank, runs in enumerate(ranks):
        found, own = runs[run], runs[RETAINED[run]]
        assert own["forwards"] == [1] * RETAIN_SAMPLES * N_VISITED
        first = [n_looked] + [0] * (n_retained - 1)
        assert found["forwards"] == first + [1] * (len(own["forwards"]) - n_retained)
        assert not any(found["gathers"][n_looked:n_retained])
        assert found["said"].count(LINE.format(n_samples)) == (rank == 0)


def test_the_ranks_agree(ranks):
    for run, record in ranks[0].items():
        assert torch.equal(record["weights"], ranks[1][run]["weights"])


@pytest.mark.parametrize("engine", KEEPING)
def test_what_a_model_keeps_of_a_sample_stops_every_rank_also_where_gradients_add_up_unreduced(launched, engine):
    for records in launched:
        require_runnable(engine, records[engine]["keeping"])
        assert re.search(r"% off the one .*\nthe rollout's graph isn't the training forward's", records[engine]["keeping"])


@pytest.mark.parametrize(("run", "own"), [("exact", "unpatched"), ("joint, knots, retained", "joint, knots")])
def test_ddp_reduces_gradients_also_where_an_accumulation_ends_sooner_than_the_first_did(launched, run, own):
    """With a sample that was to be retained: its last micro-step runs its own forward."""
    for records in launched:
        found, expected = records["sooner"][run], records["sooner"][own]
        pairs = list(zip(found["gradients"], expected["gradients"], strict=True))
        assert len(pairs) == 2 and all((one - other).norm() <= 1e-6 * other.norm() for one, other in pairs)
        assert found["forwards"][:N_VISITED] == [0] * (N_VISITED - 1) + [1]
        assert torch.equal(found["weights"], launched[0]["sooner"][run]["weights"])
