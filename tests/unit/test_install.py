"""The interception on a loop of upstream's shape: what it does when all is well, and what it refuses."""

import argparse
import contextlib
import gc
import inspect
import weakref
from functools import partial

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.testing import assert_close

from jagg_patch import JaggConfig, JaggError, group_backward, install, plan_groups
from jagg_patch.engines import Engine, ddp
from jagg_patch.trainers import TRAINERS


@pytest.fixture
def load(load_loop):
    return partial(load_loop, "train_grpo_flux")


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


class Gradients:
    """An optimizer that keeps the gradient of each step and changes nothing."""

    def __new__(cls, model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.seen = []

        def keep(optimizer, *_):
            optimizer.seen.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))

        optimizer.register_step_pre_hook(keep)
        return optimizer


def run(module, model=None, seed=1, **settings):
    """One training step. Returns the visited steps, the gradient at each optimizer step and the RNG state after."""
    model = model or make_model()
    torch.manual_seed(seed)
    optimizer = Gradients(model)
    visited = module.train_one_step(module.make_args(**settings), model, optimizer)
    return visited, torch.stack(optimizer.seen), torch.get_rng_state()


def by_sample(visited, n_samples=2):
    k = len(visited) // n_samples
    return [visited[i * k : (i + 1) * k] for i in range(n_samples)]


def count_backward_passes(model):
    """One entry per backward pass that enters the model; `.recorded` has one per forward that recorded a graph."""

    class Passes(list):
        recorded = 0

    passes = Passes()

    def watch_output(module, inputs, output):
        if output.requires_grad:
            passes.recorded += 1
            output.register_hook(lambda grad: passes.append(1))

    model.register_forward_hook(watch_output)
    return passes


# -- what it does


@pytest.mark.parametrize("settings", [{"enabled": False}, {"frac": 0.0}])
def test_off_and_nothing_routed_are_bit_identical(load, settings, capsys):
    visited, gradients, rng = run(load())
    module = load()
    install(vars(module), config=JaggConfig(**settings))
    assert run(module)[0] == visited
    _, patched_gradients, patched_rng = run(module)
    assert torch.equal(patched_gradients, gradients) and torch.equal(patched_rng, rng)
    assert "first optimizer step" not in capsys.readouterr().out


@pytest.mark.parametrize("fraction", [1.0, 0.6, 0.5])  # 0.5 of 15 steps are 7, not 8
def test_the_same_steps_are_trained_in_trajectory_order_with_the_same_random_numbers(load, fraction):
    visited, _, rng = run(load(), timestep_fraction=fraction)
    module = load()
    install(vars(module), config=JaggConfig())
    sorted_visited, _, patched_rng = run(module, timestep_fraction=fraction)
    assert by_sample(sorted_visited) == [sorted(steps) for steps in by_sample(visited)]
    assert torch.equal(patched_rng, rng)


@pytest.mark.usefixtures("without_self_check")
def test_group_size_two_is_exact_with_half_the_autograd_calls(load):
    _, expected, _ = run(load(), sampling_steps=9)
    module, model = load(), make_model()
    handle = install(vars(module), config=JaggConfig(group_size=2, frac=1))
    passes = count_backward_passes(model)
    _, found, _ = run(module, model, sampling_steps=9)
    assert_close(found, expected, rtol=1e-5, atol=1e-8)
    assert handle.stats.groups == 2 * 4 and len(passes) == 2 * 8


