"""A group whose steps don't have the same weights, or whose losses reach them another way, stops; what is exact runs."""

import threading
from functools import partial

import models
import pytest
import torch
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from jagg_patch import JaggConfig, JaggError, install

BEFORE_FORWARD = "            new_log_probs = grpo_one_step("
BACKWARD = "loss.backward()"
WITH_AUX = BACKWARD, "(loss + 0.01 * model.aux).backward()"
PENALTY = BACKWARD, "(loss + 0.01 * sum(weight.square().sum() for weight in model.parameters())).backward()"
SWITCHED_BY_LOOP = (
    BEFORE_FORWARD,
    f"            for n, w in enumerate(model.parameters()): w.requires_grad_((int(step) < 5) == (n < 2))\n{BEFORE_FORWARD}",
)
SWAPPED = (
    f"            {BACKWARD}",
    f"            {BACKWARD}\n            with torch.no_grad(): [weight.mul_(1) for weight in model.parameters()]",
)


@pytest.fixture
def trains(load_loop):
    """`trains(model's class, pieces of the loop, settings)`: the gradient of one training step; without settings unpatched."""

    def run(model, pieces=(), **settings):
        module, model = load_loop("train_grpo_flux", *pieces), model()
        if settings:
            install(vars(module), config=JaggConfig(**{"frac": 1, "self_check": True} | settings))
        torch.manual_seed(1)
        module.train_one_step(module.make_args(), model, torch.optim.SGD(model.parameters(), lr=0.0))
        return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])

    return run


def stops(run, match, start=""):
    with pytest.raises(JaggError, match=match) as error:
        run()
    text = str(error.value)
    assert len(text.splitlines()) == 2 and text.startswith(start)


SWITCHES = [
    (models.Experts, (), "which weights the model's output depends on", 7),
    (models.SwitchedInside, (), "which weights are trained", 7),
    (models.Plain, SWITCHED_BY_LOOP, "which weights are trained", 5),
]


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize(("model", "pieces", "match", "step"), SWITCHES)
def test_a_group_across_a_switch_of_weights_stops_and_says_at_which_step(trains, model, pieces, match, step, schedule):
    where = f"sample 0, visited step {step} (trajectory step {step}): {match}"
    stops(partial(trains, model, pieces, schedule=schedule), "begin a new group there", where)


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize(("model", "pieces", "match", "step"), SWITCHES)
def test_groups_that_are_cut_at_the_switch_train(trains, model, pieces, match, step, schedule):
    """With groups of two that is exact."""
    assert_close(
        trains(model, pieces, schedule=schedule, group_size=2, cuts=(step,)), trains(model, pieces), rtol=1e-5, atol=1e-7
    )
    error = (trains(model, pieces, schedule=schedule, cuts=(step,)) - trains(model, pieces)).norm() / trains(model, pieces).norm()
    assert 1e-4 < error < 0.2


@pytest.mark.parametrize(("model", "pieces"), [row[:2] for row in SWITCHES])
def test_groups_of_two_across_a_switch_are_exact_or_stop(trains, model, pieces):
    """In the sequential schedule each step has its own backward; joint is late for weights that aren't trained any more."""
    assert_close(trains(model, pieces, schedule="sequential", group_size=2), trains(model, pieces), rtol=1e-5, atol=1e-7)
    if model is models.Experts:
        assert_close(trains(model, pieces, schedule="joint", group_size=2), trains(model, pieces), rtol=1e-5, atol=1e-7)
    else:
        stops(partial(trains, model, pieces, schedule="joint", group_size=2), "which weights are trained")


