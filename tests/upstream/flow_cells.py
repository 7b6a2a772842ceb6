"""Runs under torchrun: a real Flow-GRPO trainer's whole `main` on a tiny pipeline, in one cell of settings after another.

usage: torchrun ... flow_cells.py CHECKOUT TRAINER OUT; writes OUT/rank{N}.pt. What a trainer is given is in flow_setups/, a
module each; the tests that read the cells are in test_flow_grpo.py. One epoch is run: `main` never ends by itself, so its
evaluation, which comes before each epoch's rollout, ends it.
"""

import importlib
import os
import random
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import accelerate
import flow_standins as standins
import torch
import torch.distributed as dist
import wandb
from accelerate.state import AcceleratorState, DistributedType, GradientState
from observe import Loop, Observer, local_weights, oracle_gradient, recorded_steps, relative_error, self_checks
from probes import agreements, read_log
from skips import comparison, recorded_steps_of_rollouts, refusals
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from jagg_patch import JaggConfig, JaggError, install
from jagg_patch.contract import CONTRACTS
from jagg_patch.loop.retaining import Retaining
from jagg_patch.trainers.intercept import ForwardingModule

LOOP = Loop(
    step="compute_log_prob",
    solver="sde_step_with_logprob",
    index=lambda arguments: arguments["j"],
    timesteps=lambda arguments: arguments["sample"]["timesteps"][:, arguments["j"]],
)
N_BATCHES = 2

# Two batches of two samples on each rank, one optimizer step. The clip is wide: upstream's is below float32's rounding.
CONFIG = {
    "mixed_precision": "no",
    "allow_tf32": False,
    "resolution": 64,
    "prompt_fn": "general_ocr",
    "eval_freq": 1,
    "save_freq": 1000,
    "sample.num_steps": 10,
    "sample.train_batch_size": 2,
    "sample.num_image_per_prompt": 2,
    "sample.num_batches_per_epoch": N_BATCHES,
    "sample.sde_window_size": 3,
    "sample.sde_type": "sde",
    "train.batch_size": 2,
    "train.gradient_accumulation_steps": N_BATCHES,
    "train.timestep_fraction": 0.99,
    "train.learning_rate": 1e-4,
    "train.beta": 0.04,
    "train.clip_range": 0.2,
    "train.max_grad_norm": 1e9,
    "train.ema": True,
}

# name: (configuration that differs, JAGG settings, None for the unpatched trainer, {} for the defaults)
CELLS = {
    "unpatched": ({}, None),
    "off": ({}, dict(enabled=False)),
    "frac 0": ({}, dict(frac=0)),
    "W=2": ({}, dict(group_size=2, frac=1, schedule="joint")),
    "W=3": ({}, dict(group_size=3, frac=1, schedule="joint")),  # 9 steps: 3 + 3 + 3
    "W=4": ({}, dict(frac=1, schedule="joint")),  # 9 steps: 5 + 4
    "default": ({}, {}),  # 9 steps: 5, then 4 exact; sequential, as always before the third optimizer step
    "knots": ({}, dict(knots_at="0,4,7,8")),
    "default, checked": ({}, dict(self_check=True)),
    "no KL unpatched": ({"train.beta": 0.0}, None),
    "no KL W=2": ({"train.beta": 0.0}, dict(group_size=2, frac=1, schedule="joint")),
    "no KL W=4": ({"train.beta": 0.0}, dict(frac=1, schedule="joint")),
    "inner unpatched": ({"train.num_inner_epochs": 2}, None),
    "inner W=2": ({"train.num_inner_epochs": 2}, dict(group_size=2, frac=1, schedule="joint")),
    "inner W=4": ({"train.num_inner_epochs": 2}, dict(frac=1, schedule="joint")),
}
WINDOW_CELLS = {
    "unpatched": ({}, None),
    "off": ({}, dict(enabled=False)),
    "frac 0": ({}, dict(frac=0)),
    "W=2": ({}, dict(group_size=2, frac=1, schedule="joint")),  # 2, then 1 exact
    "W=3": ({}, dict(group_size=3, frac=1, schedule="joint")),
    "default": ({}, {}),  # 3, sequential
    "default, checked": ({}, dict(frac=1, self_check=True)),  # frac 1 is the default of a window
    "no KL unpatched": ({"train.beta": 0.0}, None),
    "no KL W=2": ({"train.beta": 0.0}, dict(group_size=2, frac=1, schedule="joint")),
    "no KL default": ({"train.beta": 0.0}, {}),
    "inner unpatched": ({"train.num_inner_epochs": 2}, None),
    "inner W=2": ({"train.num_inner_epochs": 2}, dict(group_size=2, frac=1, schedule="joint")),
    "window 4 unpatched": ({"sample.sde_window_size": 4}, None),
    "window 4 W=2": ({"sample.sde_window_size": 4}, dict(group_size=2, frac=1, schedule="joint")),  # 2 + 2
    "window 4 default": ({"sample.sde_window_size": 4}, {}),
    "window 4 knots": ({"sample.sde_window_size": 4}, dict(knots_at="0,2,3")),
    "window 2 unpatched": ({"sample.sde_window_size": 2}, None),
    "window 2 default": ({"sample.sde_window_size": 2}, {}),
    "window 0 unpatched": ({"sample.sde_window_size": 0}, None),
    "window 0 default": ({"sample.sde_window_size": 0}, {}),  # 9 steps: 5, then 4 exact
}

