"""Runs under torchrun: models that don't suit groups, on one engine after another, each rank with its own samples.

usage: torchrun ... unsuited_cells.py OUT; writes OUT/rank{N}.pt, `{(engine, model, schedule): what stopped it, or None}`. The
tests that read them are in test_unsuited.py.
"""

import logging
import sys
import warnings
from functools import partial
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
import torch.distributed as dist
from engines import Zero1, Zero1Bf16, Zero3, fully_shard
from observe import self_checks
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel
from unit import models

from jagg_patch import JaggConfig, JaggError, install

LOOP = Path(__file__).resolve().parents[1] / "unit/loop/train_grpo_flux.py"


def load(path):
    """Not by its name, which the pytest process, that reads the tables here, gives to other loops."""
    spec = spec_from_file_location("train_grpo_flux", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


loop = load(LOOP)

N_RANKS = 2
ORIGINAL = dict(device_id=torch.device("cpu"), use_orig_params=True)
ENGINES = {
    "none": lambda model: model,
    "DDP": DistributedDataParallel,
    "DDP, no broadcast": partial(DistributedDataParallel, broadcast_buffers=False),
    "DDP, unused": partial(DistributedDataParallel, find_unused_parameters=True),
    "FSDP1": partial(FullyShardedDataParallel, **ORIGINAL),
}
if hasattr(torch.distributed.fsdp, "fully_shard"):
    ENGINES["FSDP2"] = fully_shard  # torch 2.5 has it elsewhere, and not for a CPU
# It moves gradients away in a forward, and so from a joint group's backward.
FOR_CLIPPING = ENGINES | {
    "FSDP1's ZeRO-2": partial(FullyShardedDataParallel, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, **ORIGINAL)
}
WEIGHTS = "Experts", "SwitchedInside", "InTheMiddle"  # which not all forwards use, so that DDP has to look for unused ones
OTHERS = "Plain", "RankMask", "InOneBuffer", "Injected", "Scaled"
CELLS = [
    (engine, model, schedule)
    for engine in ENGINES
    for model in (*WEIGHTS, *OTHERS)
    for schedule in ("joint", "sequential")
    if not engine.startswith("DDP") or (model in WEIGHTS and schedule == "sequential") == (engine == "DDP, unused")
    if not (model in WEIGHTS and engine in ("DDP", "DDP, no broadcast"))
    if (engine, model) != ("FSDP1", "SwitchedInside")  # whose forward has views of its weights, not them
]

# What one rank does alone.
LONELY = [(engine, "a critic steps", schedule) for engine in ("none", "DDP", "FSDP1") for schedule in ("joint", "sequential")]
LONELY += [("none", "the model breaks", schedule) for schedule in ("joint", "sequential")]
LONELY += [(engine, "the model goes by the grad mode", "joint") for engine in ("none", "DDP", "FSDP1")]
HOOKED = ("DDP", "FSDP1")
CLIPPED = [(engine, schedule, "clipped") for engine in FOR_CLIPPING if "," not in engine for schedule in ("joint", "sequential")]

# A loss that reaches weights by another way than the model's output; DeepSpeed runs the backward and the step itself.
ZEROS = {"ZeRO-1": Zero1, "ZeRO-3": Zero3}
AUXILIARY = [(engine, "ValueHead", schedule) for engine in ("FSDP1", *ZEROS) for schedule in ("joint", "sequential")]
HEADS = [("DDP", "sequential"), ("DDP", "joint")]
IN_BF16 = "sequential", "joint"
OWN_BACKWARD = IN_BF16 if int(version("deepspeed").split(".")[1]) >= 18 else ()  # before it, DeepSpeed couldn't have it unpatched
BACKWARD, STEP = "            loss.backward()\n", "            optimizer.step()\n"
WITH_AUX = {BACKWARD: "            (loss + 0.5 * model.module.aux).backward()\n"}
WITH_HELPER = {BACKWARD: f"{BACKWARD}            model.after_backward()\n"}
WITH_HEAD = {BACKWARD: "            (loss + model.module.head(latents[i : i + 1, step]).square().mean()).backward()\n"}
IN_ZERO = {BACKWARD: "            model.backward(loss)\n            model.step()\n", STEP: "            pass\n"}
OF_TWO_ENGINES = {
    "                model,\n": "                model if int(step) < 7 else args.other,\n",
    BACKWARD: "            (model if int(step) < 7 else args.other).backward(loss)\n",
    STEP: "            pass\n",
}
WITH_OWN_BACKWARD = IN_ZERO | {BACKWARD: f"{BACKWARD}            model.step()\n"}
WITH_AUX_IN_ZERO = IN_ZERO | {BACKWARD: IN_ZERO[BACKWARD].replace("loss", "loss + 0.5 * model.module.aux")}


def run(engine, model, schedule, optimizer=torch.optim.SGD, module=loop):
    torch.manual_seed(0)
    model = FOR_CLIPPING[engine](getattr(models, model)())
    model.after_backward = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), 1e-9)  # on each rank
    torch.manual_seed(10 + dist.get_rank())
    handle = install(vars(module), config=JaggConfig(frac=0.8, schedule=schedule))
    try:
        module.train_one_step(module.make_args(), model, optimizer(model.parameters(), lr=0.1))
    except JaggError as error:
        return str(error)
    finally:
        handle.uninstall()


