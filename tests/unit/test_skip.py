"""Skipped forwards on loops of upstream's shapes: the gradient of JAGG with all forwards, with fewer of them, or none skipped.

The optimizers change nothing unless a test says so, and while the policy hasn't moved the estimates are the model's own outputs.
"""

import contextlib
import copy
import functools
import gc
import json
import re
import sys
import weakref
from types import SimpleNamespace

import observe
import pytest
import torch
from torch.testing import assert_close

from jagg_patch import JaggConfig, JaggError, install, plan_groups
from jagg_patch.engines import ddp
from jagg_patch.loop.between import StandIn
from jagg_patch.loop.recording import Recording
from jagg_patch.loop.records import Records
from jagg_patch.loop.skipping import Skipping
from jagg_patch.method.cost import forward_passes
from jagg_patch.method.folding import estimated_output
from jagg_patch.method.plan import ENDPOINTS_FIRST, LOOK_AHEAD

pytestmark = pytest.mark.usefixtures("without_self_check")

FLUX, FLOW, SD = SHAPES = ("train_grpo_flux", "train_sd3_fast", "train_grpo_sd")
SCHEDULES = {"joint": ENDPOINTS_FIRST, "sequential": LOOK_AHEAD}
EPOCHS = 2  # rollouts; so many micro-batches come from one of them:
BATCHES = {FLUX: 4, FLOW: 2, SD: 2}
STEPS = {FLUX: 15, FLOW: 9, SD: 9}  # that a micro-batch visits
REFERENCE = r"the training forward calls the model for an output without a gradient too \(a reference's\?\)"
VELOCITY = "    velocity = run_model(transformer, latents, timesteps)"
PRINTED = "JAGG: no forwards are skipped from here on: rank 0: "


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def keep_gradients(optimizer):
    """A list that gets the gradient of each of the optimizer's steps."""
    seen, parameters = [], optimizer.param_groups[0]["params"]
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.cat([p.grad.flatten().clone() for p in parameters])))
    return seen


def run(module, settings=None, layers=None, lr=0.0, n_epochs=EPOCHS, **changes):
    """Install with `settings`, then the whole run of `n_epochs` rollouts; `changes` are the loop's own settings.

    Returns its gradients, how often the model ran and recorded a graph, ratios, random state, stats and handle.
    """
    handle = None if settings is None else install(vars(module), config=JaggConfig(**settings))
    if module.__name__ == FLUX:
        args, model = module.make_args(**(dict(n_samples=BATCHES[FLUX]) | changes)), layers or make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr)
        inner, seen = model, keep_gradients(optimizer)
    else:
        module.FLAGS.config = config = module.make_config(n_epochs=n_epochs)
        for name, value in changes.items():
            owner = next(owner for owner in (config.train, config.sample, config) if hasattr(owner, name))
            setattr(owner, name, value)
        model = config.unet if module.__name__ == SD else config.policy
        if layers is not None:
            model.layers = layers
            config.optimizer = torch.optim.SGD(layers.parameters())
        config.optimizer.param_groups[0]["lr"] = lr
        inner, seen = model.layers, keep_gradients(config.optimizer)
    forwards, ratios, exp = [], [], torch.exp
    inner.register_forward_hook(lambda *_: forwards.append(torch.is_grad_enabled()))

    def kept_exp(log_ratio):
        ratios.append(exp(log_ratio).detach())
        return exp(log_ratio)

    torch.manual_seed(1)
    torch.exp = kept_exp
    try:
        if module.__name__ == FLUX:
            for epoch in range(n_epochs):
                args.epoch = epoch
                module.train_one_step(args, model, optimizer)
                optimizer.zero_grad()
        else:
            module.main(None)
    finally:
        torch.exp = exp
    return SimpleNamespace(
        gradients=torch.stack(seen),
        forwards=len(forwards),
        recorded=sum(forwards),
        ratios=torch.cat(ratios),
        rng=torch.get_rng_state(),
        stats=handle and handle.stats,
        handle=handle,
        model=model,
    )


def run_both(load_loop, name, *pieces, settings, records_as_many=True, **changes):
    """The same loop with all forwards, and with skipped ones."""
    settings = dict(frac=1) | settings
    full = run(load_loop(name, *pieces), settings, **changes)
    skipped = run(load_loop(name, *pieces), settings | {"skip_forwards": True}, **changes)
    assert torch.equal(skipped.rng, full.rng)
    assert full.forwards - skipped.forwards == skipped.stats.skipped_forwards
    assert full.stats.skipped_forwards == 0 and (full.recorded == skipped.recorded or not records_as_many)
    return full, skipped


def saved(config, n_visited, forwards, n_batches):
    """Forwards that so many micro-batches save; the run's first one saves none."""
    return (n_batches - 1) * (n_visited - forward_passes(n_visited, plan_groups(n_visited, config), forwards))


def assert_same(found, expected, tolerance=1e-6):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert observe.relative_error(one, other) <= tolerance


@pytest.fixture
def sessions(monkeypatch):
    """The sessions that `install` makes."""
    module, made = sys.modules["jagg_patch.install"], []
    make = module.Session
    monkeypatch.setattr(module, "Session", lambda *args: made.append(make(*args)) or made[-1])
    return made


@pytest.fixture
def references(monkeypatch):
    """Weak references to all recorded tensors."""
    found, keep = [], Records._kept

    def kept(records, tensor):
        copy = keep(records, tensor)
        found.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(Records, "_kept", kept)
    return found


# -- the gradient, and what it takes


