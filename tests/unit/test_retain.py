"""Retained graphs on a loop of DanceGRPO's shape: the gradients of own forwards, and of the unpatched loop, without forwards."""

import gc
import json
import math
import sys
import weakref
from contextlib import ExitStack, nullcontext, suppress
from types import SimpleNamespace

import models
import pytest
import torch
from test_skip import keep_gradients, make_model
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from jagg_patch import JaggConfig, JaggError, install
from jagg_patch.engines import engine_of
from jagg_patch.evidence.local_gradient import LocalGradient
from jagg_patch.install import Handle
from jagg_patch.loop import retaining
from jagg_patch.loop.checkpointed import arguments_saved
from jagg_patch.loop.drawn import Drawn
from jagg_patch.loop.memory import graph_bytes
from jagg_patch.loop.offload import on_host
from jagg_patch.loop.records import Entry, Records
from jagg_patch.loop.retaining import Retaining

FLUX = "train_grpo_flux"
N_SAMPLES, N_STEPS, N_FIRST = 4, 15, 2  # of a rollout; of a sample; before the first optimizer step
ONE_BY_ONE = (
    "        latents, log_probs = run_sample_step(args, torch.randn(args.n_samples, 2), sigmas, model)\n",
    "        batches = [run_sample_step(args, torch.randn(1, 2), sigmas, model) for _ in range(args.n_samples)]\n"
    "        latents, log_probs = (torch.cat(parts) for parts in zip(*batches))\n",
)
SELECTED = "    rewards, latents, log_probs = rewards[shuffled], latents[shuffled], log_probs[shuffled]\n"
IN_ORDER = SELECTED, ""
BACKWARD = "            loss.backward()\n"
LINE = "JAGG: no graphs are retained from here on: rank 0: "


def run(module, settings=None, model=None, lr=0.1, n_epochs=5, **changes):
    """Gradients of each optimizer step, forwards of each update, visited steps of each, and the handle.

    There are two optimizer steps an update; graphs are retained from the third rollout on.
    """
    handle = None if settings is None else install(vars(module), config=JaggConfig(**dict(self_check=False) | settings))
    args = module.make_args(n_samples=N_SAMPLES, gradient_accumulation_steps=N_FIRST, **changes)
    model = model or make_model()
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr)
    gradients, forwards, visited, calls = keep_gradients(optimizer), [], [], []
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    counting = model.register_forward_hook(lambda *_: calls.append(True))
    torch.manual_seed(1)
    try:
        for _ in range(n_epochs):
            calls.clear()
            visited.append(module.train_one_step(args, model, optimizer))
            forwards.append(len(calls) - N_SAMPLES * module.TOTAL)
    finally:
        counting.remove()
    return SimpleNamespace(gradients=torch.stack(gradients), forwards=forwards, visited=visited, handle=handle)


PLANS = {
    "exact": dict(frac=0),
    "W=4": dict(frac=1),
    "W=4, frac 0.6": dict(frac=0.6),
    "W=5, frac 0.95": dict(group_size=5, frac=0.95),  # one step is left over
    "4 knots": dict(knots=4),
    "named knots": dict(knots_at="0,6,7,14"),
    "skipped": dict(frac=1, skip_forwards=True),
}


@pytest.mark.parametrize("schedule", ["sequential", "joint", "auto"])
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_are_those_of_own_forwards_and_retained_samples_run_none(load_loop, plan, schedule):
    pieces, settings = ONE_BY_ONE + IN_ORDER, PLANS[plan] | dict(schedule=schedule)
    own = run(load_loop(FLUX, *pieces), settings if plan != "exact" else None)
    retained = run(load_loop(FLUX, *pieces), settings | dict(retain=True))
    assert_close(retained.gradients, own.gradients, rtol=1e-5, atol=1e-6)
    assert retained.forwards[:2] == own.forwards[:2]
    assert retained.forwards[2:] == [n * (N_SAMPLES - N_FIRST) // N_SAMPLES for n in own.forwards[2:]]
    assert retained.handle.stats.retained_forwards == 3 * N_FIRST * N_STEPS


def test_the_ratio_before_the_first_optimizer_step_is_exactly_one(load_loop):
    ratios = []
    module = load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER, BACKWARD, f"            args.ratios.append(ratio.item())\n{BACKWARD}")
    run(module, dict(frac=1, retain=True), ratios=ratios)
    first = N_FIRST * N_STEPS
    epochs = [ratios[start : start + N_SAMPLES * N_STEPS] for start in range(0, len(ratios), N_SAMPLES * N_STEPS)]
    assert all(set(epoch[:first]) == {1.0} and 1.0 not in epoch[first:] for epoch in epochs[2:])


