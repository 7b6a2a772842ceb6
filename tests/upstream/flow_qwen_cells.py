"""Runs under torchrun: a real Flow-GRPO Qwen trainer's whole `main` on a tiny pipeline, in one cell of settings after another.

usage: torchrun ... flow_qwen_cells.py CHECKOUT TRAINER OUT; writes OUT/rank{N}.pt, which test_flow_grpo_qwen.py reads. As
flow_cells.py, for the trainers that have no accelerate: upstream's own start of the process group and FSDP wrapper, over gloo.
"""

import importlib
import os
import random
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import flow_standins as standins
import torch
import torch.distributed as dist
import wandb
from flow_cells import CONFIG, EPOCHS, LOOP, RETAINED, RETAINED_UPDATES, WINDOW_CELLS, WINDOW_SKIPS
from flow_cells import OneEpochIsOver, beside_own, retained_changes, run_main, skips
from observe import local_weights, oracle_gradient, relative_error, self_checks
from probes import agreements, read_log
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jagg_patch import JaggConfig, JaggError, install
from jagg_patch.trainers.intercept import ForwardingModule


def end_after_one_epoch(*arguments):
    """In the place of the trainer's evaluation, whose eighth argument is the number of optimizer steps."""
    if arguments[7]:
        raise OneEpochIsOver


def put_on_cpu(trainer, rank):
    """In the place of CUDA, NCCL and worker processes. The process group is started once and then stays."""
    fsdp_utils = importlib.import_module("flow_grpo.fsdp_utils")
    start, fsdp, loader, set_seed = dist.init_process_group, fsdp_utils.FSDP, trainer.DataLoader, trainer.set_seed
    torch.cuda.set_device = lambda device: None
    torch.cuda.device_count = lambda: 1  # upstream takes the rank modulo this for FSDP's device
    torch.cuda.amp.autocast = partial(torch.autocast, "cpu")
    dist.init_process_group = lambda backend, init_method: dist.is_initialized() or start("gloo", init_method=init_method)
    fsdp_utils.FSDP = lambda model, **kwargs: fsdp(model, **(kwargs | {"device_id": torch.device("cpu")}))
    trainer.DataLoader = lambda *args, **kwargs: loader(*args, **(kwargs | {"num_workers": 0}))
    trainer.set_seed = lambda seed, **kwargs: set_seed(seed + rank, **kwargs)  # upstream's CUDA seeds differ so
    trainer.save_fsdp_checkpoint = lambda *_: None  # on a CPU FSDP1 can't give its full state