@pytest.mark.parametrize(
    "group_size", [3, 4, 5, 8]
)  # of 15 steps: 3 x 5, 4 + 4 + 4 + 3, 3 x 5, 8 + 7; of 9: 3 x 3, 5 + 4, 5 + 4, 9
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SHAPES)
def test_the_gradient_is_that_with_all_forwards(load_loop, name, schedule, group_size, capsys):
    settings = dict(group_size=group_size, schedule=schedule)
    full, skipped = run_both(load_loop, name, settings=settings)
    assert_same(skipped.gradients, full.gradients)
    config, n_batches = JaggConfig(frac=1, **settings), EPOCHS * BATCHES[name]
    assert skipped.stats.skipped_forwards == saved(config, STEPS[name], SCHEDULES[schedule], n_batches)
    assert skipped.stats.backward_passes == full.stats.backward_passes
    # Before the first optimizer step a ratio is 1, and here the policy never moves.
    assert (skipped.ratios - 1).abs().max() <= 1e-6
    assert PRINTED not in capsys.readouterr().out


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("name", "settings", "changes"),
    [
        *((name, dict(aggregation="endpoints"), {}) for name in SHAPES),
        *((name, dict(frac=0.6), {}) for name in SHAPES),
        (FLUX, {}, dict(timestep_fraction=0.6)),
        (SD, {}, dict(timestep_fraction=0.6)),  # each sample of a batch visits steps of its own
        (SD, {}, dict(num_inner_epochs=3)),
        (SD, {}, dict(num_inner_epochs=2, timestep_fraction=0.6)),
        (FLOW, {}, dict(beta=0.5)),
        (FLOW, {}, dict(sde_window_size=4)),
        (FLUX, dict(offload_records=True), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(f"{key}={value[key]}" for key in value) or "-",
)
def test_the_gradient_with_other_settings(load_loop, name, settings, changes, schedule):
    full, skipped = run_both(load_loop, name, settings=settings | {"schedule": schedule}, **changes)
    assert_same(skipped.gradients, full.gradients)
    n_visited = changes.get("sde_window_size", int(STEPS[name] * changes.get("timestep_fraction", 1)))
    n_batches = EPOCHS * BATCHES[name] * changes.get("num_inner_epochs", 1)
    config = JaggConfig(**(dict(frac=1) | settings))
    assert skipped.stats.skipped_forwards == saved(config, n_visited, SCHEDULES[schedule], n_batches) > 0


@pytest.mark.parametrize("name", SHAPES)
def test_auto_looks_ahead_until_it_is_joint(load_loop, name, tmp_path):
    """It is sequential for two optimizer steps, of two micro-batches each, and there is memory enough after that."""
    log = tmp_path / "run.jsonl"
    full, skipped = run_both(load_loop, name, settings={"schedule": "auto", "log": log}, n_epochs=4)
    assert_same(skipped.gradients, full.gradients)
    config, n_batches = JaggConfig(frac=1), 4 * BATCHES[name]
    joint = saved(config, STEPS[name], ENDPOINTS_FIRST, n_batches - 4 + 1) - (
        name == FLUX
    )  # whose group of three is compared then
    assert skipped.stats.skipped_forwards == saved(config, STEPS[name], LOOK_AHEAD, 4) + joint
    records = [json.loads(line) for line in log.read_text().splitlines()]
    expected = {"auto": LOOK_AHEAD, "joint": ENDPOINTS_FIRST}
    assert [record["forwards_a_group"] for record in records] == [None] * 4 + [expected[r["schedule"]] for r in records[4:]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_frac_auto_routes_and_probes_as_with_all_forwards(load_loop, schedule, tmp_path):
    """The probe takes the losses' gradients at the estimates, and its own forwards all run."""
    logs = [tmp_path / name for name in ("full", "skipped")]
    settings = dict(frac="auto", probe_every=1, schedule=schedule, group_size=5)
    full = run(load_loop(FLUX), settings | {"log": logs[0]}, n_epochs=4)
    skipped = run(load_loop(FLUX), settings | {"log": logs[1], "skip_forwards": True}, n_epochs=4)
    assert_same(skipped.gradients, full.gradients)
    assert torch.equal(skipped.rng, full.rng)
    groups, cosines = (
        [[read(record) for record in map(json.loads, open(log))] for log in logs] for read in (routed, own_cosines)
    )
    assert groups[0] == groups[1] and len(groups[0]) == 4
    assert_close(*cosines, rtol=1e-5, atol=1e-5)
    saved_each = [n - (1 if not step else 0) for step, n in enumerate([BATCHES[FLUX]] * 4)]
    n_saved = [n * sum(size - SCHEDULES[schedule] for size in sizes) for n, sizes in zip(saved_each, groups[1], strict=True)]
    assert skipped.stats.skipped_forwards == sum(n_saved) == full.forwards - skipped.forwards


def routed(record):
    return record["groups"]


def own_cosines(record):
    return [group["cosine"] for group in record["probe"][0]["groups"]]


class LinearInTime(torch.nn.Linear):
    """v = w t + b, whatever the sample: what a policy step changes in it is linear in t, so the estimates are exact."""

    def __init__(self, column):
        super().__init__(1, 2)
        self.column = column
        with torch.no_grad():
            self.weight.copy_(torch.tensor([[0.5], [-0.3]]))

    def forward(self, inputs):
        return super().forward(inputs[:, self.column : self.column + 1])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("name", "pieces", "lr", "changes"),
    [
        (FLUX, [], 20, dict(gradient_accumulation_steps=1)),
        (
            FLOW,
            ["n_batches = config.train.gradient_accumulation_steps", "n_batches = 2"],
            10,
            dict(gradient_accumulation_steps=1),
        ),
        (SD, [], 0.5, dict(gradient_accumulation_steps=1, num_inner_epochs=2, timestep_fraction=0.6)),
    ],
    ids=SHAPES,
)
def test_estimates_are_exact_after_the_policy_has_moved_where_its_change_is_linear_in_t(
    load_loop, name, pieces, lr, changes, schedule
):
    """With stale outputs, or another weighing of the two endpoints' changes, the gradients would differ."""
    full, skipped = (
        run(load_loop(name, *pieces), settings, LinearInTime(2), lr, **changes)
        for settings in (dict(frac=1, schedule=schedule), dict(frac=1, schedule=schedule, skip_forwards=True))
    )
    assert len(full.gradients) >= 2 * EPOCHS
    assert (full.ratios - 1).abs().max() > 0.05
    assert_same(skipped.gradients, full.gradients, 1e-5)
    assert_close(skipped.ratios, full.ratios, rtol=1e-5, atol=1e-5)
    assert skipped.stats.skipped_forwards == full.forwards - skipped.forwards > 0


def test_the_estimate_weighs_the_endpoints_changes_by_alpha():
    recorded, first, last = torch.zeros(2, 3), torch.ones(2, 3), torch.full((2, 3), 5.0)
    assert torch.equal(estimated_output(recorded, torch.tensor(0.25), first, last), torch.full((2, 3), 2.0))
    each = estimated_output(recorded.bfloat16(), torch.tensor([0.0, 1.0], dtype=torch.float64), first, last)
    assert each.dtype == torch.float32 and each.tolist() == [[1.0] * 3, [5.0] * 3]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        (FLUX, ["torch.randn(args.n_samples, 2)", "torch.randn(1, 2).repeat(args.n_samples, 1)"]),
        (FLOW, ["[torch.randn(config.batch_size, 2)]", "[torch.randn(1, 2).repeat(config.batch_size, 1)]"]),
        (SD, ["[torch.randn(n_samples, 2)]", "[torch.ones(n_samples, 2)]"]),  # told apart by their numbers
    ],
    ids=SHAPES,
)
def test_samples_that_begin_alike(load_loop, name, pieces, schedule):
    full, skipped = run_both(load_loop, name, *pieces, settings={"schedule": schedule})
    assert_same(skipped.gradients, full.gradients)
    n_saved = saved(JaggConfig(frac=1), STEPS[name], SCHEDULES[schedule], EPOCHS * BATCHES[name])
    assert skipped.stats.skipped_forwards == n_saved


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_model_output_and_the_latents_may_be_changed_in_place_afterwards(load_loop, schedule):
    in_place = "    return flux_step(velocity", "    log_prob = flux_step(velocity"
    spoil = "sde_solver=True)[2]\n    velocity.detach().mul_(0.5)\n    return log_prob"
    pieces = [*in_place, "sde_solver=True)[2]", spoil, "        all_latents.append(z)", "        all_latents.append(z.clone())"]
    pieces += ["None, True, True)", "None, True, True)\n        all_latents[-1].mul_(1)"]
    full, skipped = run_both(load_loop, FLUX, *pieces, settings={"schedule": schedule})
    assert_same(skipped.gradients, full.gradients)
    assert skipped.stats.skipped_forwards


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_reference_forwards_are_not_skipped(load_loop, schedule):
    """A KL term's forwards, without gradients, of another model: each visited step has one."""
    counts = []
    for settings in (dict(frac=1, schedule=schedule), dict(frac=1, schedule=schedule, skip_forwards=True)):
        module, references = load_loop(FLOW), []
        make_config = module.make_config

        def counted(make_config=make_config, references=references, **changes):
            config = make_config(**changes)
            config.reference.register_forward_hook(lambda *_: references.append(1))
            return config

        module.make_config = counted
        run(module, settings, beta=0.5)
        counts.append(len(references))
    assert counts == [EPOCHS * BATCHES[FLOW] * STEPS[FLOW]] * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_reference_forward_of_the_policy_runs_and_is_no_planned_step(load_loop, schedule):
    """As with LoRA, whose reference is the same model."""
    pieces = "compute_log_prob(config.reference,", "compute_log_prob(policy,"
    full, skipped = run_both(load_loop, FLOW, *pieces, settings={"schedule": schedule}, beta=0.5)
    assert_same(skipped.gradients, full.gradients)
    assert skipped.stats.skipped_forwards == saved(JaggConfig(frac=1), 9, SCHEDULES[schedule], EPOCHS * BATCHES[FLOW])


