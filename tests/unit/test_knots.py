"""Knots on a loop of upstream's shape: its gradient against a fold of the unpatched loop's own upstream gradients."""

import itertools
import json
import math
import re
from argparse import Namespace
from types import SimpleNamespace

import models
import numpy
import pytest
import torch
from torch.testing import assert_close

from jagg_patch import JaggConfig, JaggError, group_backward, install, plan_groups
from jagg_patch.evidence.placement import Placement, noise_levels, same_on_all
from jagg_patch.install import require_placement
from jagg_patch.method.folding import fold, shares
from jagg_patch.method.placement import best_knots, cost_of, expected_sigmas
from jagg_patch.method.plan import Group, groups_of, knots_of, passes, places
from jagg_patch.trainers import TRAINERS

FLUX = "train_grpo_flux"


def shifted(n_steps, shift=3.0, sampling_steps=None):
    """Noise levels of the first `n_steps` of a rollout with a time shift."""
    even = [1 - step / (sampling_steps or n_steps + 1) for step in range(n_steps)]
    return [shift * sigma / (1 + (shift - 1) * sigma) for sigma in even]


# -- sets of knots


@pytest.mark.parametrize(
    ("knots", "groups"),
    [
        ((0, 10, 13, 14), [(0, 10, 13)]),  # the last one has nothing to share
        ((0, 3, 4, 7), [(0, 3), (4, 7)]),  # two published groups
        ((0, 1, 4, 5, 6, 9, 11), [(1, 4), (6, 9, 11)]),
        (range(5), []),
        ((0,), []),
    ],
)
def test_a_set_comes_apart_between_neighbours(knots, groups):
    assert [group.knots for group in groups_of(tuple(knots))] == groups
    assert knots_of(knots[-1] + 1, groups_of(tuple(knots))) == tuple(knots)


def test_places_of_a_group_with_a_knot_inside():
    found = places(7, (Group((1, 3, 6)),))
    assert [(place.before, place.after) for place in found] == [
        (None, None), (None, 3), (1, 3), (1, 6), (3, 6), (3, 6), (3, None)
    ]  # fmt: skip
    assert [place.position for place in found if place.is_knot] == [0, 1, 3, 6]
    assert [place.position for place in found if place.is_first] == [1]
    assert [place.position for place in found if place.is_last] == [6]


@pytest.mark.parametrize(
    ("knots", "one_by_one", "two_by_two"),
    [
        ((0, 3), {2: (0,), 3: (3,)}, {3: (0, 3)}),
        ((0, 1), {0: (0,), 1: (1,)}, {1: (0, 1)}),
        ((0, 5, 9), {4: (0,), 8: (5,), 9: (9,)}, {8: (0, 5), 9: (9,)}),
        ((0, 5, 9, 11), {4: (0,), 8: (5,), 10: (9,), 11: (11,)}, {8: (0, 5), 11: (9, 11)}),
    ],
)
def test_a_pass_runs_when_its_knot_has_its_whole_gradient(knots, one_by_one, two_by_two):
    assert passes(Group(knots), holds_two_graphs=False) == one_by_one
    assert passes(Group(knots), holds_two_graphs=True) == two_by_two


def test_shares_are_hat_functions_of_t():
    t = torch.tensor([9.0, 8.0, 6.0, 5.0, 1.0, 0.5])
    knots = (0, 3, 5)
    expected = [numpy.interp(-t, -t[list(knots)], one_hot) for one_hot in numpy.eye(3)]
    assert_close(shares(t, knots), torch.tensor(numpy.array(expected), dtype=torch.float32))
    assert_close(shares(t[:, None].expand(6, 2), knots)[..., 1], shares(t, knots))
    assert shares(t, knots, "endpoints").tolist() == [[float(p == knot) for p in range(6)] for knot in knots]


# -- placement


def by_trying_all(n_knots, sigmas, sizes=None):
    inner = itertools.combinations(range(1, len(sigmas) - 1), n_knots - 2)
    return min(cost_of((0, *between, len(sigmas) - 1), sigmas, sizes) for between in inner)


