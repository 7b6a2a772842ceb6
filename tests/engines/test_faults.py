"""What goes wrong in the middle of a group: the next training step starts clean, and nothing of the broken group is left.

In one process, on the loop of tests/unit around a small model: two samples of two groups of four steps each. What needs more
processes or the mini trainer is launched (fault_cells.py). What the session refuses by itself is in tests/unit/test_install.py.
"""

import argparse
import functools
import gc
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from launch import ROOT, forked, torchrun
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from unit.conftest import load_loop, without_contract  # noqa: F401

from jagg_patch import JaggConfig, JaggError, install

HERE = Path(__file__).parent
SAMPLING_STEPS, N_VISITED, GROUP_SIZE = 9, 8, 4
LAST_GROUP = 2 * N_VISITED - GROUP_SIZE  # its first step, counted over both samples
SCHEDULES = ["joint", "sequential", "auto"]  # auto is still measuring, in the sequential schedule

# The loop with places to break it at: before and after each step's backward.
BACKWARD = "            loss.backward()\n"
BREAKABLE = "            args.before_backward(loss, i * train_timesteps + j).backward()\n"
BREAKABLE += "            if args.after_backward(i * train_timesteps + j): return\n"


class Graph:
    """Stands for one in `Model.graphs`."""


class Model(torch.nn.Module):
    """Two layers, and between them `hooks[call, "forward"](hidden)`, and `hooks[call, "backward"](grad)` in the backward.

    By then the last layer has its gradient and the first hasn't. `call` counts a training step's forwards, those of the rollout
    too. `graphs` has something for each graph, which lives as long as that.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(3, 8), torch.nn.Linear(8, 2)
        self.graphs = weakref.WeakSet()
        self.start_with({})

    def start_with(self, hooks):
        self.hooks, self.n_calls = hooks, 0

    def forward(self, x):
        call, self.n_calls = self.n_calls, self.n_calls + 1
        first = self.first(x)
        hidden = self.hooks.get((call, "forward"), torch.clone)(first.tanh())
        if hidden.requires_grad:
            first.grad_fn.metadata["graph"] = graph = Graph()
            self.graphs.add(graph)
            hidden.register_hook(self.hooks.get((call, "backward"), torch.clone))
        return self.last(hidden)


class Run:
    """A model, its optimizer and the loop, patched unless `schedule` is None, through one training step after another.

    `gradients` has a vector for each optimizer step, `seen` weak references to the solver's inputs (the proxies) and losses.
    """

    def __init__(self, module, schedule):
        self.module, self.model = module, Model()
        self.gradients, self.seen = [], []
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.optimizer.register_step_pre_hook(lambda *_: self.gradients.append(gradient(self.model)))
        config = JaggConfig(frac=1, group_size=GROUP_SIZE, schedule=schedule or "joint", enabled=schedule is not None)
        module.flux_step = self._watched(module.flux_step)
        self.handle = install(vars(module), config=config)

    def _watched(self, function):
        @functools.wraps(function)
        def watched(tensor, *args, **kwargs):
            self.seen.append(weakref.ref(tensor))
            return function(tensor, *args, **kwargs)

        return watched

    def train(self, seed=1, before_backward=lambda loss, number: loss, after_backward=lambda number: None, hooks={}, zeroes=True):
        """One training step; returns its gradient."""
        self.model.start_with(hooks)
        if zeroes:
            self.optimizer.zero_grad()
        before_backward = self._watched(before_backward)
        hooks = dict(before_backward=before_backward, after_backward=after_backward)
        args = self.module.make_args(sampling_steps=SAMPLING_STEPS, **hooks)
        torch.manual_seed(seed)
        self.module.train_one_step(args, self.model, self.optimizer)
        return self.gradients[-1]


def gradient(model):
    """Flattened, or None where there is none at all."""
    if all(p.grad is None for p in model.parameters()):
        return None
    return torch.cat([p.grad.flatten().clone() for p in model.parameters()])


@pytest.fixture
def make_run(load_loop, without_contract):  # noqa: F811
    """The contract would refuse a loss that is told its place in the loop."""
    return lambda schedule: Run(load_loop("train_grpo_flux", BACKWARD, BREAKABLE), schedule)


def failing(kind):
    def fail(*_):
        raise kind

    return fail


def before(number, action):
    """What `train` takes to put `action(loss)` in the place of the loss of that step, counted over both samples."""
    return {"before_backward": lambda loss, at: action(loss) if at == number else loss}


def after(number, action):
    return {"after_backward": lambda at: at == number and action()}


def inside(call, place, action):
    return {"hooks": {(call, place): action}}


def on_gradient(action):
    def with_hook(loss):
        loss.register_hook(action)
        return loss

    return with_hook


# place: what `train` takes to fail there at a trained step of that number
PLACES = {
    "forward": lambda number, kind: inside(SAMPLING_STEPS + number, "forward", failing(kind)),
    "loss": lambda number, kind: before(number, failing(kind)),
    "loss's backward": lambda number, kind: before(number, on_gradient(failing(kind))),
    "between steps": lambda number, kind: after(number, failing(kind)),
    "model's backward": lambda number, kind: inside(SAMPLING_STEPS + number, "backward", failing(kind)),
}
FAULTS = [
    pytest.param(place, position, id=f"{place}, step {position}")
    for place in PLACES
    for position in range(GROUP_SIZE)
    if position in (0, GROUP_SIZE - 1) or place != "model's backward"  # which the endpoints alone have
]


def fail(run, kind, **breaks):
    with pytest.raises(kind):
        run.train(2, **breaks)


OLD_NODE = torch.ones((), requires_grad=True).exp()


def require_nothing_left(run):
    """On a CPU torch's engine keeps what a failed backward hadn't got to in its queue, until it has something older to do."""
    OLD_NODE.backward(retain_graph=True)
    gc.collect()
    assert run.seen and not any(tensor() is not None for tensor in run.seen) and not run.model.graphs
    assert not _global_optimizer_pre_hooks and not _global_optimizer_post_hooks


# -- exceptions


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("place", "position"), FAULTS)
@pytest.mark.parametrize(("group", "kind"), [(0, torch.OutOfMemoryError), (LAST_GROUP, KeyboardInterrupt)])
def test_the_training_step_after_an_exception_is_a_clean_one(make_run, schedule, group, kind, place, position):
    run = make_run(schedule)
    expected = run.train()
    fail(run, kind, **PLACES[place](group + position, kind))
    require_nothing_left(run)
    assert len(run.gradients) == 1  # no optimizer step
    assert torch.equal(run.train(), expected)
    assert run.handle.stats.training_steps == 2


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("place", "position"), FAULTS)
def test_no_part_of_a_broken_group_stays_in_the_gradient(make_run, schedule, place, position):
    """Some trainers zero gradients after an optimizer step only: what stays is the closed groups' gradient, or nothing at all.

    The last group breaks. Nothing stays once a part of it has been added to the rest.
    """
    run = make_run(schedule)
    whole = run.train(2, **after(LAST_GROUP - 1, lambda: run.gradients.append(gradient(run.model))))
    closed = run.gradients[0]
    fail(run, MemoryError, **PLACES[place](LAST_GROUP + position, MemoryError))
    first_end = 3 if schedule == "joint" else 2  # the step whose backward reaches the first endpoint
    has_begun = position > first_end or place == "model's backward" or (place, position) == ("between steps", first_end)
    if (place, position) == ("between steps", GROUP_SIZE - 1):
        assert torch.equal(gradient(run.model), whole)
    elif has_begun:
        assert gradient(run.model) is None
    else:
        assert torch.equal(gradient(run.model), closed)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("where", ["a rollout's forward", "the reward model"])
def test_the_training_step_after_a_failed_rollout_is_a_clean_one(make_run, monkeypatch, schedule, where):
    run = make_run(schedule)
    expected = run.train()
    if where == "the reward model":
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "sum", failing(MemoryError))  # a sample's reward is its sum
            fail(run, MemoryError)
    else:
        fail(run, MemoryError, **inside(3, "forward", failing(MemoryError)))
    require_nothing_left(run)
    assert torch.equal(run.train(), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("position", range(GROUP_SIZE - 1))
def test_the_training_step_after_a_loop_that_ended_early_is_a_clean_one(make_run, schedule, position):
    run = make_run(schedule)
    expected = run.train()
    with pytest.raises(JaggError, match="the training step ended while the group .* was still open"):
        run.train(2, **after(LAST_GROUP + position, lambda: True))
    require_nothing_left(run)
    assert torch.equal(run.train(), expected)


# -- not a number


@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize("place", ["loss", "model output"])
@pytest.mark.parametrize("position", range(GROUP_SIZE))
def test_a_nan_gives_what_the_unpatched_trainer_gives_and_nothing_later(make_run, schedule, place, position):
    def spoil(tensor):
        return tensor * float("nan")

    spoilt = before(position, spoil) if place == "loss" else inside(SAMPLING_STEPS + position, "forward", spoil)
    unpatched, run = make_run(None), make_run(schedule)
    expected, weights = run.train(), {name: value.clone() for name, value in run.model.state_dict().items()}
    assert unpatched.train(**spoilt).isnan().all() and run.train(**spoilt).isnan().all()
    require_nothing_left(run)
    run.model.load_state_dict(weights)  # the optimizer has made them NaN
    assert torch.equal(run.train(), expected)


# -- two trainers in one process


@pytest.mark.parametrize("schedules", [("joint", "sequential"), ("sequential", "joint"), ("auto", "auto")], ids=" ".join)
def test_two_trainers_do_not_see_each_other(make_run, schedules):
    """One's whole training step inside the other's rollout, and one after the other."""
    alone = [make_run(schedule).train(seed) for seed, schedule in enumerate(schedules)]
    outer, inner = (make_run(schedule) for schedule in schedules)

    def train_inner(hidden):
        with torch.random.fork_rng(), torch.enable_grad():
            inner.train(1)
        return hidden

    outer.train(0, **inside(3, "forward", train_inner))
    inner.train(1)
    outer.train(0)
    assert [len(run.gradients) for run in (outer, inner)] == [2, 2]
    assert all(torch.equal(found, alone[0]) for found in outer.gradients)
    assert all(torch.equal(found, alone[1]) for found in inner.gradients)
    assert [run.handle.stats.training_steps for run in (outer, inner)] == [2, 2]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_failure_of_one_trainer_is_not_the_other_s(make_run, schedule):
    outer, inner = make_run(schedule), make_run(schedule)
    expected = outer.train()

    def fail_inside(hidden):
        with torch.random.fork_rng(), torch.enable_grad():
            fail(inner, MemoryError, **PLACES["between steps"](2, MemoryError))
        return hidden

    assert torch.equal(outer.train(**inside(3, "forward", fail_inside)), expected)


# -- uninstall


@pytest.mark.parametrize("name", ["train_grpo_flux", "train_sd3_fast", "train_grpo_sd"])
@pytest.mark.parametrize("fails", [False, True])
def test_uninstall_leaves_nothing(load_loop, name, fails):  # noqa: F811
    """Names, the parser, optimizer hooks, the model's attributes and hooks: after a training step, whole or broken."""
    module, parser = load_loop(name), None
    if name == "train_grpo_flux":
        model, parser = Model(), argparse.ArgumentParser()
        parser.set_defaults(**vars(module.make_args()))
    else:
        module.FLAGS.config = config = module.make_config()
        model = config.policy if name == "train_sd3_fast" else config.unet
    model._is_accelerate_prepared = True  # accelerate's own
    attributes, namespace = set(vars(model)), dict(vars(module))
    if fails:
        next(model.parameters()).register_hook(failing(MemoryError))
    handle = install(vars(module), parser, JaggConfig(group_size=3, schedule="sequential"))
    with pytest.raises(MemoryError) if fails else nullcontext():
        if parser:
            module.train_one_step(parser.parse_args([]), model, torch.optim.SGD(model.parameters(), lr=0.0))
        else:
            module.main(None)
    handle.uninstall()
    assert dict(vars(module)) == namespace and (parser is None or "parse_known_args" not in vars(parser))
    assert not _global_optimizer_pre_hooks and not _global_optimizer_post_hooks
    assert set(vars(model)) == attributes
    assert not any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in model.modules())