@pytest.mark.usefixtures("without_self_check")
@pytest.mark.parametrize("group_size", [3, 4, 5])
@pytest.mark.parametrize("frac", [0.6, 1.0])
@pytest.mark.parametrize("aggregation", ["interpolate", "endpoints"])
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_the_gradient_is_group_backward_s(load, group_size, frac, aggregation, schedule):
    config = JaggConfig(group_size=group_size, frac=frac, aggregation=aggregation, schedule=schedule)
    module, model = load(), make_model()
    calls = []  # (arguments, log-probability) of every training forward
    original = module.grpo_one_step

    def recording(*args):
        calls.append(args)
        return original(*args)

    module.grpo_one_step = recording
    recording.__signature__ = inspect.signature(original)
    handle = install(vars(module), config=config)
    passes = count_backward_passes(model)
    _, found, _ = run(module, model)

    # The oracle: the same steps, one group at a time, outside the trainer.
    module = load()
    torch.manual_seed(1)
    args = module.make_args()
    rewards, _, _, _ = module.sample_reference_model(args, model)
    order = torch.randperm(len(rewards))
    advantages = ((rewards - rewards.mean()) / rewards.std())[order]
    n_visited, model = args.sampling_steps - 1, make_model()
    groups = plan_groups(n_visited, config)
    singles = [range(j, j + 1) for j in range(sum(map(len, groups)), n_visited)]
    for sample in range(args.n_samples):
        for group in [*groups, *singles]:
            steps = [calls[sample * n_visited + position] for position in group]

            def velocity(j, steps=steps):
                return module.run_model(model, steps[j][1], steps[j][4])

            def loss(j, v_hat, steps=steps, sample=sample):
                _, latents, pre_latents, _, _, i, sigmas = steps[j]
                with torch.no_grad():
                    old = module.flux_step(velocity(j), latents, args.eta, sigmas, i, pre_latents, True, True)[2]
                new = module.flux_step(v_hat, latents, args.eta, sigmas, i, pre_latents, True, True)[2]
                return -(advantages[sample] * torch.exp(new - old)).mean() / (args.n_samples * n_visited)

            group_backward(velocity, loss, torch.stack([step[4] for step in steps]), JaggConfig(aggregation=aggregation))
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert_close(found[0], expected, rtol=1e-5, atol=1e-8)
    n_backward = args.n_samples * (2 * len(groups) + len(singles))
    assert handle.stats.backward_passes == n_backward == len(passes) == passes.recorded
    assert handle.stats.training_steps == 1
    assert handle.stats.backward_passes_unpatched == args.n_samples * n_visited


def test_uninstall_restores_every_name_and_the_parser(load):
    module = load()
    before = dict(vars(module))
    parser = argparse.ArgumentParser()
    parser.set_defaults(**vars(module.make_args()))
    handle = install(vars(module), parser)
    parser.parse_args([])
    assert module.flux_step is not before["flux_step"]
    handle.uninstall()
    assert dict(vars(module)) == before
    assert "parse_known_args" not in vars(parser)
    handle.uninstall()


def test_only_the_trainer_sees_the_other_randperm(load):
    module = load()
    real = torch.randperm
    install(vars(module), config=JaggConfig())
    assert torch.randperm is real
    assert module.torch.randperm is not real
    assert module.torch.nn is torch.nn and module.torch.__version__ == torch.__version__
    assert isinstance(torch.ones(1), module.torch.Tensor)
    module.torch.set_by_the_trainer = 1
    assert torch.set_by_the_trainer == 1 and "set_by_the_trainer" in dir(module.torch)
    del module.torch.set_by_the_trainer
    assert not hasattr(torch, "set_by_the_trainer")


def test_flags_reach_the_trainer_s_args_and_off_by_flag_wraps_nothing_that_computes(load):
    module = load()
    before = dict(vars(module))
    parser = argparse.ArgumentParser()
    for name, value in vars(module.make_args()).items():
        parser.add_argument(f"--{name}", default=value)
    install(vars(module), parser)
    args = parser.parse_args(["--jagg_enabled", "0", "--jagg_frac", "0.5"])
    assert (args.jagg_enabled, args.jagg_frac, args.jagg_group_size) == (False, 0.5, 4)
    assert all(vars(module)[name] is before[name] for name in before if name != "train_one_step")
    assert "--jagg_group_size" in parser.format_help()


def test_banner_names_version_settings_plan_and_saving(load, capsys, monkeypatch):
    from jagg_patch import __version__

    monkeypatch.setenv("RANK", "0")
    module = load()
    parser = argparse.ArgumentParser()
    parser.set_defaults(**vars(module.make_args(timestep_fraction=0.6)))
    install(vars(module), parser)
    parser.parse_args([])
    assert capsys.readouterr().out.splitlines() == [
        f"JAGG {__version__} on train_grpo_flux: group_size 4, frac 0.6, aggregation interpolate, schedule auto",
        "  plan: 9 of 15 steps visited, in trajectory order: 5 in 1 group (5), 4 exact",
        "  predicted per sample, in forwards: update 36 -> 27 (1.33x), with sampling 52 -> 43 (1.21x)",
        "  memory: as unpatched for 2 optimizer steps (sequential); then joint, if what they have left free holds it (jagg_patch/loop/README.md)",
    ]
    for _ in range(2):
        run(module, timestep_fraction=0.6)
    assert capsys.readouterr().out == "JAGG: first optimizer step after 12 backward passes through the model instead of 18\n"


