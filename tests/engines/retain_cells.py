"""Runs under torchrun: the loop with graphs retained from its rollouts, and with its own forwards, on one engine after another.

usage: torchrun ... retain_cells.py OUT [ENGINE...]; writes OUT/rank{N}.pt, `{engine: {cell: {run: record}}}`. The cells are in
matrix.py, the tests that read the records in test_retaining.py.
"""

import argparse
import io
import sys
import traceback
from contextlib import redirect_stdout
from unittest.mock import patch

import torch
import torch.distributed as dist
from as_rank import recording_rank
from matrix import KEEPING, LOOKED_AT, N_VISITED, RETAIN_CELLS, RETAIN_RUNS, RETAIN_SAMPLES, RETAIN_STEPS_AFTER
from matrix_cells import ARGS, Collectives, build, loop
from observe import first_layer
from skip_cells import MOVING_RATE

from jagg_patch import JaggConfig, JaggError, install
from jagg_patch.loop import retaining


def local_gradients(optimizer):
    gradients = [weight.grad for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
    return torch.cat([getattr(gradient, "_local_tensor", gradient).detach().float().flatten() for gradient in gradients])


def keep_sample(engine):
    """Its first block goes by the latents of the last call of the model: in a recomputation that comes later, by other ones."""
    kept, transformer = [], engine.transformer
    transformer.register_forward_pre_hook(lambda *call: kept.append(call[-1]["hidden_states"].mean()), with_kwargs=True)
    inside = next(part for name, part in transformer.named_modules() if name.endswith("to_v"))
    inside.register_forward_hook(lambda part, args, output: output * (1 + kept[-1]))


def close_sooner(engine):
    """The third update's first accumulation ends with its first sample, which the first two updates' didn't."""
    accumulate, step, n_steps, last = engine.accumulate, engine.step, [0], (2 * RETAIN_SAMPLES + 1) * N_VISITED

    def accumulate_less(closes):
        n_steps[0] += 1
        return accumulate(closes or n_steps[0] == last)

    engine.accumulate, engine.step = accumulate_less, lambda closes: step(closes or n_steps[0] == last)


def run(name, cell, settings, changed=lambda engine: None):
    """Three training steps, the first two of which are watched; each has a rollout, and an optimizer step after some samples.

    Of the third: this rank's part of the gradients, and each training forward's calls of the model and all-gathers.
    """
    engine = build(name, cell, N_VISITED)
    changed(engine)
    is_exact = settings is None or settings.get("frac") == 0  # in another order of steps, whose sum rounds otherwise
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0 if is_exact else MOVING_RATE
    handle = None if settings is None else install(vars(loop), config=JaggConfig(**dict(self_check=False) | settings))
    record, calls, said, step = {"gradients": [], "forwards": [], "gathers": []}, [], io.StringIO(), engine.step
    first_layer(engine.transformer).register_forward_hook(lambda *_: calls.append(True))
    keeping = engine.optimizer.register_step_pre_hook(lambda *_: record["gradients"].append(local_gradients(engine.optimizer)))
    forward, n_steps = loop.grpo_one_step, [0]

    def watched_forward(*args):
        calls.clear()
        with Collectives() as collectives:
            log_probs = forward(*args)
        record["forwards"].append(len(calls))
        record["gathers"].append(collectives.counts["allgather"])
        return log_probs

    def step_after_samples(closes):
        n_steps[0] += 1
        step(n_steps[0] % (RETAIN_SAMPLES * N_VISITED) in RETAIN_STEPS_AFTER)

    if not cell.accumulates:
        engine.step = step_after_samples
    args = dict(n_samples=RETAIN_SAMPLES, sampling_steps=N_VISITED + 1, timestep_fraction=1.0, rollout_batch=1)
    torch.manual_seed(42 + dist.get_rank())
    try:
        with patch.object(loop, "grpo_one_step", watched_forward), redirect_stdout(said):
            for _ in range(3):
                for values in record.values():
                    values.clear()
                loop.train_one_step(argparse.Namespace(**ARGS | args | dict(autocast=cell.autocast)), engine)
    finally:
        keeping.remove()
        if handle is not None:
            handle.uninstall()
    return record | {"weights": engine.trained_weights(), "said": said.getvalue()}


def run_all(name, cell):
    records = {}
    for label, settings in RETAIN_RUNS.items():
        try:
            with patch.object(retaining, "LOOK_EVERY", 1 if label == LOOKED_AT else retaining.LOOK_EVERY):
                records[label] = run(name, cell, settings)
        except Exception:
            return records | {label: {"failed": traceback.format_exc()}}
    return records


def run_keeping(name):
    """What has stopped a run with graphs of a model that keeps a sample."""
    try:
        run(name, KEEPING[name], dict(frac=0, retain=True, self_check=True), keep_sample)
    except JaggError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()
    return None


def main(out, *names):
    with recording_rank(out) as records:
        for name in names or RETAIN_CELLS:
            records[name] = {label: run_all(name, cell) for label, cell in RETAIN_CELLS[name].items()}
            if name in KEEPING:
                records[name]["keeping"] = run_keeping(name)
        if not names:
            labels = ("joint, knots", "joint, knots, retained", "exact", "unpatched")
            cell = RETAIN_CELLS["DDP"]["accumulation"]
            records["sooner"] = {label: run("DDP", cell, RETAIN_RUNS[label], close_sooner) for label in labels}


if __name__ == "__main__":
    main(*sys.argv[1:])
