"""Runs under torchrun: the loop's training steps with and without the probe, on one engine after another.

usage: torchrun ... probe_cells.py OUT; writes OUT/rank{N}.pt, `{engine: {run: record}}`. The tests that read them are in
test_probe.py.
"""

import argparse
import functools
import itertools
import sys
import traceback
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from unittest.mock import patch

import engines
import torch
import torch.distributed as dist
from as_rank import recording_rank
from live import Allocated
from matrix import Cell
from observe import Loop, folded, model_output, recorded_steps
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from jagg_patch import JaggConfig, JaggError, group_backward, install
from jagg_patch.install import Handle
from jagg_patch.method.quality import Agreement

# Not imported by its name, which the pytest process, that reads the tables here, gives to other loops.
spec = spec_from_file_location("train_grpo_flux", Path(__file__).parent / "loop/train_grpo_flux.py")
loop = module_from_spec(spec)
spec.loader.exec_module(loop)

N_SAMPLES, N_VISITED = 2, 6
ARGS = dict(n_samples=N_SAMPLES, sampling_steps=9, timestep_fraction=0.75, eta=0.7, shift=3.0, clip_range=0.2)
# Positions of the visited steps in the groups of W=3 and of W=5, the first other one whose groups differ; written out.
PARTITIONS = {3: ((0, 1, 2), (3, 4, 5)), 5: ((0, 1, 2, 3, 4, 5),)}
HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class Block(torch.nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x):
        return x + self.down(self.dropout(torch.nn.functional.silu(self.up(x))))


