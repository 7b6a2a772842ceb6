"""The self-check finds models whose backward doesn't wait, and changes nothing."""

import math
import re
from contextlib import nullcontext
from functools import partial

import models
import pytest
import torch
from test_weights import CONDITIONED
from torch.testing import assert_close

from jagg_patch import JaggConfig, JaggError, install
from jagg_patch.evidence import replay
from jagg_patch.evidence.kept_group import errors
from jagg_patch.evidence.self_check import SelfCheck
from jagg_patch.method.plan import groups_of

FLUX = "train_grpo_flux"


@pytest.fixture
def trains(load_loop):
    """`trains(model's class, pieces of the loop, settings)`: the gradients of two training steps; without settings unpatched."""

    def run(model, pieces=(), optimizer=partial(torch.optim.SGD, lr=0.0), as_dense=False, **settings):
        module, model = load_loop(FLUX, *pieces), model()
        if settings:
            install(vars(module), config=JaggConfig(**{"frac": 1} | settings))
        torch.manual_seed(1)
        optimizer = optimizer(model.parameters())
        gradients = []
        for _ in range(2):
            optimizer.zero_grad()
            module.train_one_step(module.make_args(), model, optimizer)
            trained = [weight.grad for weight in model.parameters() if weight.requires_grad]
            found = [gradient.to_dense() if as_dense else gradient for gradient in trained]
            gradients.append(torch.cat([gradient.flatten() for gradient in found]))
        return torch.stack(gradients)

    return run


@pytest.fixture
def verdicts(monkeypatch):
    """What the checks have found: relative errors."""
    found = []
    judge = SelfCheck._judge
    monkeypatch.setattr(SelfCheck, "_judge", lambda self, error, **others: [found.append(error), judge(self, error, **others)])
    return found


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_it_is_silent_and_changes_no_bit(trains, verdicts, capsys, schedule, group_size):
    settings = dict(schedule=schedule, group_size=group_size)
    adam = partial(torch.optim.AdamW, lr=0.1)
    assert torch.equal(
        trains(models.Plain, optimizer=adam, **settings), trains(models.Plain, optimizer=adam, self_check=False, **settings)
    )
    assert len(verdicts) == 2 and max(verdicts) < 1e-6  # a group of each training step
    assert "self-check" not in capsys.readouterr().out


@pytest.fixture
def checked_at(monkeypatch):
    """Where the groups that have been checked begin."""
    found = []
    judge = SelfCheck._judge
    monkeypatch.setattr(SelfCheck, "_judge", lambda self, **found_: [found.append(self._kept.where), judge(self, **found_)])
    return found


@pytest.mark.parametrize("settings", [{"frac": 1}, {"knots_at": "0,3,4,7,8,11,12,14"}])
def test_each_group_of_the_plan_is_checked_once_and_the_first_once_more(load_loop, checked_at, settings):
    module, (model, optimizer) = load_loop(FLUX), with_optimizer(models.Plain())
    install(vars(module), config=JaggConfig(schedule="joint", **settings))
    for _ in range(7):
        module.train_one_step(module.make_args(), model, optimizer)
    assert checked_at == [f"sample 0, visited step {n} (trajectory step {n})" for n in (0, 4, 8, 12, 0)]


def test_knots_that_have_moved_are_checked_where_they_are_now(load_loop, monkeypatch, capsys):
    checked, judge = set(), SelfCheck._judge
    monkeypatch.setattr(
        SelfCheck, "_judge", lambda self, **found: [checked.add(self._kept.group.plan), judge(self, **found)]
    )
    noisy = "loss = -(advantages[i] * ratio)", "loss = -(advantages[i] * ratio * (1 + 20 * (step < 6)))"
    module, (model, optimizer) = load_loop(FLUX, *noisy), with_optimizer(models.Plain())
    install(vars(module), config=JaggConfig(knots=6))
    for _ in range(8):
        module.train_one_step(module.make_args(), model, optimizer)
    sets = re.findall(r"visited steps ([\d, ]+) from here on", capsys.readouterr().out)
    assert len(sets) == 2
    assert checked == {group for one in sets for group in groups_of(tuple(map(int, one.split(", "))))}


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_what_changes_in_a_later_group_alone_is_found_in_that(load_loop, schedule):
    """An adapter's rank that falls when the image is nearly there: in the last group but one, when it is its turn."""
    module, (model, optimizer) = load_loop(FLUX), with_optimizer(models.LateRankMask())
    install(vars(module), config=JaggConfig(schedule=schedule, frac=1))
    for _ in range(2):
        module.train_one_step(module.make_args(), model, optimizer)
    with pytest.raises(JaggError, match="sample 0, visited step 8 .*: the group's gradient is .*% off"):
        module.train_one_step(module.make_args(), model, optimizer)