def test_weights_that_are_frozen_between_a_forward_and_its_backward_stop(trains):
    frozen_meanwhile = BACKWARD, f"model.requires_grad_(int(step) != 3); {BACKWARD}; model.requires_grad_()"
    stops(partial(trains, models.Plain, frozen_meanwhile, schedule="joint"), "between the group's forward and its backward")


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_weights_that_are_changed_between_a_forward_and_its_backward_stop(trains, schedule):
    changed = BACKWARD, f"int(step) != 3 or torch.no_grad()(torch._foreach_mul_)([*model.parameters()], 1.0); {BACKWARD}"
    where = "sample 0, visited step 0 (trajectory step 0): weights were changed in place"
    stops(partial(trains, models.Plain, changed, schedule=schedule), "change them after whole samples only", where)


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_weights_that_are_changed_in_place_inside_a_group_stop_at_the_next_step(trains, schedule):
    where = "sample 0, visited step 1 (trajectory step 1): weights were changed in place"
    stops(partial(trains, models.Plain, SWAPPED, schedule=schedule), "change them after whole samples only", where)


def test_groups_of_two_in_the_sequential_schedule_have_no_time_to_see_changed_weights(trains):
    expected = trains(models.Plain, SWAPPED)
    assert_close(trains(models.Plain, SWAPPED, schedule="sequential", group_size=2), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_latents_that_ask_for_a_gradient_are_no_weights(trains, schedule):
    asked = BEFORE_FORWARD, f"            latents = latents.detach().requires_grad_()\n{BEFORE_FORWARD}"
    assert torch.equal(trains(models.Plain, asked, schedule=schedule), trains(models.Plain, schedule=schedule))


@pytest.mark.parametrize("group_size", [3, 4])
@pytest.mark.parametrize("schedule", ["joint", "sequential", "auto"])
@pytest.mark.parametrize("model", [models.Auxiliary, models.Penalty])
def test_an_auxiliary_loss_of_the_model_s_stops(trains, model, schedule, group_size):
    settings = dict(schedule=schedule, group_size=group_size, self_check=False)
    stops(partial(trains, model, WITH_AUX, **settings), "reaches weights by another way than the model's output")


@pytest.mark.parametrize("model", [models.Auxiliary, models.Penalty])
def test_an_auxiliary_loss_in_sequential_groups_of_two_is_exact(trains, model):
    found = trains(model, WITH_AUX, schedule="sequential", group_size=2)
    assert_close(found, trains(model, WITH_AUX), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize("model", [models.Auxiliary, models.Penalty, models.ValueHead])
def test_an_auxiliary_loss_that_begins_later_stops(trains, model, schedule):
    later = BACKWARD, "(loss + 0.01 * model.aux * (i > 0) if i > 0 else loss).backward()"
    stops(partial(trains, model, later, schedule=schedule), "reaches weights by another way than the model's output", "sample 1")


def test_torch_s_words_for_it_are_jagg_s(trains):
    """In joint groups of two its own backward frees the graph that the group's needs."""
    stops(partial(trains, models.Auxiliary, WITH_AUX, schedule="joint", group_size=2), "reaches weights by another way")


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_what_a_model_counts_in_a_frozen_weight_is_its_own(trains, schedule):
    class Counting(models.Plain):
        def __init__(self):
            super().__init__()
            self.calls = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.calls.add_(1)
            return self.net(x)

    assert torch.equal(trains(Counting, schedule=schedule), trains(models.Plain, schedule=schedule))


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_a_penalty_on_the_weights_that_the_loop_computes_is_whole(trains, schedule, group_size):
    """Each step's loss reaches them in its own backward."""
    settings = dict(schedule=schedule, group_size=group_size)
    found, own = trains(models.Plain, PENALTY, **settings), trains(models.Plain, **settings)
    weights = torch.cat([weight.detach().flatten() for weight in models.Plain().parameters()])
    assert_close(found - own, 0.01 * 2 * weights * 2 * 15, rtol=1e-4, atol=1e-6)  # two samples of fifteen steps


SOME_STEPS = {
    "all": "(loss + 0.01 * model.aux + PENALTY).backward()",
    "low noise": "(loss + 0.01 * model.aux if int(step) >= 2 else loss).backward()",
    "first": "(loss + 0.01 * model.aux if int(step) % 3 == 0 else loss).backward()",
    "last": "(loss + 0.01 * model.aux if int(step) % 3 == 2 else loss).backward()",
}


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize("backward", SOME_STEPS.values(), ids=SOME_STEPS)
def test_an_auxiliary_loss_stops_beside_a_penalty_and_where_some_steps_have_it(trains, backward, schedule):
    backward = backward.replace("PENALTY", "1e-4 * sum(weight.square().sum() for weight in model.parameters())")
    settings = dict(schedule=schedule, group_size=3, self_check=False)
    stops(partial(trains, models.ValueHead, (BACKWARD, backward), **settings), "reaches weights by another way")


CRITIC = (
    "    return flux_step(velocity, latents, args.eta, sigma_schedule, i, pre_latents, grpo=True, sde_solver=True)[2]",
    "    found = flux_step(velocity, latents, args.eta, sigma_schedule, i, pre_latents, grpo=True, sde_solver=True)[2]\n"
    "    args.value = transformer.critic[0](velocity.detach()).square().mean()\n    return found",
    BACKWARD,
    "(loss + 0.1 * args.value).backward()",
)


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_so_does_one_of_another_network_s_weights_after_the_solver_step(trains, schedule):
    class WithCritic(models.Plain):
        def __init__(self):
            super().__init__()
            self.critic = [torch.nn.Linear(2, 1)]  # no module of it

    stops(partial(trains, WithCritic, CRITIC, schedule=schedule, group_size=3), "reaches weights by another way")
    found, exact = trains(WithCritic, CRITIC, schedule=schedule, group_size=2), trains(WithCritic, CRITIC)
    assert_close(found, exact, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("without_contract")
@pytest.mark.parametrize("aux", ["", " + 0.01 * model.aux"])
def test_a_backward_of_several_roots_is_looked_at_as_a_whole(trains, aux):
    roots = BACKWARD, f"torch.autograd.backward(root for root in (0.5 * loss, 0.5 * loss{aux}))"
    run = partial(trains, models.ValueHead, roots)
    if aux:
        stops(partial(run, schedule="joint"), "reaches weights by another way")
    else:
        assert_close(run(schedule="joint"), trains(models.ValueHead, schedule="joint"), rtol=1e-5, atol=1e-7)


def test_torch_s_own_backward_is_back_when_an_update_is_over(load_loop):
    seeing = "            ratio = torch.exp(", "            args.see()\n            ratio = torch.exp("
    module, backward, seen = load_loop("train_grpo_flux", *seeing), torch.autograd.backward, []
    install(vars(module), config=JaggConfig(frac=0.6))
    args, model = module.make_args(see=lambda: seen.append(torch.autograd.backward is backward)), models.Plain()
    module.train_one_step(args, model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert torch.autograd.backward is backward
    assert seen == [False] * 30


HELPED = {
    "before": "            help_critic(model, args)\n            loss.backward()",
    "after": "            loss.backward()\n            help_critic(model, args)",
    "at the sample's end": "            loss.backward()\n            help_critic(model, args, j == train_timesteps - 1)",
    "at the update's end": "            loss.backward()\n            help_critic(model, args, i * j == train_timesteps - 1)",
}


class HelpedBranch(models.Plain):
    """Features of a branch that is trained by a critic's loss alone; the critic is no part of the model."""

    def __init__(self):
        super().__init__()
        self.branch = torch.nn.Linear(8, 4)
        self.critic = [torch.nn.Linear(4, 1)]

    def forward(self, x):
        hidden = self.net[1](self.net[0](x))
        self.features = self.branch(hidden.detach()).tanh()
        return self.net[2](hidden)


def help_critic(model, args, is_time=True):
    """A loss with a backward of its own, at once or kept until it is time."""
    args.kept = [*getattr(args, "kept", ()), model.critic[0](model.features).square().mean()]
    if is_time:
        torch.stack(args.kept).sum().backward()
        args.kept = []


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize("helped", HELPED.values(), ids=HELPED)
def test_so_does_one_with_a_backward_of_its_own(load_loop, helped, schedule):
    """At the steps between it has a graph too, that of the critic."""

    def run(**settings):
        module, model = load_loop("train_grpo_flux", "            loss.backward()", helped), HelpedBranch()
        module.help_critic = help_critic
        if settings:
            install(vars(module), config=JaggConfig(frac=1, schedule=schedule, self_check=False, **settings))
        torch.manual_seed(1)
        module.train_one_step(module.make_args(), model, torch.optim.SGD(model.parameters(), lr=0.0))
        return torch.cat([weight.grad.flatten() for weight in model.parameters()])

    with pytest.raises(JaggError, match="reaches weights by another way than the model's output"):
        run(group_size=3)
    assert_close(run(group_size=2), run(), rtol=1e-5, atol=1e-7)


def test_another_thread_s_losses_are_its_own(load_loop):
    """Torch numbers nodes by thread: those of a reward model that is trained meanwhile may have the same numbers."""

    def train_elsewhere():
        other = torch.nn.Linear(2, 1)
        for _ in range(200):
            other(torch.ones(2)).sum().backward()

    def meanwhile():
        thread = threading.Thread(target=train_elsewhere)
        thread.start()
        thread.join()

    module = load_loop("train_grpo_flux", BACKWARD, "args.meanwhile(), loss.backward()")
    install(vars(module), config=JaggConfig(frac=1))
    model = models.Plain()
    module.train_one_step(module.make_args(meanwhile=meanwhile), model, torch.optim.SGD(model.parameters(), lr=0.0))


def test_another_thread_s_solver_steps_are_its_own(load_loop):
    """An evaluation beside the training, while a grouped forward runs."""

    def run(meanwhile):
        velocity = "    velocity = run_model("
        module = load_loop("train_grpo_flux", velocity, f"    args.meanwhile(globals())\n{velocity}")
        install(vars(module), config=JaggConfig(frac=1, self_check=False))
        torch.manual_seed(1)
        model = models.Plain()
        args, optimizer = module.make_args(meanwhile=meanwhile), torch.optim.SGD(model.parameters(), lr=0.0)
        module.train_one_step(args, model, optimizer)
        return torch.cat([weight.grad.flatten() for weight in model.parameters()])

    def evaluate(module):
        step = (torch.ones(1, 2), torch.zeros(1, 2), 0.5, torch.linspace(1, 0, 17), 3, torch.zeros(1, 2), True, True)
        thread = threading.Thread(target=module["flux_step"], args=step)
        thread.start()
        thread.join()

    assert torch.equal(run(evaluate), run(lambda module: None))


@pytest.mark.parametrize("fraction", [0.4, 0.6])
def test_weights_that_are_replaced_between_training_steps_are_no_others(load_loop, fraction):
    """Each timestep's are looked at when it is a knot's for the first time."""

    def run(replaces):
        module, model = load_loop("train_grpo_flux"), models.Plain()
        install(vars(module), config=JaggConfig(frac=1, group_size=3))
        torch.manual_seed(1)
        for _ in range(4):
            args, optimizer = module.make_args(timestep_fraction=fraction), torch.optim.SGD(model.parameters(), lr=0.1)
            module.train_one_step(args, model, optimizer)
            if replaces:
                model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
            model.zero_grad()
        return torch.cat([weight.detach().flatten() for weight in model.parameters()])

    assert torch.equal(run(True), run(False))


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_a_penalty_under_one_autocast_with_the_model_is_no_auxiliary_loss(trains, schedule):
    """It may be computed from casts of weights that a knot's forward has made."""

    def penalty_s_part(**settings):
        parts = [trains(models.Plain, under_autocast(penalty), **settings) for penalty in (" + 0.01 * NORM", "")]
        return parts[0] - parts[1]

    def under_autocast(penalty):
        norm = "(model.net[0].weight @ model.net[0].weight.T).square().sum()"
        begins = "context = torch.autocast('cpu', torch.bfloat16); context.__enter__()"
        return (
            BEFORE_FORWARD,
            f"            {begins}\n{BEFORE_FORWARD}",
            BACKWARD,
            f"(loss{penalty.replace('NORM', norm)}).backward(); context.__exit__(None, None, None)",
        )

    expected = penalty_s_part()
    error = (penalty_s_part(schedule=schedule, self_check=False) - expected).norm() / expected.norm()
    assert error < 2**-7  # bfloat16's rounding


class Reentrant(models.Plain):
    """A frozen trunk, and a trained branch under reentrant checkpointing whose loss the loop adds."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)
        self.branch = torch.nn.Linear(3, 1)

    def forward(self, x):
        self.aux = checkpoint(self.branch, x.detach().requires_grad_(), use_reentrant=True).square().mean()
        return self.net(x)


def test_an_auxiliary_loss_behind_reentrant_checkpointing_stops(trains):
    stops(partial(trains, Reentrant, WITH_AUX, schedule="sequential", self_check=False), "reaches weights by another way")
    found, exact = trains(Reentrant, WITH_AUX, schedule="sequential", group_size=2), trains(Reentrant, WITH_AUX)
    assert_close(found, exact, rtol=1e-5, atol=1e-7)


def test_outputs_of_inference_mode_are_taken_where_no_gradient_is_asked_for(trains):
    class Inferring(models.Plain):
        def forward(self, x):
            with torch.inference_mode(not torch.is_grad_enabled()):
                return self.net(x)

    assert torch.equal(trains(Inferring, schedule="joint"), trains(models.Plain, schedule="joint"))


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_a_wrapper_that_is_made_for_each_call_is_the_same_model(trains, schedule):
    after = ",\n                timesteps[step"
    wrapped = f"                model{after}", f"                torch.nn.Sequential(model){after}"
    assert torch.equal(trains(models.Plain, wrapped, schedule=schedule), trains(models.Plain, schedule=schedule))


@pytest.mark.usefixtures("without_contract")
def test_rows_that_are_of_no_timestep_are_refused(trains):
    frames = (
        "    velocity = run_model(transformer, latents, timesteps)\n",
        "    velocity = run_model(transformer, latents, timesteps).repeat(3, 1)\n"
        "    latents, pre_latents = latents.repeat(3, 1), pre_latents.repeat(3, 1)\n",
        "                timesteps[step : step + 1],",
        "                timesteps[step : step + 1].expand(2),",
        "                latents[i : i + 1, step],",
        "                latents[i : i + 1, step].expand(2, 2),",
        "                latents[i : i + 1, step + 1],",
        "                latents[i : i + 1, step + 1].expand(2, 2),",
    )
    with pytest.raises(JaggError, match="the model output has 6 rows, and the forward was given 2 timesteps"):
        trains(models.Plain, frames, schedule="joint")


@pytest.mark.parametrize("is_around", [True, False])
@pytest.mark.parametrize("comes_at", [0, 3])
def test_somebody_else_s_backward_in_torch_s_place_hides_no_loss_of_a_later_group(load_loop, is_around, comes_at):
    """A profiler, say, that begins within a group and stays, or one that ends there and puts back what it found."""
    backward, calls = torch.autograd.backward, []
    with_aux = BACKWARD, "args.see(), (loss + 0.01 * model.aux if int(step) > 8 else loss).backward()"
    module, model = load_loop("train_grpo_flux", *with_aux), models.ValueHead()
    install(vars(module), config=JaggConfig(frac=1, group_size=3, self_check=False))

    def replace():
        calls.append(torch.autograd.backward)
        if len(calls) == comes_at + 1:
            noted = calls[-1] if is_around else backward
            torch.autograd.backward = lambda *args, **kwargs: noted(*args, **kwargs)

    try:
        with pytest.raises(JaggError, match="reaches weights by another way"):
            module.train_one_step(module.make_args(see=replace), model, torch.optim.SGD(model.parameters(), lr=0.0))
    finally:
        torch.autograd.backward = backward


CONDITIONED = (
    "    return model(torch.cat([latents, timesteps[:, None] / 1000], 1))",
    "    return model(torch.cat([latents + model.conditioner[0](timesteps[:, None] / 1000), timesteps[:, None] / 1000], 1))",
)
FAILS = (
    "            ratio = torch.exp(new_log_probs",
    "            if (i, j) == args.fails_at: raise MemoryError\n            ratio = torch.exp(new_log_probs",
)


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize(("fails_at", "self_check"), [((0, 14), True), ((1, 3), True), ((1, 9), True), ((1, 9), False)])
def test_half_a_group_is_left_in_no_weight_that_it_reached(load_loop, schedule, fails_at, self_check):
    """Nor in one that is trained with the model but isn't in it; a failure in joint, where nothing has come yet, leaves all."""
    module, model = load_loop("train_grpo_flux", *CONDITIONED, *FAILS), models.WithConditioner()
    weights = [*model.parameters(), *model.conditioner[0].parameters()]
    install(vars(module), config=JaggConfig(frac=1, group_size=5, schedule=schedule, self_check=self_check))
    torch.manual_seed(1)
    with pytest.raises(MemoryError):
        module.train_one_step(module.make_args(fails_at=fails_at), model, torch.optim.SGD(weights, lr=0.0))
    has_begun = schedule == "sequential" and fails_at[1] in (9, 14)
    assert [weight.grad is None for weight in weights] == [has_begun] * len(weights)


# A KL from the solver's mean to a reference that doesn't move, by the loop itself or inside the training forward.
SOLVED = "    return flux_step(velocity, latents, args.eta, sigma_schedule, i, pre_latents, grpo=True, sde_solver=True)[2]"
MEAN_TOO = SOLVED.replace("return ", "_, mean, log_prob = ").removesuffix("[2]") + "\n    "
NEW, LOSS = "            new_log_probs = grpo_one_step(", "            loss = -(advantages[i] * ratio).mean()"
RATIO = "torch.exp(new_log_probs - log_probs"
KL = "20 * (mean - latents).square().mean()"
WITH_KL = "            loss = KL - (advantages[i] * ratio).mean()"
INSIDE = {
    "a tuple": ("return log_prob, " + KL, RATIO.replace("new_log_probs", "new_log_probs[0]"), "new_log_probs[1]"),
    "an attribute": (f"args.kl = {KL}\n    return log_prob", RATIO, "args.kl"),
    "an object": (
        f"return argparse.Namespace(log_prob=log_prob, kl={KL})",
        RATIO.replace("new_log_probs", "new_log_probs.log_prob"),
        "new_log_probs.kl",
    ),
}
BY_LOOP = (
    "return log_prob, mean",
    RATIO.replace("new_log_probs", "new_log_probs[0]"),
    KL.replace("mean -", "new_log_probs[1] -").replace("latents", "latents[i : i + 1, step]"),
)


def with_kl(returned, ratio, kl):
    return SOLVED, MEAN_TOO + returned, RATIO, ratio, LOSS, WITH_KL.replace("KL", kl)


@pytest.mark.usefixtures("without_contract")
@pytest.mark.parametrize("form", INSIDE.values(), ids=INSIDE)
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_a_loss_inside_the_training_forward_counts_at_the_steps_between_as_the_loop_s_own_does(trains, form, schedule):
    """It comes after the solver step, with the gradients on that the unpatched forward has."""
    expected = trains(models.Plain, with_kl(*BY_LOOP), schedule=schedule)
    assert_close(trains(models.Plain, with_kl(*form), schedule=schedule), expected, rtol=1e-5, atol=1e-7)
    assert (trains(models.Plain, schedule=schedule) - expected).norm() > 0.1 * expected.norm()
    exact = trains(models.Plain, with_kl(*form))
    assert_close(trains(models.Plain, with_kl(*form), schedule=schedule, group_size=2), exact, rtol=1e-5, atol=1e-7)
