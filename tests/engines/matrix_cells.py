"""Runs under torchrun: the loop's training step on one engine after another, in each cell of settings, from the same weights.

usage: torchrun ... matrix_cells.py OUT ENGINE...; writes OUT/ENGINE/rank{N}.pt, `{cell: {run: record}}`. The cells are in
matrix.py.
"""

import argparse
import functools
import gc
import logging
import sys
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from engines import LEARNING_RATE
from matrix import ENGINES, GROUPS, KNOT_RUNS, KNOTS, N_SAMPLES, N_VISITED, PAIRED, PATCHED
from observe import Loop, folded, model_output, recorded_steps, self_checks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper

from jagg_patch import JaggConfig, install
from jagg_patch.trainers import intercept

sys.path.insert(0, str(Path(__file__).parent / "loop"))
import train_grpo_flux as loop  # noqa: E402

BLOCKS = (FluxTransformerBlock, FluxSingleTransformerBlock)
ARGS = dict(n_samples=N_SAMPLES, sampling_steps=9, timestep_fraction=0.75, eta=0.7, shift=3.0, clip_range=0.2)
TINY_FLUX = dict(
    patch_size=1,
    in_channels=loop.CHANNELS,
    num_layers=1,
    num_single_layers=1,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=loop.WIDTH,
    pooled_projection_dim=loop.WIDTH,
    guidance_embeds=False,
    axes_dims_rope=(4, 6, 6),
)


class Collectives:
    """Counts c10d's calls by kind while it is entered, from Python or from DDP's reducer.

    By a kernel in front of each of c10d's operations: a dispatch mode, as torch's CommDebugMode is, slows all others too.
    """

    kinds = ("allgather", "reducescatter", "allreduce", "reduce", "broadcast")
    entered = []
    library = torch.library.Library("c10d", "IMPL")

    def __init__(self):
        self.counts = Counter()

    def __enter__(self):
        self.entered.append(self)
        return self

    def __exit__(self, *_):
        self.entered.remove(self)

    @classmethod
    def watch(cls, name, kind):
        operation = getattr(torch.ops.c10d, name).default

        def count(keys, *args):
            for collectives in cls.entered:
                collectives.counts[kind] += 1
            return operation.redispatch(keys & torch._C._after_autograd_keyset, *args)

        cls.library.impl(name, count, "AutogradCPU", with_keyset=True)

    @classmethod
    def watch_all(cls):
        for name in (name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")):
            kind = next((kind for kind in cls.kinds if name.replace("_", "").startswith(kind)), None)
            if kind and "." not in name:
                cls.watch(name, kind)


Collectives.watch_all()


def read_once(differences):
    """The loop's contract takes as long to read as a training step, and `install` asks for it each time."""
    found = {}

    def read(text, contract):
        if text not in found:
            found[text] = differences(text, contract)
        return found[text]

    return read


intercept.differences = read_once(intercept.differences)


def build(engine, cell, n_micro_steps):
    torch.manual_seed(0)
    model = FluxTransformer2DModel(**TINY_FLUX)
    if cell.lora:
        from peft import LoraConfig

        model.requires_grad_(False)
        targets = ["to_k", "to_q", "to_v", "to_out.0"]
        model.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=targets))  # neither factor starts at zero

    def checkpoint(module):
        if cell.checkpointing:
            blocks = [part for part in module.modules() if isinstance(part, BLOCKS)]
            chosen = set(blocks[: round(cell.checkpointing * len(blocks))])
            apply_activation_checkpointing(module, checkpoint_wrapper, check_fn=chosen.__contains__)

    return ENGINES[engine].engine(model, BLOCKS, checkpoint, cell, n_micro_steps)


def watch(engine):
    """A list that gets, at every backward of `engine`, the passes that entered the transformer and the collectives inside it."""
    backward, backwards, entered = engine.backward, [], []

    def watch_output(module, inputs, output):
        if output[0].requires_grad:
            output[0].register_hook(lambda grad: entered.append(True))

    def watched_backward(loss):
        entered.clear()
        with Collectives() as collectives:
            backward(loss)
        backwards.append(dict(collectives.counts) | {"passes": len(entered)})

    engine.transformer.register_forward_hook(watch_output)
    engine.backward = watched_backward
    return backwards