def test_a_schedule_that_changes_is_checked_again(trains, verdicts, capsys):
    trains(models.Plain, ("if (i + 1) % args.gradient_accumulation_steps == 0", "if True"), schedule="auto")
    assert "JAGG: schedule joint from here on" in capsys.readouterr().out
    assert len(verdicts) == 4 and max(verdicts) < 1e-6  # with the rollout's weights and with others


class Caching(models.Plain):
    """What doesn't depend on the step is kept from the rollout on, where no gradient is asked for."""

    def __init__(self):
        super().__init__()
        self.prompt, self.kept = torch.nn.Linear(2, 2), None

    def forward(self, x):
        if torch.is_grad_enabled():
            return self.net(x) + self.prompt(torch.ones(2))
        if self.kept is None:
            self.kept = self.prompt(torch.ones(2))
        return self.net(x) + self.kept


@pytest.mark.parametrize(
    ("settings", "step"),
    [
        ({"schedule": "joint"}, 1),
        ({"schedule": "sequential"}, 1),
        ({"schedule": "sequential", "skip_forwards": True}, 4),  # the group's last, which has been looked at before
        ({"schedule": "joint", "skip_forwards": True, "knots_at": "0,2,4,14"}, 2),  # a short gap, and then its step between
    ],
)
def test_a_cache_that_is_older_than_the_weights_is_found(load_loop, settings, step):
    """Until the first optimizer step after a rollout it is right."""
    begins = "    with torch.no_grad():\n        latents, log"
    emptied = begins, f"    model.kept = None\n{begins}"
    module, model = load_loop(FLUX, *emptied), Caching()
    install(vars(module), config=JaggConfig(**settings))
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    torch.manual_seed(1)
    args = module.make_args(n_samples=4, gradient_accumulation_steps=1)
    with pytest.raises(JaggError, match="gives something else where no gradient is asked for") as error:
        module.train_one_step(args, model, optimizer)
    assert re.match(f"sample [12], visited step {step} ", str(error.value))


def test_each_model_of_a_run_is_checked(load_loop):
    """Two experiments in one process, or two networks that are trained in turn."""
    module = load_loop(FLUX)
    install(vars(module), config=JaggConfig(schedule="joint"))
    module.train_one_step(module.make_args(), *with_optimizer(models.Plain()))
    with pytest.raises(JaggError, match="with each backward right after its forward"):
        module.train_one_step(module.make_args(), *with_optimizer(models.RankMask()))


class OnBase(torch.nn.Module):
    """A frozen base that models share, which comes first among their weights, and a network on it."""

    base = torch.nn.Linear(3, 2).requires_grad_(False)

    def __init__(self, network):
        super().__init__()
        self.base, self.network = self.base, network

    def forward(self, x):
        return self.base(x) + self.network(x)


def test_each_of_two_models_on_one_frozen_base_is_checked(load_loop):
    module = load_loop(FLUX)
    install(vars(module), config=JaggConfig(schedule="joint"))
    plain, plain_optimizer = with_optimizer(OnBase(models.Plain()))
    for _ in range(5):
        module.train_one_step(module.make_args(), plain, plain_optimizer)
    with pytest.raises(JaggError, match="with each backward right after its forward"):
        module.train_one_step(module.make_args(), *with_optimizer(OnBase(models.RankMask())))


