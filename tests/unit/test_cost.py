"""The cost model gives the published arithmetic."""

import pytest

from jagg_patch import JaggConfig, plan_groups
from jagg_patch.cost import StepCost, backward_passes, training_step_cost, update_cost


def test_a_group_of_four_costs_ten_units_instead_of_sixteen():
    assert update_cost(4) == 16
    assert update_cost(4, plan_groups(4, JaggConfig(frac=1))) == 10


def test_the_published_training_step_is_100_to_82_units():
    groups = plan_groups(20, JaggConfig())
    assert training_step_cost(20, 20) == 100
    assert training_step_cost(20, 20, groups) == 82


@pytest.mark.parametrize(
    ("n_steps", "sampling_steps", "cost", "update", "whole"),
    [
        (9, 16, StepCost(), (36, 27), (52, 43)),  # Flux script
        (6, 12, StepCost(backward=1), (18, 16), (30, 28)),  # Flux LoRA script: one group of 3, frozen weights
        (15, 16, StepCost(), (60, 45), (76, 61)),  # Flux script with timestep_fraction 1
    ],
)
def test_upstream_s_own_scripts(n_steps, sampling_steps, cost, update, whole):
    """The README's table."""
    groups = plan_groups(n_steps, JaggConfig())
    assert (update_cost(n_steps, (), cost), update_cost(n_steps, groups, cost)) == update
    assert tuple(training_step_cost(n_steps, sampling_steps, g, cost) for g in ((), groups)) == whole


def test_without_checkpointing_a_backward_costs_two():
    assert update_cost(4, cost=StepCost(recompute=0)) == 12
    assert update_cost(4, plan_groups(4, JaggConfig(frac=1)), StepCost(recompute=0.5)) == 4 + 2 * 2.5


def test_backward_passes_two_a_group_and_one_for_a_group_of_one():
    assert backward_passes(20, plan_groups(20, JaggConfig())) == 3 * 2 + 8
    assert backward_passes(5, plan_groups(5, JaggConfig(frac=1, group_size=2))) == 5