class Running(torch.nn.Module):
    """A buffer that every forward changes, as batch normalization's statistics are."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x


class Denoiser(torch.nn.Module):
    """What the loop calls, of two blocks, small enough for many runs."""

    def __init__(self, dropout=0.0, has_statistics=False, width=12):
        super().__init__()
        self.running = Running(width) if has_statistics else torch.nn.Identity()
        self.embed, self.time = torch.nn.Linear(loop.CHANNELS, width), torch.nn.Linear(4, width)
        self.prompt, self.pooled = (torch.nn.Linear(loop.WIDTH, width) for _ in range(2))
        self.transformer_blocks = torch.nn.ModuleList([Block(width, dropout)])
        self.single_transformer_blocks = torch.nn.ModuleList([Block(width, dropout)])
        self.project = torch.nn.Linear(width, loop.CHANNELS)

    def forward(self, hidden_states, timestep, encoder_hidden_states, pooled_projections, **others):
        waves = (3 * timestep[:, None] * torch.arange(1, 5)).sin().to(hidden_states.dtype)
        x = self.embed(hidden_states) + (2 * self.time(waves) + self.pooled(pooled_projections))[:, None]
        x = x + self.prompt(encoder_hidden_states).mean(1, keepdim=True)
        x = self.running(x)
        for block in (*self.transformer_blocks, *self.single_transformer_blocks):
            x = block(x)
        return (self.project(x),)


class DDP(engines.Replicated):
    def __init__(self, *args, **options):
        self.options = options
        engines.Replicated.__init__(self, *args)

    def wrap(self, model, blocks, checkpoint, cell):
        checkpoint(model)
        self.transformer = torch.nn.parallel.DistributedDataParallel(model, **self.options)


class FSDP1(engines.FSDP1):
    __init__ = DDP.__init__

    def wrap(self, model, blocks, checkpoint, cell):
        settings = dict(auto_wrap_policy=ModuleWrapPolicy(blocks), device_id=torch.device("cpu")) | self.options
        self.transformer = FullyShardedDataParallel(model, **settings)
        checkpoint(self.transformer)


@dataclass(frozen=True)
class Kind:
    """An engine in a setting.

    autocast_around: the loop calls a training step's forward inside this autocast, which its optimizer doesn't step in.
    rounds: it rounds weights and gradients itself, which a copy of the model can't repeat.
    """

    engine: object
    cell: Cell = Cell()
    dropout: float = 0.0
    has_statistics: bool = False
    autocast_around: torch.dtype | None = None
    rounds: bool = False


KINDS = {
    "DDP": Kind(DDP),
    "DDP, gradients as bucket views": Kind(functools.partial(DDP, gradient_as_bucket_view=True)),
    "DDP, bucket views, accumulation": Kind(functools.partial(DDP, gradient_as_bucket_view=True), Cell(accumulates=True)),
    "DDP, static graph": Kind(functools.partial(DDP, static_graph=True)),
    "DDP, fp16": Kind(DDP, Cell(autocast=torch.float16)),
    "DDP, LoRA, accumulation": Kind(DDP, Cell(lora=True, accumulates=True)),
    "DDP, dropout, checkpointing": Kind(DDP, Cell(checkpointing=1.0), dropout=0.2),
    "DDP, bf16 around the steps": Kind(DDP, autocast_around=torch.bfloat16),
    "DDP, running statistics": Kind(DDP, has_statistics=True),
    "accelerate": Kind(engines.Accelerated, Cell(accumulates=True)),
    "FSDP1 FULL_SHARD": Kind(engines.FSDP1),
    "FSDP1 SHARD_GRAD_OP": Kind(engines.ShardGradOp),
    "FSDP1 NO_SHARD": Kind(engines.NoShard),
    "FSDP1 HYBRID_SHARD": Kind(engines.HybridShard),
    "FSDP1, original parameters": Kind(functools.partial(FSDP1, use_orig_params=True)),
    "FSDP1, bf16": Kind(functools.partial(FSDP1, mixed_precision=HALF), rounds=True),
    "FSDP1, fp16": Kind(engines.FSDP1, Cell(autocast=torch.float16)),
    "FSDP1, accumulation": Kind(engines.FSDP1, Cell(accumulates=True)),
    "FSDP1, LoRA, checkpointing": Kind(engines.FSDP1, Cell(lora=True, checkpointing=1.0)),
    "FSDP1, dropout": Kind(engines.FSDP1, dropout=0.2),
    "FSDP2": Kind(engines.FSDP2),
    "FSDP2, LoRA, accumulation": Kind(engines.FSDP2, Cell(lora=True, accumulates=True)),
    "FSDP2, dropout, checkpointing": Kind(engines.FSDP2, Cell(checkpointing=1.0), dropout=0.2),
}
FOLLOWED = ("DDP", "FSDP1 FULL_SHARD", "FSDP2")  # with frac=auto and skipped forwards too, and into memory and faults
FAULTS = {  # name: engine, place, whether the trainer goes on
    f"{name}, fails in the {place}{', swallowed' * swallows}": (name, place, swallows)
    for name in FOLLOWED
    for place in ("forward", "backward")
    for swallows in (False, True)
}
ZERO = (engines.Zero0, engines.Zero1, engines.Zero2, engines.Zero3)
UNRUNNABLE = "FSDP requires CUDA for streams"  # FSDP2 of torch 2.5
PROBED = dict(group_size=3, probe_every=1)
JOINT = dict(group_size=3, frac=0.5, schedule="joint")  # the groups that frac=auto starts with
SEQUENTIAL = JOINT | dict(schedule="sequential")
SKIPPING = JOINT | dict(skip_forwards=True)
KNOTS = dict(knots_at=(0, 3, 5), schedule="joint")
# What the probe compares with knots that are named: those, and the knots of groups of three.
KNOT_SETS = ((0, 3, 5), (0, 2, 3, 5))
# The cosine of all groups at each training step, and how many of the three groups are routed in it under frac=auto.
N_FOLLOWED = 9
SCRIPT = ((0.9, 2), (0.9, 2), (0.5, 3), (0.5, 3), (0.9, 0), (None, 0), (0.9, 0), (0.9, 1))


class Adam(torch.optim.AdamW):
    """AdamW that says whether `zero_grad` drops gradients or fills them with zeros."""

    def __init__(self, model, sets_to_none):
        super().__init__(engines.trained(model), lr=1e-3)
        self.sets_to_none = sets_to_none

    def zero_grad(self, set_to_none=None):
        super().zero_grad(self.sets_to_none)


def make_model(kind):
    torch.manual_seed(0)
    model = Denoiser(kind.dropout, kind.has_statistics)
    if kind.cell.lora:
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=2, init_lora_weights=False, target_modules=["up", "down"]), model)
    return model


def build(kind, sets_to_none=True):
    def checkpoint(module):
        if kind.cell.checkpointing:
            apply_activation_checkpointing(module, checkpoint_wrapper, check_fn=lambda part: isinstance(part, Block))

    with patch.object(engines, "sgd", functools.partial(Adam, sets_to_none=sets_to_none)):
        return kind.engine(make_model(kind), (Block,), checkpoint, kind.cell, N_SAMPLES * N_VISITED)


def plain_optimizer(engine):
    return getattr(engine.optimizer, "optimizer", engine.optimizer)  # accelerate's has the one that steps


def flat(tensors):
    """This rank's part of them all."""
    parts = [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().flatten() for tensor in tensors]
    return torch.cat([torch.zeros(0), *parts])