def test_a_model_that_switches_its_weights_is_checked_as_often_as_any_other(load_loop, verdicts):
    """Three groups, and the first once more; other weights are trained at the optimizer step than at the first group."""
    module = load_loop(FLUX)
    install(vars(module), config=JaggConfig(schedule="joint", frac=1, group_size=5, cuts=(7,)))
    model, optimizer = with_optimizer(models.SwitchedInside())
    n_checks = []
    for _ in range(7):
        module.train_one_step(module.make_args(), model, optimizer)
        n_checks.append(len(verdicts))
    assert n_checks == [1, 2, 3, 4, 4, 4, 4]


@pytest.mark.usefixtures("without_contract")
def test_each_model_of_an_update_is_checked(load_loop):
    """Two that are trained together, the group cut between them: the second one's when both groups of the first are checked."""
    module = load_loop(FLUX, "                model,\n", "                model if int(step) < 7 else args.other,\n")
    install(vars(module), config=JaggConfig(schedule="joint", frac=1, cuts=(7,)))
    first, second = models.Plain(), models.RankMask()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.0)
    args = module.make_args(other=second)
    for _ in range(2):
        module.train_one_step(args, first, optimizer)
    with pytest.raises(JaggError, match="sample 0, visited step 7 .*with each backward right after its forward"):
        module.train_one_step(args, first, optimizer)


def with_optimizer(model):
    return model, torch.optim.SGD(model.parameters(), lr=0.0)


# How far the gradient is off without the check, of a training step with W=4.
LATE = [
    (models.RankMask, "joint", 0.09),
    (models.RankMask, "sequential", 0.06),
    (models.InOneBuffer, "joint", 0.07),
    (models.InOneBuffer, "sequential", 0.06),
]


@pytest.mark.parametrize(("model", "schedule", "least"), LATE)
def test_a_model_whose_backward_reads_what_a_later_forward_has_changed_is_stopped(trains, model, schedule, least):
    with pytest.raises(JaggError, match="with each backward right after its forward") as error:
        trains(model, schedule=schedule)
    assert len(str(error.value).splitlines()) == 2
    assert str(error.value).startswith("sample 0, visited step 0 (trajectory step 0): the group's gradient is ")
    silent = trains(model, schedule=schedule, self_check=False)
    twins = with_a_twin_for_each_forward(model)
    assert torch.equal(trains(twins), trains(model))
    assert relative(silent, trains(twins, schedule=schedule, self_check=False)) > least


def with_a_twin_for_each_forward(model):
    """A class of the same function and weights, each graph of which has a module of its own."""

    class Twins(model):
        def forward(self, x):
            with torch.random.fork_rng():  # its weights are drawn, and replaced
                twin = model()
            for name, weight in self.named_parameters():
                path, _, last = name.rpartition(".")
                setattr(twin.get_submodule(path), last, weight)
            return twin(x)

    return Twins


@pytest.mark.parametrize("model", [models.RankMask, models.InOneBuffer])
def test_groups_of_two_in_the_sequential_schedule_are_right_with_such_a_model(trains, model):
    assert_close(trains(model, schedule="sequential", group_size=2), trains(model), rtol=1e-4, atol=1e-6)
    with pytest.raises(JaggError, match="right after its forward"):
        trains(model, schedule="joint", group_size=2)


