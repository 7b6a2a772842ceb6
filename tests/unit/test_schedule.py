"""When `schedule=auto` decides, and what it goes by."""

from types import SimpleNamespace

import pytest
import torch

from jagg_patch import JaggError
from jagg_patch.engines import engine_of
from jagg_patch.loop import memory, schedule
from jagg_patch.loop.knots import Joint, Sequential
from jagg_patch.loop.memory import free_bytes, graph_bytes, joint_excess
from jagg_patch.loop.schedule import Schedule


WAYS = {"joint": Joint, "sequential": Sequential}


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def update(schedule, n_groups, model):
    """So many groups end, then an optimizer of the model's weights steps."""
    for _ in range(n_groups):
        schedule.way(engine_of(model))
        schedule.group_ends(None, None)
    schedule.optimizer_steps(None, torch.optim.SGD(model.parameters(), lr=0.0))


@pytest.mark.parametrize(("spare", "name"), [(-1, "sequential"), (0, "joint"), (1, "joint")])
def test_auto_decides_once_after_two_updates_with_groups(model, monkeypatch, spare, name):
    said = []
    auto = Schedule("auto", said.append)
    with auto.measuring(model):
        model(torch.ones(3, 8))
    # what Tanh saves of its own and the second Linear's input are one tensor; the first Linear's input is another
    needed = 4 * (3 * 16 + 3 * 8) + 4 * sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(schedule, "free_bytes", lambda: needed + spare)
    for n_groups in (0, 1, 0, 0, 0):  # an update before there are groups, and an optimizer that steps four times in one
        update(auto, n_groups, model)
        assert isinstance(auto.way(engine_of(model)), Sequential)
        assert (auto.name, said) == ("auto", [])
    update(auto, 2, model)
    assert isinstance(auto.way(engine_of(model)), WAYS[name]) and auto.name == name
    assert said == [
        f"JAGG: schedule {name} from here on: joint needs {needed / 1e9:.3g} GB more than unpatched, "
        f"{(needed + spare) / 1e9:.3g} GB are free on the fullest rank (0)"
    ]
    monkeypatch.setattr(schedule, "free_bytes", lambda: needed - spare - 1)
    assert isinstance(auto.way(engine_of(model)), WAYS[name])
    assert auto.name == name and len(said) == 1


@pytest.mark.parametrize("has_own", [True, False], ids=["another network's too", "of copies alone"])
def test_another_network_s_optimizer_is_not_counted_and_one_of_copies_once_an_update(model, monkeypatch, has_own):
    """It steps after every group, as a critic may on one rank alone: the ranks would decide at different groups."""
    auto = Schedule("auto")
    monkeypatch.setattr(schedule, "free_bytes", lambda: 10**9)
    other = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.0)
    for _ in range(2):
        for _ in range(3):
            assert isinstance(auto.way(engine_of(model)), Sequential)
            auto.group_ends(None, None)
            auto.optimizer_steps(None, other)
        if has_own:
            update(auto, 1, model)
        auto.update_ends(None)
    assert isinstance(auto.way(engine_of(model)), Joint)


@pytest.mark.parametrize("register", [torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook])
@pytest.mark.parametrize("rank", [0, 1])
def test_auto_stays_sequential_on_all_ranks_where_one_has_hooks(model, monkeypatch, rank, register):
    """The second one has; what the other is to know comes with the memory that both exchange."""
    said, auto = [], Schedule("auto")
    monkeypatch.setattr(auto, "_say", said.append)
    monkeypatch.setattr(schedule, "free_bytes", lambda: 10**9)
    if rank:
        register(model[0].weight, lambda gradient: None)
    others = [(10**9, 0, False), (10**9, 0, True)]
    monkeypatch.setattr(schedule, "gathered", lambda mine: [mine if n == rank else other for n, other in enumerate(others)])
    for _ in range(3):
        assert isinstance(auto.way(engine_of(model)), Sequential)
        update(auto, 1, model)
    assert said == ["JAGG: schedule sequential from here on: a hook on a parameter's gradient would get both passes' at once"]