@pytest.mark.parametrize("n_knots", range(2, 10))
@pytest.mark.parametrize("shift", [1, 3])
def test_the_placed_set_costs_least_of_all(n_knots, shift):
    sigmas, sizes = shifted(9, shift), torch.rand(9, generator=torch.Generator().manual_seed(0)).tolist()
    for of_steps in (None, sizes):
        knots = best_knots(n_knots, sigmas, of_steps)
        assert len(knots) == n_knots and knots[0] == 0 and knots[-1] == 8 and list(knots) == sorted(set(knots))
        assert cost_of(knots, sigmas, of_steps) == pytest.approx(by_trying_all(n_knots, sigmas, of_steps), rel=1e-12)


def test_a_cost_is_the_sum_over_the_steps_between():
    sigmas, sizes = [4.0, 3.0, 2.0, 1.0], [1.0, 5.0, 7.0, 1.0]
    # Σ |s|² α (1 - α) (σ_a - σ_b) / σ, with α 1/3 and 2/3 of a gap of 3
    assert cost_of((0, 3), sigmas, sizes) == pytest.approx((5 / 3 + 7 / 2) * (2 / 9) * 3)
    assert cost_of((0, 2, 3), sigmas, sizes) == pytest.approx(5 / 3 * (1 / 4) * 2)
    assert cost_of((0, 3), sigmas) == pytest.approx((1 / 9 + 1 / 4) * (2 / 9) * 3)
    assert cost_of((0, 3), [10 * sigma for sigma in sigmas], sizes) == pytest.approx(cost_of((0, 3), sigmas, sizes))


def test_knots_go_to_low_noise():
    """Half of six are among the last third of fifteen steps, more than evenly spaced ones would be."""
    assert best_knots(6, shifted(15))[-4:] == (10, 12, 13, 14)


@pytest.mark.parametrize("n_visited", [1, 4, 6])
def test_expected_noise_levels_are_the_mean_over_all_subsets(n_visited):
    sigmas = shifted(6)
    sets = list(itertools.combinations(sigmas, n_visited))
    assert expected_sigmas(sigmas, n_visited) == pytest.approx([sum(one) / len(sets) for one in zip(*sets, strict=True)])


# -- settings


@pytest.mark.parametrize(
    "settings",
    [{"knots": 4, "group_size": 3}, {"knots": 4, "frac": 1}, {"knots_at": "0,3", "cuts": "2"}, {"knots": 4, "knots_at": "0,3"}],
)
def test_groups_and_knots_together_are_refused(settings):
    with pytest.raises(JaggError, match="are set together") as error:
        JaggConfig(**settings)
    assert len(str(error.value).splitlines()) == 2
    environ = {f"JAGG_{name.upper()}": str(value) for name, value in settings.items()}
    with pytest.raises(JaggError, match="are set together"):
        JaggConfig.from_env(environ)


def test_defaults_that_are_given_are_refused_as_well_and_a_trainer_s_own_are_not():
    with pytest.raises(JaggError, match="JAGG_KNOTS and JAGG_GROUP_SIZE are set together"):
        JaggConfig.from_env({"JAGG_KNOTS": "4", "JAGG_GROUP_SIZE": "4"})
    assert JaggConfig.from_env({"JAGG_KNOTS": "4", "JAGG_CUTS": ""}, frac=1.0).knots == 4
    assert JaggConfig.from_env({}, frac=1.0).frac == 1
    assert JaggConfig.from_env({"JAGG_KNOTS": ""}, frac=1.0).frac == 1


def with_flags(environ, **flags):
    return JaggConfig.from_env(environ).with_flags(Namespace(**{f"jagg_{name}": value for name, value in flags.items()}))


@pytest.mark.parametrize(
    ("environ", "flags"),
    [
        ({"JAGG_KNOTS": "4"}, {"group_size": "4"}),
        ({"JAGG_KNOTS_AT": "0,3"}, {"frac": "0.6"}),
        ({"JAGG_GROUP_SIZE": "4"}, {"knots": "4"}),
        ({}, {"knots": "4", "frac": "0.6"}),
    ],
)
def test_a_flag_and_the_environment_that_say_different_things_are_refused_at_defaults_too(environ, flags):
    with pytest.raises(JaggError, match="are set together"):
        with_flags(environ, **flags)