@pytest.mark.parametrize("plan", PLANS)
def test_the_log_has_the_plan_of_own_forwards_and_how_many_were_retained(load_loop, plan, tmp_path):
    """The probe measures a sample that is retained, and gets what it gets of one that isn't."""
    pieces, records = ONE_BY_ONE + IN_ORDER, {}
    for name, settings in {"own": {}, "retained": dict(retain=True)}.items():
        log = tmp_path / f"{name}.jsonl"
        run(load_loop(FLUX, *pieces), PLANS[plan] | settings | dict(log=log, probe_every=1, schedule="sequential"))
        records[name] = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record.pop("forwards_retained") for record in records["retained"]] == [0, 0, *[N_FIRST * N_STEPS] * 3]
    assert [record.pop("forwards_retained") for record in records["own"]] == [0] * 5
    for own, retained in zip(records["own"], records["retained"], strict=True):
        for name in ("training_step", "frac", "visited", "groups", "knots", "backward_passes"):
            assert retained[name] == own[name]
        for entry, expected in zip(retained["probe"], own["probe"], strict=True):
            assert entry.keys() == expected.keys()
            for found, wanted in zip(entry.get("groups", [entry]), expected.get("groups", [expected]), strict=True):
                assert found["cosine"] == pytest.approx(wanted["cosine"], abs=1e-4)


# -- orders


ORDERED = "            torch.randperm(n)\n", "            (torch.randperm(n), args.orders.pop(0))[1]\n"


@pytest.mark.parametrize("plan", ["exact", "W=4", "4 knots"])
def test_with_a_fraction_a_sample_is_trained_at_the_steps_that_its_rollout_was_drawn_for(load_loop, plan):
    pieces = ONE_BY_ONE + IN_ORDER
    retained = run(load_loop(FLUX, *pieces), PLANS[plan] | dict(retain=True), timestep_fraction=0.6)
    n_visited, n_forwards = 9, 9 * (N_SAMPLES - N_FIRST)
    assert retained.forwards == [9 * N_SAMPLES] * 2 + [n_forwards] * 3
    steps = torch.tensor(retained.visited).view(-1, n_visited)
    orders = [torch.cat([row, torch.tensor(sorted(set(range(N_STEPS)) - set(row.tolist())))]) for row in steps]
    own = run(load_loop(FLUX, *pieces, *ORDERED), None, timestep_fraction=0.6, orders=list(orders))
    if plan == "exact":
        assert_close(retained.gradients, own.gradients, rtol=1e-5, atol=1e-6)
    assert len({tuple(row.tolist()) for row in steps}) > len(steps) / 2


def drawn(device, n_rollouts, n_samples=4, n_steps=15):
    ahead, orders = Drawn(), []
    for _ in range(n_rollouts):
        orders += [ahead.draw(n_steps, device) for _ in range(n_samples)]
        ahead.forget()
        torch.randn(7)  # the rollout's noise, from the CPU's generator on a CPU alone
    return torch.stack(orders)


def test_on_a_gpu_orders_are_those_that_the_trainer_draws_after_its_rollout():
    torch.manual_seed(3)
    ahead = Drawn()
    before = [ahead.draw(15, "cuda") for _ in range(5)]
    assert torch.equal(torch.stack(before), torch.stack([torch.randperm(15) for _ in range(5)]))


def test_drawing_leaves_the_trainer_s_random_numbers_alone():
    for device in ("cpu", "cuda"):
        torch.manual_seed(3)
        Drawn().draw(15, device)
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(3).get_state())


def test_every_step_comes_equally_often_and_no_sample_s_order_depends_on_another_s():
    torch.manual_seed(0)
    n_visited, n_rollouts = 9, 600
    visited = torch.zeros(n_rollouts * 4, 15).scatter_(1, drawn("cpu", n_rollouts)[:, :n_visited], 1.0)
    share, n = n_visited / 15, len(visited)
    spread = (share * (1 - share)) ** 0.5
    assert (visited.mean(0) - share).abs().max() < 4 * spread / n**0.5
    first, second = visited.view(n_rollouts, 4, 15)[:, 0] - share, visited.view(n_rollouts, 4, 15)[:, 1] - share
    assert (first.T @ second / n_rollouts).abs().max() < 4.5 * spread**2 / n_rollouts**0.5


# -- memory


def test_where_samples_come_to_have_more_knots_fewer_are_retained(load_loop, monkeypatch, capsys):
    made = []

    class Noted(Retaining):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(sys.modules[Handle.__module__], "Retaining", Noted)
    settings, n_knots = dict(frac=1, retain=True), 8  # in four groups
    run(load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER), settings)
    graph = made[0]._shown.measured.graph
    run(load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER), settings | dict(retain_gb=(2 * n_knots + 0.5) * graph / 1e9))
    said, retaining = capsys.readouterr().out, made[1]
    assert said.count("JAGG: graphs of 2 samples of each rollout are retained") == 2 and retaining._room.n_retained == 2
    exact = SimpleNamespace(order=SimpleNamespace(planner=SimpleNamespace(groups=lambda n_steps: ())))
    retaining._follow_plan(exact)
    retaining._follow_plan(exact)
    assert capsys.readouterr().out.count("JAGG: graphs of 1 samples of each rollout are retained") == 1
    assert retaining._room.n_retained == 1 and retaining.is_on


