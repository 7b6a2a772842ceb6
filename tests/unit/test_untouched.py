"""Gradients that are changed while a part of a group's is still to come, in places that the text doesn't show."""

from functools import partial

import models
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from jagg_patch import JaggConfig, JaggError, install

FLUX = "train_grpo_flux"
BACKWARD = "            loss.backward()"
HELPER = "            model.help(model)"


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


OTHER = torch.nn.Linear(2, 1)
CHANGES = {
    "clipped": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "set to zero": lambda model: model.zero_grad(set_to_none=False),
    "clamped past torch's counting": lambda model: [p.grad.data.clamp_(-1e-5, 1e-5) for p in trained(model)],
    "before a backward of others": lambda model: [CHANGES["clipped"](model), (OTHER(torch.ones(2)).sum()).backward()],
    "replaced": lambda model: [setattr(p, "grad", p.grad / 2) for p in trained(model)],
    "scaled by next to nothing": lambda model: [p.grad.mul_(0.9999) for p in trained(model)],
    "scaled by hand": lambda model: [p.grad.mul_(0.5) for p in trained(model)],
}


@pytest.fixture
def train(load_loop):
    """`train(change, settings)`: the gradient of a training step, after each of whose backwards `change(model)` is called.

    Or wherever `lines` have it.
    """

    def run(change, pieces=(), lines=(BACKWARD, HELPER), model=models.Plain, **settings):
        module = load_loop(FLUX, BACKWARD, "\n".join(lines), *pieces)
        model, seen = model(), []
        model.help = change
        if settings:
            install(vars(module), config=JaggConfig(**settings))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in trained(model)))
        torch.manual_seed(1)
        module.train_one_step(module.make_args(), model, optimizer)
        return seen

    return run


@pytest.mark.parametrize("settings", [{"group_size": 2, "schedule": "joint"}, {"group_size": 3}, {"group_size": 4, "frac": 0.5}])
@pytest.mark.parametrize("lines", [(BACKWARD, HELPER), (HELPER, BACKWARD)], ids=["after", "before"])
@pytest.mark.parametrize("change", CHANGES)
def test_gradients_that_a_helper_changes_inside_a_group_stop_the_run(train, change, lines, settings):
    with pytest.raises(JaggError, match=r"gradients were changed since the group that began at sample \d") as error:
        train(CHANGES[change], lines=lines, **{"frac": 1} | settings)
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize("change", CHANGES)
def test_in_a_group_of_two_that_is_sequential_nothing_is_still_to_come(train, change):
    expected = train(CHANGES[change], IN_ORDER)
    for found, one in zip(train(CHANGES[change], schedule="sequential", group_size=2, frac=1), expected, strict=True):
        assert torch.allclose(found, one, rtol=1e-5, atol=1e-9)


HARMLESS = {
    "looked at": lambda model: [p.grad.norm() for p in trained(model)],
    "clipped far above their norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9),
    "mended where they are no numbers": lambda model: [p.grad.nan_to_num_() for p in trained(model)],
    "detached": lambda model: [setattr(p, "grad", p.grad.detach()) for p in trained(model)],
}


@pytest.mark.parametrize("settings", [{}, {"group_size": 2, "cuts": "3"}], ids=["", "steps alone between groups"])
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize("look", HARMLESS)
def test_gradients_may_be_looked_at_and_left_as_they_are(train, look, schedule, settings):
    found, expected = (train(how, schedule=schedule, frac=1, **settings) for how in (HARMLESS[look], lambda model: None))
    assert all(map(torch.equal, found, expected))


# -- in places, by the number of the step whose loss is next or over


IN_ORDER = "            torch.randperm(n)\n", "            torch.randperm(n).sort().values\n"
BEFORE, AFTER = ("            model.help(model, j)", BACKWARD), (BACKWARD, "            model.help(model, j)")


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("out of memory")


def after_a_critic(model, step):
    if step == 14:
        OTHER(torch.ones(2)).sum().backward()
        CHANGES["clipped"](model)