def gradient(parameters):
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)


@contextmanager
def recording():
    """`recorded_steps` of the unpatched loop, each with the random state that its forward began in."""
    forward = loop.grpo_one_step

    @functools.wraps(forward)
    def noting_forward(*args, **kwargs):
        steps[-1]["rng"] = torch.get_rng_state()
        return forward(*args, **kwargs)

    with patch.object(loop, "grpo_one_step", noting_forward), recorded_steps(loop) as steps:
        yield steps


@contextmanager
def patched(settings):
    """JAGG in the loop; a list that gets each training step's record."""
    records = []
    with patch.object(Handle, "_record", lambda handle, record: records.append(record)):
        handle = install(vars(loop), config=JaggConfig(self_check=False, **settings))
        try:
            yield records
        finally:
            handle.uninstall()


@contextmanager
def autocast_around(kind):
    """The loop's own autocast, inside its call of the model, becomes what the call is in."""
    predict, dtype = loop.predict_velocity, kind.autocast_around

    def predict_in_ambient(args, *others):
        ambient = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return predict(argparse.Namespace(**vars(args) | {"autocast": ambient}), *others)

    step = torch.autocast("cpu", dtype)(loop.grpo_one_step)
    with patch.multiple(loop, predict_velocity=predict_in_ambient, grpo_one_step=step) if dtype else nullcontext():
        yield


def train(kind, engine, **changes):
    with autocast_around(kind):
        loop.train_one_step(argparse.Namespace(**(ARGS | changes), autocast=kind.cell.autocast), engine)


def run(kind, settings=None, n_training_steps=2, sets_to_none=True, prepare=lambda engine: None, **changes):
    """Training steps under these JAGG settings, None for the unpatched loop: what the tests compare, and what was recorded."""
    engine, gradients = build(kind, sets_to_none), []
    prepare(engine)
    optimizer = plain_optimizer(engine)
    optimizer.register_step_pre_hook(lambda *_: gradients.append(gradient(engines.trained(engine.transformer))))
    torch.manual_seed(42 + dist.get_rank())
    with patched(settings) if settings else recording() as recorded:
        for _ in range(n_training_steps):
            train(kind, engine, **changes)
    found = {
        "weights": engine.trained_weights(),
        "buffers": flat(engine.transformer.buffers()),
        "gradients": gradients,
        "gradient left": gradient(engines.trained(engine.transformer)),
        "optimizer": flat(leaf for leaf in tree_leaves(list(optimizer.state.values())) if torch.is_tensor(leaf)),
        "random numbers": torch.get_rng_state(),
    }
    return found, recorded


def velocity(model, step):
    torch.set_rng_state(step["rng"])
    return model_output(loop, Loop(), {"arguments": step["arguments"] | {"transformer": model}})


def agreement(model, members, schedule):
    """Cosine and relative error of one group's gradient on `model`, averaged over the ranks."""

    def backward(groups):
        group_backward(
            lambda j: velocity(model, members[j]),
            lambda j, v_hat: (members[j]["grad"] * v_hat).sum(),
            torch.stack([member["arguments"]["timesteps"] for member in members]),
            JaggConfig(enabled=groups, schedule=schedule),
        )

    return agreement_of(model, functools.partial(backward, True), functools.partial(backward, False))


def agreement_with(model, sample, knots):
    """The same of all of a sample's steps together, with these knots; folded by the formula that the tests have."""

    def backward(knots):
        timesteps = [step["arguments"]["timesteps"] for step in sample]
        for knot, grad in folded(tuple(knots), timesteps, [step["grad"] for step in sample]):
            velocity(model, sample[knot]).backward(grad)

    return agreement_of(model, functools.partial(backward, knots), functools.partial(backward, range(len(sample))))


def agreement_of(model, jagg, exact):
    """Of the gradients that two functions leave."""
    gradients = []
    for backward in (jagg, exact):
        model.zero_grad()
        backward()
        gradients.append(gradient(engines.trained(model)).double())
    jagg, exact = gradients
    if isinstance(model, Denoiser):
        for mine in gradients:
            dist.all_reduce(mine)
    sums = torch.stack([jagg @ exact, jagg @ jagg, exact @ exact, (jagg - exact) @ (jagg - exact)])
    dist.all_reduce(sums)
    dot, jagg, exact, difference = sums.tolist()
    return dot / (jagg * exact) ** 0.5, (difference / exact) ** 0.5