class LikeDdp(torch.nn.Sequential):
    """The attributes of DDP that JAGG reads."""

    require_backward_grad_sync, find_unused_parameters = True, False


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_under_ddp_the_micro_step_that_syncs_runs_its_own_forward(load_loop, monkeypatch, schedule):
    """Its reduction is prepared in the forward; without one the ranks would drift apart. tests/engines has the real DDP."""
    monkeypatch.setattr(ddp, "DDP", LikeDdp)
    call = "            new_log_probs = grpo_one_step("
    pieces = call, f"            model.require_backward_grad_sync = j == 14 and i % 2 == 1\n{call}"
    settings = dict(frac=1, schedule=schedule, group_size=5)
    full = run(load_loop(FLUX, *pieces), settings, LikeDdp(*make_model()))
    model, recorded = LikeDdp(*make_model()), []
    model[0].register_forward_hook(
        lambda *_: recorded.append(1) if model.require_backward_grad_sync and torch.is_grad_enabled() else None
    )
    skipped = run(load_loop(FLUX, *pieces), settings | {"skip_forwards": True}, model)
    assert_same(skipped.gradients, full.gradients)
    assert len(recorded) == len(full.gradients) == EPOCHS * 2
    # Three groups a sample. Its last one may be the one that syncs, so it looks ahead in either schedule.
    a_sample = 2 * (5 - SCHEDULES[schedule]) + (5 - LOOK_AHEAD)
    assert skipped.stats.skipped_forwards == (EPOCHS * BATCHES[FLUX] - 1) * a_sample


def test_gradients_that_sync_where_the_last_forward_was_run_already_are_stopped(load_loop, monkeypatch):
    """In the middle of a sample, whose groups have both endpoints' forwards run first."""
    monkeypatch.setattr(ddp, "DDP", LikeDdp)
    call = "            new_log_probs = grpo_one_step("
    module = load_loop(FLUX, call, f"            model.require_backward_grad_sync = i == 1 and j == 3\n{call}")
    with pytest.raises(JaggError, match="sample 1, visited step 3 .* synced between the ranks changed inside a group"):
        run(module, dict(frac=1, schedule="joint", skip_forwards=True), LikeDdp(*make_model()))


# -- where nothing is skipped


