"""`python upstream/quality_knots.py` against `group_backward`, and what its rows have to keep."""

import argparse
import json

import pytest
import quality_knots
import torch
from launch import ROOT
from quality_knots import NUMBERS, Pairs, near_by_folding, published, vjps
from quality_measure import Setting, select, visited_steps
from quality_probe import Probe

from jagg_patch import JaggConfig, JaggError, group_backward, plan_groups
from jagg_patch.method.plan import knots_of
from jagg_patch.method.quality import agreement, sums

SAMPLING_STEPS, SAMPLES, ETA, SHIFT = 8, 3, 0.7, 3.0
FLAGS = f"--etas {ETA} --shifts {SHIFT} --prompts 2 --samples {SAMPLES} --sampling-steps {SAMPLING_STEPS}".split()


def run_command(*flags):
    parser = argparse.ArgumentParser()
    quality_knots.add_arguments(parser)
    quality_knots.run(parser.parse_args(flags))


@pytest.fixture(scope="module")
def out(tmp_path_factory, one_thread):
    folder = tmp_path_factory.mktemp("knots")
    run_command("--out", str(folder), *FLAGS)
    return folder


@pytest.fixture(scope="module")
def results(out):
    return json.loads((out / "knots.json").read_text())["rows"]


@pytest.fixture(scope="module")
def probe(one_thread):
    return Probe(ROOT / "upstream/mini", SAMPLING_STEPS)


@pytest.mark.parametrize("visited", ["all", "random"])
def test_a_set_s_gradient_is_group_backward_s(probe, visited):
    torch.manual_seed(0)
    setting, rollout = Setting(ETA, SHIFT, visited), probe.roll_out(3, SAMPLES, ETA, SHIFT)
    steps = visited_steps(visited, SAMPLING_STEPS - 1, SAMPLES)
    vjp, timesteps, grads = vjps(probe, rollout, steps, setting)
    last = len(steps) - 1
    sets = [(0, last), (0, 2, last), (0, 1, last - 1, last)]
    found = near_by_folding(vjp, timesteps, grads, sets)
    if visited == "all":
        for one, other in zip(Pairs(vjp, timesteps[:, 0], grads).near(sets), found, strict=True):
            assert one == pytest.approx(other, rel=1e-4)
    sigmas = probe.sigmas(SHIFT)

    def gradient(knots):
        probe.transformer.zero_grad()
        group_backward(
            lambda j: probe.forward(rollout, steps[j], timesteps[j]),
            lambda j, v: probe.loss(v, rollout, steps[j], ETA, sigmas),
            timesteps,
            knots=knots,
        )
        return torch.cat([weight.grad.flatten() for weight in probe.parameters])

    exact = gradient(range(last + 1))
    for knots, near in zip(sets, found, strict=True):
        assert near == pytest.approx(agreement(sums([gradient(knots)], [exact])), rel=1e-4)
    probe.transformer.zero_grad()


def test_published_plans_are_found_by_their_backward_passes():
    for n_passes, sets in published(9).items():
        assert all(len(knots) == n_passes and knots[0] == 0 and knots[-1] == 8 for knots in sets)
    assert knots_of(9, plan_groups(9, JaggConfig())) in published(9)[6]
    assert (0, 4, 5, 8) in published(9)[4]


def test_every_row_is_there_and_none_is_better_than_the_best(results):
    for visited, n_steps in (("all", SAMPLING_STEPS - 1), ("random", 4)):
        numbers = [n for n in NUMBERS if n < n_steps]
        for way in ("rule", "rule, unmeasured"):
            assert [row["passes"] for row in select(results, visited=visited, way=way)] == numbers
    for best in select(results, way="best"):
        for row in select(results, visited="all", passes=best["passes"]):
            assert best["relative_error"]["mean"] <= row["relative_error"]["mean"] and row["n"] == 2
            assert len(row["knots"]) == row["passes"]


def test_the_picture_is_one(out):
    assert (out / "knots.png").read_bytes().startswith(b"\x89PNG")


def test_too_little_to_measure_is_refused(tmp_path):
    with pytest.raises(JaggError, match="this needs 1 prompt group"):
        run_command("--out", str(tmp_path), "--sampling-steps", "5")
