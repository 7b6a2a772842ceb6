"""The cost model gives the published arithmetic."""

import json
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

from jagg_patch import JaggConfig, plan_groups
from jagg_patch.method.cost import StepCost, backward_passes, forward_passes, training_step_cost, update_cost
from jagg_patch.method.plan import ENDPOINTS_FIRST, LOOK_AHEAD, Group, forwards_a_group, groups_of
from jagg_patch.trainers import TRAINERS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TRAINERS_PAGE = ROOT / "jagg_patch/trainers/README.md"
BENCH_PAGE = ROOT / "upstream/bench-results/README.md"
PATCHES = list(ROOT.glob("patches/*/series"))


def test_a_group_of_four_costs_ten_units_instead_of_sixteen():
    assert update_cost(4) == 16
    assert update_cost(4, plan_groups(4, JaggConfig(frac=1))) == 10


def test_the_published_training_step_is_100_to_82_units():
    groups = plan_groups(20, JaggConfig())
    assert training_step_cost(20, 20) == 100
    assert training_step_cost(20, 20, groups) == 82


def test_skipped_forwards_cost_8_units_a_group_with_both_endpoints_first_and_9_with_a_look_ahead():
    for size in (4, 5, 8):
        groups = [Group((0, size - 1))]
        assert update_cost(size, groups, forwards_a_group=ENDPOINTS_FIRST) == 8
        assert update_cost(size, groups, forwards_a_group=LOOK_AHEAD) == 9
    assert forward_passes(3, [Group((0, 2))], LOOK_AHEAD) == forward_passes(3, [Group((0, 2))]) == 3
    assert forward_passes(2, [Group((0, 1))], ENDPOINTS_FIRST) == 2


def test_from_knot_to_knot_forwards_are_skipped_as_in_a_group():
    """15 steps; in joint the first two knots run together, and from the second to the third one looks ahead."""
    groups = groups_of((0, 10, 13, 14))
    assert backward_passes(15, groups) == 4
    assert forward_passes(15, groups, ENDPOINTS_FIRST) == 15 - (11 - 2) - (4 - 3) == 5
    assert forward_passes(15, groups, LOOK_AHEAD) == 15 - (11 - 3) - (4 - 3) == 6
    assert update_cost(15, groups) == 15 + 4 * 3 == 27


# Trained and sampled steps, settings, and the bench's row.
README_ROWS = {
    "DanceGRPO's Flux script: 9 of 15": (9, 16, {}, "on 9 of 15 W=4 frac 0.6 JAGG, retained"),
    "the same, exact": (9, 16, dict(frac=0), "on 9 of 15 exact, retained"),
    "[4 knots][knots] of 15": (15, 16, dict(knots=4), "on 15 4 knots JAGG, retained"),
    "the paper's setting: 20": (20, 20, {}, "on 20 W=4 frac 0.6 JAGG, retained"),
}
BENCH = json.loads((ROOT / "upstream/bench-results/bench.json").read_text())["rows"]


@pytest.mark.parametrize("name", README_ROWS)
def test_the_readme_s_first_table_is_the_cost_model_s(name):
    (row,) = re.findall(rf"\| {re.escape(name)} \|(.*)\|", README.read_text())
    visited, sampled, settings, row_of_bench = README_ROWS[name]
    (measured,) = (one["training_step"]["median"] for one in BENCH if " ".join(one["row"].split()) == row_of_bench)
    groups = plan_groups(visited, JaggConfig(**settings))

    def cell(sampled, **way):
        before, after = training_step_cost(visited, sampled), training_step_cost(visited, sampled, groups, **way)
        return f"{before:g} → {after:g}, {before / after:.2f}x"

    skipped = cell(sampled, forwards_a_group=ENDPOINTS_FIRST) if groups else ""
    retained = f"{cell(sampled, retained=1.0)} ({measured:.2f})"
    assert [found.strip() for found in row.split("|")] == [cell(0), cell(sampled), skipped, retained]


@pytest.mark.parametrize(
    ("n_steps", "group_size", "frac", "expected"),
    [(20, 4, 0.6, 80 / 56), (20, 4, 1, 2.0), (24, 8, 1, 4.0), (9, 4, 0.6, 1.5), (15, 4, 0.6, 1.5)],
)
def test_the_limits_with_skipped_forwards(n_steps, group_size, frac, expected):
    config = JaggConfig(group_size=group_size, frac=frac, schedule="joint", skip_forwards=True)
    groups = plan_groups(n_steps, config)
    assert update_cost(n_steps) / update_cost(n_steps, groups, forwards_a_group=ENDPOINTS_FIRST) == expected


def test_a_prediction_without_a_settled_schedule_is_the_look_ahead_s():
    assert [forwards_a_group(True, name) for name in ("auto", "sequential", "joint")] == [3, 3, 2]
    assert forwards_a_group(False, "joint") is None


