"""The session alone: what watches can be left out, and what a knot is given is the math's."""

import pytest
import torch
from torch.testing import assert_close

from jagg_patch import JaggConfig, JaggError, alphas, install, plan_groups
from jagg_patch.evidence.routing import Routing
from jagg_patch.evidence.stats import Stats
from jagg_patch.loop.knots import Knot
from jagg_patch.loop.recording import Recording
from jagg_patch.loop.retaining import Retaining
from jagg_patch.loop.schedule import Schedule
from jagg_patch.loop.session import Session
from jagg_patch.loop.skipping import Skipping
from jagg_patch.loop.watcher import Watcher
from jagg_patch.method.plan import places
from jagg_patch.trainers import TRAINERS

FLUX = "train_grpo_flux"


def train(module):
    """Gradient of one training step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    module.train_one_step(module.make_args(), model, torch.optim.SGD(model.parameters(), lr=0.0))
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def session_on(module, config, *watchers):
    recording = Recording()
    others = recording, Skipping(config, recording), Retaining(config, recording)
    session = Session(config, Routing(config), Schedule(config.schedule), *others, watchers)
    vars(module).update(TRAINERS[FLUX].wrappers(vars(module), session))
    return session


@pytest.mark.parametrize("settings", [{}, dict(frac=1), dict(frac=1, skip_forwards=True), dict(frac=0)], ids=str)
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_without_anybody_who_watches_the_gradient_is_the_same(load_loop, settings, schedule):
    config = JaggConfig(schedule=schedule, **settings)
    module = load_loop(FLUX)
    install(vars(module), config=config)
    expected = train(module)
    module = load_loop(FLUX)
    session_on(module, config)
    assert torch.equal(train(module), expected)


class Outer(torch.optim.SGD):
    """Steps by another optimizer, as ZeroRedundancyOptimizer does, and some wrappers."""

    def __init__(self, params, fails_at=None, **kwargs):
        super().__init__(params, **kwargs)
        self.inner = torch.optim.SGD(self.param_groups[0]["params"][:1], **kwargs)
        self.n_steps, self.fails_at = 0, fails_at

    def step(self):
        self.n_steps += 1
        if self.n_steps == self.fails_at:
            raise ValueError("no step")
        self.inner.step()


@pytest.mark.parametrize("fails_at", [None, 1])
def test_an_optimizer_inside_another_s_step_is_not_told_of(load_loop, fails_at):
    class Steps(Watcher):
        seen = []

        def optimizer_steps(self, session, optimizer):
            self.seen.append(optimizer)

    module, model = load_loop(FLUX), torch.nn.Linear(3, 2)
    session_on(module, JaggConfig(), Steps())
    optimizer = Outer(model.parameters(), lr=0.0, fails_at=fails_at)
    if fails_at:
        with pytest.raises(ValueError, match="no step"):
            module.train_one_step(module.make_args(), model, optimizer)
    module.train_one_step(module.make_args(), model, optimizer)
    module.train_one_step(module.make_args(), model, optimizer.inner)
    assert Steps.seen == [optimizer] * (2 if fails_at else 1) + [optimizer.inner]


def test_an_optimizer_whose_step_fails_hides_no_other_s(load_loop):
    """A critic's, after the first sample's steps, which the loop passes over."""

    class Steps(Watcher):
        seen = []

        def optimizer_steps(self, session, optimizer):
            self.seen.append(optimizer)

    passed_over = "            loss.backward()\n", "            loss.backward()\n            args.after_step(i, j)\n"
    module, model = load_loop(FLUX, *passed_over), torch.nn.Linear(3, 2)
    session_on(module, JaggConfig(), Steps())
    critic, optimizer = (Outer(model.parameters(), lr=0.0, fails_at=n) for n in (1, None))

    def after_step(i, j):
        if (i, j) == (0, 14):
            with pytest.raises(ValueError, match="no step"):
                critic.step()

    module.train_one_step(module.make_args(after_step=after_step), model, optimizer)
    assert Steps.seen == [critic, optimizer]


class Diary(Watcher):
    """The events that come, without those of every step."""

    def __init__(self):
        self.events = []

    def training_step_begins(self, session):
        self.events.append("training step")

    def rollout_begins(self, session):
        self.events.append("rollout")

    def update_begins(self, session, step):
        self.events.append("update")

    def group_begins(self, session, visit):
        self.events.append(("from", session.group.positions[0]))

    def group_ends(self, session, group):
        self.events.append(("to", group.positions[-1]))

    def optimizer_steps(self, session, optimizer):
        self.events.append("optimizer")

    def training_step_ends(self, session):
        self.events.append("whole")

    def training_step_fails(self, session, error):
        self.events.append("failed")

    def update_ends(self, session):
        self.events.append("update over")


def test_the_events_of_a_training_step_and_of_one_that_fails(load_loop):
    module, diary, stats = load_loop(FLUX), Diary(), Stats()
    session_on(module, JaggConfig(), diary, stats)  # 9 of 15 steps are routed, as 5 + 4
    train(module)
    sample = [("from", 0), ("to", 4), ("from", 5), ("to", 8)]
    assert diary.events == ["training step", "rollout", "update", *sample, *sample, "optimizer", "whole", "update over"]
    assert (stats.training_steps, stats.groups, stats.grouped_steps, stats.exact_steps) == (1, 4, 18, 12)
    del diary.events[:]
    module.flux_step = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        train(module)
    assert diary.events == ["training step", "rollout", "failed"]
    assert stats.training_steps == 1


def test_a_session_keeps_two_knots_and_no_list_of_steps(load_loop):
    """While a group is open: the first knot's output and two gradients, however many steps have gone by."""
    module, seen = load_loop(FLUX, "            loss.backward()\n", "            loss.backward(); args.after_backward(j)\n"), []
    session = session_on(module, JaggConfig(frac=1, group_size=15, schedule="joint"))
    make_args = module.make_args

    def after_backward(step):
        knots = () if session.group is None else session.group.knots.values()
        tensors = [one for knot in knots for one in vars(knot).values()]
        seen.append(sum(torch.is_tensor(one) for one in tensors))

    module.make_args = lambda: make_args(after_backward=after_backward)
    train(module)
    assert seen == [2, *[3] * 13, 0] * 2  # of the first step nothing is carried to the last


def test_what_a_knot_is_given_is_the_weighted_sum():
    knot, grads = Knot("here"), torch.randn(3, 2, 5)
    for grad, weight in zip(grads, (torch.ones(2), torch.tensor([0.25, 0.5]), torch.tensor([0.5, 0.0])), strict=True):
        knot.add(grad, weight)
    assert_close(knot.begin(), torch.stack([grads[0, 0] + grads[1, 0] / 4 + grads[2, 0] / 2, grads[0, 1] + grads[1, 1] / 2]))
    with pytest.raises(JaggError, match="here: a second backward"):
        knot.add(grads[0], torch.ones(2))


def test_a_plan_is_a_set_of_knots():
    """Nine steps, five of them grouped: two knots with three steps between, and four exact steps."""
    found = places(9, plan_groups(9, JaggConfig()))
    assert [place.position for place in found if place.is_knot] == [0, 4, 5, 6, 7, 8]
    assert [(place.before, place.after) for place in found[:6]] == [(None, 4), *[(0, 4)] * 3, (0, None), (None, None)]
    assert alphas(torch.tensor([1000.0, 750.0, 0.0])).tolist() == [0, 0.25, 1]
