"""Runs under torchrun: a real DanceGRPO trainer's `train_one_step` on a tiny model, in one cell of settings after another.

usage: torchrun ... cells.py CHECKOUT TRAINER OUT [CELL ...]; writes OUT/rank{N}.pt, with all cells if none is named. What a
trainer is given is in setups/, a module each; the tests that read the cells are in test_dancegrpo.py.
"""

import argparse
import importlib
import inspect
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import standins
import torch
import torch.distributed as dist
from observe import Observer, local_weights, oracle_gradient, recorded_steps, relative_error, self_checks
from probes import agreements, read_log
from skips import comparison, refusals

from jagg_patch import JaggConfig, install
from jagg_patch.trainers.intercept import ForwardingModule

# Two prompts, two samples each, one optimizer step. The clip is wide: upstream's 1e-4 is below bf16's rounding.
ARGS = dict(
    h=64,
    w=64,
    t=1,
    sampling_steps=10,
    shift=3.0,
    eta=0.3,
    init_same_noise=True,
    use_hpsv2=True,
    use_pickscore=False,
    use_hpsv3=False,
    use_group=True,
    num_generations=2,
    timestep_fraction=1.0,
    clip_range=0.2,
    adv_clip_max=5.0,
    gradient_accumulation_steps=4,
    gradient_checkpointing=True,
    selective_checkpointing=1.0,
    lr=1e-5,
)

# name: (arguments that differ, JAGG settings, None for the unpatched trainer, "sorted" for it in trajectory order, how many
# training steps if not one, and what is done to the model)
CELLS = {
    "unpatched": ({}, None),
    "off": ({}, dict(enabled=False)),
    "frac 0": ({}, dict(frac=0)),
    "sorted": ({}, "sorted"),
    "W=2": ({}, dict(group_size=2, frac=1, schedule="joint")),
    "W=3": ({}, dict(group_size=3, frac=1, schedule="joint")),  # 9 steps: 3 + 3 + 3
    "W=4": ({}, dict(frac=1, schedule="joint")),  # 9 steps: 5 + 4
    "knots": ({}, dict(knots_at="0,4,7,8", schedule="joint")),
    "knots skip": ({}, dict(knots_at="0,4,7,8", schedule="joint", skip_forwards=True)),
    "W=4 skip": ({}, dict(frac=1, schedule="joint", skip_forwards=True)),
    "default": ({}, {}),  # 9 steps: 5, then 4 exact; sequential, as always before the third optimizer step
    "default, checked": ({}, dict(self_check=True)),
    "fraction": (dict(timestep_fraction=0.6), None),
    "fraction W=4": (dict(timestep_fraction=0.6), dict(frac=1, schedule="joint")),  # 5 of 9 steps
    "twice": (dict(timestep_fraction=0.6), {}, 2),  # 5 steps: 3, then 2 exact
    "twice probed": (dict(timestep_fraction=0.6), dict(probe_every=1, log="twice.jsonl"), 2),
    "thrice": (dict(lr=0.0), None, 3),
    "thrice retained": (dict(lr=0.0), dict(frac=0, retain=True), 3),  # from the third training step on
    "thrice W=4": ({}, dict(frac=1, schedule="joint"), 3),
    "thrice W=4 retained": ({}, dict(frac=1, schedule="joint", retain=True), 3),
}
RETAINED = {"thrice retained": "thrice", "thrice W=4 retained": "thrice W=4"}  # the same with own forwards
ORACLES = dict.fromkeys(("W=2", "W=3", "W=4", "knots", "default"), "unpatched") | {"fraction W=4": "fraction"}


def in_trajectory_order(namespace, n_visited):
    """What the interception does to the order, and nothing else: those orders are the only integers that a trainer stacks."""

    def stack_in_order(rows, *args, **kwargs):
        stacked = torch.stack(rows, *args, **kwargs)
        if stacked.dtype == torch.int64:
            stacked[:, :n_visited] = stacked[:, :n_visited].sort().values
        return stacked

    namespace["torch"] = ForwardingModule(torch, stack=stack_in_order)