@pytest.mark.parametrize(
    ("plan", "schedule", "cost", "forwards"),
    [
        (4, "auto", 25, "3 a group, counted above; 2 in the joint schedule"),
        (4, "sequential", 25, "3 a group, counted above; 2 in the joint schedule"),
        (4, "joint", 24, "2 a group (one more where DDP syncs the last one's gradients)"),
        (3, "auto", 33, "3 a group, counted above; 2 in the joint schedule"),
        (3, "sequential", 33, None),
        ("0,3,8", "auto", 14, "5 a sample, counted above; 4 in the joint schedule"),
        ("0,3,8", "joint", 13, "4 a sample (one more where DDP syncs the last one's gradients)"),
    ],
)
def test_banner_says_how_many_forwards_a_group_takes(load, capsys, monkeypatch, plan, schedule, cost, forwards):
    """By hand: of nine steps five are a group of 5, or three one of 3; the others cost 4 each, a group a forward and 3 at each end.

    With three knots, of four steps and of six from one to the next, the first two are run first, or none.
    """
    monkeypatch.setenv("RANK", "0")
    module = load()
    parser = argparse.ArgumentParser()
    parser.set_defaults(**vars(module.make_args(timestep_fraction=0.6)))
    which = {"knots_at": plan} if isinstance(plan, str) else {"group_size": plan, "frac": 0.6 if plan == 4 else 0.4}
    config = JaggConfig(schedule=schedule, skip_forwards=True, **which)
    install(vars(module), parser, config)
    parser.parse_args([])
    printed = capsys.readouterr().out
    assert f"update 36 -> {cost} " in printed
    lines = [line for line in printed.splitlines() if line.startswith("  forwards:")]
    said = f"  forwards: {forwards}, the others are estimated from the rollout's; its first sample is compared"
    assert lines == ([said] if forwards else [])