def load_changed(changes, out):
    text = LOOP.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = out / f"loop{dist.get_rank()}" / LOOP.name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return load(path)


class WithHead(models.Plain):
    """Of which the loop's own loss alone reaches a part."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 1)


def run_head(engine, schedule, out):
    """What the self-checks have come to, and how far groups of two are from the unpatched loop after two training steps."""
    weights = []
    for config in (None, JaggConfig(frac=1, group_size=2, schedule=schedule)):
        torch.manual_seed(0)
        module, model = load_changed(WITH_HEAD, out), ENGINES[engine](WithHead())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(10 + dist.get_rank())
        if config is not None:
            install(vars(module), config=config)
        with self_checks() as found:
            for _ in range(2):
                try:
                    module.train_one_step(module.make_args(sampling_steps=5), model, optimizer)
                except JaggError as error:
                    return [str(error)], 0.0
                optimizer.zero_grad()
        weights.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    return [entry if isinstance(entry, str) else "agrees" for entry in found], float((weights[1] - weights[0]).abs().max())


def run_auxiliary(engine, model, schedule, out, changes=None):
    torch.manual_seed(0)
    module = load_changed(changes or (WITH_AUX_IN_ZERO if engine in ZEROS else WITH_AUX), out)
    model = getattr(models, model)()
    if engine in ZEROS:
        zero = ZEROS[engine](model, None, lambda model: None, None, n_micro_steps=30)
        model, optimizer = zero.transformer, zero.optimizer
    else:
        model = ENGINES[engine](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = install(vars(module), config=JaggConfig(frac=0.8, schedule=schedule))
    try:
        module.train_one_step(module.make_args(), model, optimizer)
    except JaggError as error:
        return str(error)
    finally:
        handle.uninstall()


def run_engines(schedule, out):
    """Groups of two across the step at which the loop goes on to another network, that has an engine of its own."""
    torch.manual_seed(0)
    module = load_changed(OF_TWO_ENGINES, out)
    engines = [Zero1(models.Plain(), None, lambda model: None, None, n_micro_steps=30).transformer for _ in range(2)]
    handle = install(vars(module), config=JaggConfig(frac=1, group_size=2, schedule=schedule))
    try:
        module.train_one_step(module.make_args(other=engines[1]), engines[0], None)
    except JaggError as error:
        return str(error)
    finally:
        handle.uninstall()


class InBf16(models.Plain):
    def forward(self, x):
        return super().forward(x.bfloat16()).float()


def run_in_bf16(schedule, out):
    """The update of DeepSpeed's own bf16, unpatched, and in groups of two."""
    updates = []
    for config in (None, JaggConfig(frac=1, group_size=2, schedule=schedule)):
        torch.manual_seed(0)
        module = load_changed(IN_ZERO, out)
        zero = Zero1Bf16(InBf16(), None, lambda model: None, None, n_micro_steps=30)
        before = zero.trained_weights()
        torch.manual_seed(10 + dist.get_rank())
        if config is not None:
            install(vars(module), config=config)
        module.train_one_step(module.make_args(), zero.transformer, None)
        updates.append(zero.trained_weights() - before)
    return updates


