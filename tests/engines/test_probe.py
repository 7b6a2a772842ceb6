"""The probe inside a run, on every engine, on two CPU ranks, one launch (probe_cells.py).

Training goes on bit for bit as if it hadn't been, and what it measures is what `group_backward` comes to on a copy of the model
without an engine. Then which training steps and groups it takes, what it leaves in memory, its failures, and `frac=auto`.
"""

import pytest
import torch
from launch import forked
from matrix import HERE, N_RANKS
from probe_cells import CELLS, FAULTS, FOLLOWED, KINDS, KNOT_SETS, N_SAMPLES, N_VISITED, PARTITIONS, SCRIPT, UNRUNNABLE, ZERO

# Runs with the probe, and those that they are to train like. Zeroed: with zero_grad(set_to_none=False) in the loop.
PAIRS = {
    "frac 0, zeroed, probed": "unpatched",
    "joint, probed": "joint",
    "auto, zeroed, probed": "sequential",
    "skipping, probed": "skipping",
    "knots, probed": "knots",
}
GROUPED = [run for run in PAIRS if not run.startswith("knots")]
PLACES = [(kind, run) for kind in KINDS for run in GROUPED if kind in FOLLOWED or not run.startswith(("auto", "skipping"))]
# With dropout, a run whose order is sorted has other random numbers at each step than the unpatched one, whose numbers they are.
SAME_NUMBERS = [(kind, run) for kind, run in PLACES if not KINDS[kind].dropout or run == "frac 0, zeroed, probed"]


def each(places):
    return pytest.mark.parametrize(("cell", "run"), places, ids=[": ".join(place) for place in places])


every_run = each(PLACES)
WITH_KNOTS = [(kind, "knots, probed") for kind in FOLLOWED]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The records of all cells, one dict per rank."""
    out = tmp_path_factory.mktemp("probe")
    forked(N_RANKS, HERE / "probe_cells.py", out, cwd=out, env={"DS_ACCELERATOR": "cpu"}, timeout=1800)
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(N_RANKS)]


@pytest.fixture
def ranks(launched, cell):
    """Those of one cell; skips where the engine itself can't run."""
    assert set(launched[0]) == set(CELLS)
    found = [records[cell] for records in launched]
    for records in found:
        message = records.get("failed", "")
        if UNRUNNABLE in message:
            pytest.skip(f"the unpatched engine: {UNRUNNABLE}")
        assert not message, message
    return found


def require_same_training(found, expected):
    assert len(found["gradients"]) == len(expected["gradients"])
    assert all(map(torch.equal, found["gradients"], expected["gradients"]))
    for what in ("weights", "buffers", "gradient left", "optimizer", "random numbers"):
        assert torch.equal(found[what], expected[what]), what


def tiles(groups, n_steps):
    """Whether the groups are the steps from the first to the last, each once."""
    steps = [step for group in groups for step in range(group["start"], group["start"] + group["steps"])]
    return steps == [*range(n_steps)]


# -- every engine


@each([*PLACES, *WITH_KNOTS])
def test_training_is_bit_identical(ranks, run):
    for runs in ranks:
        require_same_training(runs[run], runs[PAIRS[run]])
        assert len(runs[run]["gradients"]) == 2 and all(gradient.any() for gradient in runs[run]["gradients"])


@pytest.mark.parametrize("cell", KINDS)
def test_grouped_training_is_not_the_unpatched(ranks):
    for runs in ranks:
        assert not torch.equal(runs["joint"]["weights"], runs["unpatched"]["weights"])


@each(SAME_NUMBERS)
def test_the_numbers_are_those_of_a_copy_without_an_engine(ranks, cell, run):
    """To 1e-6 in half precision too: autocast rounds the copy as it does what the engine runs, and the oracle gets the same s_j.

    FSDP1's own bf16 rounds what a copy can't, each backward pass for itself: the oracle then runs on the engine, as the run does.
    """
    schedule = "joint" if KINDS[cell].rounds and run == "joint, probed" else "sequential"
    for runs in ranks:
        for probe in runs[run]["records"][0]["probe"]:
            expected = runs["references"][probe["group_size"], schedule]
            assert len(probe["groups"]) == len(expected)
            for group, (cosine, error) in zip(probe["groups"], expected, strict=True):
                assert group["cosine"] == pytest.approx(cosine, rel=0, abs=1e-6)
                assert group["relative_error"] == pytest.approx(error, rel=0, abs=1e-6)
                assert 0.6 < cosine < 0.999 and error > 0.05  # neither exact nor unrelated