def dancegrpo(sampling_steps, n_samples, accumulated, checkpointed=1.0, **others):
    """`n_samples`: of a rank and rollout, as generations of one prompt."""
    return SimpleNamespace(
        train_batch_size=1,
        num_generations=n_samples,
        gradient_accumulation_steps=accumulated,
        sampling_steps=sampling_steps,
        timestep_fraction=0.6,
        gradient_checkpointing=True,
        selective_checkpointing=checkpointed,
        **others,
    )


def flow_grpo(num_steps, window=0, beta=0.0, checkpointed=False, fraction=0.99, use_lora=True):
    return SimpleNamespace(
        sample=SimpleNamespace(num_steps=num_steps, sde_window_size=window, num_batches_per_epoch=2),
        train=SimpleNamespace(  # accumulated are half of the batches, however many there are
            timestep_fraction=fraction, beta=beta, gradient_accumulation_steps=1, num_inner_epochs=1
        ),
        use_lora=use_lora,
        activation_checkpointing=checkpointed,
    )


# What upstream's own scripts and configurations say, the one for eight GPUs where there are several.
SCRIPTS = {
    "train_grpo_flux": dancegrpo(16, 2 * 12, 12),
    "train_grpo_flux_lora": dancegrpo(12, 2 * 12, 12),
    "train_grpo_qwenimage": dancegrpo(20, 2 * 12, 12, checkpointed=0.5),
    "train_grpo_qwenimage_edit": dancegrpo(20, 2 * 8, 8),
    "train_grpo_hunyuan": dancegrpo(16, 24, 4, bestofn=8),
    "train_grpo_skyreels_i2v": dancegrpo(16, 8, 8),
    "train_grpo_wan_2_1": dancegrpo(20, 2 * 12, 24),
    "train_grpo_sd": flow_grpo(50, fraction=1.0, use_lora=False),
    "train_sd3": flow_grpo(10, beta=0.04),
    "train_sd3_fast": flow_grpo(10, window=3),
    "train_sd3_GRPO_Guard": flow_grpo(10),
    "train_flux": flow_grpo(6),
    "train_flux_fast": flow_grpo(6, window=3),
    "train_flux_kontext": flow_grpo(6),
    "train_wan2_1": flow_grpo(20, beta=0.004),
    "train_qwenimage": flow_grpo(10, window=2, checkpointed=True),
    "train_qwenimage_edit": flow_grpo(10, checkpointed=True),
}


def test_every_trainer_has_a_patch_and_a_script():
    """A new one needs all three: a row in jagg_patch/trainers/, a patch in a series, and a row in SCRIPTS above."""
    patches = {line.removesuffix(".patch") for series in PATCHES for line in series.read_text().splitlines() if line[0] != "#"}
    assert set(TRAINERS) == patches
    assert set(TRAINERS) == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_table_of_trainers(name):
    trainer, args = TRAINERS[name], SCRIPTS[name]
    steps, cost = trainer.steps(args), trainer.step_cost(args)
    groups = plan_groups(steps.visited, JaggConfig(**trainer.defaults(args)))

    def saved(before, after):
        return f"{before:g} → {after:g}, {before / after:.2f}x"

    update = saved(*(update_cost(steps.visited, g, cost) for g in ((), groups)))
    whole, jagg = (training_step_cost(steps.visited, steps.sampled, g, cost) for g in ((), groups))
    retained = "no"
    if not trainer.no_retaining:
        share = Fraction(*trainer.first_samples(args))
        after = training_step_cost(steps.visited, steps.sampled, groups, cost, retained=float(share))
        retained = f"{'all' if share == 1 else share}: {saved(whole, after)}"
    plan = f"{steps.visited}: {' + '.join(str(len(group)) for group in groups)}"
    row = f"| `{name}` | {plan} | {update} | {saved(whole, jagg)} | {retained} |"
    assert row in TRAINERS_PAGE.read_text(), row


@pytest.mark.parametrize(
    ("visited", "sampled", "checkpointed", "expected"), [(20, 20, 1.0, 100 / 82), (20, 20, 0.5, 90 / 75), (9, 16, 1.0, 52 / 43)]
)
def test_the_settings_that_the_page_sets_against_the_published_seconds(visited, sampled, checkpointed, expected):
    """Published: ~279 to ~228 s for Flux, ~835 to ~691 s for QwenImage; rounded to seconds, they say 1.224 and 1.208."""
    cost, groups = StepCost(recompute=checkpointed), plan_groups(visited, JaggConfig())
    ratio = training_step_cost(visited, sampled, (), cost) / training_step_cost(visited, sampled, groups, cost)
    assert ratio == pytest.approx(expected, abs=1e-12)
    assert f"{ratio:.3f}" in BENCH_PAGE.read_text()


def test_without_checkpointing_a_backward_costs_two():
    assert update_cost(4, cost=StepCost(recompute=0)) == 12
    assert update_cost(4, plan_groups(4, JaggConfig(frac=1)), StepCost(recompute=0.5)) == 4 + 2 * 2.5


def test_backward_passes_two_a_group_and_one_for_a_group_of_one():
    assert backward_passes(20, plan_groups(20, JaggConfig())) == 3 * 2 + 8
    assert backward_passes(5, plan_groups(5, JaggConfig(frac=1, group_size=2))) == 5