def test_an_empty_flag_takes_back_what_the_environment_says():
    assert with_flags({"JAGG_KNOTS": "4"}, knots="", group_size="4").has_knots is False
    assert with_flags({"JAGG_KNOTS": "4"}, knots="5").knots == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("knots", value) for value in (1, "1.5", "some")),
        *(("knots_at", value) for value in ("1,3", "0", ",", "0,,3")),
        *(("knots_cosine", value) for value in (0, 1)),
    ],
)
def test_bad_values_are_refused(name, value):
    with pytest.raises(JaggError, match=f"bad value {name}"):
        JaggConfig(**{name: value})


def test_named_knots_end_with_the_last_visited_step():
    assert plan_groups(15, JaggConfig(knots_at="0,10,13,14")) == (Group((0, 10, 13)),)
    with pytest.raises(JaggError, match="JAGG_KNOTS_AT ends with 14, and the last of the 9 visited steps is 8"):
        plan_groups(9, JaggConfig(knots_at="0,10,13,14"))


@pytest.mark.parametrize("n_knots", [9, 12])
def test_as_many_knots_as_steps_are_exact(n_knots):
    assert plan_groups(9, JaggConfig(knots=n_knots)) == ()


def test_auto_needs_a_probe():
    with pytest.raises(JaggError, match="knots=auto follows the probe"):
        Placement(JaggConfig(knots="auto"))


# -- one group by itself


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_group_backward_takes_knots(schedule):
    torch.manual_seed(0)
    model, z, targets = models.Plain(), torch.randn(7, 2, 3), torch.randn(7, 2, 2)
    t, knots = torch.tensor([9.0, 8.0, 6.0, 5.0, 4.0, 1.0, 0.5]), (0, 3, 4, 6)
    grads = [output_gradient(model, z[j], targets[j]) for j in range(7)]
    for knot, grad in zip(knots, fold(grads, shares(t, knots)), strict=True):
        model(z[knot]).backward(grad)
    expected = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    group_backward(
        lambda j: model(z[j]), lambda j, v: (v - targets[j]).square().sum(), t, JaggConfig(schedule=schedule), knots=knots
    )
    for weight, grad in zip(model.parameters(), expected, strict=True):
        assert_close(weight.grad, grad)


def output_gradient(model, z, target):
    output = model(z).detach().requires_grad_()
    return torch.autograd.grad((output - target).square().sum(), output)[0]


# -- the loop


class Loop:
    """Runs of the loop, patched or not; `steps` are an unpatched one's: of each training forward its place, inputs and s_p."""

    def __init__(self, load_loop, *pieces, **args):
        self._load = lambda: load_loop(FLUX, *pieces)
        self._args = args

    def run(self, config=None, record=None, n_training_steps=1, lr=0.0):
        """The gradients of each training step, flattened; the handle, if there is a config."""
        module, model = self._load(), models.Plain()
        if record is not None:
            module.run_model = recording(module.run_model, record)
        handle = install(vars(module), config=config) if config is not None else None
        torch.manual_seed(1)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=lr), []
        for _ in range(n_training_steps):
            optimizer.zero_grad()
            module.train_one_step(module.make_args(**self._args), model, optimizer)
            found.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
        return found, handle

    def expected(self, knots):
        """The first training step's gradient with `knots` of each sample's visited steps, folded here."""
        steps, model = [], models.Plain()
        self.run(record=steps)
        n_visited = len(steps) // 2
        for sample in (steps[:n_visited], steps[n_visited:]):
            sample = sorted(sample, key=lambda step: -step["t"])
            t = numpy.array([step["t"] for step in sample])
            for n, knot in enumerate(knots):
                weights = numpy.interp(-t, -t[list(knots)], numpy.eye(len(knots))[n])
                folded = sum(float(weight) * step["grad"] for weight, step in zip(weights, sample, strict=True))
                model(sample[knot]["input"]).backward(folded)
        return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def recording(run_model, steps):
    def recorded(model, latents, timesteps):
        output = run_model(model, latents, timesteps)
        if output.requires_grad:
            step = {"t": timesteps[0].item(), "input": torch.cat([latents, timesteps[:, None] / 1000], 1).detach()}
            output.register_hook(lambda grad: step.update(grad=grad))
            steps.append(step)
        return output

    return recorded


