"""The routing rule and α: a table of cases, and the properties that hold for every count and setting."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jagg_patch import JaggConfig, JaggError, alphas, plan_groups
from jagg_patch.method.plan import places, whole_groups

fractions = st.floats(0, 1)
group_sizes = st.integers(2, 12)
step_counts = st.integers(0, 200)


@pytest.mark.parametrize(
    ("n_steps", "settings", "sizes", "n_exact"),
    [
        (20, {}, [4, 4, 4], 8),  # the published setting
        (9, {}, [5], 4),  # upstream's Flux script: 16 sampling steps, timestep_fraction 0.6
        (6, {}, [3], 3),  # its LoRA script: 12 sampling steps
        (15, {"frac": 1}, [4, 4, 4, 3], 0),
        (10, {"frac": 1}, [4, 3, 3], 0),  # r / W = 2.5 rounds up
        (50, {"frac": 0.58}, [5, 4, 4, 4, 4, 4, 4], 21),  # 0.58 * 50 is 28.999999999999996
        (15, {"frac": 1, "cuts": "6"}, [3, 3, 5, 4], 0),  # 6 and 9 steps by themselves
        (9, {"cuts": (1, 4)}, [3], 6),  # 5 routed: a step alone before each cut, and after the last
        (9, {"cuts": (5, 20)}, [5], 4),  # a cut where the routed steps end, or after them
        (5, {"frac": 1, "group_size": 2}, [2, 2, 1], 1),  # a group of one is an exact step
        (3, {}, [], 3),  # r = 1
        (20, {"frac": 0}, [], 20),
        (20, {"enabled": False}, [], 20),
        (0, {}, [], 0),
    ],
)
def test_routing_table(n_steps, settings, sizes, n_exact):
    groups = plan_groups(n_steps, JaggConfig(**settings))
    assert [len(group) for group in groups] == sizes
    assert sum(place.is_exact for place in places(n_steps, groups)) == n_exact


@given(step_counts, fractions, group_sizes)
def test_groups_cut_the_routed_steps_evenly_and_in_order(n_steps, frac, group_size):
    groups = plan_groups(n_steps, JaggConfig(frac=frac, group_size=group_size))
    routed = [position for group in groups for position in group]
    r = int(frac * n_steps + 1e-9)
    assert routed == list(range(r if r >= 2 else 0))
    sizes = [len(group) for group in groups]
    assert sizes == sorted(sizes, reverse=True)
    if groups:
        assert max(sizes) - min(sizes) <= 1
        assert len(groups) == max(1, math.floor(r / group_size + 0.5))


@given(step_counts, group_sizes)
def test_the_first_of_all_groups_are_the_plan_of_as_many_steps(n_steps, group_size):
    """What a probe has measured of a trajectory's groups is what a lower frac would route."""
    config = JaggConfig(group_size=group_size)
    groups = whole_groups(n_steps, config)
    for n in range(len(groups) + 1):
        n_routed = sum(map(len, groups[:n]))
        if n_routed != 1:
            assert whole_groups(n_routed, config) == groups[:n]
            assert whole_groups(n_steps - n_routed, config, start=n_routed) == groups[n:] or n_steps - n_routed < 2


@pytest.mark.parametrize(("n_steps", "sizes"), [(20, [4, 4, 4]), (9, [5]), (11, [4, 4]), (15, [4, 4]), (5, [5]), (1, [])])
def test_auto_begins_with_six_tenths_of_the_groups(n_steps, sizes):
    assert [len(group) for group in plan_groups(n_steps, JaggConfig(frac="auto"))] == sizes


@given(step_counts, fractions, group_sizes)
def test_every_group_opens_once_and_closes_once(n_steps, frac, group_size):
    groups = plan_groups(n_steps, JaggConfig(frac=frac, group_size=group_size))
    knots = [place.position for place in places(n_steps, groups) if place.is_knot]
    before = None
    for position, place in enumerate(places(n_steps, groups)):
        assert place.position == position
        assert place.before == before and place.is_exact == (before is None and place.after is None and place.is_knot)
        if place.opens:
            before = position
        elif place.closes:
            before = None
        if place.after is not None:
            assert place.after == next(knot for knot in knots if knot > position)
    assert before is None


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=9, unique=True))
def test_alpha_runs_from_zero_to_one_and_ignores_the_unit_of_time(times):
    t = torch.tensor(sorted(times, reverse=True), dtype=torch.float64)
    alpha = alphas(t)
    assert alpha[0] == 0 and alpha[-1] == 1
    assert (alpha.diff() > 0).all()
    torch.testing.assert_close(alphas(t / 1000 + 3), alpha, rtol=0, atol=1e-9)
    torch.testing.assert_close((1 - alpha) * t[0] + alpha * t[-1], t, rtol=0, atol=1e-9)


def test_alpha_is_per_sample():
    t = torch.tensor([[1000, 900], [800, 600], [500, 0]])
    expected = torch.tensor([[0, 0], [200 / 500, 300 / 900], [1, 1]])
    torch.testing.assert_close(alphas(t), expected)


def test_alpha_of_low_precision_timesteps_is_worked_out_in_float32():
    t = torch.tensor([1000, 900, 100], dtype=torch.bfloat16)
    assert alphas(t).dtype == torch.float32
    assert alphas(t)[1] == alphas(t.float())[1]


@pytest.mark.parametrize("t", [[500, 400, 500], [[900, 500], [800, 400], [700, 500]]])
def test_endpoints_that_share_a_timestep_are_refused(t):
    with pytest.raises(JaggError, match="share a timestep"):
        alphas(torch.tensor(t))