def test_banner_only_on_rank_zero(load, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    module = load()
    install(vars(module), config=JaggConfig())
    run(module)
    assert capsys.readouterr().out == ""


def test_a_rank_that_is_found_out_later_writes_no_log(load, tmp_path, monkeypatch):
    """Under SLURM some trainers set RANK inside `main`."""
    monkeypatch.delenv("RANK", raising=False)
    logs = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    for rank, log in enumerate(logs):
        module = load()
        install(vars(module), config=JaggConfig(log=str(log)))
        monkeypatch.setenv("RANK", str(rank))
        run(module)
        monkeypatch.delenv("RANK")
    assert [log.read_text().count("\n") for log in logs] == [1, 0]


def test_an_optimizer_of_another_model_does_not_use_up_the_report(load, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    rollout = "    rewards, latents, log_probs, sigmas = sample_reference_model("
    module = load(rollout, "    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()\n" + rollout)
    install(vars(module), config=JaggConfig())
    run(module)
    assert capsys.readouterr().out.count("first optimizer step after 20 backward passes") == 1


def test_a_reference_forward_without_gradients_passes_through(load):
    call = "            ratio = torch.exp("
    reference = "            with torch.no_grad():\n                grpo_one_step(args, latents[i : i + 1, step], "
    reference += "latents[i : i + 1, step + 1], model, timesteps[step : step + 1], step, sigmas)\n"
    plain = load()
    install(vars(plain), config=JaggConfig())
    with_reference = load(call, reference + call)
    install(vars(with_reference), config=JaggConfig())
    assert torch.equal(run(with_reference)[1], run(plain)[1])


# -- what it refuses


def stops(module, match, **settings):
    """The training step ends in a two-line JaggError."""
    with pytest.raises(JaggError, match=match) as error:
        run(module, **settings)
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        # an unexpected step
        ("            step = perms[i][j]\n", "            step = perms[i][train_timesteps - 1 - j]\n", "the plan expected trajectory step 0"),
        ("range(train_timesteps):", "range(train_timesteps - 1):", "visited step 14 .trajectory step 0.: the plan expected"),
        # an optimizer step, or the end of the training step, with a group open
        ("            loss.backward()\n", "            loss.backward()\n            if j == 1: optimizer.step()\n", "optimizer was about to step"),
        ("range(train_timesteps):", "range(2):", "the plan expected trajectory step 2"),
        ("for j in range(train_timesteps):", "for j in range(train_timesteps - 1 if i else 15):", "optimizer was about to step"),
        ("for j in range(train_timesteps):", "for j in range(train_timesteps - 3 if i else 15):", "12 of the 15 steps planned"),
        ("            loss.backward()\n", "            loss.backward()\n            if j == 1: return\n", "training step ended"),
        # a step whose gradient never arrives, or arrives twice
        ("            loss.backward()\n", "            if j != 1: loss.backward()\n", "no gradient arrived for step 1"),
        ("            loss.backward()\n", "            if j != 2: loss.backward()\n", "no gradient arrived for step 2"),
        ("            loss.backward()\n", "            if j != 3: loss.backward()\n", "still open"),
        ("            loss.backward()\n", "            loss.backward(retain_graph=True)\n            if j == 3: loss.backward()\n", "second backward"),
        # one backward for the accumulated losses
        ("            loss.backward()\n", "            total = loss if j == 0 else total + loss\n            if j == 14: total.backward()\n", "no gradient arrived"),
        # the solver step isn't run once
        ("    return flux_step(velocity", "    flux_step(velocity, latents, args.eta, sigma_schedule, i, pre_latents, True, True)\n    return flux_step(velocity", "2 times"),
        ("    return flux_step(velocity", "    return flux_step.__wrapped__(velocity", "0 times"),
        # a forward that failed and was passed over
        ("            new_log_probs = grpo_one_step(", "            if j == 2:\n                try: grpo_one_step(args, None, None, model, timesteps[step : step + 1], step, sigmas)\n                except TypeError: pass\n            new_log_probs = grpo_one_step(", "visited step 2 had failed"),
        # another number of steps than the arguments say
        ("    n = args.sampling_steps - 1\n", "    n = args.sampling_steps - 2\n", "orders 14 steps"),
        # endpoints of a group at one timestep
        ("torch.linspace(1, 0, args.sampling_steps + 1)", "torch.full([args.sampling_steps + 1], 0.5)", "visited step 0 .*share a timestep"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.usefixtures("without_contract")
def test_a_loop_that_would_lose_a_gradient_is_stopped(load, old, new, match, schedule):
    module = load(old, new)
    install(vars(module), config=JaggConfig(frac=1, schedule=schedule))
    stops(module, match)


@pytest.mark.usefixtures("without_contract")
def test_a_loss_on_the_model_output_itself_is_stopped(load):
    """It would lose the intermediate steps' gradient: their forwards record no graph."""
    returned = "sde_solver=True)[2]", "sde_solver=True)[2], velocity"
    module = load(*returned, "            ratio = ", "            new_log_probs, velocity = new_log_probs\n            ratio = ")
    install(vars(module), config=JaggConfig(frac=1))
    stops(module, "visited step 0 .* depends on weights by another way than the model's output")


FED = "                timesteps[step : step + 1],\n"
IN_PLACE = {
    "in the forward": (
        FED,
        FED.replace("],", "].clone(),"),
        "    velocity = run_model(transformer, latents, timesteps)\n",
        "    velocity = run_model(transformer, latents, timesteps)\n    timesteps.zero_()\n",
    ),
    "after the backward": (
        "            new_log_probs = grpo_one_step(",
        "            fed = timesteps[step : step + 1].clone()\n            new_log_probs = grpo_one_step(",
        FED,
        "                fed,\n",
        "            loss.backward()\n",
        "            loss.backward()\n            fed.zero_()\n",
    ),
}


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize("where", IN_PLACE)
def test_timesteps_may_be_changed_in_place_afterwards(load, where, schedule):
    found = []
    for pieces in ((), IN_PLACE[where]):
        module = load(*pieces)
        install(vars(module), config=JaggConfig(frac=1, schedule=schedule))
        found.append(run(module)[1])
    assert torch.equal(*found)


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        (
            ("                model,\n", "                model if timesteps[step] >= 500 else model.second,\n"),
            "another model's than the group's first",
        ),
        (
            ("flux_step(velocity, latents, args.eta,", "flux_step(velocity, latents, args.eta * transformer.scale,"),
            "by another way than the model's output",
        ),
        (
            ("flux_step(velocity, latents,", "flux_step(velocity, latents + run_model(transformer, latents, timesteps),"),
            "by another way than the model's output",
        ),
    ],
)
def test_a_gradient_that_the_steps_between_would_lose_is_stopped(load, pieces, match, schedule):
    model = make_model()
    vars(model).update(second=make_model(), scale=torch.nn.Parameter(torch.ones(())))
    module = load(*pieces)
    install(vars(module), config=JaggConfig(frac=1, schedule=schedule))
    with pytest.raises(JaggError, match=match):
        run(module, model)


def like_ddp(monkeypatch, **attributes):
    """The model, with the attributes of DDP that JAGG reads."""
    own = dict(require_backward_grad_sync=True, find_unused_parameters=False, gradient_as_bucket_view=False)
    kind = type("LikeDdp", (torch.nn.Sequential,), own | attributes)
    monkeypatch.setattr(ddp, "DDP", kind)
    return kind(*make_model())


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize(("step", "stopped_at"), [(0, 1), (1, 1), (2, 2), (3, None), (14, None)])
def test_gradients_that_sync_within_a_group_are_stopped(load, monkeypatch, schedule, step, stopped_at):
    """DDP prepares its reduction in a forward that records: the syncing step must be a group's last, or outside groups."""
    call = "            new_log_probs = grpo_one_step("
    module = load(call, f"            model.require_backward_grad_sync = j == {step}\n" + call)
    model = like_ddp(monkeypatch)
    install(vars(module), config=JaggConfig(frac=1, schedule=schedule))  # 15 steps: 4 + 4 + 4 + 3
    if stopped_at is None:
        run(module, model)
    else:
        with pytest.raises(JaggError, match=f"visited step {stopped_at} .* synced between the ranks changed inside a group"):
            run(module, model)


def test_ddp_that_looks_for_unused_parameters_rules_joint_out(load, monkeypatch, capsys):
    """It would look in the last endpoint's graph alone, and fail on a layer that only the first one's reaches."""
    model = like_ddp(monkeypatch, find_unused_parameters=True)
    for schedule in ("auto", "sequential", "joint"):
        module = load()
        install(vars(module), config=JaggConfig(schedule=schedule))
        with pytest.raises(JaggError, match="unused parameters") if schedule == "joint" else contextlib.nullcontext():
            run(module, model)
        assert ("schedule sequential from here on: DDP looks" in capsys.readouterr().out) == (schedule == "auto")


@pytest.mark.usefixtures("without_contract")
def test_an_exact_step_after_an_unclosed_group_is_stopped(load):
    module = load("            loss.backward()\n", "            if j != 8: loss.backward()\n")  # 9 routed: 5 + 4
    install(vars(module), config=JaggConfig())
    stops(module, "visited step 9 .* came while the group .* still open")


REENTRANT = """
    inputs = torch.cat([latents, timesteps[:, None] / 1000], 1).requires_grad_()
    return torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=True)
"""


def test_reentrant_checkpointing_is_refused(load):
    module = load("    return model(torch.cat([latents, timesteps[:, None] / 1000], 1))", REENTRANT)
    install(vars(module), config=JaggConfig(schedule="joint"))
    stops(module, "reentrant checkpointing")


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_timesteps_that_the_schedule_does_not_have_are_refused(load, schedule):
    """Upstream gradients are split as they come, so a group's last timestep is needed at its second step."""
    module = load("int(s * 1000) for s in sigmas[:n]", "int(s * 999) for s in sigmas[:n]")
    install(vars(module), config=JaggConfig(schedule=schedule))
    stops(module, "visited step 0 .*: the model is fed timesteps .999., its schedule says .1000.")


def test_reentrant_checkpointing_settles_the_schedule(load, capsys):
    module = load("    return model(torch.cat([latents, timesteps[:, None] / 1000], 1))", REENTRANT)
    expected = run(module)[1]
    for schedule in ("auto", "sequential"):
        handle = install(vars(module), config=JaggConfig(group_size=2, frac=1, schedule=schedule))
        assert_close(run(module)[1], expected, rtol=1e-5, atol=1e-8)
        assert handle.stats.groups == 2 * 7
        assert ("schedule sequential from here on: the model recomputes" in capsys.readouterr().out) == (schedule == "auto")
        handle.uninstall()


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_the_model_output_may_be_changed_in_place_afterwards(load, schedule):
    in_place = "    return flux_step(velocity", "    log_prob = flux_step(velocity"
    module = load(*in_place, "sde_solver=True)[2]", "sde_solver=True)[2]\n    velocity.mul_(0.5)\n    return log_prob")
    expected = run(load())[1]
    install(vars(module), config=JaggConfig(group_size=2, frac=1, schedule=schedule))
    assert_close(run(module)[1], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_autocast_around_the_loop_loses_no_gradient(load, schedule):
    """torch 2.5 keeps the casts of a forward without a graph, and a later one that records would use them."""

    class LateLayer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.always, self.late = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.always(x) + self.late(x) if x[0, -1] < 0.99 else self.always(x)  # t = 1000 is the first endpoint

    # The rollout's casts would be kept too, and spoil the unpatched trainer as well.
    module = load("    shuffled = ", "    torch.clear_autocast_cache()\n    shuffled = ")
    install(vars(module), config=JaggConfig(frac=1, schedule=schedule, self_check=False))  # which doesn't let this model pass
    gradients = []
    for cache in (True, False):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            gradients.append(run(module, LateLayer())[1])
    assert torch.equal(*gradients)


SWALLOW = "            try: loss.backward()\n            except {error}: pass\n"


@pytest.mark.parametrize(
    ("schedule", "failing", "match"),
    [
        ("joint", 1, "visited step 5 .* while the group .* still open"),
        ("joint", 2, "visited step 5 .* while the group .* still open"),
        ("sequential", 1, "visited step 0 .* an endpoint of the group, in that of the step before .* visited step 4 .* failed"),
        ("sequential", 2, "visited step 5 .* while the group .* still open"),
    ],
)
@pytest.mark.usefixtures("without_contract")
def test_an_endpoint_s_backward_that_fails_and_is_passed_over_is_stopped(load, schedule, failing, match):
    """As when memory runs out in the transformer's own backward: the whole group's gradient would be missing."""
    module, model = load("            loss.backward()\n", SWALLOW.format(error="MemoryError")), make_model()
    install(vars(module), config=JaggConfig(schedule=schedule))
    calls = []

    def fail_once(grad):
        calls.append(1)
        if len(calls) == failing:
            raise MemoryError

    def watch_output(module, inputs, output):
        if output.requires_grad:
            output.register_hook(fail_once)

    model.register_forward_hook(watch_output)
    with pytest.raises(JaggError, match=match):
        run(module, model)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize("step", [0, 1, 3, 4])
@pytest.mark.parametrize("again", [4, 6])
@pytest.mark.usefixtures("without_contract")
def test_a_second_backward_of_an_earlier_step_is_stopped(load, step, again, schedule):
    twice = "            loss.backward(retain_graph=True)\n"
    twice += f"            if j == {step}: kept = loss\n            if j == {again}: kept.backward()\n"
    module = load("            loss.backward()\n", twice)
    install(vars(module), config=JaggConfig(frac=1, group_size=5, schedule=schedule))
    stops(module, "a second backward reached the group")


@pytest.mark.usefixtures("without_contract")
def test_a_second_backward_of_an_earlier_group_is_stopped_when_passed_over(load):
    twice = "            loss.backward(retain_graph=True)\n            if j == 4: kept = loss\n"
    twice += "            if j == 6:\n                try: kept.backward()\n                except Exception: pass\n"
    module = load("            loss.backward()\n", twice)
    install(vars(module), config=JaggConfig(frac=1, group_size=5))
    stops(module, "the loop went on although .* had failed")


@pytest.mark.usefixtures("without_contract")
def test_a_training_step_inside_another_is_refused(load):
    call = "            ratio = torch.exp("
    module = load(call, "            if j == 1: train_one_step(args, model, optimizer)\n" + call)
    install(vars(module), config=JaggConfig())
    stops(module, "inside another one")


def test_a_part_of_a_group_that_an_engine_keeps_ends_the_training(load, monkeypatch):
    module, model = (
        load("            loss.backward()\n", "            loss.backward()\n            args.after_step(j)\n"),
        make_model(),
    )
    monkeypatch.setattr(Engine, "drop_gradients", lambda engine: False)
    install(vars(module), config=JaggConfig(schedule="sequential"))  # 9 of 15 steps: 5 + 4

    def fail_at(step):
        def after_step(j):
            if j == step:
                raise MemoryError

        return after_step

    for step in (2, 4, 3):  # before the first endpoint's backward, at the end of the group, between the two
        with pytest.raises(MemoryError):
            run(module, model, after_step=fail_at(step))
    for _ in range(2):
        with pytest.raises(JaggError, match="visited step 0 .* this engine keeps a part of its gradient"):
            run(module, model, after_step=lambda j: None)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_nothing_outlives_a_training_step(load, fails, schedule):
    module = load("            loss.backward()\n", "            loss.backward()\n            args.after_step(j)\n")
    install(vars(module), config=JaggConfig(schedule=schedule))
    graphs, model = [], make_model()
    model.register_forward_hook(lambda module, inputs, output: graphs.append(weakref.ref(output)))
    hooks = len(_global_optimizer_pre_hooks)

    def after_step(j):
        if fails and j == 2:
            raise MemoryError

    with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
        run(module, model, after_step=after_step)
    gc.collect()
    assert len(graphs) > 3 and not any(graph() is not None for graph in graphs)
    assert len(_global_optimizer_pre_hooks) == hooks


def test_a_frozen_model_is_refused(load):
    module, model = load(), make_model().requires_grad_(False)
    install(vars(module), config=JaggConfig())
    with pytest.raises(JaggError, match="has no graph"):
        module.train_one_step(module.make_args(), model, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))


def test_the_training_step_after_a_failed_one_starts_clean(load):
    module = load("            loss.backward()\n", "            loss.backward()\n            args.after_step(j)\n")
    install(vars(module), config=JaggConfig())
    expected = run(module, after_step=lambda j: None)[1]

    def fail(j):
        if j == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(module, after_step=fail)
    assert torch.equal(run(module, after_step=lambda j: None)[1], expected)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("def flux_step(model_output, latents", "def flux_step(output, latents", "flux_step.. has no parameter model_output"),
        ("def grpo_one_step(args, latents, pre_latents, transformer, timesteps, i,", "def grpo_one_step(args, latents, pre_latents, transformer, timesteps, j,", "grpo_one_step.. has no parameter i"),
        ("def sample_reference_model(args,", "def sample_reference_model(options,", "no parameter args"),
        ("def sample_reference_model(", "def roll_out(", "no function sample_reference_model"),
        ("    perms = torch.stack(", "    orders = torch.stack(", "0 calls of randperm.. in statements `perms = …`"),
        ("    perms = torch.stack(", "    perms = torch.randperm(1), torch.stack(", "2 calls of randperm"),
        ("    return visited", "    yield visited", "train_one_step.. has become a generator"),
        ("import torch\n", "import torch as T\nfrom torch import *\n", "torch isn't imported as torch"),
    ],
)  # fmt: skip
def test_changed_upstream_functions_are_refused_at_install(load, old, new, match):
    module = load(old, new)
    with pytest.raises(JaggError, match=match) as error:
        install(vars(module), config=JaggConfig())
    assert module.__file__ in str(error.value) and len(str(error.value).splitlines()) == 2
    install(vars(module), config=JaggConfig(enabled=False))  # off never gets in the way