def run_engine(name):
    kind, records = KINDS[name], {}
    records["unpatched"], steps = run(kind)
    runs = {
        "frac 0, zeroed, probed": PROBED | dict(frac=0),
        "joint": JOINT,
        "joint, probed": PROBED | JOINT,
    }
    if name in FOLLOWED:
        runs |= {"sequential": SEQUENTIAL, "auto, zeroed, probed": PROBED | SEQUENTIAL | dict(frac="auto")}
        runs |= {"skipping": SKIPPING, "skipping, probed": PROBED | SKIPPING}
        runs |= {"knots": KNOTS, "knots, probed": dict(probe_every=1) | KNOTS}
    for run_name, settings in runs.items():
        records[run_name], found = run(kind, settings, sets_to_none="zeroed" not in run_name)
        records[run_name]["records"] = found
    sample = sorted(steps[:N_VISITED], key=lambda step: int(step["arguments"]["i"]))
    model = build(kind).transformer if kind.rounds else make_model(kind)
    with autocast_around(kind):
        records["references"] = {
            (size, schedule): [agreement(model, [sample[n] for n in group], schedule) for group in groups]
            for size, groups in PARTITIONS.items()
            for schedule in (("joint", "sequential") if kind.rounds else ("sequential",))
        }
        if name in FOLLOWED:
            records["references with knots"] = {knots: agreement_with(model, sample, knots) for knots in KNOT_SETS}
    return records


def run_with(name, settings, **options):
    found, records = run(KINDS[name], settings, **options)
    return found | {"records": records}


def compare(prepare):
    """FSDP1 with use_orig_params has the gradient twice: of each parameter, and whole and hidden, to which the next is added."""
    name = "FSDP1, original parameters"
    return {"plain": run_with(name, JOINT, prepare=prepare), "probed": run_with(name, PROBED | JOINT, prepare=prepare)}


def twice(engine):
    def step(closes):
        if closes:
            engine.optimizer.step()
            engine.optimizer.step()
            engine.optimizer.zero_grad()

    engine.step = step


def never(engine):
    engine.step = lambda closes: None


def zeroes_nothing(engine):
    engine.step = lambda closes: closes and engine.optimizer.step()


def after_each_sample(engine):
    step, n_steps = engine.step, itertools.count(1)
    engine.step = lambda closes: step(next(n_steps) % N_VISITED == 0)


def memory(kind, settings):
    """When the optimizer steps: bytes of all tensors, and how many of the latents are still there that forwards were given.

    The ranks' sums aren't gathered here: gloo lets go of such tensors in its own time.
    """
    allocated, latents, found, forward = Allocated(), [], [], loop.grpo_one_step

    @functools.wraps(forward)
    def watched_forward(*args, **kwargs):
        latents.append(weakref.ref(args[1]))
        return forward(*args, **kwargs)

    def look(*_):
        found.append({"bytes": allocated.alive, "latents": sum(tensor() is not None for tensor in latents)})

    def watch(engine):
        plain_optimizer(engine).register_step_pre_hook(look)

    gather = patch.object(dist, "all_gather_object", lambda everyone, mine: everyone.__setitem__(slice(None), [mine] * 2))
    with allocated.watching(), patch.object(loop, "grpo_one_step", watched_forward), gather:
        run(kind, settings, prepare=watch)
    return found


def memories(name):
    return {"plain": memory(KINDS[name], JOINT), "probed": memory(KINDS[name], PROBED | JOINT)}


