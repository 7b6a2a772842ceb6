"""What upstream/parity.py makes of reward curves; the runs themselves take forty minutes and are committed as a result."""

import json
import sys
from pathlib import Path

import pytest

UPSTREAM = Path(__file__).parents[2] / "upstream"


@pytest.fixture(scope="module")
def parity():
    sys.path.insert(0, str(UPSTREAM))
    try:
        import parity

        yield parity
    finally:
        sys.path.remove(str(UPSTREAM))


def rows(rewards):
    return [{"reward": reward} for reward in rewards]


def ramp(slope, n_steps=30):
    return [slope * step for step in range(n_steps)]


def test_the_arms_cost_what_the_cost_model_says(parity):
    """By hand, all blocks checkpointed: 16 to sample, 4 a trained step; a group of n saves n - 2 passes back of 3, or forwards"""
    assert {arm: setup.cost for arm, setup in parity.GROUPS.items()} == {
        "baseline: 9 of 15 steps": 16 + 36,
        "JAGG, frac 0.6": 16 + 36 - 9,
        "JAGG, frac 1": 16 + 36 - 9 - 6,
        "endpoints only, frac 1": 16 + 36 - 9 - 6,
        "7 of 15 steps, no JAGG": 16 + 28,
        "5 of 15 steps, no JAGG": 16 + 20,
        "frac 0.6, skipped forwards": 16 + 36 - 9 - 3,
    }
    assert {arm: setup.cost for arm, setup in parity.KNOTS.items()} == {
        "all 15 steps, no JAGG": 16 + 15 + 3 * 15,
        "15 steps, 6 knots": 16 + 15 + 3 * 6,
        "15 steps, 5 knots": 16 + 15 + 3 * 5,
        "15 steps, 4 knots": 16 + 15 + 3 * 4,
        "15 steps, groups, 8 passes": 16 + 15 + 3 * 8,
        "15 steps, groups, 4 passes": 16 + 15 + 3 * 4,
        "9 of 15 steps, no JAGG": 16 + 36,
        "9 of 15 steps, 5 knots": 16 + 9 + 3 * 5,
        "9 of 15 steps, 4 knots": 16 + 9 + 3 * 4,
    }
    assert {arm: setup.cost for arm, setup in parity.RETAINED.items()} == {
        "all 15 steps, no JAGG": 16 + 15 + 3 * 15,
        "exact, retained": 16 + 3 * 15,
        "frac 0.6, retained": 16 + 3 * 10,
        "frac 1, retained": 16 + 3 * 8,
        "5 knots, retained": 16 + 3 * 5,
        "4 knots, retained": 16 + 3 * 4,
        "9 of 15 steps, no JAGG": 16 + 36,
    }


def test_the_flags_train_as_many_steps_as_the_arm_says(parity):
    for arm in [*parity.GROUPS.values(), *parity.KNOTS.values(), *parity.RETAINED.values()]:
        assert int(parity.TRAINABLE * float(arm.flags[1])) == arm.visited


def test_a_level_is_reached_when_the_mean_of_five_steps_is_there(parity):
    assert parity.first_reaching(ramp(1), 10) == 13  # rewards 8 to 12, of steps 9 to 13
    assert parity.first_reaching([0] * 9 + [5] + [0] * 9, 1) == 10  # the mean of the last five is 1
    assert parity.first_reaching(ramp(1), 28) is None


def test_the_comparison_of_known_curves(parity):
    arms = list(parity.GROUPS)
    slopes = {arm: (1.0, 1.0) for arm in arms} | {arms[1]: (2.0, 2.0), arms[2]: (0.9, 1.1), arms[5]: (0.5, 0.5)}
    runs = {arm: {seed: rows(ramp(slope)) for seed, slope in enumerate(slopes[arm])} for arm in arms}
    timed = {arm: [[{"seconds": seconds} for seconds in (9.0, 1.0, 2.0, 3.0)]] * 2 for arm in arms}  # 9 is the first step's
    results = parity.compare(parity.GROUPS, runs, timed)
    assert results["reward_before"] == 0
    assert results["level"] == pytest.approx(0.9 * 24.5)  # the last ten of 0 to 29 have a mean of 24.5
    base, twice, spread, half = (results["arms"][arms[n]] for n in (0, 1, 2, 5))
    assert base["training_steps_to_level"] == [26, 0.0]
    assert base["forwards_to_level"] == [26 * 52, 0.0]
    assert base["seconds_to_level"] == [26 * 2.0, 0.0]
    assert twice["training_steps_to_level"][0] == 15  # a mean of 22.05 or more in steps 11 to 15
    assert twice["final_reward_minus_baseline"] == (pytest.approx(24.5), 0.0)
    assert spread["final_reward"] == (pytest.approx(24.5), pytest.approx(2.45))  # 0.9 and 1.1 times 24.5
    assert half["seeds_that_reach_the_level"] == 0 and half["training_steps_to_level"] == [None, None]
    assert "never" in parity.table(results, 2)


def test_the_committed_result_is_what_its_curves_come_to(parity):
    """Nobody has edited a number by hand, and it has at least five seeds an arm."""
    results = json.loads((UPSTREAM / "parity-results/groups.json").read_text())

    def rows(columns):
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    runs = {arm: {seed: rows(columns) for seed, columns in seeds.items()} for arm, seeds in results["runs"].items()}
    timed = {arm: [rows(columns) for columns in again] for arm, again in results["timed"].items()}
    assert min(map(len, runs.values())) >= 5
    again = json.loads(json.dumps(parity.compare(parity.GROUPS, runs, timed)))
    for arm, row in again["arms"].items():
        for name, values in row.items():
            for found, value in zip(
                *(x if isinstance(x, list) else [x] for x in (results["arms"][arm][name], values)), strict=True
            ):
                assert found == (value if value is None else pytest.approx(value, abs=1e-4, rel=1e-4)), (arm, name)