# -- when it can't


@pytest.mark.parametrize("plan", ["exact", "W=4"])
def test_samples_that_the_trainer_selects_are_found_and_the_others_let_go_of(load_loop, plan):
    """Here all are, in another order: any may come first, so all are retained."""
    own = run(load_loop(FLUX, *ONE_BY_ONE), PLANS[plan] if plan != "exact" else None)
    retained = run(load_loop(FLUX, *ONE_BY_ONE), PLANS[plan] | dict(retain=True))
    assert_close(retained.gradients, own.gradients, rtol=1e-5, atol=1e-6)
    assert retained.forwards[2:] == [n // 2 for n in own.forwards[2:]]


GUIDED = "flux_step(run_model(model, z, timesteps), z", "flux_step(1.2 * run_model(model, z, timesteps), z"
SIGMAS, VELOCITY = "    sigmas = torch.linspace(1, 0, args.sampling_steps + 1)\n", "    velocity = run_model("
MODES = SIGMAS, f"{SIGMAS}    model.eval()\n", VELOCITY, f"    transformer.train()\n{VELOCITY}"
DOUBTS = {
    "the rollout's model outputs differ by 20% from": GUIDED,
    "the rollout's model outputs differ by 0.2% from": (GUIDED[0], GUIDED[1].replace("1.2", "1.002")),
    "the rollout's model outputs are torch.bfloat16, and torch.float32 in training": (
        GUIDED[0],
        GUIDED[0].replace("timesteps),", "timesteps).bfloat16(),"),
    ),
    "the training forward calls the model for an output without a gradient too": (
        "    velocity = run_model(transformer, latents, timesteps)\n",
        "    velocity = run_model(transformer, latents, timesteps)\n    with torch.no_grad():\n"
        "        run_model(transformer, latents, timesteps)\n",
    ),
}


@pytest.mark.parametrize("why", DOUBTS)
def test_what_the_first_updates_show_is_said_and_no_graph_is_retained(load_loop, capsys, why):
    pieces = ONE_BY_ONE + IN_ORDER + DOUBTS[why]
    own = run(load_loop(FLUX, *pieces), dict(frac=1))
    capsys.readouterr()
    retained = run(load_loop(FLUX, *pieces), dict(frac=1, retain=True))
    assert_close(retained.gradients, own.gradients, rtol=1e-6, atol=1e-7)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(LINE)]
    assert len(lines) == 1 and why in lines[0] and retained.forwards == own.forwards


def test_samples_of_a_batch_with_steps_of_their_own_are_not_retained(load_loop, capsys):
    run(load_loop(FLUX, *IN_ORDER), dict(frac=1, retain=True))
    assert "the update's batches aren't the rollout's" in capsys.readouterr().out


INFERENCE = (
    "    with torch.no_grad():\n",
    "    with torch.inference_mode():\n",
    "    return latents[:, -1].sum(1), latents, log_probs, sigmas",
    "    latents, log_probs = latents.clone(), log_probs.clone()\n    return latents[:, -1].sum(1), latents, log_probs, sigmas",
)
# Something puts the average of the weights in their place and back, say.
TOUCHED = "    n = args.sampling_steps - 1\n", "    n = args.sampling_steps - 1\n    model[0].weight.detach().mul_(1)\n"
UNCOUNTED = TOUCHED[0], TOUCHED[0] + "    model[0].weight.data *= 1.000001\n"
MOVED = "its weights have changed since the rollout"
CALL = "        z, _, log_prob = flux_step(run_model(model, z, timesteps), z, args.eta, sigmas, i, None, True, True)\n"


class Dropping(models.Plain):
    """Which nobody sees before the last layer has learned something."""

    def __init__(self):
        super().__init__()
        self.net[1] = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Dropout(0.5))
        torch.nn.init.zeros_(self.net[2].weight)


