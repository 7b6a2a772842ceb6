"""Runs under torchrun: peak memory of one training step of the loop, unpatched and in both schedules, engine by engine.

usage: torchrun ... memory_cells.py OUT; writes OUT/rank{N}.pt and prints a table. On CUDA, where there is one, else on the CPU.
"""

import argparse
import sys
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import engines
import matrix_cells
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from live import Allocated, Saved
from matrix import ENGINES, Cell, Engine

import jagg_patch.loop.schedule
from jagg_patch import JaggConfig, install
from jagg_patch.loop.retaining import Retaining
from jagg_patch.loop.schedule import MEASURED_UPDATES

loop = matrix_cells.loop
# Blocks of one shape. A block's weights and what its forward keeps are of one size, and the model output is next to nothing.
matrix_cells.TINY_FLUX |= dict(
    num_layers=0, num_single_layers=12, attention_head_dim=32, num_attention_heads=4, axes_dims_rope=(8, 12, 12)
)
loop.PROMPT_LENGTH = 92
# Two samples, so that the second one's group finds gradients there; one group of three each.
ARGS = argparse.Namespace(n_samples=2, sampling_steps=4, timestep_fraction=1.0, eta=0.7, shift=3.0, clip_range=0.2, autocast=None)


class Unwrapped(engines.Replicated):
    def wrap(self, model, blocks, checkpoint, cell):
        checkpoint(model)
        self.transformer = model


ENGINES["no engine"] = Engine(Unwrapped)
MEASURED = ["no engine", "DDP", "FSDP1 SHARD_GRAD_OP", "FSDP1 FULL_SHARD"]
CHECKPOINTED = ["no engine", "FSDP1 FULL_SHARD", "FSDP2"]
if hasattr(torch.distributed.fsdp, "fully_shard"):
    MEASURED.append("FSDP2")  # torch 2.5 has it elsewhere, and not for a CPU
CELLS = {"": Cell(), "checkpointing": Cell(checkpointing=1.0)}
PLACES = [(name, "") for name in MEASURED] + [(name, "checkpointing") for name in CHECKPOINTED if name in MEASURED]
SCHEDULES = {"exact": None} | {
    name + ", checked" * checks: dict(schedule=name, self_check=checks)
    for name in ("joint", "sequential")
    for checks in (False, True)
}

# Of which the least counts: gloo's threads let go of a gathered block a moment earlier or later. Fewer where two are alike.
REPEATS = {name: 3 if name.startswith("FSDP") else 1 for name in MEASURED}


def train(engine, settings):
    torch.manual_seed(dist.get_rank())
    engine.optimizer.zero_grad()
    handle = None if settings is None else install(vars(loop), config=JaggConfig(group_size=3, frac=1, **settings))
    try:
        with patch("jagg_patch.engines.gradients.on_host", lambda storage: False):  # as on a device
            loop.train_one_step(ARGS, engine)
    finally:
        if handle:
            handle.uninstall()


def predicted_excess(engine):
    """What `auto` goes by when it decides, in the second training step with one measured update instead of two."""
    found, joint_excess = [], jagg_patch.loop.schedule.joint_excess

    def recorded_joint_excess(*args):
        found.append(joint_excess(*args))
        return found[0]

    jagg_patch.loop.schedule.joint_excess, jagg_patch.loop.schedule.MEASURED_UPDATES = recorded_joint_excess, 1
    handle = install(vars(loop), config=JaggConfig(group_size=3, frac=1, schedule="auto", self_check=False))
    try:
        for _ in range(2):
            engine.optimizer.zero_grad()
            loop.train_one_step(ARGS, engine)
    finally:
        handle.uninstall()
        jagg_patch.loop.schedule.joint_excess = joint_excess
    return found[0]


def retained(engine, repeats):
    """What the graphs of a rollout's two samples are said to take, in bytes, and the peaks of training steps that retain them."""
    said, choose = [], Retaining._choose

    def noted_choose(retaining, n_knots):
        choose(retaining, n_knots)
        said.append(retaining._room.n_retained * n_knots * retaining._shown.measured.graph)

    settings = dict(group_size=3, frac=1, schedule="sequential", self_check=False, retain=True, retain_on="device")
    handle, args = install(vars(loop), config=JaggConfig(**settings)), argparse.Namespace(**vars(ARGS), rollout_batch=1)

    def step():
        torch.manual_seed(dist.get_rank())
        engine.optimizer.zero_grad()
        loop.train_one_step(args, engine)

    try:
        with patch.object(Retaining, "_choose", noted_choose):
            for _ in range(MEASURED_UPDATES):
                step()
        return said[0], *peaks(step, repeats)
    finally:
        handle.uninstall()


def measure(name, cell):
    """Bytes: all weights, the prediction, and the peak of each measure and schedule, after what engines do once only."""
    engine = matrix_cells.build(name, cell, 1)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    record = {"weights": engine.trained_weights().nbytes, "predicted": predicted_excess(engine), "saved": {}, "allocated": {}}
    with matrix_cells.one_rollout():
        for schedule, settings in SCHEDULES.items():
            if cell.checkpointing and "checked" in schedule:
                continue  # the self-check's one graph is small then
            record["saved"][schedule], record["allocated"][schedule] = peaks(partial(train, engine, settings), REPEATS[name])
    if name != "DDP":  # which reduces after each of the loop's steps
        record["retained"] = retained(engine, REPEATS[name])
    return record


def peaks(step, repeats):
    found = []
    while len(found) < repeats and not (len(found) > 1 and alike_everywhere(*found)):
        saved, allocated = Saved(), Allocated()
        with allocated.watching(), saved.watching():
            step()
        found.append((saved.peak, allocated.peak))
    return map(min, zip(*found, strict=True))


def alike_everywhere(*peaks):
    """Whether two measurements differ by less than a thousandth, on every rank."""
    differ = torch.tensor(float(any(abs(a - b) > 1e-3 * b for a, b in zip(*peaks, strict=True))))
    dist.all_reduce(differ)
    return not differ


def main(out):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
        torch.set_default_device("cuda")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    records = {(name, label): measure(name, CELLS[label]) for name, label in PLACES}
    torch.save(records, Path(out) / f"rank{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        print("| engine | saved by autograd | all tensors | with the self-check | joint's excess | predicted |")
        print("|---|---|---|---|---|---|")
        for name, record in records.items():
            saved, peaks = record["saved"], record["allocated"]
            plain, checked = [[label for label in saved if label.endswith("checked") == checks] for checks in (False, True)]
            columns = [map(saved.get, plain), map(peaks.get, plain), map(peaks.get, checked)]
            columns += [[peaks["joint"] - peaks["exact"]], [record["predicted"]]]
            shown = (", ".join(f"{number / 1e6:.1f}" for number in column) for column in columns)
            print(f"| {', '.join(filter(None, name))} | {' | '.join(shown)} |")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