def after_a_loss_of_its_own(model, step):
    if step == 14:
        (0.01 * model.net(torch.ones(4, 3)).square().mean()).backward()
        CHANGES["clipped"](model)


def then_moved_away(model, step):
    for p in model.parameters():
        if step == 4:
            p.grad.mul_(0.1)
        elif step == 5:
            p.kept, p.grad = p.grad, None
        elif step == 14:
            p.grad += p.kept


def after_another_backward_has_failed(model, step):
    if step == 5:
        with pytest.raises(RuntimeError, match="out of memory"):
            Fails.apply(OTHER(torch.ones(2))).sum().backward()
        model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize(
    ("change", "lines"),
    [(after_a_critic, BEFORE), (after_a_loss_of_its_own, BEFORE)]
    + [(change, AFTER) for change in (then_moved_away, after_another_backward_has_failed)],
)
def test_a_change_at_one_step_stops_the_run(train, change, lines, schedule):
    with pytest.raises(JaggError, match="gradients were changed since the group that began at sample 0"):
        train(change, IN_ORDER, lines, frac=1, schedule=schedule)


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize("step", [9, 10, 12])
def test_a_change_of_the_second_of_two_models_stops_the_run(load_loop, step, schedule):
    """The first one's gradients were the last to be looked at."""
    pieces = "                model,\n", "                model if int(step) < 8 else args.other,\n"
    module = load_loop(FLUX, BACKWARD, f"{BACKWARD}\n            args.help(int(step))", *IN_ORDER, *pieces)
    model, other = models.Plain(), models.Plain()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.0)
    install(vars(module), config=JaggConfig(frac=1, cuts="8", schedule=schedule))
    with pytest.raises(JaggError, match=f"sample 1, visited step {step + 1} .*: gradients were changed"):
        module.train_one_step(module.make_args(other=other, help=partial(zeroed_at, step, other, [])), model, optimizer)


def zeroed_at(when, model, seen, step):
    """In the second sample."""
    seen += [step] * (step == when)
    if step == when and len(seen) == 2:
        model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("lines", [AFTER, BEFORE], ids=["after", "before"])
@pytest.mark.parametrize("step", [1, 5, 6, 10, 13])
@pytest.mark.parametrize("n_changed", [1, 4], ids=["one", "all"])
def test_a_change_that_is_taken_back_a_step_later_stops_the_run(train, n_changed, step, lines):
    """Between two knots, of the first sample that finds gradients there."""

    def pulse(model, now):
        for p in trained(model)[:n_changed]:
            p.grad.mul_({step: 2, step + 1: 0.5}.get(now, 1))

    stops_at = step if lines is BEFORE else step + 1
    with pytest.raises(JaggError, match=f"sample 1, visited step {stops_at} .*: gradients were changed"):
        train(pulse, IN_ORDER, lines, schedule="joint", knots_at="0,14")


class Doubled(models.Plain):
    """Whose weights have two dtypes."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 8), *(torch.nn.Linear(8, 8) for _ in range(4)), torch.nn.Linear(8, 2))
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return (self.net(x).double() * self.scale).float()


class Shadowed(models.Plain):
    """It runs on copies, whose hooks add gradients to the weights', as master weights that are kept by hand."""

    def forward(self, x):
        copies = {}
        for name, weight in self.net.named_parameters():
            copies[name] = weight.detach().clone().requires_grad_(torch.is_grad_enabled())
            if torch.is_grad_enabled():
                copies[name].register_post_accumulate_grad_hook(partial(add_to, weight))
        return torch.func.functional_call(self.net, copies, (x,))


def add_to(weight, copy):
    weight.grad = copy.grad.clone() if weight.grad is None else weight.grad + copy.grad


@pytest.mark.parametrize("settings", [{"frac": 0.6}, {"frac": 1}, {"knots_at": "0,3,4,5,14"}])
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize("model", [Doubled, Shadowed])
def test_a_run_that_changes_nothing_goes_on(train, model, schedule, settings):
    """Whatever shows of its weights in a graph: its gradient is that of the plain model, and of the other schedule."""
    plain, (other,) = models.Plain if model is Shadowed else model, {"joint", "sequential"} - {schedule}
    expected = train(lambda *_: None, IN_ORDER, model=plain, schedule=other, **settings)
    found = train(lambda *_: None, IN_ORDER, model=model, schedule=schedule, **settings)
    for one, wanted in zip(found, expected, strict=True):
        assert torch.allclose(one, wanted, rtol=1e-4, atol=1e-8)