class WithEncoder(models.Plain):
    """Whose input the loop has to give to its encoder first."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(3, 3)


class Cached(models.Plain):
    """A part of its input is computed at a sample's first step alone, when it isn't trained; in value it makes no difference."""

    def __init__(self):
        super().__init__()
        self.context = torch.nn.Linear(3, 3)
        self.kept = None

    def forward(self, x):
        if self.training or x[0, -1] == 1:  # the noisiest
            context = self.context(torch.ones(1, 3))
            self.kept = context.detach()
        return self.net(x + (context if self.training or x[0, -1] == 1 else self.kept))


class CheckpointedInTraining(models.Plain):
    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False) if self.training else self.net(x)


IN_TWO_CALLS = "flux_step(run_model(model, z, timesteps), z", "flux_step(combined(model, z, timesteps, guided=False), z"
IN_TWO_CALLS += VELOCITY, VELOCITY.replace("run_model(", "combined(")
IN_TWO_CALLS += (
    "def grpo_one_step",
    "def combined(model, latents, timesteps, guided=True):\n"
    "    with torch.set_grad_enabled(guided and torch.is_grad_enabled()):\n"
    "        other = run_model(model, latents, timesteps + 1)\n"
    "    return 2 * run_model(model, latents, timesteps) - other\n\n\n"
    "def grpo_one_step",
)
ENCODED = (
    "    return model(torch.cat([latents, timesteps[:, None] / 1000], 1))\n",
    "    encoded = model.encoder(torch.cat([latents, timesteps[:, None] / 1000], 1))\n    return model(encoded)\n",
)
UNUSED = {
    "a cache": ("the rollout's forwards don't go through all weights that training's do", MODES, Cached),
    "an encoder before": ("the rollout's forwards don't go through all weights that training's do", ENCODED, WithEncoder),
    "no graph of one call": ("a forward of the rollout is under no_grad by itself", IN_TWO_CALLS, make_model),
    "inference": ("the rollout's forwards leave no graph", INFERENCE, make_model),
    "touched": (MOVED, TOUCHED, make_model),
    "past torch's counting": (MOVED, UNCOUNTED, make_model),
    "larger graphs": ("a forward of the rollout keeps ", MODES, CheckpointedInTraining),
}


@pytest.mark.parametrize("what", UNUSED)
def test_graphs_that_cannot_be_used_are_said_and_given_up_after_three_updates(load_loop, capsys, what):
    why, changes, make = UNUSED[what]
    pieces = ONE_BY_ONE + IN_ORDER + changes
    own = run(load_loop(FLUX, *pieces), dict(frac=1), make(), n_epochs=6)
    capsys.readouterr()
    retained = run(load_loop(FLUX, *pieces), dict(frac=1, retain=True), make(), n_epochs=6)
    assert_close(retained.gradients, own.gradients, rtol=1e-6, atol=1e-7)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("JAGG: graphs aren't used in ")]
    assert [line.split(":")[1] for line in lines] == [" graphs aren't used in this update"] * 2 + [
        " graphs aren't used in any update from here on"
    ]
    assert all(why in line for line in lines) and retained.forwards == own.forwards


def test_dropout_in_training_alone_is_seen_before_it_drops_what_counts(load_loop, capsys):
    run(load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER, *MODES), dict(frac=0, retain=True), Dropping(), n_epochs=3, lr=0.0)
    assert "dropout is on in training alone" in capsys.readouterr().out


@pytest.mark.parametrize("plan", ["exact", "W=4"])
def test_what_the_rollout_does_to_an_output_afterwards_does_not_matter(load_loop, plan):
    """It may reuse its memory, for a preview say."""
    later = (
        "        z, _, log_prob = flux_step(run_model(model, z, timesteps), z, args.eta, sigmas, i, None, True, True)\n",
        "        velocity = run_model(model, z, timesteps)\n"
        "        z, _, log_prob = flux_step(velocity, z, args.eta, sigmas, i, None, True, True)\n"
        "        velocity.zero_()\n",
    )
    pieces = ONE_BY_ONE + IN_ORDER + later
    own = run(load_loop(FLUX, *pieces), PLANS[plan])
    retained = run(load_loop(FLUX, *pieces), PLANS[plan] | dict(retain=True))
    assert_close(retained.gradients, own.gradients, rtol=1e-6, atol=1e-7)
    assert retained.forwards[2:] == [n // 2 for n in own.forwards[2:]]


MODE = {
    "around each call alone": (False, "        with torch.no_grad():\n            velocity = run_model(model, z, timesteps)\n"),
    "there too": (True, "        with torch.no_grad():\n            velocity = run_model(model, z, timesteps)\n"),
    "of its own": (
        True,
        "        velocity = run_model(model, z, timesteps)\n"
        "        with torch.enable_grad():\n"
        "            start = z.clone().requires_grad_()\n"
        "            torch.autograd.grad(start.square().sum(), start)\n",
    ),
}


@pytest.mark.parametrize("where", MODE)
def test_the_rollout_goes_on_in_the_mode_that_it_had(load_loop, where, capsys):
    is_under_no_grad, call = MODE[where]
    solver = CALL.replace("run_model(model, z, timesteps)", "velocity")
    assertion = f"        assert torch.is_grad_enabled() is {not is_under_no_grad}\n"
    outer = () if is_under_no_grad else ("    with torch.no_grad():\n", "    if True:\n")
    pieces = *ONE_BY_ONE, *IN_ORDER, *outer, CALL, call + solver + assertion
    own = run(load_loop(FLUX, *pieces))
    retained = run(load_loop(FLUX, *pieces), dict(frac=0, retain=True))
    assert_close(retained.gradients, own.gradients, rtol=1e-5, atol=1e-6)
    assert retained.forwards[2:] == [n // 2 for n in own.forwards[2:]]
    assert "aren't used" not in capsys.readouterr().out


class Keeping(models.Plain):
    """A checkpointed block reads what the model keeps of a sample, and gets it as `give` says."""

    def __init__(self, give):
        super().__init__()
        self._give, self._kept = give, torch.zeros(1, 3)
        self.outer = torch.nn.Linear(3, self.net[0].out_features)

    def block(self, hidden, given=None):
        kept = self._kept if given is None else given[0]
        return self.net[2]((hidden + self.outer(kept)).tanh())

    def forward(self, x):
        if x[0, -1] == 1:  # a sample's first step
            self._kept = x if self._give == "kept" else self._kept.copy_(x)
        given = {"kept": {}, "listed": {"given": [self._kept]}, "named": {"given": self._kept[None]}}[self._give]
        return checkpoint(self.block, self.net[0](x), use_reentrant=False, **given)


def test_what_a_model_keeps_from_one_sample_to_the_next_stops_the_run(load_loop):
    """Where a backward comes right after its own forward it is right, and the outputs are the same."""
    module = load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER)
    with pytest.raises(JaggError, match=r"% off the one .*\nthe rollout's graph isn't the training forward's"):
        run(module, dict(frac=0, retain=True, self_check=True), Keeping("kept"))


def test_graphs_whose_gradients_come_with_others_are_not_used(load_loop, capsys):
    """They can't be told apart in the check."""
    penalised = BACKWARD, "            (loss + 0.01 * sum(weight.square().sum() for weight in model.parameters())).backward()\n"
    settings = dict(frac=0), dict(frac=0, retain=True, self_check=True)
    own, retained = (run(load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER, *penalised), one, n_epochs=6) for one in settings)
    assert_close(retained.gradients, own.gradients, rtol=1e-5, atol=1e-6)
    assert retained.handle.stats.retained_forwards == N_FIRST * N_STEPS  # of one update, the checked one
    assert "in this update: rank 0: losses may reach weights by another way as well (a penalty?)" in capsys.readouterr().out