def main(checkout, name, out, *wanted):
    torch.set_num_threads(1)
    standins.install(checkout)
    setup = importlib.import_module(f"setups.{name.removeprefix('train_grpo_')}")
    dist.init_process_group("gloo")
    trainer, transformer, train_arguments = setup.build(f"fastvideo.{name}")
    rank = dist.get_rank()

    observer = Observer(transformer)
    initial = [parameter.detach().clone() for parameter in transformer.parameters()]

    def restore():
        for parameter, value in zip(transformer.parameters(), initial, strict=True):
            parameter.data.copy_(value)
        transformer.zero_grad()

    def run(changes, settings, n_training_steps=1, around_model=nullcontext):
        args = argparse.Namespace(**(ARGS | setup.ARGS | changes))
        restore()
        torch.manual_seed(42 + rank)
        optimizer = torch.optim.AdamW([p for p in transformer.parameters() if p.requires_grad], lr=args.lr)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
        handle, real_torch = None, trainer.torch
        if settings == "sorted":
            in_trajectory_order(vars(trainer), args.sampling_steps - 1)
        elif settings is not None:
            handle = install(vars(trainer), config=JaggConfig(**dict(self_check=False) | settings))
        given = dict(args=args, transformer=transformer, optimizer=optimizer, lr_scheduler=schedule, max_grad_norm=1e9)
        asked_for = inspect.signature(trainer.train_one_step).parameters  # by an early version for less
        try:
            with (
                around_model(transformer),
                observer.watching() as seen,
                refusals() as refused,
                self_checks() as checks,
                recorded_steps(trainer) if settings in (None, "sorted") else nullcontext() as steps,
            ):
                returned = [
                    trainer.train_one_step(
                        **{name: value for name, value in (train_arguments() | given).items() if name in asked_for}
                    )
                    for _ in range(n_training_steps)
                ]
        finally:
            if handle:
                handle.uninstall()
            trainer.torch = real_torch
        dist.barrier()
        return {
            "weights": local_weights(transformer),
            "rng": torch.get_rng_state(),
            "gradient": seen.gradients[0],
            "gradients": seen.gradients,
            "forwards": seen.forwards,
            "passes": seen.passes,
            "gathers": seen.gathers,
            "stats": handle.stats.as_dict() if handle else None,
            "returned": returned,
            "log": read_log(Path(handle.config.log)) if handle and handle.config.log else None,
            "steps": steps,
            "refusals": refused,
            "checks": checks,
        }

    cells = CELLS | getattr(setup, "CELLS", {})
    records = {cell: run(*cells[cell]) for cell in wanted or cells}
    for cell, source in ORACLES.items():
        if cell not in records:
            continue
        restore()
        changes, settings = CELLS[cell]
        n_visited = int((ARGS["sampling_steps"] - 1) * (ARGS | changes)["timestep_fraction"])
        expected = oracle_gradient(trainer, transformer, records[source]["steps"], n_visited, JaggConfig(**settings))
        records[cell]["oracle_error"] = relative_error(records[cell]["gradient"], expected)
    restore()
    for record in records.values():
        if record["log"]:
            n_visited = record["log"][0]["visited"]
            steps = records["unpatched" if n_visited == 9 else "fraction"]["steps"][:n_visited]
            record["agreements"] = agreements(
                record["log"][0]["probe"],
                sorted(steps, key=lambda step: int(step["arguments"]["i"])),
                lambda steps, config: oracle_gradient(trainer, transformer, steps, len(steps), config),
            )
    for cell in ("sorted", "W=2", "W=3", "W=4"):  # in one order on all ranks, which sum the errors up
        if cell in records:
            records[cell]["exact_error"] = relative_error(records[cell]["gradient"], records["unpatched"]["gradient"])
    for cell, own in RETAINED.items():
        if cell in records:
            pairs = zip(records[cell]["gradients"], records[own]["gradients"], strict=True)
            records[cell]["errors"] = [relative_error(*pair) for pair in pairs]
    for cell in records:
        if cell.endswith(" skip"):
            records[cell]["skips"] = comparison(records[cell], records[cell.removesuffix(" skip")])
    for record in records.values():
        record["visited"] = [int(step["arguments"]["i"]) for step in record.pop("steps") or ()]
    torch.save(records, os.path.join(out, f"rank{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