def test_from_the_parser_an_error_ends_the_program_with_the_message_alone(load, monkeypatch):
    module = load()
    parser = argparse.ArgumentParser()
    install(vars(module), parser)
    monkeypatch.setenv("JAGG_FRACTION", "1")
    with pytest.raises(SystemExit, match="jagg_patch: unknown setting in the environment: JAGG_FRACTION"):
        parser.parse_args([])


def test_a_second_parse_with_other_settings_is_refused(load):
    module = load()
    parser = argparse.ArgumentParser()
    parser.set_defaults(**vars(module.make_args()))
    install(vars(module), parser)
    parser.parse_args([])
    parser.parse_args([])
    with pytest.raises(SystemExit, match="the parser ran twice"):
        parser.parse_args(["--jagg_enabled", "0"])


@pytest.mark.parametrize("settings", [{}, {"enabled": False}])
def test_a_later_wrapper_of_the_training_step_stays(load, settings):
    module = load()
    install(vars(module), config=JaggConfig(**settings))
    calls, wrapped = [], module.train_one_step

    def timed(*args):
        calls.append(1)
        return wrapped(*args)

    module.train_one_step = timed
    for _ in range(3):
        run(module)
    assert len(calls) == 3


def test_an_old_handle_leaves_a_new_one_alone(load):
    module = load()
    old = install(vars(module), config=JaggConfig())
    old.uninstall()
    install(vars(module), config=JaggConfig(enabled=False))
    old.uninstall()
    with pytest.raises(JaggError, match="already installed"):
        install(vars(module), config=JaggConfig())