class ByLatest(torch.autograd.Function):
    """`velocity` times `scale`; its gradient is another where the model has seen another sample since: by `change`."""

    @staticmethod
    def forward(ctx, velocity, scale, model):
        ctx.save_for_backward(velocity, scale)
        ctx.model, ctx.sample = model, model.sample
        return velocity * scale

    @staticmethod
    def backward(ctx, gradient):
        velocity, scale = ctx.saved_tensors
        change = 0.0 if ctx.sample is ctx.model.sample else ctx.model.change
        return gradient * scale + change, (gradient * velocity).sum(0), None


class Changing(models.Plain):
    def __init__(self, change):
        super().__init__()
        self.scale, self.change, self.sample = torch.nn.Parameter(torch.ones(2)), change, None

    def forward(self, x):
        if x[0, -1] == 1:
            self.sample = x
        return ByLatest.apply(super().forward(x), self.scale, self)


@pytest.mark.parametrize(("change", "found"), [(1.0, r"[\d.]+% off"), (math.nan, "not finite, unlike")])
def test_a_wrong_gradient_of_a_retained_graph_stops_the_run_whatever_it_is(load_loop, change, found):
    module = load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER)
    with pytest.raises(JaggError, match=f"the group's gradient is {found} the one .*\nthe rollout's graph isn't"):
        run(module, dict(frac=0, retain=True, self_check=True), Changing(change))


def test_a_weight_that_an_autograd_function_saves_stops_nothing(load_loop):
    """torch 2.6 drops the hooks of one that the function gets from hooks on what is saved, as where a graph is measured."""
    settings = dict(frac=0), dict(frac=0, retain=True, self_check=True)
    own, retained = (run(load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER), one, Changing(0.0)) for one in settings)
    assert_close(retained.gradients, own.gradients, rtol=1e-5, atol=1e-6)
    assert retained.handle.stats.retained_forwards == 3 * N_FIRST * N_STEPS


def test_no_graph_goes_to_the_host_where_weights_have_hooks(load_loop, capsys):
    """torch 2.6 may drop them there."""
    model, seen = Changing(0.0), []
    model.scale.register_hook(seen.append)
    module = load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER)
    retained = run(module, dict(frac=0, retain=True, retain_on="host"), model)
    assert len(seen) == 5 * N_SAMPLES * N_STEPS and retained.handle.stats.retained_forwards == 0
    assert "and 0 GB of the host's may be taken" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_backward_of_the_loop_s_own_between_the_group_s_stops_nothing(load_loop, where):
    def penalise(model):
        (0.01 * sum(weight.square().sum() for weight in model.parameters())).backward()

    call = "            args.penalise(model)\n"
    pieces = (*ONE_BY_ONE, *IN_ORDER, BACKWARD, call + BACKWARD if where == "before" else BACKWARD + call)
    settings = dict(frac=0), dict(frac=0, retain=True, self_check=True)
    own, retained = (run(load_loop(FLUX, *pieces), one, penalise=penalise) for one in settings)
    assert_close(retained.gradients, own.gradients, rtol=1e-5, atol=1e-6)
    assert retained.handle.stats.retained_forwards == 3 * N_FIRST * N_STEPS