@every_run
def test_the_record_is_of_the_whole_trajectory(ranks, run):
    n_routed = int(run != "frac 0, zeroed, probed")
    for runs in ranks:
        for number, record in enumerate(runs[run]["records"], 1):
            assert (record["training_step"], record["visited"]) == (number, N_VISITED)
            assert record["groups"] == [3] * n_routed
            assert record["backward_passes"] == N_SAMPLES * (N_VISITED - n_routed)  # the probe's own aren't among them
            assert record["backward_passes_saved"] == N_SAMPLES * n_routed
            assert min(record[f"{part}_seconds"] for part in ("rollout", "update", "probe")) > 0
            own, other = record["probe"]
            assert (own["group_size"], other["group_size"]) == tuple(PARTITIONS)
            assert [group["routed"] for group in own["groups"]] == [True, False] if n_routed else [False, False]
            assert not any(group["routed"] for group in other["groups"])
            for probe in (own, other):
                assert tiles(probe["groups"], N_VISITED)
                timesteps = [t for group in probe["groups"] for t in group["timesteps"]]
                assert timesteps == sorted(set(timesteps), reverse=True) and len(timesteps) == N_VISITED


@every_run
def test_the_ranks_agree_on_different_samples(ranks, run):
    def read(records, name):
        return [[group[name] for probe in record["probe"] for group in probe["groups"]] for record in records[run]["records"]]

    for name in ("cosine", "relative_error", "routed"):
        assert read(ranks[0], name) == read(ranks[1], name)
    assert read(ranks[0], "timesteps") != read(ranks[1], "timesteps")


@pytest.mark.parametrize("cell", FOLLOWED)
def test_the_numbers_with_knots_are_those_of_a_copy_without_an_engine(ranks):
    """Of the first training step: the gradient of all steps together, with the run's knots and with those of groups of three."""
    for runs in ranks:
        record, _ = runs["knots, probed"]["records"]
        assert tuple(record["knots"]) == (0, 3, 5) and [tuple(row["knots"]) for row in record["probe"]] == [*KNOT_SETS]
        assert [row["group_size"] for row in record["probe"]] == [None, 3]
        assert record["backward_passes"] == N_SAMPLES * 3
        for row in record["probe"]:
            expected = runs["references with knots"][tuple(row["knots"])]
            assert (row["cosine"], row["relative_error"]) == pytest.approx(expected, rel=0, abs=1e-6)
            assert 0.6 < row["cosine"] < 0.999 and row["relative_error"] > 0.05
    values = [[(row["cosine"], row["relative_error"]) for row in runs["knots, probed"]["records"][0]["probe"]] for runs in ranks]
    assert values[0] == values[1]


@pytest.mark.parametrize("cell", FOLLOWED)
def test_the_numbers_are_those_without_skipped_forwards(ranks):
    """The probe's sample is the first, which has all of its forwards in the first training step, and not in the second."""
    for runs in ranks:
        skipping, full = (runs[run]["records"] for run in ("skipping, probed", "joint, probed"))
        assert [record["forward_passes_saved"] for record in skipping] == [N_SAMPLES - 1, N_SAMPLES]
        for record, expected in zip(skipping, full, strict=True):
            groups, others = (
                [group for probe in probes for group in probe["groups"]] for probes in (record["probe"], expected["probe"])
            )
            for name in ("cosine", "relative_error"):
                assert [group[name] for group in groups] == pytest.approx([group[name] for group in others], rel=0, abs=1e-6)


# -- which training steps, which groups