# name: as above; each is run with forwards skipped as well
SKIPS = {cell: CELLS[cell] for cell in ("W=4", "default")}
WINDOW_SKIPS = {
    "window 4": ({"sample.sde_window_size": 4}, dict(frac=1)),
    "window 0 W=4": ({"sample.sde_window_size": 0}, dict(frac=1, schedule="joint")),
}

# Runs of three epochs that retain graphs in the third one, with four batches and two optimizer steps in each. Exact steps are
# taken in another order than the unpatched trainer's, from which weights that move would drift away.
RETAINED_BATCHES = 4
RETAINED_UPDATES = 6
RETAINED = {
    "exact": ({"train.learning_rate": 0.0}, dict(frac=0)),
    "groups": ({}, dict(group_size=3, frac=1, schedule="joint")),
}

# Runs of two epochs with upstream's own evaluation before each, and two optimizer steps in each.
EPOCHS = {"train.num_inner_epochs": 2, "sample.eval_num_steps": 2, "sample.test_batch_size": 8}


class OneEpochIsOver(Exception):
    pass


def retained_changes(n_ranks):
    n_prompts = n_ranks * RETAINED_BATCHES
    return EPOCHS | {
        "train.num_inner_epochs": 1,
        "sample.num_batches_per_epoch": RETAINED_BATCHES,
        "sample.unique_prompt_per_epoch": n_prompts,
        "sample.unique_sample_per_epoch": n_prompts,
    }


def beside_own(retained, own):
    """What the tests need of a run that retains graphs, and of its difference to the same one with its own forwards."""
    return {
        "errors": [relative_error(*pair) for pair in zip(retained["gradients"], own["gradients"], strict=True)],
        "fewer": own["forwards"] - retained["forwards"],
        "retained": retained["stats"]["retained_forwards"],
        "alike": torch.equal(retained["rng"], own["rng"]) and retained["passes"] == own["passes"],
    }


def end_after_one_epoch(pipeline, test_dataloader, text_encoders, tokenizers, config, accelerator, global_step, *_):
    """In the place of the trainer's evaluation."""
    if global_step:
        raise OneEpochIsOver


@contextmanager
def noted_orders():
    """A list of the orders of samples that retaining has the trainer go by inside, one a rollout."""
    orders, ordered = [], Retaining.ordered_samples

    def noted(retaining, permutation):
        orders.append(ordered(retaining, permutation))
        return orders[-1]

    Retaining.ordered_samples = noted
    try:
        yield orders
    finally:
        Retaining.ordered_samples = ordered


