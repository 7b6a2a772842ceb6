"""Runs under torchrun: the mini trainer's own training steps in one cell of settings after another, from the same weights.

usage: torchrun ... cells.py OUT; writes OUT/rank{N}.pt, one record per cell. The tests that read them are in test_mini.py.
"""

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from observe import Observer, local_weights, oracle_gradient, recorded_steps, relative_error

import jagg_patch.loop.schedule
from jagg_patch import JaggConfig, JaggError, install

MINI = Path(__file__).resolve().parents[2] / "upstream/mini"
sys.path.insert(0, str(MINI / "fastvideo"))
import train_grpo_flux as trainer  # noqa: E402

# 2 prompts x 4 samples in micro-batches of 3, 3 and 2; clipping by norm is out of the way so that gradients compare.
BASE = dict(
    pretrained_model_name_or_path=str(MINI / "data/flux"),
    train_batch_size=2,
    num_generations=4,
    micro_batch_size=3,
    use_group=True,
    gradient_accumulation_steps=3,
    gradient_checkpointing=True,
    selective_checkpointing=1.0,
    fsdp_sharding_startegy="full",
    learning_rate=1e-4,
    weight_decay=1e-4,
    max_grad_norm=1e9,
    sampling_steps=10,
    timestep_fraction=1.0,
    eta=0.7,
    shift=3.0,
    clip_range=1e-4,
    adv_clip_max=5.0,
    sampler_seed=0,
)

# name: (trainer arguments that differ, JAGG settings or None for the unpatched trainer, training steps)
CELLS = {
    "unpatched": ({}, None, 2),
    "off": ({}, dict(enabled=False), 2),
    "frac 0": ({}, dict(frac=0), 2),
    "W=2": ({}, dict(group_size=2, frac=1, schedule="joint"), 1),
    "W=3": ({}, dict(group_size=3, frac=1, schedule="joint"), 1),  # 9 steps: 3 + 3 + 3
    "W=4": ({}, dict(group_size=4, frac=1, schedule="joint"), 1),  # 9 steps: 5 + 4
    "W=4 frac 0.6": ({}, dict(schedule="joint"), 1),  # 9 steps: 5, then 4 exact
    "sequential W=2": ({}, dict(group_size=2, frac=1, schedule="sequential"), 1),
    "sequential W=3": ({}, dict(group_size=3, frac=1, schedule="sequential"), 1),
    "sequential": ({}, dict(schedule="sequential"), 1),
    "auto": ({}, dict(), 4),  # two optimizer steps of sequential groups, then what it has come to
    "endpoints": ({}, dict(aggregation="endpoints"), 1),
    "W=4 skipped": ({}, dict(group_size=4, frac=1, schedule="joint", skip_forwards=True), 1),
    "sequential skipped": ({}, dict(schedule="sequential", skip_forwards=True), 1),
    "script": (dict(sampling_steps=16, timestep_fraction=0.6), None, 1),
    "script W=4": (dict(sampling_steps=16, timestep_fraction=0.6), dict(), 1),  # 9 of 15 steps: 5, then 4 exact
    "script endpoints": (dict(sampling_steps=16, timestep_fraction=0.6), dict(aggregation="endpoints"), 1),
    "fraction": (dict(timestep_fraction=0.6), None, 2),
    "fraction W=4": (dict(timestep_fraction=0.6), dict(frac=1, schedule="joint"), 1),  # 5 of 9 steps: one group of 5
    "fraction off": (dict(timestep_fraction=0.6), dict(enabled=False), 2),
    "windows": (dict(gradient_accumulation_steps=1), None, 2),
    "windows off": (dict(gradient_accumulation_steps=1), dict(enabled=False), 2),
    "windows W=2": (dict(gradient_accumulation_steps=1), dict(group_size=2, frac=1, schedule="joint"), 1),
    "windows W=4": (dict(gradient_accumulation_steps=1), dict(frac=1, schedule="joint"), 1),
    "default clip": (dict(max_grad_norm=1.0), None, 2),
    "default clip off": (dict(max_grad_norm=1.0), dict(enabled=False), 2),
}
# cells whose gradient group_backward predicts, from the unpatched cell of the same trainer arguments
GROUPED = (
    "W=2",
    "W=3",
    "W=4",
    "W=4 frac 0.6",
    "sequential W=2",
    "sequential W=3",
    "sequential",
    "endpoints",
    "W=4 skipped",
    "sequential skipped",
)
ORACLES = dict.fromkeys(GROUPED, "unpatched") | {"fraction W=4": "fraction"}
# cells that are compared with the exact gradient, the unpatched trainer's
EXACT = dict.fromkeys(GROUPED, "unpatched")
EXACT |= {"windows W=2": "windows", "script W=4": "script", "script endpoints": "script"}


