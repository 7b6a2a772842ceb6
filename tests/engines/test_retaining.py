"""Retained graphs on every engine that can have them, on two CPU ranks, one launch (retain_cells.py).

The gradients are those of the training step's own forwards, before the first optimizer step and after it.
"""

import pytest
import torch
from launch import forked
from matrix import CHECKED, HERE, LOOKED_AT, N_RANKS, N_VISITED, RETAIN_CELLS, RETAIN_RUNS, RETAIN_SAMPLES

PLACES = [(engine, cell) for engine, cells in RETAIN_CELLS.items() for cell in cells]
RETAINED = {"exact": "unpatched"} | {run: run.removesuffix(", retained") for run in RETAIN_RUNS if run.endswith(", retained")}
RETAINED |= {LOOKED_AT: "sequential", CHECKED: "joint, knots"}
LINE = "JAGG: graphs of 2 samples of each rollout are retained from here on, "


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The records of all engines, one dict per rank."""
    out = tmp_path_factory.mktemp("retain")
    forked(N_RANKS, HERE / "retain_cells.py", out, cwd=out, env={"DS_ACCELERATOR": "cpu"}, timeout=1800)
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(N_RANKS)]


@pytest.fixture(params=PLACES, ids=[", ".join(place) for place in PLACES])
def ranks(launched, request):
    engine, cell = request.param
    found = [records[engine][cell] for records in launched]
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
def test_no_forward_runs_and_nothing_is_gathered_before_the_first_optimizer_step(ranks, run):
    n_retained, n_looked = 2 * N_VISITED, int(run == LOOKED_AT)
    for rank, runs in enumerate(ranks):
        found, own = runs[run], runs[RETAINED[run]]
        assert own["forwards"] == [1] * RETAIN_SAMPLES * N_VISITED
        first = [n_looked] + [0] * (n_retained - 1)
        assert found["forwards"] == first + [1] * (len(own["forwards"]) - n_retained)
        assert not any(found["gathers"][n_looked:n_retained])
        assert found["said"].count(LINE) == (rank == 0)


def test_the_ranks_agree(ranks):
    for run, record in ranks[0].items():
        assert torch.equal(record["weights"], ranks[1][run]["weights"])