@pytest.mark.parametrize("model", [models.SlicedRank, models.MovingScale])
@pytest.mark.parametrize("schedule", ["joint", "sequential", "auto"])
def test_what_torch_sees_of_it_is_said_in_jagg_s_words(trains, model, schedule):
    """auto measures memory during the first group, and that must not hide it."""
    with pytest.raises(JaggError, match="a later forward has changed what the backward of an endpoint") as error:
        trains(model, schedule=schedule)
    assert len(str(error.value).splitlines()) == 2 and error.value.__cause__ is not None


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_a_gradient_that_the_model_s_backward_adds_is_found(trains, schedule):
    with pytest.raises(JaggError, match="backward adds a gradient of its own") as error:
        trains(models.Injected, schedule=schedule)
    assert str(error.value).startswith("sample 0, visited step 1 (trajectory step 1): ")
    assert_close(trains(models.Injected, schedule=schedule, group_size=2), trains(models.Injected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_other_weights_in_the_middle_of_a_group_are_found(trains, schedule):
    with pytest.raises(JaggError, match="depends on other weights than at the first step of its group") as error:
        trains(models.InTheMiddle, schedule=schedule, frac=0.8)
    assert str(error.value).startswith("sample 0, visited step 1 (trajectory step 1): ")


def said(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if "self-check" in line or "hasn't been checked" in line]


@pytest.mark.usefixtures("without_contract")
def test_samples_that_the_loop_changes_in_place_cannot_be_checked_and_that_is_said_once(trains, verdicts, capsys):
    trains(models.Plain, ("loss.backward()", "loss.backward(); latents[i, step] = 0"), schedule="joint")
    (line,) = said(capsys)
    assert line.startswith("JAGG: no self-check of a group: a forward gives something else") and verdicts == []


def test_a_forward_that_fails_when_it_is_run_again_is_said(trains, verdicts, capsys):
    """The loop has let go of something by then."""

    class Emptied(models.Plain):
        def __init__(self):
            super().__init__()
            self.samples = {"latents": 1}

        def forward(self, x):
            return self.net(x) * self.samples["latents"]

    step = "            optimizer.step()"
    emptied = step, f"            model.samples.clear()\n{step}\n            model.samples['latents'] = 1"
    expected = trains(Emptied, emptied, schedule="joint", self_check=False)
    assert torch.equal(trains(Emptied, emptied, schedule="joint"), expected) and verdicts == []
    (line,) = said(capsys)
    assert "its forward or backward can't be run again (KeyError: 'latents')" in line


def test_a_training_step_without_a_gradient_leaves_it_to_the_next(trains, verdicts):
    none_at_first = "    global CALLS\n    CALLS = globals().get('CALLS', -1) + 1\n    advantages = CALLS * (rewards"
    first, second = trains(models.Plain, ("    advantages = (rewards", none_at_first), schedule="joint")
    assert not first.any() and second.any() and len(verdicts) == 1 and verdicts[0] < 1e-6


def test_a_loss_that_is_no_number_leaves_it_to_the_next_training_step(trains, verdicts, capsys):
    trains(models.Plain, ("loss.backward()", "(loss * float('nan')).backward()"), schedule="joint")
    assert verdicts == [] and said(capsys) == []


def test_hooks_that_keep_each_gradient_are_left_alone(trains, verdicts, capsys):
    """A float32 accumulator, say: the backward passes of a check would be added to it."""

    class Accumulated(models.Plain):
        def __init__(self):
            super().__init__()
            for weight in self.parameters():
                weight.main_grad = torch.zeros_like(weight)
                weight.register_post_accumulate_grad_hook(self.add)

        def add(self, weight):
            weight.main_grad += weight.grad

    trains(Accumulated, schedule="joint")
    (line,) = said(capsys)
    assert line.startswith("JAGG: no self-check of a group: hooks run at each gradient") and verdicts == []


class Fused(torch.autograd.Function):
    """A linear layer whose backward adds the weight's gradient to `main_grad`, and gives torch zeros."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.main_grad += grad.T @ x
        return grad @ weight, torch.zeros_like(weight)


@pytest.mark.parametrize("form", ["a hook", "in the backward"])
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_gradients_that_are_added_up_elsewhere_are_left_alone(trains, verdicts, capsys, form, schedule):
    class Accumulated(models.Plain):
        def __init__(self):
            super().__init__()
            kept.append(self)
            self.sums = [torch.zeros_like(weight) for weight in self.parameters()]
            for weight, total in zip(self.parameters(), self.sums, strict=True):
                if form == "a hook":
                    weight.register_hook(total.add_)
                else:
                    weight.main_grad = total

        def forward(self, x):
            if form == "a hook":
                return self.net(x)
            first, _, last = self.net
            return Fused.apply((Fused.apply(x, first.weight) + first.bias).tanh(), last.weight) + last.bias

    def sums(**settings):
        kept.clear()
        trains(Accumulated, schedule=schedule, **settings)
        return torch.cat([total.flatten() for total in kept[0].sums])

    kept = []
    assert torch.equal(sums(), sums(self_check=False)) and verdicts == []
    assert [line.partition(": ")[2].partition(":")[0] for line in said(capsys)] == ["no self-check of a group"]


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_a_model_that_does_something_else_without_a_gradient_is_stopped(trains, schedule):
    """From a cache, say. The steps between run so, and have other losses then; their gradient is off, and says nothing of it."""

    class Cached(models.Plain):
        def forward(self, x):
            return self.net(x) * (1 if torch.is_grad_enabled() else 1.05)

    with pytest.raises(JaggError, match="gives something else where no gradient is asked for") as error:
        trains(Cached, schedule=schedule)
    assert len(str(error.value).splitlines()) == 2 and str(error.value).startswith("sample 0, visited step 1 ")
    assert relative(trains(Cached, schedule=schedule, self_check=False), trains(Cached, schedule=schedule, frac=0)) > 0.005


def test_what_a_forward_changes_besides_buffers_is_put_back(trains, verdicts):
    """A frozen copy that follows the weights, a tensor in an attribute; and a buffer whose elements share memory stays."""

    class Following(models.Plain):
        def __init__(self):
            super().__init__()
            self.teacher = torch.nn.Parameter(torch.zeros(8, 3), requires_grad=False)
            self.mean = torch.zeros(())
            self.register_buffer("ones", torch.ones(1).expand(2))

        def forward(self, x):
            with torch.no_grad():
                self.teacher.lerp_(self.net[0].weight, 0.1)
                self.mean.lerp_(x.mean(), 0.1)
            return self.net(x) * self.ones + (x @ self.teacher.T).mean(1, keepdim=True) + self.mean

    adam = partial(torch.optim.Adam, lr=0.1)
    settings = dict(optimizer=adam, schedule="joint", group_size=2)
    assert torch.equal(trains(Following, **settings), trains(Following, self_check=False, **settings))


def test_a_solver_that_changes_the_output_in_place_finds_it_its_own(trains):
    old = "    mean = latents + "
    changed = old, f"    model_output *= 0.5\n{old}"
    found = trains(models.Plain, changed, schedule="joint", group_size=2)
    assert_close(found, trains(models.Plain, changed), rtol=1e-5, atol=1e-6)


def test_an_optimizer_of_copies_of_the_weights_leaves_it_unchecked_and_that_is_said_once(trains, verdicts, capsys):
    class OfCopies:
        def __init__(self, parameters):
            self.parameters = list(parameters)
            self.optimizer = torch.optim.SGD([weight.detach().clone() for weight in self.parameters], lr=0.0)

        def zero_grad(self):
            for weight in self.parameters:
                weight.grad = None

        def step(self):
            self.optimizer.step()

    assert torch.equal(trains(models.Plain, optimizer=OfCopies, schedule="joint"), trains(models.Plain, schedule="joint"))
    (line,) = said(capsys)
    assert line.endswith("no torch optimizer that holds the model's own weights has stepped")
    assert len(verdicts) == 2  # of the second run


def test_an_optimizer_that_is_none_of_torch_s_leaves_the_group_unchecked_which_is_said(trains, verdicts, capsys):
    class Own:
        def __init__(self, parameters):
            self.parameters = list(parameters)

        def zero_grad(self):
            for weight in self.parameters:
                weight.grad = None

        def step(self):
            """Leaves the weights as they are."""

    trains(models.Plain, optimizer=Own, schedule="joint")
    (line,) = said(capsys)
    assert line.endswith("no torch optimizer that holds the model's own weights has stepped") and verdicts == []


def test_sparse_and_complex_gradients_are_compared(trains, verdicts, capsys):
    class Numbers(models.Plain):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(2, 2, sparse=True)
            self.phase = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self, x):
            return self.net(x) + self.table(torch.zeros(len(x), dtype=torch.long)) * (self.phase * (1 + 2j)).imag

    run = partial(trains, Numbers, schedule="joint", as_dense=True)
    assert torch.equal(run(), run(self_check=False))
    assert said(capsys) == [] and len(verdicts) == 2 and max(verdicts) < 1e-6


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_a_penalty_at_some_steps_is_told_apart_from_a_late_backward(trains, verdicts, capsys, schedule):
    squares = "sum(weight.square().sum() for weight in model.parameters())"
    penalty = "loss.backward()", f"(loss + {squares} if int(step) % 4 == 3 else loss).backward()"
    found = trains(models.Plain, penalty, schedule=schedule)
    assert torch.equal(found, trains(models.Plain, penalty, schedule=schedule, self_check=False))
    assert said(capsys) == [] and verdicts[0] < 1e-6


@pytest.mark.usefixtures("without_contract")
def test_what_comes_to_the_gradient_in_a_group_some_other_way_is_said(trains, verdicts, capsys):
    """In a sequential group of two, where each step's gradient is there after its own backward, so that it may be changed."""
    decayed = "loss.backward()", "loss.backward(); [w.grad.add_(0.01) for w in model.parameters() if w.grad is not None]"
    settings = dict(schedule="sequential", group_size=2)
    found = trains(models.Plain, decayed, **settings)
    assert torch.equal(found, trains(models.Plain, decayed, self_check=False, **settings))
    (line,) = said(capsys)
    assert "hasn't come through the model's outputs" in line and verdicts[0] < 1e-6


def test_weights_that_the_outputs_do_not_reach_are_no_part_of_it(trains, verdicts, capsys):
    """A value head that the loop calls: each step's loss reaches it in its own backward."""

    class WithHead(models.Plain):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(2, 1)

    value = "loss.backward()", "(loss + (model.head(latents[i, step]) - advantages[i]).square().mean()).backward()"
    assert_close(trains(WithHead, value, schedule="joint", group_size=2), trains(WithHead, value), rtol=1e-5, atol=1e-6)
    assert said(capsys) == [] and len(verdicts) == 2


@pytest.mark.parametrize("is_another_s", [True, False])
def test_another_network_that_another_optimizer_steps_leaves_the_group_unchecked(trains, verdicts, capsys, is_another_s):
    """It may have stepped by now, and its gradients may be in an engine of its own."""

    class Model(models.WithConditioner):
        def parameters(self, recurse=True):
            yield from super().parameters(recurse)
            if not is_another_s:
                yield from self.conditioner[0].parameters()

    trains(Model, CONDITIONED, schedule="joint")
    assert len(verdicts) == 2 * (not is_another_s)
    why = "the training forward trains weights that are neither the model's nor, as they are, the optimizer's"
    assert [line.partition(": ")[2] for line in said(capsys)] == [f"no self-check of a group: {why}"] * is_another_s


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inside_the_model_has_a_rounding_of_its_own(trains, verdicts, dtype):
    class Half(models.Plain):
        def forward(self, x):
            with torch.autocast("cpu", dtype):
                return self.net(x).float()

    trains(Half, schedule="joint")
    assert len(verdicts) == 2 and max(verdicts) < 1e-2


@pytest.mark.parametrize(("dtype", "off", "is_found"), [(None, 0.002, False), (None, 0.02, True), (torch.bfloat16, 0.02, False)])
def test_as_much_as_rounding_does_is_allowed_and_no_more(trains, verdicts, dtype, off, is_found):
    """Its backward reads what the latest forward has set: a hundredth of the gradient is rounding in half precision alone."""

    class Latest(models.Plain):
        def forward(self, x):
            self.t = x[0, -1].item()
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                hidden = self.net[0](x)
                if hidden.requires_grad:
                    hidden.register_hook(lambda grad: grad * (1 + off * self.t))
                return self.net[1:](hidden).float()

    with pytest.raises(JaggError, match="with each backward right after") if is_found else nullcontext():
        trains(Latest, schedule="joint")
    assert max(verdicts) > (1e-3 if off == 0.02 else 1e-4)


@pytest.mark.parametrize(("whose", "settings"), [("self-check", {}), ("probe", {"self_check": False, "probe_every": 1})])
def test_an_optimizer_that_steps_in_hooks_is_stopped_before_it_trains_on_what_is_measured(load_loop, whose, settings):
    """There is a backward pass too many when those of a group are run again."""
    module, model = load_loop(FLUX), models.Plain()
    (first, *others), seen = model.parameters(), []
    inner = torch.optim.SGD([first], lr=0.1)
    n_passes = 2 * 8  # of two samples, each of four groups

    def step_late(module, grads, grads_of_output):
        seen.append(module)
        if len(seen) > n_passes:
            inner.step()

    model.net[-1].register_full_backward_hook(step_late)
    install(vars(module), config=JaggConfig(frac=1, schedule="sequential", **settings))
    before = first.detach().clone()
    with pytest.raises(JaggError, match=f"an optimizer stepped inside the {whose}'s backward passes"):
        module.train_one_step(module.make_args(), model, torch.optim.SGD(others, lr=0.1))
    assert torch.equal(first, before)


def test_what_a_model_keeps_in_attributes_is_put_back_and_given_to_each_forward_again(trains, verdicts):
    class Keeping(models.Plain):
        def __init__(self):
            super().__init__()
            self.calls, self.scale, self.noise = 0, 1.0, torch.Generator().manual_seed(0)
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()  # another tensor each time
            return self.net(x) * (1 + 0.01 * self.calls + 0.1 * self.mean + torch.rand((), generator=self.noise)) * self.scale

    set_by_loop = "            new_log_probs = ", "            model.scale = 1 + 0.1 * int(step)\n            new_log_probs = "
    adam = partial(torch.optim.Adam, lr=0.1)
    settings = dict(optimizer=adam, schedule="joint", frac=0.5)
    assert torch.equal(trains(Keeping, set_by_loop, **settings), trains(Keeping, set_by_loop, self_check=False, **settings))


def test_random_numbers_of_python_and_numpy_are_put_back(trains):
    import random

    import numpy

    class Drawing(models.Plain):
        def forward(self, x):
            return self.net(x) * (1 + 0.1 * random.random() + 0.1 * numpy.random.rand())

    def run(**settings):
        random.seed(0)
        numpy.random.seed(0)
        return trains(Drawing, schedule="joint", **settings)

    assert torch.equal(run(), run(self_check=False))


def test_random_numbers_of_each_device_that_weights_are_on_are_put_back(trains, monkeypatch):
    """Two generators stand for those of two devices, from which a forward draws."""
    states, devices = {}, [torch.device("xpu", 0), torch.device("xpu", 1)]

    class Drawing(models.Plain):
        def forward(self, x):
            states.update({device: state + 1 for device, state in states.items()})
            return self.net(x)

    class Generators:
        get_rng_state = staticmethod(states.get)

        @staticmethod
        def set_rng_state(state, device):
            states[device] = state

    monkeypatch.setattr(replay, "accelerators", lambda models: devices)
    monkeypatch.setattr(torch, "get_device_module", {device: Generators for device in devices}.get)
    drawn = []
    for settings in ({"self_check": False}, {}):
        states.update(zip(devices, (0, 100), strict=True))
        trains(Drawing, schedule="joint", **settings)
        drawn.append(dict(states))
    assert drawn[0] == drawn[1] and drawn[0][devices[0]] > 30


def test_an_attribute_that_becomes_a_tensor_is_put_back_for_each_forward(trains, verdicts):
    class Becoming(models.Plain):
        def __init__(self):
            super().__init__()
            self.scale = 1.0

        def forward(self, x):
            found = self.net(x) * self.scale
            self.scale = torch.full([2], 1.5)
            return found

    set_by_loop = "            new_log_probs = ", "            model.scale = 1.0\n            new_log_probs = "
    run = partial(trains, Becoming, set_by_loop, schedule="joint")
    assert torch.equal(run(), run(self_check=False))
    assert len(verdicts) == 2 and max(verdicts) < 1e-6


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_a_weight_with_next_to_nothing_of_the_gradient_is_looked_at_by_itself(trains, schedule):
    """The whole gradient is off by less than its rounding may be, the adapter's by more than a tenth."""
    with pytest.raises(JaggError, match=r"visited step 0 .*: the gradient of (down|up)\.weight is [1-9]\d?\.\d% off"):
        trains(models.SmallAdapter, schedule=schedule)
    found = trains(models.SmallAdapter, schedule=schedule, self_check=False)
    expected = trains(with_a_twin_for_each_forward(models.SmallAdapter), schedule=schedule, self_check=False)
    n_net = sum(weight.numel() for weight in models.mlp().parameters())
    assert relative(found, expected) < 1e-3 and relative(found[:, n_net:], expected[:, n_net:]) > 0.1


def test_a_weight_that_should_have_got_nothing_is_infinitely_far_off():
    assert errors([0.0, 1.0], [100.0, 0.0], 1e-3) == (0.1, (1, math.inf))
    assert errors([0.0, 0.0], [100.0, 0.0], 1e-3) == (0.0, None)


def test_what_begins_as_nothing_is_found_when_it_has_been_trained(load_loop):
    """At the first check the adapter adds nothing, with a gradient or without. There is one group."""
    module, model = load_loop(FLUX), models.Adapted()
    install(vars(module), config=JaggConfig(schedule="joint", frac=0.34))
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    module.train_one_step(module.make_args(), model, optimizer)
    with pytest.raises(JaggError, match="visited step 1 .*gives something else where no gradient is asked for"):
        module.train_one_step(module.make_args(), model, optimizer)


# What the forward does by whether gradients are on, as one that the rollout shares may.
SOLVED = "    return flux_step(velocity, latents, args.eta, sigma_schedule, i, pre_latents, grpo=True, sde_solver=True)[2]"
BY_MODE = {
    "the noise": SOLVED.replace("args.eta", "args.eta * (1 if torch.is_grad_enabled() else 2)"),
    "the next latents": SOLVED.replace("pre_latents", "pre_latents if torch.is_grad_enabled() else None"),
}


@pytest.mark.usefixtures("without_contract")
@pytest.mark.parametrize("changed", BY_MODE.values(), ids=BY_MODE)
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_a_training_forward_that_goes_by_the_grad_mode_is_stopped(trains, changed, schedule):
    with pytest.raises(JaggError, match="visited step 1 .*: the training forward gives something else where no gradient"):
        trains(models.Plain, (SOLVED, changed), schedule=schedule)
    assert_close(
        trains(models.Plain, (SOLVED, changed), schedule=schedule, group_size=2),
        trains(models.Plain, (SOLVED, changed)),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_loop_that_goes_on_after_it_has_been_stopped_is_stopped_again(load_loop):
    """As one that takes any exception for a bad batch."""
    module, (model, optimizer) = load_loop(FLUX), with_optimizer(models.RankMask())
    install(vars(module), config=JaggConfig(schedule="joint", frac=1))
    for _ in range(3):
        with pytest.raises(JaggError, match="each backward right after its forward\n.*try JAGG_SCHEDULE=sequential, or run with"):
            module.train_one_step(module.make_args(), model, optimizer)
        optimizer.zero_grad()


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("frac", [0.6, 1])
def test_under_an_autocast_around_several_optimizer_steps_no_step_has_weights_from_before(load_loop, frac, self_check):
    """Autocast keeps its casts until it ends; unpatched they are let go of here, as they have to be."""
    in_order = "            torch.randperm(n)\n", "            torch.randperm(n).sort().values\n"
    clears = "            optimizer.step()", "            optimizer.step(); torch.clear_autocast_cache()"
    seen = []
    for pieces in ([*in_order, *clears], in_order):
        module, model = load_loop(FLUX, *pieces), models.Plain()
        if pieces is in_order:
            install(vars(module), config=JaggConfig(group_size=2, schedule="joint", frac=frac, self_check=self_check))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found, weights = [], list(model.parameters())
        optimizer.register_step_pre_hook(lambda *_, to=found, of=weights: to.append(torch.cat([p.grad.flatten() for p in of])))
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            module.train_one_step(module.make_args(n_samples=4, gradient_accumulation_steps=1), model, optimizer)
        seen.append(torch.stack(found))
    assert len(seen[0]) == 4 and relative(seen[1], seen[0]) < 1e-6