def fault(name, place, swallows):
    """What happens when the model fails in the probe's third forward, or in the backward after it."""
    kind, messages, before, steps, n_forwards = KINDS[name], [], [], [], itertools.count(1)
    engine = build(kind)
    parameters = engines.trained(engine.transformer)
    optimizer = plain_optimizer(engine)

    def fail(*_):
        raise MemoryError(f"in the {place}")

    def fail_in_probe(block, inputs, output):
        if next(n_forwards) == ARGS["sampling_steps"] + N_SAMPLES * N_VISITED + 3:
            fail() if place == "forward" else output.register_hook(fail)

    def step_or_go_on(closes, step=engine.step):
        for _ in range(2):
            try:
                step(closes)
            except (MemoryError, JaggError) as error:
                messages.append(f"{type(error).__name__}: {error}")

    last_block = [module for module in engine.transformer.modules() if isinstance(module, Block)][-1]
    last_block.register_forward_hook(fail_in_probe)
    if swallows:
        engine.step = step_or_go_on
    hook = register_optimizer_step_pre_hook(lambda *_: before.append(gradient(parameters)))  # before JAGG's own
    optimizer.register_step_pre_hook(lambda *_: steps.append(True))
    try:
        with patched(PROBED | JOINT):
            train(kind, engine)
    except (MemoryError, JaggError) as error:
        messages.append(f"{type(error).__name__}: {error}")
    finally:
        hook.remove()
    return {"messages": messages, "kept": torch.equal(before[0], gradient(parameters)), "optimizer steps": len(steps)}


def without_backward(name, n_skipped):
    """What a run says where a step of the first sample has no backward."""
    kind, n_backwards = KINDS[name], itertools.count()
    engine = build(kind)
    engine.backward = lambda loss, backward=engine.backward: next(n_backwards) == n_skipped or backward(loss)
    return refusal(kind, engine)


def refused(engine):
    kind = Kind(engine)
    return refusal(kind, build(kind))


def refusal(kind, engine):
    before = engine.trained_weights()
    try:
        with patched(PROBED | JOINT):
            train(kind, engine)
    except JaggError as error:
        return {"message": str(error), "trained": not torch.equal(engine.trained_weights(), before)}


def scripted(cosine, n_routed):
    return patch("jagg_patch.evidence.probe.agreement", lambda sums: Agreement(cosine, 0.0))


def by_hand(cosine, n_routed):
    if n_routed:
        return patched(SEQUENTIAL | dict(frac=n_routed / 3))
    randperm = torch.randperm

    def sorted_randperm(n):
        """The unpatched loop then visits the steps in the order that a grouped one does."""
        permutation = randperm(n)
        permutation[:N_FOLLOWED] = permutation[:N_FOLLOWED].sort().values
        return permutation

    return patch.object(torch, "randperm", sorted_randperm)


def follow():
    """`auto` under the scripted cosines, and the same groups set by hand."""
    kind, runs = KINDS["FSDP1 FULL_SHARD"], {}
    for name, settled in (("auto", scripted), ("by hand", by_hand)):
        engine, weights = build(kind), []
        torch.manual_seed(42 + dist.get_rank())
        with patched(PROBED | SEQUENTIAL | dict(frac="auto")) if name == "auto" else nullcontext([]) as records:
            for cosine, n_routed in SCRIPT:
                with settled(cosine, n_routed):
                    train(kind, engine, sampling_steps=13)
                weights.append(engine.trained_weights())
        runs[name] = {"weights": weights, "records": records}
    return runs


# name: what makes its record; each on both ranks at once
CELLS = {name: functools.partial(run_engine, name) for name in KINDS}
CELLS |= {
    "turns": functools.partial(
        run_with, "DDP", dict(group_size=3, frac=0.4, probe_every=2), n_training_steps=4, sampling_steps=13
    ),
    "groups of two": functools.partial(run_with, "FSDP1 FULL_SHARD", PROBED | dict(group_size=2, frac=1), n_training_steps=1),
    "two steps of the optimizer": functools.partial(compare, prepare=twice),
    "no step of the optimizer": functools.partial(compare, prepare=never),
    "no zeroing": functools.partial(compare, prepare=zeroes_nothing),
    "a step after each sample": functools.partial(compare, prepare=after_each_sample),
    "auto": follow,
}
CELLS |= {f"memory, {name}": functools.partial(memories, name) for name in FOLLOWED}
CELLS |= {name: functools.partial(fault, *arguments) for name, arguments in FAULTS.items()}
CELLS["no backward"] = functools.partial(without_backward, "FSDP1 FULL_SHARD", 4)
CELLS |= {f"ZeRO-{engine.stage}": functools.partial(refused, engine) for engine in ZERO}


def main(out, *names):
    with recording_rank(out) as records:
        for name in names or CELLS:
            try:
                with patch("jagg_patch.engines.gradients.on_host", lambda storage: False):  # emptied as on a device
                    records[name] = CELLS[name]()
            except Exception:
                records[name] = {"failed": traceback.format_exc()}


if __name__ == "__main__":
    main(*sys.argv[1:])