def test_of_a_large_weight_no_row_or_column_is_left_out():
    """A model that is wrong in what a regular sample leaves out would pass."""
    weight = torch.nn.Parameter(torch.zeros(512, 512))
    first, other = LocalGradient(), LocalGradient()
    for local, gradient in (first, torch.ones(512, 512)), (other, (torch.arange(512) % 4 == 0).float().expand(512, 512)):
        output = weight.clone()
        local.watch(output)
        output.backward(gradient)
        local.close()
    ((apart,), (size,)) = first.squares(other)
    assert apart / size == pytest.approx(3, rel=0.05)


class Complex(models.Plain):
    def __init__(self):
        super().__init__()
        self.turned = torch.nn.Parameter(torch.full((3,), 0.1 + 0.2j))

    def forward(self, x):
        return super().forward(x) + (x[:, :2] * self.turned[:2]).exp().real


def test_a_complex_weight(load_loop):
    pieces, settings = ONE_BY_ONE + IN_ORDER, [dict(frac=0), dict(frac=0, retain=True, self_check=True)]
    own, retained = (run(load_loop(FLUX, *pieces), one, Complex()) for one in settings)
    assert_close(retained.gradients, own.gradients, rtol=1e-5, atol=1e-6)
    assert retained.handle.stats.retained_forwards == 3 * N_FIRST * N_STEPS


@pytest.mark.parametrize("how", ["listed", "named"])
def test_what_a_checkpointed_block_is_given_may_not_change(load_loop, how):
    """In a list, or by keyword, torch keeps it where it isn't looked after. On the host there is a copy."""
    with pytest.raises(JaggError, match="a later forward has changed what the backward of an endpoint of the group reads"):
        run(load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER), dict(frac=1, retain=True), Keeping(how))
    own = run(load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER), dict(frac=1), Keeping(how))
    on_host = run(load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER), dict(frac=1, retain=True, retain_on="host"), Keeping(how))
    assert_close(on_host.gradients, own.gradients, rtol=1e-5, atol=1e-6)
    assert on_host.forwards[2:] == [n // 2 for n in own.forwards[2:]]


LATER = {
    "calls the model for an output without a gradient too": (
        "    if args.is_late():\n        with torch.no_grad():\n            run_model(transformer, latents, timesteps)\n"
    ),
    "has a loss on the model's output besides the solver step": (
        "    if args.is_late():\n        args.penalties.append(velocity.square().mean())\n"
    ),
}


@pytest.mark.parametrize("plan", ["exact", "W=4"])
@pytest.mark.parametrize("what", LATER)
def test_what_the_training_forward_begins_to_do_later_stops_the_run(load_loop, without_contract, what, plan):
    """In whose place nothing is run."""
    penalised = BACKWARD, "            (loss + sum(args.penalties)).backward()\n            args.penalties.clear()\n"
    call = "    velocity = run_model(transformer, latents, timesteps)\n"
    module, n_calls = load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER, *penalised, call, call + LATER[what]), []

    def is_late():
        n_calls.append(True)
        return len(n_calls) > 3 * N_SAMPLES * N_STEPS

    with pytest.raises(JaggError, match=f"sample 0, visited step 0 .*: the training forward now {what}"):
        run(module, PLANS[plan] | dict(retain=True), is_late=is_late, penalties=[])


class Adapted(models.Plain):
    """Its adapter does nothing before it is trained."""

    def __init__(self):
        super().__init__()
        self.adapter = torch.nn.Linear(3, 2)
        self.requires_grad_(False)
        torch.nn.init.zeros_(self.adapter.requires_grad_().weight)
        torch.nn.init.zeros_(self.adapter.bias)

    def forward(self, x):
        return self.net(x) + (1.0 if self.training else 0.5) * self.adapter(x)


def test_an_adapter_that_the_rollout_uses_otherwise_is_seen_before_graphs_are_retained(load_loop, capsys):
    """Both optimizer steps may be of the first rollout's update, whose outputs don't go by the adapter."""
    own = run(load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER, *MODES), model=Adapted())
    retained = run(load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER, *MODES), dict(frac=0, retain=True), Adapted())
    assert_close(retained.gradients, own.gradients, rtol=1e-5, atol=1e-6)
    assert retained.forwards == own.forwards
    assert f"{LINE}the rollout's model outputs differ by " in capsys.readouterr().out


class Tokens(models.Plain):
    """`[B, 2]` in tokens of two, of which each rollout has another number."""

    def forward(self, x):
        return torch.stack([self.net(x)] * int(x[0, -1] * 0 + self.n_tokens), 1).flatten(1)