@pytest.mark.parametrize("name", ["joint", "sequential"])
def test_a_chosen_schedule_stays_and_measures_nothing(model, monkeypatch, name):
    monkeypatch.setattr(schedule, "free_bytes", None)
    monkeypatch.setattr(schedule, "graph_bytes", None)
    chosen, session = Schedule(name), SimpleNamespace(retaining=SimpleNamespace(trial=SimpleNamespace(is_on=False)))
    for _ in range(4):
        with chosen.around_forward(session, None):
            pass
        update(chosen, 1, model)
        assert isinstance(chosen.way(engine_of(model)), WAYS[name])
        assert chosen.name == name


def test_the_largest_graph_counts(model, monkeypatch):
    monkeypatch.setattr(schedule, "free_bytes", lambda: 0)
    needed = []
    monkeypatch.setattr(schedule, "joint_excess", lambda model, graph: needed.append(graph) or 1)
    auto = Schedule("auto")
    for size in (1, 5, 2):
        with auto.measuring(model):
            model(torch.ones(size, 8))
        update(auto, 1, model)
    auto.way(engine_of(model))
    assert needed == [4 * 5 * (8 + 16)]


def test_a_graph_holds_each_tensor_once_and_no_weights(model):
    with graph_bytes(model) as found:
        model(torch.ones(2, 8))
    assert found == [4 * 2 * (8 + 16)]
    with torch.no_grad(), graph_bytes(model) as found:
        model(torch.ones(2, 8))
    assert found == [0]


def test_gradients_of_what_is_trained_wait(model):
    model[0].requires_grad_(False)
    trained = 4 * (16 * 4 + 4)
    assert engine_of(model).waiting_bytes() == (trained, 0)
    assert joint_excess(model, 100) == 100 + trained


def test_free_memory_is_shared_by_the_ranks_of_a_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    alone = free_bytes()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert alone > 0 and 0.5 < 8 * free_bytes() / alone < 2


def test_on_a_gpu_the_peak_so_far_is_taken_off_what_there_is(monkeypatch):
    """No GPU here: 80 GB of which others use 4; 60 GB reserved by torch, which had at most 50 GB in use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (16e9, 80e9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 60e9)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 50e9)
    assert free_bytes() == 76e9 - 50e9 - memory.RESERVE * 80e9


def test_engines_without_needs_of_their_own(model):
    engine = engine_of(model)
    assert engine.link is None and engine.syncs_gradients() is True
    assert engine.drop_gradients() and not engine.looks_for_unused_parameters


class ZeroEngine(torch.nn.Module):
    """What JAGG reads off DeepSpeed's."""

    def __init__(self, model, stage, cpu_offload=False):
        super().__init__()
        self.module, self.optimizer = model, SimpleNamespace(micro_step_id=3, cpu_offload=cpu_offload)
        self.zero_optimization_stage = lambda: stage


@pytest.mark.parametrize(
    ("stage", "offload", "links", "holds"), [(1, 0, 0, 0), (2, 0, 1, 0), (2, 1, 1, 1), (3, 0, 0, 1), (3, 1, 0, 1)]
)
def test_deepspeed_s_engine_is_found_inside_the_model_that_is_called(model, stage, offload, links, holds):
    engine = ZeroEngine(model, stage, offload)
    found = engine_of(torch.nn.Sequential(engine))
    assert found.link is (model[2].bias if links else None)
    hold = found.hold_micro_step()
    engine.optimizer.micro_step_id = 5
    hold()
    assert engine.optimizer.micro_step_id == (3 if holds else 5)
    assert not found.drop_gradients()


def test_a_partitioned_model_without_its_engine_is_refused(model):
    model[0].weight.ds_id = 0
    with pytest.raises(JaggError, match="without the DeepSpeed engine"):
        engine_of(model)