# -- more than one process, and many training steps


def launch(n_ranks, out, *arguments, start=forked):
    start(n_ranks, HERE / "fault_cells.py", *arguments, out, cwd=out, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})
    return [torch.load(out / f"rank{rank}.pt") for rank in range(n_ranks)]


@pytest.mark.parametrize(("engine", "schedule"), [("DDP", "joint"), ("FSDP1", "sequential")])
def test_a_rank_that_fails_ends_the_job_with_its_error(tmp_path, engine, schedule):
    """Well within launch.py's time limit; and the other rank doesn't train on what it has."""
    with pytest.raises(AssertionError, match="rank1.*MemoryError: rank 1 is out of memory"):
        launch(2, tmp_path, "fails", engine, schedule, start=torchrun)
    assert not list(tmp_path.glob("stepped*"))


@pytest.fixture(scope="module")
def decisions(tmp_path_factory):
    return launch(2, tmp_path_factory.mktemp("decides"), "decides")


@pytest.mark.parametrize("engine", ["DDP", "FSDP1"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_decision_differs_between_ranks(decisions, engine, schedule):
    """Other data, other steps in other orders, and other free memory: the same forwards and collectives in the same order."""
    first, second = (records[engine, schedule] for records in decisions)
    assert all(mine != other for mine, other in zip(first["visited"], second["visited"], strict=True))
    assert first["events"] == second["events"]
    trained = [event for event in first["events"] if event == ("forward", True)]
    # The first group's steps once more; where gradients are there already (nobody zeroes them), the knots as trained as well: the
    # second group's in the next training step, then the first's again.
    of_self_check = 5 + (4 + 2) + (5 + 2)
    assert len(trained) == 4 * 2 * 2 * 2 + of_self_check  # training steps x samples x groups x endpoints


def test_memory_stays_where_it_is_over_many_training_steps(tmp_path):
    """210 of the mini trainer's, a third each in both schedules and with retained graphs: not a tensor more.

    And under 2 % more resident memory.
    """
    (records,) = launch(1, tmp_path, "soaks", start=torchrun)  # a forked process is still getting its pages
    sizes = [size for record in records.values() for size in record["sizes"]]
    assert [record["groups"] for record in records.values()] == [70] * 3
    assert [record["retained"] for record in records.values()] == [0, 0, 3 * (70 - 2)]  # after two updates
    n = sizes[0]["tensors"]
    # Kept for good: one output that shows what the model returns, and what latents are recognized by.
    assert [size["tensors"] for size in sizes] == [n, n, n, n, n + 2, n + 2]
    assert sizes[-1]["resident"] < 1.02 * sizes[0]["resident"]