class Bench:
    """One model per process; every cell starts from its initial weights and the same seeds."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.transformer = trainer.build_transformer(argparse.Namespace(**BASE), self.device)
        self.observer = Observer(self.transformer)
        self.initial = local_weights(self.transformer)
        self.forwards = 0
        self.transformer.register_forward_hook(self._count_forward)

    def _count_forward(self, *_):
        self.forwards += 1

    def restore(self):
        offset = 0
        for parameter in self.transformer.parameters():
            parameter.data.copy_(self.initial[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
        self.transformer.zero_grad()

    def run(self, changes, settings, n_steps):
        args = argparse.Namespace(**(BASE | changes))
        self.restore()
        self.forwards = 0
        torch.manual_seed(42 + dist.get_rank())
        optimizer = torch.optim.AdamW(self.transformer.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
        loader = trainer.prompts(args, dist.get_rank(), dist.get_world_size())
        handle = None if settings is None else install(vars(trainer), config=JaggConfig(self_check=False, **settings))
        try:
            with self.observer.watching() as seen, recorded_steps(trainer) if settings is None else nullcontext() as steps:
                metrics = [trainer.train_one_step(args, self.device, self.transformer, optimizer, loader) for _ in range(n_steps)]
        finally:
            if handle:
                handle.uninstall()
        return {
            "weights": local_weights(self.transformer),
            "rng": torch.get_rng_state(),
            "gradients": seen.gradients,
            "forwards": self.forwards,
            "passes": seen.passes,
            "reaching": seen.reaching,
            "gathers": seen.gathers,
            "metrics": metrics,
            "stats": handle.stats.as_dict() if handle else None,
            "steps": steps,
        }

    def oracle(self, name, recorded):
        changes, settings, _ = CELLS[name]
        args = argparse.Namespace(**(BASE | changes))
        self.restore()
        n_visited = int((args.sampling_steps - 1) * args.timestep_fraction)
        first_window = recorded["steps"][: 3 * n_visited]
        return oracle_gradient(trainer, self.transformer, first_window, n_visited, JaggConfig(**settings))


def refusal(bench, settings):
    """What a run says when this rank has `settings`."""
    try:
        bench.run({}, settings, 1)
    except JaggError as error:
        return str(error)
    return None


def main(out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    bench = Bench()
    records = {name: bench.run(*cell) for name, cell in CELLS.items()}
    for name, source in ORACLES.items():
        records[name]["oracle_error"] = relative_error(records[name]["gradients"][0], bench.oracle(name, records[source]))
    for name, source in EXACT.items():
        records[name]["exact_error"] = relative_error(*(records[cell]["gradients"][0] for cell in (name, source)))
    records["ranks differ in frac"] = refusal(bench, dict(frac=0.6 if rank == 0 else 0.5))
    records["one rank is off"] = refusal(bench, dict(enabled=rank == 0))
    records["the run after"] = bench.run(*CELLS["W=4"])
    if rank == 1:
        jagg_patch.loop.schedule.free_bytes = lambda: 0
    records["auto, one rank full"] = bench.run(*CELLS["auto"])
    for record in records.values():
        if isinstance(record, dict):
            record.pop("steps", None)
    torch.save(records, os.path.join(out, f"rank{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