def main(checkout, name, out):
    torch.set_num_threads(1)
    setup = importlib.import_module(f"flow_setups.{name.removeprefix('train_')}")
    standins.install()
    trainer = importlib.import_module(name)
    rank = int(os.environ["RANK"])
    put_on_cpu(trainer, rank)
    getattr(setup, "prepare", lambda trainer: None)(trainer)
    evaluate, trainer.eval = trainer.eval, end_after_one_epoch
    trainer.get_peft_model = standins.with_trained_adapter(trainer.get_peft_model)
    trainer.QwenImageTransformer2DModel = SimpleNamespace(from_pretrained=lambda *_, **__: setup.build_reference())
    logged = []

    def log(values, **kwargs):
        if "policy_loss" in values:
            logged.append({key: float(value) for key, value in values.items()})
        wandb.log(values, **kwargs)

    trainer.wandb = ForwardingModule(wandb, log=log)
    getattr(setup, "write_prompts", standins.write_prompts)(out / f"prompts{rank}")
    base = importlib.import_module("config.base")

    def run(changes, settings, n_updates=None):
        logged.clear()
        pipeline = setup.build()
        setattr(trainer, setup.PIPELINE, SimpleNamespace(from_pretrained=lambda *_, **__: pipeline))
        own = {"dataset": str(out / f"prompts{rank}"), "logdir": str(out / "logs"), "save_dir": str(out)}
        config = base.get_config()
        config.update_from_flattened_dict(CONFIG | own | setup.CONFIG | changes)
        trainer.FLAGS = SimpleNamespace(config=config)
        transformer, weights = pipeline.transformer, []
        handle = None
        if settings is not None:
            handle = install(vars(trainer), config=JaggConfig(**dict(self_check=False) | settings) if settings else None)
        hook = register_optimizer_step_pre_hook(lambda *_: weights.append(local_weights(transformer)))
        try:
            with self_checks() as checks:
                seen, steps, events, refused = run_main(trainer, transformer, handle, evaluate, weights, n_updates)
        finally:
            hook.remove()
        return {
            "weights": [*weights, local_weights(transformer)],
            "rng": torch.get_rng_state(),
            "random": random.getstate(),
            "gradients": seen.gradients,
            "forwards": seen.forwards,
            "passes": seen.passes,
            "gathers": seen.gathers,
            "logged": list(logged),
            "stats": handle.stats.as_dict() if handle else None,
            "config": handle.config if handle else None,
            "tokens": [step["arguments"]["sample"]["prompt_embeds"].shape[1] for step in steps or ()],
            "steps": steps,
            "transformer": transformer,
            "events": events,
            "refusals": refused,
            "checks": checks,
        }

    def first_gradient(source, steps, n_visited, config):
        """This rank's shard of that of `steps` before the first optimizer step."""
        transformer, parameters = source["transformer"], list(source["transformer"].parameters())
        for parameter, value in zip(parameters, source["weights"][0].split([p.numel() for p in parameters]), strict=True):
            parameter.data.copy_(value.view_as(parameter))
        return oracle_gradient(trainer, transformer, steps, n_visited, config, LOOP)

    def expected_gradient(record, source):
        steps = source["steps"][: len(source["steps"]) // len(source["gradients"])]
        n_visited = 1 + max(step["arguments"]["j"] for step in steps)
        return first_gradient(source, steps, n_visited, record["config"])

    def probed_records():
        """Of all 9 steps, as in upstream's configuration without a window."""
        changes, log = EPOCHS | {"sample.sde_window_size": 0}, out / "log.jsonl"
        plain = run(changes, {}, 4)
        os.environ |= {"JAGG_PROBE_EVERY": "1", "JAGG_LOG": str(log)}
        probed = run(changes, {}, 4)
        del os.environ["JAGG_PROBE_EVERY"], os.environ["JAGG_LOG"]
        dist.barrier()
        source = run(changes, None, 4)  # with the evaluation before it, which draws random numbers in the edit trainer
        probed["log"] = read_log(log)
        probed["agreements"] = agreements(
            probed["log"][0]["probe"],
            source["steps"][:9],
            lambda steps, config: first_gradient(source, steps, len(steps), config),
        )
        return {"plain": plain, "probed": probed}

    refusal = None
    try:
        run({}, dict(group_size=2 + rank))  # first: nothing but main has started the process group then
    except JaggError as error:
        refusal = str(error)
    cells = WINDOW_CELLS | setup.CELLS
    sources = {
        cell: next(name for name, (other, settings) in cells.items() if settings is None and other == changes)
        for cell, (changes, _) in cells.items()
    }
    records = {cell: run(*settings) for cell, settings in cells.items()}
    for cell, record in records.items():
        source = records[sources[cell]]
        record["exact_errors"] = [relative_error(*pair) for pair in zip(record["gradients"], source["gradients"], strict=True)]
        if record["stats"] and record["stats"]["groups"]:
            record["oracle_error"] = relative_error(record["gradients"][0], expected_gradient(record, source))
    skipped = skips(run, WINDOW_SKIPS | {"W=3": WINDOW_CELLS["W=3"]}, records)
    probes, retained = probed_records(), {}
    for name, (of_this, settings) in RETAINED.items():
        changes = retained_changes(2) | {"sample.sde_window_size": 4} | of_this
        own = run(changes, settings if name != "exact" else None, RETAINED_UPDATES)
        retained[name] = beside_own(run(changes, settings | dict(retain=True), RETAINED_UPDATES), own)
    for record in (*records.values(), *probes.values()):
        del record["steps"], record["transformer"], record["config"]
    found = {"cells": records, "sources": sources, "refusal": refusal, "skips": skipped, "probes": probes}
    found["retained"] = retained
    torch.save(found, out / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