def run(engine, windows):
    """`windows` are functions of the engine that end with an optimizer step; all but the last one's leave the weights alone."""
    backwards, before = watch(engine), engine.trained_weights()
    torch.manual_seed(42 + dist.get_rank())
    for number, window in enumerate(windows, 1):
        for group in engine.optimizer.param_groups:
            group["lr"] = LEARNING_RATE if number == len(windows) else 0.0
        backwards.clear()
        window(engine)
    after = engine.trained_weights()
    return {"update": after - before, "weights": after, "backwards": backwards}


def train(cell, engine):
    loop.train_one_step(argparse.Namespace(**ARGS, autocast=cell.autocast), engine)


def exact_backwards(sets, steps):
    """`(step, upstream gradient)` of the exact backwards that the recorded `steps` come to, under `sets` of a sample's knots."""
    for start in range(0, len(steps), N_VISITED):
        sample = sorted(steps[start : start + N_VISITED], key=lambda step: int(step["arguments"]["i"]))
        timesteps = [step["arguments"]["timesteps"] for step in sample]
        for knots in sets:
            yield from ((sample[n], grad) for n, grad in folded(knots, timesteps, [step["grad"] for step in sample]))


def reference(passes, engine):
    """Each pass a forward and a backward of its own; `backward` puts a factor on a loss that the gradients have already."""
    for number, (step, grad) in enumerate(passes, 1):
        step["arguments"]["transformer"] = engine.transformer
        closes = number == len(passes)
        with engine.accumulate(closes):
            engine.backward((model_output(loop, Loop(), step) * grad).sum() / engine.scale)
            engine.step(closes)


@contextmanager
def one_rollout():
    """Runs from the same weights and random numbers sample the same: the first one's stand for the others', which train alone."""
    sample, first = loop.sample_reference_model, []

    @functools.wraps(sample)
    def sample_once(*args):
        state = torch.get_rng_state()
        if not first:
            first.extend((state, sample(*args), torch.get_rng_state()))
        before, sampled, after = first
        assert torch.equal(state, before)
        torch.set_rng_state(after)
        return tuple(tensor.clone() for tensor in sampled)

    loop.sample_reference_model = sample_once
    try:
        yield
    finally:
        loop.sample_reference_model = sample


def run_cell(name, cell):
    n_micro_steps = N_SAMPLES * N_VISITED
    windows = [partial(train, cell)] * cell.windows
    records = {}
    try:
        with recorded_steps(loop) as steps:
            records["unpatched"] = run(build(name, cell, n_micro_steps), windows)
    except Exception as error:
        return {"unpatched": {"failed": f"{type(error).__name__}: {error}"}}
    records["unpatched"]["visited"] = [int(step["arguments"]["i"]) for step in steps]
    groups = [tuple(sorted({group[0], group[-1]})) for group in GROUPS[cell.frac]]
    for label, sets in {"reference": groups, "reference, knots": [KNOTS] * cell.has_knots}.items():
        windows_of_steps = [steps[n : n + n_micro_steps] for n in range(0, len(steps), n_micro_steps)] if sets else []
        passes = [list(exact_backwards(sets, window)) for window in windows_of_steps]
        if passes:
            records[label] = run(build(name, cell, len(passes[0])), [partial(reference, window) for window in passes])
    patched = PATCHED | (PAIRED if cell.checkpointing else {}) | (KNOT_RUNS if cell.has_knots else {})
    for label, settings in patched.items():
        plan = {} if "knots_at" in settings else {"frac": cell.frac}
        handle = install(vars(loop), config=JaggConfig(**plan | settings))
        try:
            with self_checks() as checks:
                records[label] = run(build(name, cell, n_micro_steps), windows)
            records[label] |= {"stats": handle.stats.as_dict(), "checks": checks}
        except Exception:
            records[label] = {"failed": traceback.format_exc()}
        finally:
            handle.uninstall()
    return records


def run_engine(name):
    records = {}
    for label, cell in ENGINES[name].cells.items():
        gc.collect()
        gc.freeze()  # what was imported; DeepSpeed collects garbage whenever it wraps a model
        with one_rollout() if cell.windows == 1 else nullcontext():
            records[label] = run_cell(name, cell)
    return records


def main(out, *names):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    for name in names:
        records = run_engine(name)
        Path(out, name).mkdir(exist_ok=True)
        torch.save(records, Path(out, name, f"rank{dist.get_rank()}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