class Hidden(models.Plain):
    """Whose graph shows none of its weights."""

    def forward(self, x):
        return checkpoint(self.net, x.detach().requires_grad_(), use_reentrant=True) if torch.is_grad_enabled() else self.net(x)


@pytest.mark.parametrize("settings", [{"knots_at": "0,3,4,5,14"}, {"cuts": "4,5", "frac": 1}])
def test_weights_behind_reentrant_checkpointing_get_gradients_too(train, settings):
    """Nothing is changed, but by exact steps' losses."""
    kinds = Hidden, models.Plain
    found, expected = (train(lambda *_: None, IN_ORDER, model=kind, schedule="sequential", **settings) for kind in kinds)
    assert all(map(torch.allclose, found, expected))


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_a_checkpointed_loss_of_its_own_in_the_midst_of_a_group_changes_nothing(train, schedule):
    def add(model, step, run):
        if step == 5:
            (0.01 * run(model.net, torch.ones(4, 3).requires_grad_()).square().mean()).backward()

    ways = partial(checkpoint, use_reentrant=True), lambda net, x: net(x)
    found, expected = (train(partial(add, run=way), IN_ORDER, AFTER, frac=1, schedule=schedule) for way in ways)
    assert all(map(torch.allclose, found, expected))


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_sums_elsewhere_may_be_put_back_in_the_midst_of_a_group(train, schedule):
    sums = {}

    def move(model, step):
        for p in trained(model):
            sums[p], p.grad = sums.get(p, 0) + p.grad, None
        if step in (9, 14):
            for p in list(sums):
                p.grad = sums.pop(p)

    found, expected = (train(how, IN_ORDER, AFTER, frac=1, schedule=schedule) for how in (move, lambda *_: None))
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-8) for one, other in zip(found, expected, strict=True))


class Auxiliary(models.Plain):
    def forward(self, x):
        hidden = self.net[:2](x)
        self.aux = hidden.square().mean()
        return self.net[2](hidden)


def test_a_training_step_after_one_that_was_refused_is_watched_as_well(load_loop):
    """Its caller may go on."""
    lines = "            (loss + model.aux if args.has_aux else loss).backward()\n            args.help(model)"
    module, model = load_loop(FLUX, BACKWARD, lines, *IN_ORDER), Auxiliary()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    install(vars(module), config=JaggConfig(frac=1, schedule="joint"))
    for has_aux, help, why in ((True, lambda model: None, "by another way"), (False, CHANGES["clipped"], "were changed")):
        with pytest.raises(JaggError, match=why):
            module.train_one_step(module.make_args(has_aux=has_aux, help=help), model, optimizer)


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_gradients_may_be_added_up_elsewhere(train, schedule):
    found = []
    for settings in ({}, {"schedule": schedule, "group_size": 2, "frac": 1}, {"schedule": schedule, "knots": "15"}):
        sums = {}

        def move(model, sums=sums):
            for name, p in model.named_parameters():
                if p.grad is not None:
                    sums[name], p.grad = sums.get(name, 0) + p.grad, None

        assert train(move, **settings) == []
        found.append(torch.cat([sums[name].flatten() for name in sorted(sums)]))
    assert torch.allclose(found[1], found[0], rtol=1e-5, atol=1e-8) and torch.allclose(found[2], found[0], rtol=1e-5, atol=1e-8)


def test_gradients_that_are_no_numbers_are_what_they_were(train):
    """One sample's advantage is NaN, as a reward that has failed: unpatched the loop trains on."""
    broken = "            loss = -(advantages[i]", "            loss = -(advantages[i] * torch.where(step == 2, torch.nan, 1.0)"
    assert any(gradient.isnan().any() for gradient in train(lambda model: None, broken, schedule="joint", frac=1))