def test_a_failed_install_from_the_parser_leaves_nothing(load, monkeypatch):
    module = load()
    before = dict(vars(module))
    parser = argparse.ArgumentParser()
    parser.add_argument("--jagg_frac")
    with pytest.raises(SystemExit, match="has a flag of that name already"):
        install(vars(module), parser)
    assert dict(vars(module)) == before
    parser = argparse.ArgumentParser()
    install(vars(module), parser)
    monkeypatch.setenv("JAGG_FRAC", "junk")
    with pytest.raises(SystemExit, match="bad value JAGG_FRAC='junk'"):
        parser.parse_args([])
    assert dict(vars(module)) == before


def test_a_failed_install_leaves_nothing(load, monkeypatch):
    module = load()
    before = dict(vars(module))
    monkeypatch.setenv("JAGG_FRAC", "junk")
    with pytest.raises(JaggError):
        install(vars(module))
    assert dict(vars(module)) == before
    monkeypatch.delenv("JAGG_FRAC")
    install(vars(module))


@pytest.mark.parametrize(("name", "settings", "units"), [
    ("train_grpo_flux", {}, 3),
    ("train_grpo_flux", {"selective_checkpointing": 0.5}, 2.5),
    ("train_grpo_flux", {"gradient_checkpointing": False}, 2),
    ("train_grpo_flux_lora", {}, 2),
])  # fmt: skip
def test_cost_of_a_backward_follows_the_trainer_s_arguments(load, name, settings, units):
    assert TRAINERS[name].step_cost(load().make_args(**settings)).full_backward == units