class Sgd:
    """What the loop calls as its optimizer: something happens before that steps."""

    def __init__(self, *args, **kwargs):
        self._optimizer = torch.optim.SGD(*args, **kwargs)

    def step(self):
        self.before_step()
        self._optimizer.step()


class WithCritic(Sgd):
    """The first rank alone has another network's step before."""

    def before_step(self):
        if dist.get_rank() == 0:
            critic = torch.nn.Linear(2, 1)
            critic(torch.ones(2)).sum().backward()
            torch.optim.SGD(critic.parameters(), lr=0.1).step()


class Breaking(Sgd):
    """The last rank's model can't be run any more."""

    def before_step(self):
        models.Breakable.is_broken = dist.get_rank() == N_RANKS - 1


def run_lonely(engine, what, schedule):
    """What the self-checks have come to, or what stopped it."""
    model, optimizer = {
        "a critic steps": ("Plain", WithCritic),
        "the model breaks": ("Breakable", Breaking),
        "the model goes by the grad mode": ("ByMode", torch.optim.SGD),
    }[what]
    models.Breakable.is_broken = False
    models.ByMode.differs = dist.get_rank() == N_RANKS - 1
    with self_checks() as found:
        said = run(engine, model, schedule, optimizer)
    return said or [entry if isinstance(entry, str) else "agrees" for entry in found]


def run_hooked(engine):
    """The weights after three training steps, the first rank's parameters having hooks: under auto, and sequential by name."""
    found = []
    for schedule in ("auto", "sequential"):
        torch.manual_seed(0)
        model = ENGINES[engine](models.Plain())
        for parameter in model.parameters() if dist.get_rank() == 0 else ():
            parameter.register_hook(lambda gradient: None)
        torch.manual_seed(10 + dist.get_rank())
        handle, optimizer = install(vars(loop), config=JaggConfig(schedule=schedule)), torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loop.train_one_step(loop.make_args(), model, optimizer)
        handle.uninstall()
        found.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    return found


def main(out):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found = {cell: run(*cell) for cell in CELLS}
    found |= {cell: run_lonely(*cell) for cell in LONELY}
    found |= {("hooks", engine): run_hooked(engine) for engine in HOOKED}
    helped = load_changed(WITH_HELPER, Path(out))
    found |= {cell: run(cell[0], "Plain", cell[1], module=helped) for cell in CLIPPED}
    found |= {cell: run_head(*cell, Path(out)) for cell in HEADS}  # before DeepSpeed changes torch's linear layers
    logging.disable(logging.WARNING)
    found |= {cell: run_auxiliary(*cell, Path(out)) for cell in AUXILIARY}
    for schedule in OWN_BACKWARD:
        found["backward", schedule] = run_auxiliary("ZeRO-1", "Plain", schedule, Path(out), WITH_OWN_BACKWARD)
    found |= {("engines", schedule): run_engines(schedule, Path(out)) for schedule in IN_BF16}
    found |= {("bf16", schedule): run_in_bf16(schedule, Path(out)) for schedule in IN_BF16}
    torch.save(found, Path(out, f"rank{dist.get_rank()}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
