"""DanceGRPO's Hunyuan trainer also draws a permutation that isn't of timesteps: it shuffles the best-of-n selection with it.

The trainer's other cells are in test_dancegrpo.py.
"""

import pytest
import torch
from checkouts import HERE, paths, require_dancegrpo
from launch import ROOT, torchrun
from skips import check_skipped

require_dancegrpo()

N_SAMPLES = N_VISITED = 9


@pytest.fixture(scope="module")
def records(dancegrpo, tmp_path_factory):
    out = tmp_path_factory.mktemp("best_of_n")
    torchrun(1, HERE / "best_of_n.py", dancegrpo, out, cwd=out, env=paths(dancegrpo, ROOT, ROOT / "tests", HERE))
    return torch.load(out / "records.pt")


def in_trajectory_order(record):
    """The latents of each sample's steps, `[sample, trajectory step, ...]`, the samples in the order that they are trained in."""
    return torch.stack([latents[order.argsort()] for order, latents in zip(record["order"], record["latents"], strict=True)])


def test_off_is_bit_identical(records):
    for what in ("weights", "rng", "order", "latents"):
        assert torch.equal(records["off"][what], records["unpatched"][what])


@pytest.mark.parametrize("cell", ["W=3", "W=4", "knots"])
def test_the_same_samples_are_trained_in_the_same_order(records, cell):
    unpatched = in_trajectory_order(records["unpatched"])
    assert unpatched.shape[:2] == (N_SAMPLES, N_VISITED)
    assert torch.equal(in_trajectory_order(records[cell]), unpatched)
    assert torch.equal(records[cell]["rng"], records["unpatched"]["rng"])
    assert not torch.equal(in_trajectory_order(records["every draw sorted"]), unpatched)


@pytest.mark.parametrize("cell", ["W=3", "W=4", "knots"])
def test_each_sample_s_steps_are_visited_in_trajectory_order(records, cell):
    assert torch.equal(records[cell]["order"], torch.arange(N_VISITED).expand(N_SAMPLES, -1))
    assert not torch.equal(records["unpatched"]["order"], records[cell]["order"])


@pytest.mark.parametrize("cell", ["W=3", "W=4", "knots"])
def test_the_first_optimizer_step_s_gradient_is_group_backward_s_for_the_first_samples(records, cell):
    assert records[cell]["oracle_error"] <= 1e-6


def test_skipped_forwards_find_the_selected_samples_in_the_rollout(records):
    """Which all begin with the same noise. A group takes three forwards in the first six samples, the rest is joint: two."""
    check_skipped(records["W=4"]["skips"], 5 * (2 + 1) + 3 * (3 + 2))


def test_of_retained_graphs_those_of_samples_that_are_not_selected_are_let_go_of(records):
    """In the third training step, where three samples come before the first optimizer step: any of the ten."""
    found = records["W=4"]["retained"]
    assert found["left"] == [(10, 9)]
    assert found["fewer"] == found["retained"] == 3 * N_VISITED
    assert max(found["errors"]) == 0 and found["alike"]
