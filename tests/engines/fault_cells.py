"""Runs under torchrun: what of test_faults.py needs several processes, or the mini trainer.

usage: torchrun ... fault_cells.py fails ENGINE SCHEDULE OUT     rank 1 fails in the middle of a group
       torchrun ... fault_cells.py decides OUT                   what each rank did, in order
       torchrun ... fault_cells.py soaks OUT                     memory over many training steps of the mini trainer
The last two write OUT/rank{N}.pt.
"""

import argparse
import gc
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from live import Mode
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import jagg_patch.loop.schedule
from jagg_patch import JaggConfig, install

TOP = Path(__file__).resolve().parents[2]
SETTINGS = dict(frac=1, group_size=4)
N_SAMPLED = 16  # of which nine are trained: groups of five and four
ENGINES = {
    "DDP": DistributedDataParallel,
    "FSDP1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
}
# The mini trainer as small as it goes: one prompt, two samples in one batch, three trained steps in one group.
MINI = dict(
    pretrained_model_name_or_path=str(TOP / "upstream/mini/data/flux"),
    train_batch_size=1,
    num_generations=2,
    micro_batch_size=2,
    use_group=True,
    gradient_accumulation_steps=1,
    gradient_checkpointing=False,
    selective_checkpointing=1.0,
    fsdp_sharding_startegy="full",
    learning_rate=1e-5,
    max_grad_norm=1.0,
    sampling_steps=4,
    timestep_fraction=1.0,
    eta=0.7,
    shift=3.0,
    clip_range=1e-4,
    adv_clip_max=5.0,
    sampler_seed=0,
)
WARM_UP, TRAINING_STEPS = 15, 70  # of each run


def load_loop(folder):
    sys.path.insert(0, str(TOP / folder))
    import train_grpo_flux

    return train_grpo_flux


def build(engine):
    torch.manual_seed(0)
    return ENGINES[engine](torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)))


def train(loop, model):
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return loop.train_one_step(loop.make_args(sampling_steps=N_SAMPLED, timestep_fraction=0.6), model, optimizer)


def fails(engine, schedule, out):
    """Rank 1 fails in the forward of the first group's third step; an optimizer step leaves a file."""
    loop, model, rank = load_loop("tests/unit/loop"), build(engine), dist.get_rank()
    n_calls = 0

    def fail_in_group(module, inputs):
        nonlocal n_calls
        n_calls += 1
        if rank == 1 and n_calls == N_SAMPLED + 3:
            raise MemoryError("rank 1 is out of memory")

    model.register_forward_pre_hook(fail_in_group)
    torch.optim.SGD.step = lambda *args: Path(out, f"stepped{rank}").touch()
    install(vars(loop), config=JaggConfig(schedule=schedule, **SETTINGS))
    train(loop, model)


class Events(Mode):
    """Every collective and every forward of a model, with its grad mode, in order."""

    def __init__(self, model):
        super().__init__()
        self.seen = []
        model.register_forward_pre_hook(lambda *_: self.seen.append(("forward", torch.is_grad_enabled())))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def decides(out):
    """Each rank has its own data, orders and free memory: for `auto`, only rank 0 could take the joint schedule."""
    rank, records = dist.get_rank(), {}
    loop = load_loop("tests/unit/loop")
    jagg_patch.loop.schedule.free_bytes = lambda: 2**40 if rank == 0 else 0
    for engine in ENGINES:
        for schedule in ("joint", "sequential", "auto"):
            model = build(engine)
            handle = install(vars(loop), config=JaggConfig(schedule=schedule, **SETTINGS))
            visited, events = [], Events(model)
            with events:
                for _ in range(4):
                    visited.append(train(loop, model))
            handle.uninstall()
            records[engine, schedule] = {"visited": visited, "events": events.seen}
    torch.save(records, Path(out, f"rank{rank}.pt"))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def live_tensors():
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


SOAKS = {
    "sequential": dict(schedule="sequential"),
    "joint": dict(schedule="joint"),
    "retained": dict(schedule="joint", retain=True),
}


def soaks(out):
    mini, device, records = load_loop("upstream/mini/fastvideo"), torch.device("cpu"), {}
    args = argparse.Namespace(**MINI)
    transformer = mini.build_transformer(args, device)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=args.learning_rate)
    loader = mini.prompts(args, dist.get_rank(), dist.get_world_size())
    for name, settings in SOAKS.items():
        handle = install(vars(mini), config=JaggConfig(**settings, frac=1, group_size=3))
        sizes = []
        for step in range(TRAINING_STEPS):
            mini.train_one_step(args, device, transformer, optimizer, loader)
            if step in (WARM_UP, TRAINING_STEPS - 1):
                sizes.append({"tensors": live_tensors(), "resident": resident_bytes()})
        records[name] = {"sizes": sizes, "groups": handle.stats.groups, "retained": handle.stats.retained_forwards}
        handle.uninstall()
    torch.save(records, Path(out, f"rank{dist.get_rank()}.pt"))


def main(what, *arguments):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    {"fails": fails, "decides": decides, "soaks": soaks}[what](*arguments)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