SETS = [(0, 14), (0, 7, 14), (0, 10, 13, 14), (0, 4, 9, 12, 14), (0, 1, 2, 9, 14), tuple(range(0, 15, 2))]


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize("skip_forwards", [False, True])
@pytest.mark.parametrize("knots", SETS, ids=lambda knots: "-".join(map(str, knots)))
def test_the_gradient_is_the_fold_of_the_unpatched_loop_s(load_loop, knots, schedule, skip_forwards):
    loop = Loop(load_loop)
    config = JaggConfig(knots_at=knots, schedule=schedule, skip_forwards=skip_forwards)
    (found,), handle = loop.run(config)
    assert_close(found, loop.expected(knots), rtol=1e-5, atol=1e-7)
    assert handle.stats.backward_passes == 2 * len(knots) and handle.stats.backward_passes_unpatched == 30


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize("knots", [(0, 8), (0, 4, 7, 8), (0, 3, 8)])
def test_so_it_is_where_each_sample_draws_its_steps(load_loop, knots, schedule):
    loop = Loop(load_loop, timestep_fraction=0.6)
    (found,), handle = loop.run(JaggConfig(knots_at=knots, schedule=schedule))
    assert_close(found, loop.expected(knots), rtol=1e-5, atol=1e-7)
    assert handle.stats.backward_passes == 2 * len(knots)


@pytest.mark.parametrize("settings", [{"group_size": 4, "frac": 1}, {"group_size": 5}])
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_the_published_groups_are_a_set_of_knots_in_every_bit(load_loop, settings, schedule):
    loop = Loop(load_loop)
    published = JaggConfig(schedule=schedule, **settings)
    knots = knots_of(15, plan_groups(15, published))
    assert torch.equal(loop.run(published)[0][0], loop.run(JaggConfig(knots_at=knots, schedule=schedule))[0][0])