@contextmanager
def given_orders(orders):
    """Inside, the trainer's own orders of a rollout's samples, drawn without a generator, are `orders`, one after the other."""
    left, randperm = list(orders), torch.randperm

    def given(n, *args, **kwargs):
        drawn = randperm(n, *args, **kwargs)
        return left.pop(0) if left and "generator" not in kwargs and n == len(left[0]) else drawn

    torch.randperm = given
    try:
        yield
    finally:
        torch.randperm = randperm


@contextmanager
def whole_epochs(trainer, evaluate, weights, n_updates):
    """Inside, `main` evaluates, and ends at the first rollout after `n_updates`, when there are as many `weights`.

    Yields a list of what ran in between, `(function, start, end)` in seconds, in the order of their ends.
    """
    rollout = CONTRACTS[trainer.__name__].rollout
    names = ("eval", rollout, "compute_log_prob")
    functions, events = [getattr(trainer, name) for name in names], []

    def timed(name, function):
        @wraps(function)
        def timed_function(*args, **kwargs):
            if name == rollout and len(weights) >= n_updates:
                raise OneEpochIsOver
            start = time.perf_counter()
            result = function(*args, **kwargs)
            events.append(("rollout" if name == rollout else name, start, time.perf_counter()))
            return result

        return timed_function

    hook = register_optimizer_step_post_hook(lambda *_: events.append(("step", time.perf_counter(), time.perf_counter())))
    for name, function in zip(names, (evaluate, *functions[1:]), strict=True):
        setattr(trainer, name, timed(name, function))
    try:
        yield events
    finally:
        hook.remove()
        for name, function in zip(names, functions, strict=True):
            setattr(trainer, name, function)


def run_main(trainer, transformer, handle, evaluate, weights, n_updates):
    """The trainer's `main` until it ends or stops at `OneEpochIsOver`; `n_updates` as `whole_epochs` has it, or None.

    Returns what an `Observer` saw, the training forwards where nothing is installed, what `whole_epochs` yields, and `refusals`.
    """
    with (
        whole_epochs(trainer, evaluate, weights, n_updates) if n_updates else nullcontext() as events,
        Observer(transformer).watching() as seen,
        recorded_steps(trainer, LOOP) if handle is None else nullcontext() as steps,
        refusals() as refused,
        suppress(OneEpochIsOver),
    ):
        try:
            trainer.main(None)
        finally:
            if handle:
                handle.uninstall()
    return seen, steps, events, refused


def skips(run, cells, records):
    """`{cell: its comparison}` with forwards skipped; the runs without are in `records`, or done."""
    found = {}
    for cell, (changes, settings) in cells.items():
        full = records.get(cell) or run(changes, settings)
        found[cell] = comparison(run(changes, settings | dict(skip_forwards=True)), full)
    return found


def running(accelerator, engine):
    """The class `accelerator`, but once made it says that it runs `engine`."""

    def __init__(self, *args, **kwargs):
        accelerator.__init__(self, *args, **kwargs)
        self.state.distributed_type = DistributedType[engine]

    return type("Accelerator", (accelerator,), {"__init__": __init__})


def prepare(name, out):
    """The trainer with its stand-ins, its setup, and `configure(changes)`, which makes a cell's configuration."""
    torch.set_num_threads(1)
    setup = importlib.import_module(f"flow_setups.{name.removeprefix('train_')}")
    standins.install()
    trainer = importlib.import_module(name)
    trainer.evaluate = trainer.eval
    trainer.eval = end_after_one_epoch
    trainer.Accelerator = standins.with_scaler(trainer.Accelerator)
    trainer.encode_prompt = setup.encode_prompt
    trainer.get_peft_model = standins.with_trained_adapter(trainer.get_peft_model)
    if os.environ["RANK"] == "0":
        getattr(setup, "write_prompts", standins.write_prompts)(out / "prompts")
    base = importlib.import_module("config.base")

    def configure(changes):
        config = base.get_config()
        n_prompts = int(os.environ["WORLD_SIZE"]) * N_BATCHES  # two samples of each
        own = {
            "dataset": str(out / "prompts"),
            "logdir": str(out / "logs"),
            "save_dir": str(out),
            "sample.unique_prompt_per_epoch": n_prompts,
            "sample.unique_sample_per_epoch": n_prompts,
        }
        config.update_from_flattened_dict(CONFIG | own | setup.CONFIG | changes)
        return config

    return trainer, setup, configure