def test_missing_sampling_steps_are_named(load):
    module = load()
    parser = argparse.ArgumentParser()
    parser.set_defaults(**vars(module.make_args(sampling_steps=None)))
    install(vars(module), parser)
    with pytest.raises(SystemExit, match="--sampling_steps is not set"):
        parser.parse_args([])


@pytest.mark.parametrize("enabled", [True, False])
def test_installing_twice_is_refused(load, enabled):
    module = load()
    handle = install(vars(module), config=JaggConfig(enabled=enabled))
    with pytest.raises(JaggError, match="already installed"):
        install(vars(module), config=JaggConfig())
    parser = argparse.ArgumentParser()
    with pytest.raises(SystemExit, match="already installed"):
        install(vars(module), parser)
    handle.uninstall()
    install(vars(module), parser)


def test_a_file_that_is_no_known_trainer_is_refused():
    with pytest.raises(JaggError, match="no adapter for the trainer 'train_grpo_unknown'"):
        install({"__file__": "/x/train_grpo_unknown.py"})
    with pytest.raises(SystemExit, match="no adapter for the trainer 'train_grpo_unknown'"):
        install({"__file__": "/x/train_grpo_unknown.py", "__name__": "__main__"})


@pytest.mark.parametrize("has_parser", [False, True], ids=["no parser", "parser"])
def test_off_leaves_a_file_of_any_name_alone(load, tmp_path, monkeypatch, capsys, has_parser):
    monkeypatch.setenv("JAGG_ENABLED", "0")
    module = load()
    module.__file__ = str(tmp_path / "my_flux.py")
    before = dict(vars(module))
    parser = argparse.ArgumentParser() if has_parser else None
    handle = install(vars(module), parser)
    if has_parser:
        assert parser.parse_args(["--jagg_frac", "0.5"]).jagg_enabled is False
        assert "my_flux: off" in capsys.readouterr().out
    handle.uninstall()
    assert vars(module) == before