def test_outputs_of_a_new_size_are_first_had_by_a_training_forward(load_loop, capsys):
    """The training forward reads sizes off its latents: a stand-in of another size would not fit."""
    model, made = Tokens(), []
    sizes = "    sigmas = torch.linspace(1, 0, args.sampling_steps + 1)\n"
    pieces = *ONE_BY_ONE, *IN_ORDER, sizes, f"{sizes}    args.begin()\n"
    stepped = "    mean = latents + (sigmas[index + 1] - sigmas[index]) * model_output\n"
    mean = "    mean = latents + (sigmas[index + 1] - sigmas[index]) * model_output.view(len(latents), -1, 2).mean(1)\n"
    summed = "    velocity = run_model(transformer, latents, timesteps)\n"
    checked = f"{summed}    velocity = velocity + 0 * latents.repeat(1, transformer.n_tokens)\n"

    def begin():
        made.append(True)
        model.n_tokens = 2 if len(made) in (4, 5) else 1

    module = load_loop(FLUX, *pieces, stepped, mean, summed, checked)
    found = run(module, dict(frac=0, retain=True), model, n_epochs=6, begin=begin)
    whole, others = N_SAMPLES * N_STEPS, (N_SAMPLES - N_FIRST) * N_STEPS
    assert found.forwards == [whole, whole, others, whole, others, others]
    assert "aren't used in this update: rank 0: no training forward has had outputs of this size" in capsys.readouterr().out


def test_one_forward_in_ten_updates_is_run_again_and_shows_a_rollout_that_has_changed(load_loop, capsys, monkeypatch):
    """In every third here: guidance that begins with the sixth rollout is seen by the eighth update, the sixth that retains."""
    monkeypatch.setattr(retaining, "LOOK_EVERY", 3)
    n_calls = []

    def scale():
        n_calls.append(True)
        return 1.0 if len(n_calls) <= 5 * N_SAMPLES * 16 else 1.2

    module = load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER, GUIDED[0], GUIDED[1].replace("1.2", "args.scale()"))
    found = run(module, dict(frac=0, retain=True), n_epochs=9, scale=scale)
    whole, retained = N_SAMPLES * N_STEPS, (N_SAMPLES - N_FIRST) * N_STEPS
    assert found.forwards == [whole, whole, retained, retained, retained + 1, retained, retained, whole + 1, whole]
    lines = capsys.readouterr().out.splitlines()
    ends = "JAGG: graphs aren't used in any update from here on: rank 0: the rollout's model outputs differ by 20%"
    assert [line.startswith(ends) for line in lines if "aren't used" in line] == [True]


def test_a_graph_is_that_of_a_whole_batch():
    """The first of its rows alone would be broadcast."""
    records = Records()
    records.begin_batch()
    for _ in range(4):
        records.add(torch.randn(2, 3), torch.randn(2, 3))
    first, second = Entry(0, 0, 3), Entry(0, 1, 3)
    assert records.batch_of([first, second]) == (0, 3)
    for rows in ([first], [second], [second, first], [first, second, first]):
        assert records.batch_of(rows) is None


def test_a_batch_that_is_drawn_again_leaves_nothing_of_the_first_time(load_loop, without_contract, capsys):
    """Neither its order of steps nor its graphs, some of which would be found. Three of the retained ones fail at a late step."""
    fails = "        all_latents.append(z)\n", "        all_latents.append(z)\n        args.watch(i)\n"
    draw = ONE_BY_ONE[0], ONE_BY_ONE[1].replace("run_sample_step(args, ", "args.retry(run_sample_step, args, ")
    pieces = *draw, *IN_ORDER, *fails

    def failing():
        n_batches, left = [], [3 * N_SAMPLES + 2, 4 * N_SAMPLES + 1, 4 * N_SAMPLES + 2]

        def watch(step):
            if step == 13 and left and left[0] == len(n_batches):
                del left[0]
                raise KeyError("broken")

        def retry(sample, args, noise, sigmas, model):
            n_batches.append(True)
            with suppress(KeyError):
                return sample(args, noise, sigmas, model)
            return sample(args, torch.randn(1, 2), sigmas, model)

        return dict(watch=watch, retry=retry, timestep_fraction=0.6)

    retained = run(load_loop(FLUX, *pieces), dict(frac=0, retain=True), **failing())
    steps = torch.tensor(retained.visited).view(-1, 9)
    orders = [torch.cat([row, torch.tensor(sorted(set(range(N_STEPS)) - set(row.tolist())))]) for row in steps]
    own = run(load_loop(FLUX, *pieces, *ORDERED), None, orders=list(orders), **failing())
    assert_close(retained.gradients, own.gradients, rtol=1e-5, atol=1e-6)
    assert retained.forwards[2:] == [9 * (N_SAMPLES - N_FIRST) + 14 * n_failed for n_failed in (0, 1, 2)]
    assert "aren't used" not in capsys.readouterr().out


def test_a_single_trained_step_is_said(load_loop, capsys):
    run(load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER), dict(frac=0, retain=True), n_epochs=2, timestep_fraction=0.1)
    assert "JAGG: no graphs are retained from here on: of each sample a single step is trained\n" in capsys.readouterr().out