def main(checkout, name, out):
    trainer, setup, configure = prepare(name, out)
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    logged = []
    reduce = accelerate.Accelerator.reduce

    def recording_reduce(accelerator, tensors, *args, **kwargs):
        reduced = reduce(accelerator, tensors, *args, **kwargs)
        logged.append({key: float(value) for key, value in reduced.items()})
        return reduced

    accelerate.Accelerator.reduce = recording_reduce

    def run(changes, settings, second_weights=None, n_updates=None):
        """One cell; its second optimizer step, if there is one, from `second_weights`. `n_updates` as `whole_epochs` has it."""
        AcceleratorState._reset_state()
        GradientState._reset_state()
        logged.clear()
        pipeline = setup.build()
        setattr(trainer, setup.PIPELINE, SimpleNamespace(from_pretrained=lambda *_, **__: pipeline))
        config = configure(changes)
        trainer.FLAGS = SimpleNamespace(config=config)
        transformer, weights = pipeline.transformer, []
        handle = None
        if settings is not None:
            handle = install(vars(trainer), config=JaggConfig(**dict(self_check=False) | settings) if settings else None)

        def replace_weights(*_):
            if second_weights is not None and len(weights) == 1:
                torch.nn.utils.vector_to_parameters(second_weights.clone(), transformer.parameters())

        hooks = [
            register_optimizer_step_pre_hook(lambda *_: weights.append(local_weights(transformer))),
            register_optimizer_step_post_hook(replace_weights),
        ]
        try:
            with self_checks() as checks:
                seen, steps, events, refused = run_main(trainer, transformer, handle, trainer.evaluate, weights, n_updates)
        finally:
            for hook in hooks:
                hook.remove()
        return {
            "weights": [*weights, local_weights(transformer)],
            "rng": torch.get_rng_state(),
            "random": random.getstate(),
            "gradients": seen.gradients,
            "forwards": seen.forwards,
            "passes": seen.passes,
            "reaching": seen.reaching,
            "logged": list(logged),
            "stats": handle.stats.as_dict() if handle else None,
            "config": handle.config if handle else None,
            "scale": standins.SCALE if config.mixed_precision == "fp16" else 1,
            "steps": steps,
            "transformer": transformer,
            "events": events,
            "refusals": refused,
            "checks": checks,
        }

    def mean_gradient(source, number, steps, n_visited, config):
        """That of `steps` of the `source`'s optimizer step of that number: each rank's own, then the mean, as DDP takes it."""
        transformer, wrapped = source["transformer"], steps[0]["arguments"]["transformer"]
        torch.nn.utils.vector_to_parameters(source["weights"][number].clone(), transformer.parameters())
        with wrapped.no_sync():
            gradient = oracle_gradient(trainer, transformer, steps, n_visited, config, LOOP)
        dist.all_reduce(gradient)
        return gradient / n_ranks / source["scale"]

    def expected_gradient(record, source, number):
        n_steps = len(source["steps"]) // len(source["gradients"])
        steps = source["steps"][number * n_steps : (number + 1) * n_steps]
        n_visited = 1 + max(step["arguments"]["j"] for step in steps)
        return mean_gradient(source, number, steps, n_visited, record["config"])

    def run_epochs(folder, n_updates, settings, **environment):
        """As `run`, with wandb's files in `folder`. They are whole when this process has ended."""
        wandb.finish()
        folder.mkdir(exist_ok=True)
        if rank == 0:
            wandb.init(mode="offline", dir=folder)  # not all trainers start one before they evaluate
        trainer.wandb = ForwardingModule(wandb, init=lambda **_: wandb.run)
        os.environ |= environment
        record = run(EPOCHS, settings, n_updates=n_updates)
        for variable in environment:
            del os.environ[variable]
        wandb.finish()
        dist.barrier()
        return record

    def probed_records():
        log = out / "log.jsonl"
        source = run_epochs(out / "unpatched", 2, None)
        plain = run_epochs(out / "plain", 4, {})
        probed = run_epochs(out / "probed", 4, {}, JAGG_PROBE_EVERY="1", JAGG_LOG=str(log))
        n_visited = 1 + max(step["arguments"]["j"] for step in source["steps"])
        probed["log"] = read_log(log)
        probed["agreements"] = agreements(
            probed["log"][0]["probe"],
            source["steps"][:n_visited],
            lambda steps, config: mean_gradient(source, 0, steps, len(steps), config),
        )
        return {"plain": plain, "probed": probed}

    def skipped_epochs():
        """As a cell of `skips`, with what evaluations recorded: `(solver steps, bytes kept after it)` of each."""
        evaluate, evaluations = trainer.evaluate, []

        def watched_evaluate(*args, **kwargs):
            n_before = len(recorded)
            evaluate(*args, **kwargs)
            evaluations.append((len(recorded) - n_before, sum(records.n_bytes for records in set(recorded))))

        settings = dict(frac=1, schedule="joint")
        full = run(EPOCHS, settings, n_updates=4)
        trainer.evaluate = watched_evaluate
        with recorded_steps_of_rollouts() as recorded:
            skipped = run(EPOCHS, settings | dict(skip_forwards=True), n_updates=4)
        trainer.evaluate = evaluate
        return comparison(skipped, full) | {"evaluations": evaluations, "recorded": len(recorded)}

    def retained_epochs():
        """`{settings: a run that retains beside one with own forwards in the same order, and that order}`."""
        found = {}
        for name, (of_this, settings) in RETAINED.items():
            changes = retained_changes(n_ranks) | of_this
            with noted_orders() as orders:
                retained = run(changes, settings | dict(retain=True), n_updates=RETAINED_UPDATES)
            with given_orders(orders):
                own = run(changes, settings if name != "exact" else None, n_updates=RETAINED_UPDATES)
            found[name] = beside_own(retained, own) | {"orders": [order.tolist() for order in orders]}
        return found

    def refused_starts():
        """`{what: the message}` of starts that JAGG refuses."""
        messages = {}
        accelerator = trainer.Accelerator

        def refused(what):
            try:
                run({}, {})
            except JaggError as error:
                messages[what] = str(error)

        for engine in ("MEGATRON_LM", "XLA"):
            trainer.Accelerator = running(accelerator, engine)
            refused(engine)
        trainer.Accelerator = accelerator
        os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "2"
        refused("accumulation")
        del os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"]
        return messages

    cells = (WINDOW_CELLS if setup.TRAINS_WINDOW else CELLS) | getattr(setup, "CELLS", {})
    sources = {
        cell: next(name for name, (other, settings) in cells.items() if settings is None and other == changes)
        for cell, (changes, _) in cells.items()
    }
    messages = refused_starts()
    records = {cell: run(*settings) for cell, settings in cells.items()}
    for cell, record in records.items():
        changes, settings = cells[cell]
        second = record["weights"][1] if settings and len(record["gradients"]) > 1 else None
        source = records[sources[cell]] if second is None else run(changes, None, second)
        record["exact_errors"] = [relative_error(*pair) for pair in zip(record["gradients"], source["gradients"], strict=True)]
        if record["stats"] and record["stats"]["groups"]:
            record["oracle_errors"] = [
                relative_error(gradient, expected_gradient(record, source, number))
                for number, gradient in enumerate(record["gradients"])
            ]
    skipped = skips(run, (WINDOW_SKIPS if setup.TRAINS_WINDOW else SKIPS) | getattr(setup, "SKIPS", {}), records)
    epochs = skipped_epochs() if getattr(setup, "SKIPS_EPOCHS", False) else None
    retained = retained_epochs() if getattr(setup, "RETAINS", True) else None
    probes = probed_records()
    for record in (*records.values(), *probes.values()):
        del record["steps"], record["transformer"], record["config"]
    found = {"cells": records, "sources": sources, "refusals": messages, "skips": skipped, "epochs": epochs, "probes": probes}
    found["retained"] = retained
    torch.save(found, out / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