@pytest.mark.parametrize("cell", ["turns"])
def test_other_group_sizes_take_turns(ranks):
    """Nine visited steps. W=5 and 6 come to W=4's groups, W=3's are the run's own: beside W=4 there is W=8, all nine steps."""
    for records in [runs["records"] for runs in ranks]:
        assert [bool(record["probe"]) for record in records] == [False, True, False, True]
        assert [record["probe_seconds"] > 0 for record in records] == [False, True, False, True]
        for record, (size, steps) in zip(records[1::2], ((4, [5, 4]), (8, [9])), strict=True):
            own, other = record["probe"]
            assert (own["group_size"], [group["steps"] for group in own["groups"]]) == (3, [3, 3, 3])
            assert [group["routed"] for group in own["groups"]] == [True, False, False]
            assert (other["group_size"], [group["steps"] for group in other["groups"]]) == (size, steps)
            assert tiles(own["groups"], 9) and tiles(other["groups"], 9)


@pytest.mark.parametrize("cell", ["groups of two"])
def test_groups_of_two_are_exact(ranks):
    for runs in ranks:
        (record,) = runs["records"]
        own, other = record["probe"]
        assert [group["steps"] for group in own["groups"]] == [2, 2, 2] and record["backward_passes_saved"] == 0
        for group in own["groups"]:
            assert group["cosine"] == pytest.approx(1, rel=0, abs=1e-12) and group["relative_error"] <= 1e-6
        assert all(group["relative_error"] > 0.05 for group in other["groups"])


@pytest.mark.parametrize(
    ("cell", "n_steps", "n_probes"),
    [
        ("two steps of the optimizer", 4, 1),
        ("a step after each sample", 4, 1),
        ("no zeroing", 2, 1),
        ("no step of the optimizer", 0, 0),
    ],
)
def test_optimizers_that_step_otherwise(ranks, cell, n_steps, n_probes):
    """Two training steps: the probe is at the first optimizer step of each, or not at all."""
    for runs in ranks:
        require_same_training(runs["probed"], runs["plain"])
        assert runs["probed"]["gradient left"].any() == cell.startswith("no ")
        assert len(runs["probed"]["gradients"]) == n_steps
        for record in runs["probed"]["records"]:
            assert bool(record["probe"]) == (record["probe_seconds"] > 0) == bool(n_probes)


@pytest.mark.parametrize("cell", [f"memory, {name}" for name in FOLLOWED])
def test_nothing_is_kept(ranks):
    """Neither what was recorded nor the gradients that were set aside are there any more when the optimizer steps."""
    for runs in ranks:
        assert runs["probed"] == runs["plain"]
        assert [step["latents"] for step in runs["probed"]] == [0, 0]


# -- faults


@pytest.mark.parametrize("cell", FAULTS)
def test_a_probe_that_fails_ends_the_training_step(ranks, cell):
    """With its own error, and before the optimizer steps; a trainer that goes on is stopped, and again.

    On FSDP1 the gradient can't be put back: a failed forward or backward leaves it with gathered weights, and unable to run.
    """
    engine, place, swallows = FAULTS[cell]
    for found in ranks:
        first, *others = found["messages"]
        assert first == f"MemoryError: in the {place}"
        assert [other.partition(" although an optimizer step had failed")[0] for other in others] == [
            "JaggError: the optimizer was about to step",
            "JaggError: the training step ended",
        ] * swallows
        assert found["optimizer steps"] == 0
        assert found["kept"] or engine.startswith("FSDP1")


@pytest.mark.parametrize("cell", ["no backward"])
def test_a_step_without_a_backward_is_named(ranks):
    for found in ranks:
        assert found["message"].startswith("probe: no gradient arrived for visited step 4 of the training step's first sample\n")
        assert not found["trained"]


@pytest.mark.parametrize("cell", [f"ZeRO-{engine.stage}" for engine in ZERO])
def test_deepspeed_is_refused(ranks):
    for found in ranks:
        assert found["message"].startswith("the probe can't run: DeepSpeed")
        assert not found["trained"]


# -- frac=auto


@pytest.mark.parametrize("cell", ["auto"])
def test_auto_follows_the_probe_on_all_ranks(ranks):
    """Up, down to none, where the gradient is the exact one, and up again: as with the groups set by hand, bit for bit."""
    for runs in ranks:
        assert [record["groups"] for record in runs["auto"]["records"]] == [[3] * n_routed for _, n_routed in SCRIPT]
        assert len(runs["auto"]["weights"]) == len(SCRIPT)
        assert all(map(torch.equal, runs["auto"]["weights"], runs["by hand"]["weights"]))
        assert all(map(torch.equal, runs["auto"]["weights"], ranks[0]["auto"]["weights"]))