def test_weights_that_change_from_one_batch_of_a_rollout_to_the_next_are_seen(load_loop, capsys):
    """As the third rollout's do after its first batch, which is one that is retained."""
    pieces, calls = (ONE_BY_ONE[0], ONE_BY_ONE[1].replace("sigmas, model)", "sigmas, args.given(model))")), []

    def given(model):
        calls.append(True)
        if len(calls) == 3 * N_SAMPLES + 2:
            model[0].weight.data *= 1.01
        return model

    module = load_loop(FLUX, *pieces, *IN_ORDER)
    retained = run(module, dict(frac=1, retain=True), n_epochs=4, given=given)
    assert f"JAGG: graphs aren't used in this update: rank 0: {MOVED}\n" in capsys.readouterr().out
    whole, n_others = N_SAMPLES * N_STEPS, (N_SAMPLES - N_FIRST) * N_STEPS
    assert retained.forwards == [whole, whole, n_others, whole]


@pytest.mark.parametrize("fails_in", ["rollout", "update"])
def test_a_fault_leaves_no_graph_behind(load_loop, fails_in):
    place = {
        "rollout": ("    return latents[:, -1].sum(1), latents", "    args.fail()\n    return latents[:, -1].sum(1), latents"),
        "update": (BACKWARD, f"{BACKWARD}            args.fail()\n"),
    }[fails_in]
    module, graphs, model = load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER, *place), [], make_model()

    def keep(model, args, output):
        if output.requires_grad:
            graphs.append(weakref.ref(output))

    calls = []

    def fail():
        calls.append(True)
        if len(calls) == (3 if fails_in == "rollout" else 2 * N_SAMPLES * N_STEPS + 5):
            raise KeyError("broken")

    model.register_forward_hook(keep)
    with pytest.raises(KeyError, match="broken"):
        run(module, dict(frac=1, retain=True), model=model, fail=fail)
    gc.collect()
    assert graphs and not any(graph() is not None for graph in graphs)


class Auxiliary(models.Plain):
    """Leaves a loss beside its output."""

    def forward(self, x):
        hidden = self.net[:2](x)
        self.aux = hidden.square().mean()
        return self.net[2](hidden)


def test_a_loss_beside_the_output_stops_the_run_also_where_every_step_is_exact(load_loop):
    """Where a forward isn't run it would be a constant."""
    module = load_loop(FLUX, *ONE_BY_ONE, *IN_ORDER, BACKWARD, "            (loss + model.aux).backward()\n")
    run(module, dict(frac=0), model=Auxiliary()).handle.uninstall()
    with pytest.raises(JaggError, match="reaches weights by another way than the model's output"):
        run(module, dict(frac=0, retain=True), model=Auxiliary())


@pytest.mark.parametrize("plan", ["exact", "4 knots"])
def test_in_the_host_s_memory_it_is_the_same_in_every_bit(load_loop, plan, capsys):
    pieces, settings = ONE_BY_ONE + IN_ORDER, PLANS[plan] | dict(retain=True)
    on_device, on_host = (run(load_loop(FLUX, *pieces), settings | dict(retain_on=place)) for place in ("device", "host"))
    assert torch.equal(on_device.gradients, on_host.gradients)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("JAGG: graphs of 2 samples")]
    assert [line.split("here on, ")[1].split(" memory")[0] for line in said] == [
        "2 on the device and 0 in the host's",
        "0 on the device and 2 in the host's",
    ]


def test_what_a_checkpointed_block_is_given_by_keyword_goes_to_the_host_as_well():
    """Diffusers' blocks are called so; torch keeps what they are given where no hook sees it."""
    model, x = make_model(), torch.randn(5, 3, requires_grad=True)

    def gradients(kept):
        with kept as found:
            loss = checkpoint(lambda scale, x: model(scale * x), 2.0, x=x + 1, use_reentrant=False).square().sum()
        return found[0], torch.cat([g.flatten() for g in torch.autograd.grad(loss, [x, *model.parameters()])])

    of_square = 5 * 2 * x.element_size()
    (_, own), (on_device, counted), (moved, back) = map(
        gradients, (nullcontext([0]), graph_bytes(model), on_host(engine_of(model)))
    )
    assert on_device == moved == x.nbytes + of_square
    assert torch.equal(counted, own) and torch.equal(back, own)


def test_what_is_saved_of_a_checkpointed_block_s_arguments_may_be_saved_twice():
    """By a measurement around, say, which has numbers of its own."""
    model, x = make_model(), torch.randn(5, 3, requires_grad=True)

    def gradients(*around):
        with ExitStack() as stack:
            for one in around:
                stack.enter_context(one)
            given = dict(c=x.sin(), use_reentrant=False)
            y = checkpoint(lambda a, pair, c: model(a + 2 * pair[0] + 3 * pair[1] + 4 * c), x, [x + 1, x * 2], **given)
        return torch.cat([g.flatten() for g in torch.autograd.grad(y.square().sum(), [x, *model.parameters()])])

    own = gradients()
    assert torch.equal(gradients(arguments_saved()), own)
    assert torch.equal(gradients(arguments_saved(), graph_bytes(model), on_host(engine_of(model))), own)
