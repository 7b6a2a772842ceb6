"""Runs under torchrun: the loop's training step with skipped forwards and with all of them, on one engine after another.

usage: torchrun ... skip_cells.py OUT [ENGINE...]; writes OUT/rank{N}.pt, `{engine: {cell: {run: record}}}`. The cells are in
matrix.py, the tests that read the records in test_skipping.py.
"""

import argparse
import gc
import io
import itertools
import sys
import traceback
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from as_rank import recording_rank
from engines import LEARNING_RATE
from matrix import (
    DISAGREEING,
    ENGINES,
    MOVED,
    N_SAMPLES,
    N_VISITED,
    N_VISITED_SKIPPING,
    SKIP_CELLS,
    SKIP_KNOT_RUNS,
    SKIP_RUNS,
    SPOILT,
)
from matrix_cells import ARGS, Collectives, build, loop
from observe import first_layer

from jagg_patch import JaggConfig, install

MOVING_RATE = 3.0  # the ratios then drift by some 0.2 to 0.5 %


@contextmanager
def patched(cell, settings, engine, counts_gathers):
    """JAGG in the loop; a dict that gets what came of it, and of each training forward its calls of the model and all-gathers.

    A half precision's autocast is around the training forward too, so that its cache of casts outlives a call of the model.
    """
    record, said, calls = {"forwards": [], "gathers": [], "log_probs": []}, io.StringIO(), []
    first_layer(engine.transformer).register_forward_hook(lambda *_: calls.append(True))
    plan = {} if "knots_at" in settings else {"group_size": 4, "frac": cell.frac}
    handle = install(vars(loop), config=JaggConfig(self_check=False, **plan | settings))
    forward = loop.grpo_one_step

    def watched_forward(*args):
        calls.clear()
        collectives = Collectives()
        with (
            collectives if counts_gathers else nullcontext(),
            torch.autocast("cpu", cell.autocast, enabled=cell.autocast is not None),
        ):
            log_probs = forward(*args)
        record["forwards"].append(len(calls))
        record["gathers"].append(collectives.counts["allgather"])
        record["log_probs"].append(log_probs.item())
        return log_probs

    try:
        with patch.object(loop, "grpo_one_step", watched_forward), redirect_stdout(said):
            yield record
    finally:
        handle.uninstall()
    record |= {"stats": handle.stats.as_dict(), "said": said.getvalue()}


def run(name, cell, settings, rates=None, **changes):
    """`rates` are the optimizer steps', which then come after each sample; without them the last window's alone moves weights.

    `update` is the last optimizer step's.
    """
    n_samples = 1 if cell.autocast else N_SAMPLES
    engine = build(name, cell, n_samples * N_VISITED_SKIPPING)
    step, weights, n_steps = engine.step, [], itertools.count(1)
    args = ARGS | dict(n_samples=n_samples, sampling_steps=7, timestep_fraction=5.1 / 6, autocast=cell.autocast) | changes

    def begin_window(rate):
        weights.append(engine.trained_weights())
        for group in engine.optimizer.param_groups:
            group["lr"] = rate

    def step_after_sample(closes):
        n_done, n_more = divmod(next(n_steps), N_VISITED_SKIPPING)
        step(not n_more)
        if not n_more and not closes:
            begin_window(rates[n_done])

    if rates:
        engine.step = step_after_sample
    torch.manual_seed(42 + dist.get_rank())
    with patched(cell, settings, engine, "allgather" in ENGINES[name].calls) as record:
        for rate in rates[:1] if rates else [0.0] * (cell.windows - 1) + [LEARNING_RATE]:
            begin_window(rate)
            loop.train_one_step(argparse.Namespace(**args), engine)
    after = engine.trained_weights()
    return record | {"update": after - weights[-1], "weights": after}


def run_all(run, around=nullcontext, runs=SKIP_RUNS):
    records = {}
    for label, settings in runs.items():
        try:
            with around():
                records[label] = run(settings=settings)
        except Exception:
            return records | {label: {"failed": traceback.format_exc()}}
    return records


def stale_outputs():
    """The rollout's outputs stand for the intermediate ones as they are."""
    return patch("jagg_patch.loop.between.estimated_output", lambda recorded, *_: recorded.float())


@contextmanager
def spoilt_rollout(sample, step):
    """On rank 1 the rollout goes on, at that step of that sample, from another output than the model's."""
    predict, rollout = loop.predict_velocity, loop.run_sample_step

    def spoilt(*args):
        steps = itertools.count()

        def predict_other(*args):
            velocity = predict(*args)
            if next(steps) == step:
                velocity[sample] *= 1.2
            return velocity

        with patch.object(loop, "predict_velocity", predict_other):
            return rollout(*args)

    with patch.object(loop, "run_sample_step", spoilt) if dist.get_rank() else nullcontext():
        yield


def run_engine(name):
    records = {label: run_all(partial(run, name, cell)) for label, cell in ENGINES[name].skip_cells.items()}
    whole = partial(run, name, SKIP_CELLS["full, checkpointing"])
    if name in MOVED:
        moved = partial(whole, rates=(MOVING_RATE, LEARNING_RATE))
        skipping = {label: settings for label, settings in SKIP_RUNS.items() if settings["skip_forwards"]}
        records |= {"moved": run_all(moved), "moved, stale": run_all(moved, stale_outputs, skipping)}
        records["knots"] = run_all(partial(whole, sampling_steps=N_VISITED + 1, timestep_fraction=1.0), runs=SKIP_KNOT_RUNS)
    if name in DISAGREEING:
        every_step = partial(whole, n_samples=3, sampling_steps=6, timestep_fraction=1.0)
        records |= {place: run_all(every_step, partial(spoilt_rollout, *spoilt)) for place, spoilt in SPOILT.items()}
    return records


def main(out, *names):
    with recording_rank(out) as records:
        for name in names or ENGINES:
            gc.collect()
            gc.freeze()  # what was imported; DeepSpeed collects garbage whenever it wraps a model
            records[name] = run_engine(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