def test_a_flag_turns_a_file_of_any_name_on_and_off(load, tmp_path, monkeypatch):
    module = load()
    module.__file__ = str(tmp_path / "my_flux.py")
    for env, flags, is_off in (("1", [], False), ("0", ["--jagg_enabled", "1"], False), ("1", ["--jagg_enabled", "0"], True)):
        monkeypatch.setenv("JAGG_ENABLED", env)
        parser = argparse.ArgumentParser()
        handle = install(vars(module), parser)
        if is_off:
            assert parser.parse_args(flags).jagg_enabled is False
        else:
            with pytest.raises(SystemExit, match="no adapter for the trainer 'my_flux'"):
                parser.parse_args(flags)
        handle.uninstall()


def test_a_link_to_a_trainer_is_that_trainer(load, tmp_path):
    expected = load()
    install(vars(expected), config=JaggConfig())
    module = load()
    module.__file__ = str(tmp_path / "my_flux.py")
    (tmp_path / "my_flux.py").symlink_to("train_grpo_flux.py")
    install(vars(module), config=JaggConfig())
    assert torch.equal(run(module)[1], run(expected)[1])


def test_a_trainer_that_is_a_link_to_a_file_of_another_name_stays_that_trainer(load, tmp_path):
    module = load()
    (tmp_path / "train_grpo_flux.py").rename(tmp_path / "shared.py")
    (tmp_path / "train_grpo_flux.py").symlink_to("shared.py")
    install(vars(module), config=JaggConfig()).uninstall()