@pytest.mark.parametrize("settings", [dict(enabled=False), dict(frac=0), dict(group_size=2)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_where_nothing_can_be_skipped_nothing_is_recorded(load_loop, name, settings, monkeypatch, capsys):
    monkeypatch.delattr(Records, "add")
    plain, asked = (run(load_loop(name), dict(frac=1) | settings | more) for more in ({}, {"skip_forwards": True}))
    assert torch.equal(asked.gradients, plain.gradients) and torch.equal(asked.rng, plain.rng)
    assert asked.forwards == plain.forwards and asked.stats.skipped_forwards == 0
    assert "recorded outputs" not in capsys.readouterr().out


def test_a_group_of_three_is_not_worth_a_look_ahead(load_loop, monkeypatch):
    monkeypatch.delattr("jagg_patch.loop.between.LookAhead.begin")
    _, skipped = run_both(load_loop, FLUX, settings=dict(group_size=3, schedule="sequential"))
    assert skipped.stats.skipped_forwards == 0


@pytest.mark.parametrize("name", SHAPES)
def test_without_the_setting_the_calls_are_as_before(load_loop, name, monkeypatch):
    """Nothing is recorded, no rollout function is wrapped for it, and the model that a forward gets is the trainer's own."""
    monkeypatch.delattr(Records, "add")
    monkeypatch.setattr("jagg_patch.loop.between.StandIn", None)
    module = load_loop(name)
    sampler = vars(module).get("run_sample_step")
    run(module, dict(frac=1))
    assert vars(module).get("run_sample_step") is sampler


# -- where the rollout's outputs aren't the training forward's: all forwards run, and the gradient is JAGG's


AGREES = "what has been compared agrees with the rollout's"
UNRECORDED = "the update has samples or steps that the rollout hadn't"
VALUES_DIFFER = r"the rollout's model outputs differ by \d+% from the training forward's before the policy moved .*"
GUIDED_TRAINING = 'noise = guided(unet, batch["latents"][:, j], batch["timesteps"][:, j])'
PLAIN_TRAINING = 'noise = unet(batch["latents"][:, j], batch["timesteps"][:, j], torch.zeros(2, 1)).sample'
RUN_MODEL = "        z, _, log_prob = flux_step(run_model(model, z, timesteps), z"
CACHED = (
    "        velocity = velocity if i % 2 else run_model(model, z, timesteps)\n        z, _, log_prob = flux_step(velocity, z"
)
# what is changed in the loop, and what the line says
FALLBACKS = {
    "guidance in the rollout alone": (
        SD,
        [GUIDED_TRAINING, PLAIN_TRAINING, "cfg=True", "cfg=False"],
        r"the rollout calls the model with other inputs: its outputs are \[4, 2\] there, \[2, 2\] here",
    ),
    "a cached rollout": (FLUX, [RUN_MODEL, CACHED], VALUES_DIFFER),
    "a cached rollout, flow": (
        FLOW,
        ["output = policy(latents", "output = output if j % 2 else policy(latents"],
        VALUES_DIFFER,
    ),
    "a rollout of another model": (SD, ["(unet=config.unet,", "(unet=scaled(config.unet),"], VALUES_DIFFER),
    "a rollout by another function": (
        FLUX,
        [
            "def run_sample_step(",
            "solve = flux_step\n\n\ndef run_sample_step(",
            RUN_MODEL,
            RUN_MODEL.replace("flux_step", "solve"),
        ],
        UNRECORDED,
    ),
    "a rollout by another function, flow": (
        FLOW,
        [
            "def pipeline_with",
            "solve = sde_step_with_logprob\n\n\ndef pipeline_with",
            "after, log_prob, _, _ = sde_step_with_logprob(",
            "after, log_prob, _, _ = solve(",
        ],
        UNRECORDED,
    ),
    "latents that change after the rollout": (
        FLUX,
        ["    shuffled = ", "    latents = latents * 1.001\n    shuffled = "],
        UNRECORDED,
    ),
    "a model that isn't called through the argument": (
        FLUX,
        ["velocity = run_model(transformer,", "velocity = run_model(transformer[:],"],
        "the training forward doesn't call the model that it is given",
    ),
    "a reference by the same model": (
        FLUX,
        [VELOCITY, f"{VELOCITY}\n    with torch.no_grad():\n        run_model(transformer, latents, timesteps)"],
        REFERENCE,
    ),
    "a reference whose weights are frozen": (
        FLUX,
        [
            VELOCITY,
            f"{VELOCITY}\n    run_model(transformer.requires_grad_(False), latents, timesteps)\n"
            "    transformer.requires_grad_()",
        ],
        REFERENCE,
    ),
}


def scaled(unet):
    """A copy of the UNet with twice its outputs."""
    other = copy.deepcopy(unet)
    other.layers.register_forward_hook(lambda module, inputs, output: 2 * output)
    return other


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", FALLBACKS)
def test_other_outputs_than_the_rollout_s_are_found_out_and_all_forwards_run(load_loop, case, schedule, tmp_path, capsys):
    name, pieces, why = FALLBACKS[case]

    def loop():
        module = load_loop(name, *pieces)
        module.scaled = scaled
        return module

    settings = dict(frac=1, schedule=schedule)
    full = run(loop(), settings)
    capsys.readouterr()
    log = tmp_path / "run.jsonl"
    skipped = run(loop(), settings | {"skip_forwards": True, "log": log})
    assert {json.loads(line)["forwards_a_group"] for line in log.read_text().splitlines()} == {None}
    assert torch.equal(skipped.gradients, full.gradients)
    assert torch.equal(skipped.rng, full.rng)
    assert skipped.stats.skipped_forwards == 0 and skipped.forwards == full.forwards
    said = [line for line in capsys.readouterr().out.splitlines() if "forwards are skipped" in line]
    assert len(said) == 1 and re.fullmatch(PRINTED + why, said[0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rollout_that_differs_from_the_second_one_on_is_found_out_at_a_group_s_last_endpoint(load_loop, schedule, capsys):
    """By then that endpoint's forward has been run, and once more than with all forwards."""
    spoilt = "        z, _, log_prob = flux_step((2 if i == 3 and args.epoch else 1) * run_model(model, z, timesteps), z"
    settings = dict(frac=1, schedule=schedule)  # groups of 4, 4, 4, 3
    full, skipped = (
        run(load_loop(FLUX, RUN_MODEL, spoilt), settings | more, n_epochs=3) for more in ({}, {"skip_forwards": True})
    )
    assert_same(skipped.gradients, full.gradients)
    first_rollout = saved(JaggConfig(frac=1), 15, SCHEDULES[schedule], BATCHES[FLUX])
    assert skipped.stats.skipped_forwards == full.forwards - skipped.forwards == first_rollout - 1
    assert len(re.findall(PRINTED + VALUES_DIFFER, capsys.readouterr().out)) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_group_that_auto_routes_later_is_compared_first(load_loop, schedule, tmp_path, capsys):
    """The rollout is off at one step of the last group, which is routed from the fifth update on."""
    spoilt = RUN_MODEL, RUN_MODEL.replace("run_model(model, z, timesteps)", "run_model(model, z, timesteps) * (1 + (i == 12))")
    log = tmp_path / "run.jsonl"
    settings = dict(frac="auto", probe_every=1, group_size=5, schedule=schedule)
    full, skipped = (
        run(load_loop(FLUX, *spoilt), settings | changed, n_epochs=6) for changed in ({}, {"skip_forwards": True, "log": log})
    )
    assert [len(json.loads(line)["groups"]) for line in log.read_text().splitlines()] == [2] * 4 + [3] * 2
    assert skipped.stats.skipped_forwards > 0
    assert_same(skipped.gradients, full.gradients)
    assert re.search(PRINTED + VALUES_DIFFER, capsys.readouterr().out)


@pytest.mark.parametrize("case", ["auto", "DDP"])
def test_a_group_that_could_not_skip_at_first_is_compared_before_it_does(load_loop, monkeypatch, case, capsys):
    """The last, of three, in which the rollout is off: not before the schedule is joint, or where DDP doesn't sync after it."""
    monkeypatch.setattr(ddp, "DDP", LikeDdp)
    off = RUN_MODEL, RUN_MODEL.replace("run_model(model, z, timesteps)", "run_model(model, z, timesteps) * (1 + (i == 13))")
    call = "            new_log_probs = grpo_one_step("
    syncs = f"            model.require_backward_grad_sync = i % 2 == 1\n{call}" if case == "DDP" else call
    settings = dict(frac=1, schedule="joint" if case == "DDP" else "auto")
    full, skipped = (
        run(load_loop(FLUX, *off, call, syncs), settings | more, LikeDdp(*make_model()) if case == "DDP" else None, n_epochs=4)
        for more in ({}, {"skip_forwards": True})
    )
    assert_same(skipped.gradients, full.gradients)
    assert skipped.stats.skipped_forwards > 0
    assert len(re.findall(PRINTED + VALUES_DIFFER, capsys.readouterr().out)) == 1


@pytest.mark.usefixtures("without_contract")
def test_a_group_is_not_compared_after_the_policy_has_moved(load_loop):
    """An optimizer steps after each sample's second group, so those behind it never skip."""
    pieces = AFTER, f"{AFTER}            if j == 7: optimizer.step()\n"
    full, skipped = run_both(load_loop, FLUX, *pieces, settings={"schedule": "joint"}, n_epochs=3, gradient_accumulation_steps=1)
    assert_same(skipped.gradients, full.gradients)
    assert skipped.stats.skipped_forwards == 2 * 2 * (3 * BATCHES[FLUX] - 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_off_before_the_first_group_skips_is_all_that_is_said(load_loop, schedule, capsys):
    """The second sample's first last endpoint, when its forward has been run early."""
    spoilt = RUN_MODEL.replace("run_model(model, z, timesteps)", "run_model(model, z, timesteps) * (1 + (i == 3) * args.off)")
    changed = "    shuffled = torch.randperm(len(rewards))", "    shuffled = torch.arange(len(rewards))"
    off = torch.tensor([[0.0], [1.0], [0.0], [0.0]])
    skipped = run(load_loop(FLUX, RUN_MODEL, spoilt, *changed), dict(frac=1, schedule=schedule, skip_forwards=True), off=off)
    assert skipped.stats.skipped_forwards == -1
    said = [line for line in capsys.readouterr().out.splitlines() if "forwards are skipped" in line]
    assert len(said) == 1 and re.fullmatch(PRINTED + VALUES_DIFFER, said[0])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_first_sample_that_is_compared_is_one_that_could_skip_before_the_policy_has_moved(load_loop, accumulation):
    """Groups of three can't before the schedule is joint, from the third optimizer step on: too late for the first rollout."""
    settings, changes = dict(group_size=3, schedule="auto"), dict(gradient_accumulation_steps=accumulation)
    full, skipped = run_both(load_loop, FLUX, settings=settings, **changes)
    assert_same(skipped.gradients, full.gradients)
    assert skipped.stats.skipped_forwards == (BATCHES[FLUX] - 1) * 5


def test_another_model_s_optimizer_that_steps_before_the_update_does_not_matter(load_loop):
    step = "    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()\n"
    full, skipped = run_both(load_loop, FLUX, "    shuffled = ", f"{step}    shuffled = ", settings={"schedule": "joint"})
    assert_same(skipped.gradients, full.gradients)
    assert skipped.stats.skipped_forwards == saved(JaggConfig(frac=1), 15, ENDPOINTS_FIRST, EPOCHS * BATCHES[FLUX])


def test_a_rollout_that_failed_and_is_begun_again_with_the_same_noise(load_loop):
    """One step of it had been recorded, with the same latents as the first step of the one that counts."""
    once = "    latents, log_probs = run_sample_step(args, torch.randn(args.n_samples, 2), sigmas, model)"
    twice = """    noise = torch.randn(args.n_samples, 2)
        try: run_sample_step(args, noise, sigmas, lambda inputs: model(inputs) if inputs[0, 2] == 1 else {}[0])
        except KeyError: latents, log_probs = run_sample_step(args, noise, sigmas, model)"""
    full, skipped = run_both(load_loop, FLUX, once, twice, settings={"schedule": "joint"})
    assert_same(skipped.gradients, full.gradients)
    assert skipped.stats.skipped_forwards == saved(JaggConfig(frac=1), 15, ENDPOINTS_FIRST, EPOCHS * BATCHES[FLUX])


@pytest.mark.parametrize(("n_steps", "schedule"), [(2, "joint"), (2, "auto"), (3, "sequential")])
def test_a_window_that_is_too_short_is_said_and_recorded_no_further(load_loop, references, n_steps, schedule, capsys):
    _, skipped = run_both(load_loop, FLOW, settings=dict(schedule=schedule), n_epochs=3, sde_window_size=n_steps)
    assert skipped.stats.skipped_forwards == 0
    assert len(references) == 2 * n_steps * BATCHES[FLOW]  # latents and outputs of the first rollout
    printed = capsys.readouterr().out
    why = f"from one knot to the next are {n_steps} steps at most, the schedule is {schedule}"
    line = f"JAGG: no forwards are skipped from here on: {why}\n"
    assert printed.count(line) == 1
    assert "recorded outputs" not in printed and "JAGG: forwards are skipped" not in printed and "a group" not in printed


@pytest.mark.parametrize(
    ("factors", "moved", "agreed"),
    [
        ([1.04, 1.04], False, True),
        ([1.0, 1.06], False, False),  # one sample of the batch, and a small one
        ([1.0, float("nan")], False, False),
        ([1.0, 1.06], True, True),
    ],
)
def test_each_sample_of_a_batch_is_compared_until_the_policy_moves(factors, moved, agreed):
    said, outputs = [], torch.tensor([[30.0, 40.0], [0.3, 0.4]])
    recording = Recording()
    skipping = Skipping(JaggConfig(skip_forwards=True), recording, said.append)
    recording.policy_has_moved = moved
    skipping.compare(outputs * torch.tensor(factors)[:, None], outputs)
    assert skipping.is_agreed("cpu") == skipping.is_on == (not said) == agreed


def test_after_a_doubt_the_next_rollouts_are_not_recorded(load_loop, sessions):
    name, pieces, _ = FALLBACKS["a cached rollout"]
    module, sizes = load_loop(name, *pieces), []
    sample = module.sample_reference_model

    def sized(*args):
        result = sample(*args)
        sizes.append(sessions[0].skipping.records.n_bytes)
        return result

    module.sample_reference_model = functools.wraps(sample)(sized)
    run(module, dict(frac=1, skip_forwards=True), n_epochs=3)
    assert sizes == [BATCHES[FLUX] * 16 * 4 * 4, 0, 0]


# -- what is refused


AFTER = "            loss.backward()\n"
IN_SAMPLE = "            step = perms[i][j]\n", "            args.sample = i\n            step = perms[i][j]\n"
SOLVE = "    return flux_step(velocity"
TWICE = "flux_step(velocity, latents, args.eta, sigma_schedule, i, pre_latents, True, True)"
LATENTS = "                latents[i : i + 1, step],"
TIMESTEPS = "int(s * 1000) for s in sigmas[:n]"
OTHER_SAMPLE = "sample 1, visited step {} .* the sample isn't the one that the group began with"


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        # The early forward of the first group's last endpoint is the second sample's first one with that index.
        ([SOLVE, f"    if args.sample and i == 3: {TWICE}\n{SOLVE}"], "sample 1, visited step 0 .* ran 2 times"),
        ([SOLVE, f"    if args.sample and i == 3: return velocity.sum(1)\n{SOLVE}"], "sample 1, visited step 0 .* ran 0 times"),
        # The first sample's latents in the second one, at an intermediate step and at the last; then its own at another step.
        ([LATENTS, "                latents[0 if j == 2 else i][step][None],"], OTHER_SAMPLE.format(2)),
        ([LATENTS, "                latents[0 if j == 3 else i][step][None],"], OTHER_SAMPLE.format(3)),
        ([LATENTS, "                latents[i : i + 1, step - (1 if i and j == 2 else 0)],"], OTHER_SAMPLE.format(2)),
        ([TIMESTEPS, "int(s * 999) for s in sigmas[:n]"], "sample 0, visited step 0 .* fed timesteps .999., .* says .1000."),
        (
            [TIMESTEPS, "int(s * 1000) - (k == 2) for k, s in enumerate(sigmas[:n])"],
            "sample 0, visited step 2 .* fed timesteps .874., .* says .875.",
        ),
        (
            ["run_model(transformer,", "run_model(transformer.train(),"],
            "sample 1, visited step 1 .* didn't call the model that it",
        ),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.usefixtures("without_contract")
def test_a_loop_that_does_not_fit_is_stopped(load_loop, pieces, match, schedule):
    module = load_loop(FLUX, *IN_SAMPLE, *pieces)
    with pytest.raises(JaggError, match=match) as error:
        run(module, dict(frac=1, schedule=schedule, skip_forwards=True))
    assert len(str(error.value).splitlines()) == 2
    assert ("JAGG_ENABLED=0" if "ran" in match or "fed" in match else "JAGG_SKIP_FORWARDS=0") in str(error.value)


def test_a_bad_value_stops_the_run_at_start(load_loop, monkeypatch):
    for name in ("SKIP_FORWARDS", "OFFLOAD_RECORDS"):
        with monkeypatch.context() as context:
            context.setenv(f"JAGG_{name}", "2")
            with pytest.raises(JaggError, match=f"bad value JAGG_{name}='2'\nJAGG_{name} takes 0 or 1: "):
                install(vars(load_loop(FLUX)))
    monkeypatch.setenv("JAGG_SKIP_FORWARDS", "1")
    assert install(vars(load_loop(FLUX))).config.skip_forwards


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        (
            ["def run_sample_step(", "def sample_batch(", "log_probs = run_sample_step(", "log_probs = sample_batch("],
            "there is no function run_sample_step",
        ),
        (
            ["latents, pre_latents, transformer,", "latents, after, transformer,", "i, pre_latents, grpo", "i, after, grpo"],
            "grpo_one_step.. has no parameter pre_latents",
        ),
    ],
)
def test_what_skipping_alone_needs_of_a_trainer_is_refused_only_then(load_loop, pieces, match):
    with pytest.raises(JaggError, match=f"{match}.*\n.* run with JAGG_SKIP_FORWARDS=0"):
        install(vars(load_loop(FLUX, *pieces)), config=JaggConfig(skip_forwards=True))
    run(load_loop(FLUX, *pieces), {})


# -- what is left afterwards


@pytest.mark.parametrize("fails_at", [None, (0, 1), (1, 1), (1, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_outlives_a_training_step(load_loop, references, sessions, schedule, fails_at):
    """Neither records nor graphs, the early one included, also when it ends in an exception."""
    module, model = load_loop(FLUX, AFTER, f"{AFTER}            args.after_step(i, j)\n"), make_model()
    model.register_forward_hook(lambda module, inputs, output: references.append(weakref.ref(output)))

    def after_step(i, j):
        if (i, j) == fails_at:
            raise MemoryError

    with pytest.raises(MemoryError) if fails_at else contextlib.nullcontext():
        run(module, dict(frac=1, schedule=schedule, skip_forwards=True), model, n_epochs=1, after_step=after_step)
    gc.collect()
    assert len(references) > 2 * 16 and not any(reference() is not None for reference in references)
    (session,) = sessions
    assert session.skipping.records.n_bytes == 0
    assert session.skipping.records.find(torch.zeros(1, 2), None, 0) is None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_exception_inside_the_early_forward_ends_the_training_step_and_the_next_one_is_right(load_loop, references, schedule):
    fail = f"    if args.sample and args.fails and i == 3: raise MemoryError\n{SOLVE}"
    module, model = load_loop(FLUX, *IN_SAMPLE, SOLVE, fail), make_model()
    full = run(load_loop(FLUX), dict(frac=1, schedule=schedule))
    handle = install(vars(module), config=JaggConfig(frac=1, schedule=schedule, skip_forwards=True))
    model.register_forward_hook(lambda module, inputs, output: references.append(weakref.ref(output)))
    with pytest.raises(MemoryError):
        run(module, layers=model, fails=True)
    gc.collect()
    assert len(references) > 2 * 16 and not any(reference() is not None for reference in references)
    assert handle.stats.skipped_forwards == 0  # the early forward isn't one that is saved, nor was it one too many
    for parameter in model.parameters():
        parameter.grad = None
    again = run(module, layers=model, fails=False)
    assert_same(again.gradients, full.gradients)
    # The sample that ran all its forwards has been compared before the failure.
    assert handle.stats.skipped_forwards == 2 * saved(JaggConfig(frac=1), 15, SCHEDULES[schedule], 5)


@pytest.mark.usefixtures("without_contract")
def test_an_early_forward_that_fails_and_is_passed_over_is_stopped(load_loop):
    call, solve = "            new_log_probs = grpo_one_step(", f"    if args.sample and i == 3: raise MemoryError\n{SOLVE}"
    passed_over = (
        "            try: i and j or grpo_one_step(args, latents[i : i + 1, step], latents[i : i + 1, step + 1], model, "
    )
    passed_over += f"timesteps[step : step + 1], step, sigmas) if i else None\n            except MemoryError: pass\n{call}"
    module = load_loop(FLUX, *IN_SAMPLE, SOLVE, solve, call, passed_over)
    with pytest.raises(JaggError, match="the loop went on although sample 1, visited step 0 had failed"):
        run(module, dict(frac=1, skip_forwards=True))


def test_losses_that_the_trainer_keeps_hold_no_estimates(load_loop, monkeypatch):
    """Flow-GRPO keeps every loss, with its graph, until it logs their mean."""
    module, changes = load_loop(FLOW, "accelerator.backward(loss)", "accelerator.backward(loss); FLAGS.losses.append(loss)"), []
    module.FLAGS.losses = []

    def kept_changes(recorded, alpha, *of_endpoints):
        changes.extend(map(weakref.ref, of_endpoints))
        return estimated_output(recorded, alpha, *of_endpoints)

    monkeypatch.setattr("jagg_patch.loop.between.estimated_output", kept_changes)
    run(module, dict(frac=1, skip_forwards=True))
    gc.collect()
    assert module.FLAGS.losses and changes and not any(change() is not None for change in changes)


@pytest.mark.parametrize("name", SHAPES)
def test_the_records_of_a_rollout_are_dropped_before_the_next(load_loop, name, references, sessions, monkeypatch):
    sizes, begin = [], Skipping.update_begins

    def update_begins(skipping, *args):
        sizes.append((skipping.records.n_bytes, sum(reference() is not None for reference in references)))
        begin(skipping, *args)

    monkeypatch.setattr(Skipping, "update_begins", update_begins)
    run(load_loop(name), dict(frac=1, skip_forwards=True), n_epochs=3)
    n_tensors, n_values = {FLUX: (16, 4 * 4), FLOW: (2 * 9, 2 * 4), SD: (2 * 10, 2 * 6)}[name]
    assert sizes == [(n_tensors * n_values * 4, 2 * n_tensors)] * 3
    gc.collect()
    assert not any(reference() is not None for reference in references)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({}, "on the device (in the host's: JAGG_OFFLOAD_RECORDS=1)"),
        ({"offload_records": True}, "in the host's memory"),
    ],
    ids=["device", "host"],
)
@pytest.mark.parametrize("name", SHAPES)
def test_the_memory_that_records_take_is_said_once(load_loop, name, settings, where, capsys):
    run(load_loop(name), dict(frac=1, skip_forwards=True) | settings, n_epochs=3)
    n_bytes = {FLUX: 16 * 16, FLOW: 18 * 8, SD: 20 * 12}[name] * 4
    said = f"JAGG: the rollout's recorded outputs take {n_bytes / 1e9:.3g} GB on a rank, {where}\n"
    printed = capsys.readouterr().out
    assert printed.count("recorded outputs") == printed.count(said) == 1


EVAL = """def eval(policy, scheduler, config, n_steps):
    pipeline_with_logprob(policy, scheduler, config, n_steps)
    config.after_eval()


def main(_):
"""


@pytest.mark.parametrize("when", ["before the rollout", "between rollout and update"])
def test_evaluations_are_not_recorded(load_loop, when, sessions, monkeypatch):
    call = "eval(policy, scheduler, config, n_train)"
    if when == "before the rollout":
        pieces = "        n_batches = config", f"        {call}\n        n_batches = config"
    else:
        pieces = "        for sample in samples:\n", f"        {call}\n        for sample in samples:\n"
    pieces = "def main(_):\n", EVAL, *pieces
    sizes, at_update, begin = [], [], Skipping.update_begins

    def update_begins(skipping, *args):
        at_update.append(skipping.records.n_bytes)
        begin(skipping, *args)

    monkeypatch.setattr(Skipping, "update_begins", update_begins)

    def loop():
        module = load_loop(FLOW, *pieces)
        make_config = module.make_config
        module.make_config = lambda **changes: make_config(
            after_eval=lambda: sizes.append([session.skipping.records.n_bytes for session in sessions]), **changes
        )
        return module

    full = run(loop(), dict(frac=1))
    del sessions[:], sizes[:], at_update[:]
    skipped = run(loop(), dict(frac=1, skip_forwards=True))
    assert_same(skipped.gradients, full.gradients)
    assert skipped.stats.skipped_forwards == saved(JaggConfig(frac=1), 9, LOOK_AHEAD, EPOCHS * BATCHES[FLOW])
    of_rollout = 2 * 9 * 8 * 4
    assert at_update == [of_rollout] * EPOCHS
    assert sizes == [[0 if when == "before the rollout" else of_rollout]] * EPOCHS


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    ("name", "start"),
    [(FLUX, "    all_latents, all_log_probs = [z]"), (FLOW, "    latents, log_probs = ["), (SD, "    latents, log_probs = [")],
)
def test_uninstall_restores_every_name_also_when_the_rollout_raises(load_loop, name, start, fails):
    """Flow-GRPO's rollouts have their solver step in the pipeline's own module, which is changed while one runs."""
    module, pipeline = (load_loop(name, start, f"    during()\n{start}") for _ in range(2))
    solvers = []

    def during():
        solvers.append(vars(pipeline).get("sde_step_with_logprob"))
        if fails:
            raise MemoryError

    module.during = pipeline.during = during
    if name == FLOW:
        module.pipeline_with_logprob = pipeline.pipeline_with_logprob
    before = dict(vars(module)), dict(vars(pipeline))
    handle = install(vars(module), config=JaggConfig(frac=1, skip_forwards=True))
    with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
        run(module)
    assert vars(pipeline) == before[1]
    assert solvers and (name != FLOW or before[1]["sde_step_with_logprob"] not in solvers)
    handle.uninstall()
    assert vars(module) == before[0]
    if name == SD:
        unet = module.FLAGS.config.unet
        assert not unet._forward_hooks and "forward" not in vars(unet)


def test_the_rollout_s_solver_step_in_another_module_is_recorded(load_loop):
    results = []
    for settings in (dict(frac=1), dict(frac=1, skip_forwards=True)):
        module = load_loop(FLOW)
        module.pipeline_with_logprob = load_loop(FLOW).pipeline_with_logprob
        results.append(run(module, settings))
    assert_same(results[1].gradients, results[0].gradients)
    assert results[1].stats.skipped_forwards == saved(JaggConfig(frac=1), 9, LOOK_AHEAD, EPOCHS * BATCHES[FLOW])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_solver_step_that_is_given_its_result_is_no_step_of_the_rollout(load_loop, schedule):
    """Flow-GRPO's Wan pipeline calls it a second time, with the reference model's output."""
    append = "            latents.append(after)"
    again = f"            sde_step_with_logprob(scheduler, 2 * output, timesteps[:, j], latents[-1], after)\n{append}"
    full, skipped = run_both(load_loop, FLOW, append, again, settings={"schedule": schedule})
    assert_same(skipped.gradients, full.gradients)
    assert skipped.stats.skipped_forwards == saved(JaggConfig(frac=1), 9, SCHEDULES[schedule], EPOCHS * BATCHES[FLOW])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SHAPES)
def test_the_log_and_a_line_say_how_many_forwards_are_skipped_and_from_when_on(load_loop, name, schedule, tmp_path, capsys):
    log = tmp_path / "run.jsonl"
    skipped = run(load_loop(name), dict(frac=1, schedule=schedule, skip_forwards=True, log=log), n_epochs=3)
    config, n_batches = JaggConfig(frac=1), BATCHES[name]
    first, later = (saved(config, STEPS[name], SCHEDULES[schedule], n) for n in (n_batches, n_batches + 1))
    records = [json.loads(line) for line in log.read_text().splitlines()]
    found = [record["forward_passes_saved"] for record in records]
    assert found == [first, later, later] and sum(found) == skipped.stats.skipped_forwards
    assert [record["forwards_a_group"] for record in records] == [SCHEDULES[schedule]] * 3
    assert capsys.readouterr().out.count(f"JAGG: forwards are skipped from here on: {AGREES}\n") == 1


def test_a_stand_in_is_the_model_but_for_its_calls():
    model = make_model()
    stand_in = StandIn(model)
    assert stand_in.train(False) is model and stand_in.training is False
    assert not stand_in.is_ready
    stand_in.returned({"sample": torch.ones(2, requires_grad=True) * 2, "size": 3})
    assert stand_in.is_ready
    first, second = stand_in(torch.zeros(1)), stand_in(anything=1)
    first["sample"].zero_()  # each call's own
    assert second["sample"].tolist() == [2, 2] and not second["sample"].requires_grad and second["size"] == 3