def test_a_step_count_that_comes_down_to_the_knots_is_probed_without_any_other_set(load_loop, tmp_path):
    log, module, model = tmp_path / "log.jsonl", load_loop(FLUX), models.Plain()
    install(vars(module), config=JaggConfig(knots=3, probe_every=1, log=str(log)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for sampling_steps in (16, 4):
        module.train_one_step(module.make_args(sampling_steps=sampling_steps), model, optimizer)
    many, few = [json.loads(line)["probe"] for line in log.read_text().splitlines()]
    assert [len(row["knots"]) for row in many][:3] == [3, 2, 4]
    assert few is None or [row["knots"] for row in few][:1] == [[0, 1, 2]]


def test_an_update_with_gaps_that_are_too_short_leaves_skipping_on(load_loop):
    """Fifteen steps with four knots, three with three, fifteen again."""
    module, model = load_loop(FLUX), models.Plain()
    handle = install(vars(module), config=JaggConfig(knots=4, skip_forwards=True, schedule="joint", self_check=False))
    optimizer, skipped = torch.optim.SGD(model.parameters(), lr=0.0), []
    for sampling_steps in (16, 4, 16):
        before = handle.stats.skipped_forwards
        module.train_one_step(module.make_args(sampling_steps=sampling_steps), model, optimizer)
        skipped.append(handle.stats.skipped_forwards - before)
    assert skipped[0] > 0 and skipped[1] == 0 and skipped[2] > 0


@pytest.mark.parametrize("n_knots", [15, 40])
def test_as_many_knots_as_steps_leave_the_loop_as_it_is(load_loop, n_knots):
    loop = Loop(load_loop)
    assert torch.equal(loop.run(JaggConfig(knots=n_knots))[0][0], loop.run()[0][0])


@pytest.mark.parametrize(("fraction", "n_visited"), [(1.0, 15), (0.6, 9)])
def test_knots_are_placed_by_noise_then_by_what_was_measured(load_loop, capsys, tmp_path, fraction, n_visited):
    """Three training steps: the second one's places come from the first one's upstream gradients."""
    loop, log = Loop(load_loop, timestep_fraction=fraction), tmp_path / "log.jsonl"
    loop.run(JaggConfig(knots=4, log=str(log)), n_training_steps=3)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    sigmas = expected_sigmas([int(s * 1000) for s in torch.linspace(1, 0, 17)[:15]], n_visited)
    assert records[0]["knots"] == list(best_knots(4, sigmas))
    steps = []
    loop.run(record=steps)
    sizes = [
        sum(sample[p]["grad"].square().sum().item() for sample in by_sample(steps)) for p in range(n_visited)
    ]
    best = best_knots(4, sigmas, sizes)
    is_better = cost_of(best, sigmas, sizes) < 0.64 * cost_of(records[0]["knots"], sigmas, sizes)
    assert records[1]["knots"] == (list(best) if is_better else records[0]["knots"])
    said = [line for line in capsys.readouterr().out.splitlines() if "backward passes at the visited steps" in line]
    assert len(said) == 1 + sum(one["knots"] != other["knots"] for one, other in itertools.pairwise(records))
    assert [record["backward_passes"] for record in records] == [8] * 3


def test_another_number_of_steps_has_places_of_its_own(load_loop, capsys):
    """A schedule of sampling steps that falls and rises: the places are those of the rule without anything measured."""
    module, model = load_loop("train_grpo_flux"), models.Plain()
    install(vars(module), config=JaggConfig(knots=4))
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), []
    for sampling_steps in (16, 10, 16):
        capsys.readouterr()
        module.train_one_step(module.make_args(sampling_steps=sampling_steps), model, optimizer)
        seen.append(re.search(r"backward passes at the visited steps ([\d, ]+) from here on", capsys.readouterr().out)[1])
    sigmas = {n: [int(s * 1000) for s in torch.linspace(1, 0, n + 1)[:-2]] for n in (16, 10)}
    assert seen == [", ".join(map(str, best_knots(4, sigmas[n]))) for n in (16, 10, 16)]


def by_sample(steps):
    half = len(steps) // 2
    return [sorted(sample, key=lambda step: -step["t"]) for sample in (steps[:half], steps[half:])]


def test_the_set_changes_where_the_rule_has_its_error_below_four_fifths():
    placement = Placement(JaggConfig(knots=3))
    placement._n_knots, placement._sigmas = 3, shifted(15)
    placement._place()
    first = placement._knots
    sizes = [1.0] * 15
    while True:
        sizes[2] *= 1.5
        placement._sizes = list(sizes)
        best = best_knots(3, placement._sigmas, sizes)
        ratio = math.sqrt(cost_of(best, placement._sigmas, sizes) / cost_of(first, placement._sigmas, sizes))
        placement._place()
        assert placement._knots == (best if ratio < 0.8 else first)
        if ratio < 0.8:
            break


def test_auto_takes_the_fewest_that_keep_the_cosine():
    placement = Placement(JaggConfig(knots="auto", probe_every=1))
    placement._n_knots, placement._sigmas = 5, shifted(15)

    def after(**cosines):
        placement.after_probe({int(name[1:]): cosine for name, cosine in cosines.items()})
        return placement._n_knots

    assert after(n4=0.984, n5=0.99, n6=0.995) == 5  # good enough, and not by the margin
    assert after(n4=0.986, n5=0.99, n6=0.995) == 5  # for the first time
    assert after(n4=0.97, n5=0.99, n6=0.995) == 5  # no more
    assert after(n4=0.986, n5=0.99, n6=0.995) == 5
    assert after(n4=0.986, n5=0.99, n6=0.995) == 4  # twice in a row
    assert after(n3=0.95, n4=0.97, n5=0.99) == 4
    assert after(n3=0.95, n4=None, n5=0.99) == 4  # not known: it counts for nothing
    assert after(n3=0.95, n4=0.97, n5=0.99) == 5


def test_two_knots_have_their_places():
    """Also where each rank trains a window of its own."""
    placement = Placement(JaggConfig(knots=2))
    placement.comes_to(SimpleNamespace(order=None), None)  # which it doesn't look at
    assert placement.groups(5) == (Group((0, 4)),)


@pytest.mark.parametrize("levels", [[3.0, 2.0, 0.0], [1.0, 2.0, 3.0], [3.0, 3.0, 1.0]])
def test_timesteps_that_do_not_fall_have_no_places(levels):
    step = SimpleNamespace(indices=[0], timesteps_at=lambda indices: torch.tensor([levels[index] for index in indices]))
    with pytest.raises(JaggError, match="aren't positive and descending"):
        noise_levels(step, SimpleNamespace(n_trajectory=3, n_visited=3))


def test_ranks_with_other_timesteps_are_refused():
    with pytest.raises(JaggError, match="rank 2 trains at timesteps"):
        same_on_all([[3.0, 2.0], [3.0, 2.0], [3.0, 1.0]])


@pytest.mark.parametrize("settings", [{"knots": 4}, {"knots": "auto"}, {"knots_at": "0,10,13,14"}])
def test_the_probe_measures_whole_updates_and_changes_nothing(load_loop, tmp_path, settings):
    loop, log = Loop(load_loop), tmp_path / "log.jsonl"
    probed, _ = loop.run(JaggConfig(probe_every=1, log=str(log), **settings), n_training_steps=2, lr=0.1)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    if settings["knots" if "knots" in settings else "knots_at"] != "auto":
        plain, _ = loop.run(JaggConfig(**settings), n_training_steps=2, lr=0.1)
        assert all(torch.equal(*pair) for pair in zip(probed, plain, strict=True))
    own, *others = records[0]["probe"]
    assert own["knots"] == records[0]["knots"] and own["group_size"] is None
    numbers = [len(row["knots"]) for row in others if row["group_size"] is None]
    assert numbers == ([] if "knots_at" in settings else [len(own["knots"]) - 1, len(own["knots"]) + 1])
    assert others[-1]["group_size"] == 3


def test_what_the_probe_finds_is_the_cosine_of_the_first_sample_s_gradient(load_loop, tmp_path):
    loop, log, knots, steps = Loop(load_loop), tmp_path / "log.jsonl", (0, 10, 13, 14), []
    loop.run(JaggConfig(probe_every=1, log=str(log), knots_at=knots))
    row = json.loads(log.read_text())["probe"][0]
    loop.run(record=steps)
    sample, gradients = by_sample(steps)[0], []
    t = numpy.array([step["t"] for step in sample])
    for chosen in (knots, range(15)):
        model = models.Plain()
        for n, knot in enumerate(chosen):
            weights = numpy.interp(-t, -t[list(chosen)], numpy.eye(len(chosen))[n])
            model(sample[knot]["input"]).backward(sum(float(w) * step["grad"] for w, step in zip(weights, sample, strict=True)))
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    jagg, exact = gradients
    assert row["cosine"] == pytest.approx(torch.cosine_similarity(jagg, exact, dim=0).item(), abs=1e-5)
    assert row["relative_error"] == pytest.approx(((jagg - exact).norm() / exact.norm()).item(), abs=1e-4)


# -- trainers


def windowed(size):
    sample, train = SimpleNamespace(sde_window_size=size, num_steps=10), SimpleNamespace(timestep_fraction=1.0)
    return SimpleNamespace(sample=sample, train=train)


@pytest.mark.parametrize(
    ("trainer", "settings", "knots"),
    [
        ("train_sd3_fast", windowed(5), 3),
        ("train_sd3_fast", windowed(5), "auto"),
        ("train_grpo_sd", SimpleNamespace(sample=SimpleNamespace(num_steps=10), train=SimpleNamespace(timestep_fraction=1.0)), 4),
    ],
)
def test_where_noise_levels_are_not_known_ahead_knots_are_named(trainer, settings, knots):
    n_visited = TRAINERS[trainer].steps(settings).visited
    for config in (JaggConfig(knots=knots, probe_every=1), JaggConfig(knots_at=(0, n_visited - 1)), JaggConfig()):
        if config.knots:
            with pytest.raises(JaggError, match="knots can't be placed: .*\nname those of the") as error:
                require_placement(TRAINERS[trainer], config, settings)
            assert len(str(error.value).splitlines()) == 2
        else:
            require_placement(TRAINERS[trainer], config, settings)


@pytest.mark.parametrize("knots", [2, 5, 9])
def test_where_there_is_nothing_to_place_a_window_takes_a_number(knots):
    require_placement(TRAINERS["train_sd3_fast"], JaggConfig(knots=knots), windowed(5))
    require_placement(TRAINERS["train_sd3_fast"], JaggConfig(knots=3), windowed(0))
