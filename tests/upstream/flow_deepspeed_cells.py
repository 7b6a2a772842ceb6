"""Runs under torchrun: a real Flow-GRPO trainer's whole `main` on DeepSpeed, in one cell of settings after another.

usage: torchrun ... flow_deepspeed_cells.py TRAINER OUT, with the environment that accelerate's launcher would give it; writes
OUT/rank{N}.pt. Everything but the engine and the cells is as in flow_cells.py; the tests that read the cells are in
test_flow_grpo_deepspeed.py.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from flow_cells import LOOP, OneEpochIsOver, prepare, skips
from observe import Observer, local_weights, oracle_gradient, recorded_steps, relative_error
from skips import refusals
from torch.nn.parallel import DistributedDataParallel

from jagg_patch import JaggConfig, JaggError, install

# The gradient's entries are about 1e-5. Such an epsilon makes AdamW's step smooth in them, such a rate larger than rounding.
SMOOTH = {"train.adam_epsilon": 1e-3, "train.learning_rate": 10.0}
# Two optimizer steps from the same weights, so that the second one's gradient is known too.
TWICE = SMOOTH | {"train.num_inner_epochs": 2, "train.learning_rate": 0.0}
FULL = SMOOTH | {"use_lora": False, "train.beta": 0.0}

# name: (configuration that differs, JAGG settings, None for the unpatched trainer, {} for the defaults)
CELLS = {
    "unpatched": (SMOOTH, None),
    "off": (SMOOTH, dict(enabled=False)),
    "W=2": (SMOOTH, dict(group_size=2, frac=1, schedule="joint")),
    "default": (SMOOTH, {}),  # 9 steps: 5, then 4 exact; sequential, as always before the third optimizer step
    "twice unpatched": (TWICE, None),
    "twice W=3 joint": (TWICE, dict(group_size=3, frac=1, schedule="joint")),
    "twice W=3 sequential": (TWICE, dict(group_size=3, frac=1, schedule="sequential")),
    "twice knots joint": (TWICE, dict(knots_at="0,4,7,8", schedule="joint")),
    "twice knots sequential": (TWICE, dict(knots_at="0,4,7,8", schedule="sequential")),
    "full unpatched": (FULL, None),
    "full W=3 joint": (FULL, dict(group_size=3, frac=1, schedule="joint")),
    "full W=3 sequential": (FULL, dict(group_size=3, frac=1, schedule="sequential")),
}
SKIPS = {  # each is run with forwards skipped as well
    "full W=3 joint": CELLS["full W=3 joint"],
    "twice W=4 joint": (TWICE, dict(frac=1, schedule="joint")),
    "twice W=4 sequential": (TWICE, dict(frac=1, schedule="sequential")),
}


class PartitionObserver(Observer):
    """Gradients as the optimizer inside DeepSpeed's gets them: all ranks' partitions of those of the trained parameters.

    initial: the weights before the first of them is taken.
    """

    def _before_optimizer_step(self, optimizer, *_):
        if not self.gradients:
            self.initial = local_weights(self.transformer)
        (partition,) = optimizer.param_groups[0]["params"]
        partitions = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
        dist.all_gather(partitions, partition.grad)
        self.gradients.append(torch.cat(partitions)[: sum(p.numel() for p in self.transformer.parameters() if p.requires_grad)])


def main(name, out):
    trainer, setup, configure = prepare(name, out)
    del os.environ["ACCELERATE_USE_CPU"]  # accelerate would start DDP with it
    PartialState(backend="gloo")  # and knows no backend for DeepSpeed on a CPU

    def run(changes, settings):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        pipeline = setup.build()
        setattr(trainer, setup.PIPELINE, SimpleNamespace(from_pretrained=lambda *_, **__: pipeline))
        trainer.FLAGS = SimpleNamespace(config=configure(changes))
        transformer = pipeline.transformer
        observer = PartitionObserver(transformer)
        handle = None
        if settings is not None:
            handle = install(vars(trainer), config=JaggConfig(**settings) if settings else None)
        try:
            with (
                observer.watching() as seen,
                refusals() as refused,
                recorded_steps(trainer, LOOP) if settings is None else nullcontext() as steps,
            ):
                trainer.main(None)
        except OneEpochIsOver:
            pass
        finally:
            if handle:
                handle.uninstall()
        return {
            "update": local_weights(transformer) - seen.initial,
            "rng": torch.get_rng_state(),
            "gradients": seen.gradients,
            "forwards": seen.forwards,
            "passes": seen.passes,
            "reaching": seen.reaching,
            "stats": handle.stats.as_dict() if handle else None,
            "config": handle.config if handle else None,
            "steps": steps,
            "refusals": refused,
        }

    def expected_gradients(record, source):
        """Of each optimizer step, from the same model under DDP: each rank's own, then the mean."""
        engine, model = source["steps"][0]["arguments"]["transformer"], setup.build().transformer
        if hasattr(engine.module, "peft_config"):
            model = trainer.get_peft_model(model, engine.module.peft_config["default"])
        wrapped = DistributedDataParallel(model)
        steps = [step | {"arguments": step["arguments"] | {"transformer": wrapped}} for step in source["steps"]]
        n_steps = len(steps) // len(source["gradients"])
        n_visited = 1 + max(step["arguments"]["j"] for step in steps)
        is_trained = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in model.parameters()])
        for start in range(0, len(steps), n_steps):
            with wrapped.no_sync():
                gradient = oracle_gradient(trainer, model, steps[start : start + n_steps], n_visited, record["config"], LOOP)
            dist.all_reduce(gradient)
            yield gradient[is_trained] / dist.get_world_size()

    records = {cell: run(*settings) for cell, settings in CELLS.items()}
    sources = {
        cell: next(name for name, (other, settings) in CELLS.items() if settings is None and other == changes)
        for cell, (changes, _) in CELLS.items()
    }
    for cell, record in records.items():
        source = records[sources[cell]]
        record["exact_errors"] = [relative_error(*pair) for pair in zip(record["gradients"], source["gradients"], strict=True)]
        if record["stats"] and record["stats"]["groups"]:
            expected = expected_gradients(record, source)
            record["oracle_errors"] = [relative_error(*pair) for pair in zip(record["gradients"], expected, strict=True)]
    stage = records["unpatched"]["steps"][0]["arguments"]["transformer"].zero_optimization_stage()
    skipped = skips(run, SKIPS, records)
    for record in records.values():
        del record["steps"], record["config"]
    refusal = None
    try:
        run({}, dict(probe_every=1))
    except JaggError as error:
        refusal = str(error)
    found = {"cells": records, "sources": sources, "stage": stage, "refusal": refusal, "skips": skipped}
    torch.save(found, out / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
