"""Runs under torchrun: `main` of DanceGRPO's real Stable Diffusion trainer, in one cell of settings after another.

usage: torchrun ... sd_cells.py CHECKOUT OUT, in a folder with the files that the trainer reads; writes OUT/rank{N}.pt.
Everything of that trainer is inside `main`, so each cell is a run from the rollout to the last optimizer step;
test_dancegrpo_sd.py reads the cells.
"""

import importlib
import os
import sys
import time
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path

import sd_standins
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from diffusers import StableDiffusionPipeline
from observe import local_gradient, local_weights, relative_error, self_checks
from probes import agreements, read_log
from skips import comparison, refusals
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jagg_patch import JaggConfig, JaggError, group_backward, install, plan_groups
from jagg_patch.method.plan import Group, places

# Two prompts, two samples each, in two batches, one optimizer step a pass. The clip is wide: upstream's 1e-4 is below the
# rounding of the latents. Nothing is learned, so that the gradient of a later pass can be compared.
SETTINGS = {
    "sample.num_steps": 10,
    "sample.batch_size": 2,
    "num_generations": 2,
    "num_epochs": 0,  # upstream runs one more
    "mixed_precision": "no",
    "train.batch_size": 2,
    "train.gradient_accumulation_steps": 2,
    "train.learning_rate": 0.0,
    "train.max_grad_norm": 1e9,
    "train.clip_range": 0.2,
}
TWICE = {"train.timestep_fraction": 0.6, "train.num_inner_epochs": 2}
LEARNS = TWICE | {"train.learning_rate": 1e-3}
UNGUIDED = {"train.cfg": False, "sample.guidance_scale": 1.01}  # the rollout can't do without any
BF16 = {"mixed_precision": "bf16"}

# name: (settings that differ, the UNet's dtype); below, "name ...": JAGG's settings on it.
# The gradient cancels over the pixels, so that float32 sums in another order differ by 1e-5 of it: hence float64.
UNPATCHED = {
    "all": ({}, torch.float64),  # 9 of 9 steps
    "twice": (TWICE, torch.float64),  # 5 of 9 steps, others in the second pass
    "learns": (LEARNS, torch.float32),
    "unguided": (UNGUIDED, torch.float32),
    "bf16": (BF16, torch.float32),
}
PATCHED = {
    "all W=2": dict(group_size=2, frac=1, schedule="joint"),
    "all W=3": dict(group_size=3, frac=1, schedule="joint"),  # 3 + 3 + 3
    "all W=4": dict(frac=1, schedule="joint"),  # 5 + 4
    "all knots": dict(knots_at="0,4,7,8"),
    "all default": {},  # 5, then 4 exact
    "all default, checked": dict(self_check=True),
    "twice W=2": dict(group_size=2, frac=1),  # 2 + 2 + 1
    "twice W=4": dict(frac=1),
    "learns off": dict(enabled=False),
    "learns frac 0": dict(frac=0),
    "unguided W=4": dict(frac=1),
    "bf16 off": dict(enabled=False),
    "bf16 W=4": dict(frac=1),
}
SKIPS = ("all W=4", "all default", "twice W=4", "unguided W=4")  # with forwards skipped as well: "... skip"
EPOCHS = {"num_epochs": 1, "train.learning_rate": 1e-3}  # two
PROBED = {"epochs": {}, "epochs probed": dict(probe_every=1, log="epochs.jsonl")}


class Observer:
    """What the training forwards of a UNet are given, and at each optimizer step the gradient and the backward passes so far.

    forwards: how many the UNet ran in training.

    A call's s = dL/d(model output) is right in the unpatched trainer only: elsewhere the output may be the proxy.
    """

    def __init__(self, unet):
        self.unet = unet
        self.calls, self.gradients, self.passes, self.forwards = [], [], [], 0
        self._n_passes = 0
        unet.register_forward_hook(self._watch_call)
        unet.conv_out.register_forward_hook(self._watch_output)  # never a proxy

    def _watch_call(self, unet, inputs, output):
        if unet.training:  # not the rollout
            self.calls.append({"inputs": inputs})
            if output[0].requires_grad:
                output[0].register_hook(partial(self.calls[-1].__setitem__, "grad"))

    def _watch_output(self, module, inputs, output):
        self.forwards += module.training
        if output.requires_grad:
            output.register_hook(self._enter)

    def _enter(self, grad):
        self._n_passes += 1

    def _before_optimizer_step(self, *_):
        self.gradients.append(local_gradient(self.unet))
        self.passes.append(self._n_passes)

    @contextmanager
    def watching(self):
        hook = register_optimizer_step_pre_hook(self._before_optimizer_step)
        try:
            yield self
        finally:
            hook.remove()


def backward_of_batch(unet, record, start):
    """`backward(positions, config)`, which runs `group_backward` on those visited steps of the batch whose first call is `start`.

    In a batch each sample has an order of its own, so batches of the k-th visited step of each are put together first.
    A step's loss enters as `(s * v).sum()` with the s that the trainer's own loss had, whose gradient in v is s.
    """
    batch = record["calls"][start : start + record["timesteps"].shape[2]]
    latents, timesteps, embeds = map(torch.stack, zip(*(call["inputs"] for call in batch), strict=True))
    timesteps, order = timesteps.sort(0, descending=True)
    rows = torch.arange(timesteps.shape[1])
    latents, grads = latents[order, rows], torch.stack([call["grad"] for call in batch])[order, rows]

    def velocity(step):
        with torch.autocast("cpu", torch.bfloat16, enabled=record["is_bf16"]):
            output = unet(latents[step], timesteps[step], embeds[step]).sample
        return output.float() if record["is_bf16"] else output

    def backward(positions, config):
        group_backward(
            lambda j: velocity(positions[j]),
            lambda j, v_hat: (grads[positions[j]] * v_hat).sum(),
            timesteps[list(positions)],
            config,
            [knot - positions[0] for knot in positions.knots] if isinstance(positions, Group) else None,
        )

    return backward


def take_mean_gradient(unet):
    """The mean over the ranks of the gradient, which is dropped."""
    gradient = local_gradient(unet)
    dist.all_reduce(gradient)
    unet.zero_grad()
    return gradient / dist.get_world_size()


def oracle_gradients(unet, record, config):
    """The gradient of each pass that JAGG should give, from what the unpatched trainer did, averaged over the ranks."""
    n_batches, n_visited = record["timesteps"].shape[1:3]
    groups = [group for group in plan_groups(n_visited, config) if len(group) > 1]
    exact = [[place.position] for place in places(n_visited, groups) if place.is_exact]
    gradients = []
    for start in range(0, len(record["calls"]), n_visited):
        backward = backward_of_batch(unet, record, start)
        for group in (*groups, *exact):
            backward(group, config)
        if len(gradients) < (start + n_visited) // (n_batches * n_visited):
            gradients.append(take_mean_gradient(unet))
    return gradients


def probe_agreements(unet, record, log):
    """`agreements` of the first probe with what the unpatched trainer's first batch gives."""
    backward = backward_of_batch(unet, record, 0)

    def gradient(positions, config):
        backward(positions, config)
        return take_mean_gradient(unet)

    return agreements(log[0]["probe"], range(record["timesteps"].shape[2]), gradient)


def main(checkout, out):
    torch.set_num_threads(1)
    sd_standins.install(checkout)
    trainer = importlib.import_module("fastvideo.train_grpo_sd")
    logged, rollout_seconds, rollout = [], [], trainer.pipeline_with_logprob

    @wraps(rollout)
    def timed_rollout(*args, **kwargs):
        start = time.perf_counter()
        result = rollout(*args, **kwargs)
        rollout_seconds.append(time.perf_counter() - start)
        return result

    trainer.pipeline_with_logprob = timed_rollout
    log = trainer.Accelerator.log

    def recording_log(accelerator, values, **kwargs):
        logged.append({key: torch.as_tensor(value).tolist() for key, value in values.items()})
        log(accelerator, values, **kwargs)

    trainer.Accelerator.log = recording_log

    def run(changes, dtype, settings=None):
        trainer.FLAGS(["train_grpo_sd", f"--config={checkout}/fastvideo/config_sd/dgx.py:hpsv2"])
        config = trainer.FLAGS.config
        config.update_from_flattened_dict(SETTINGS | changes)
        AcceleratorState._reset_state()  # the process group stays
        pipeline = sd_standins.build_pipeline(dtype)
        StableDiffusionPipeline.from_pretrained = lambda *_, **__: pipeline
        handle = None if settings is None else install(vars(trainer), config=JaggConfig(**dict(self_check=False) | settings))
        observer = Observer(pipeline.unet)
        logged.clear()
        rollout_seconds.clear()
        try:
            with observer.watching(), refusals() as refused, self_checks() as checks:
                trainer.main(None)
        finally:
            if handle:
                handle.uninstall()
        n_batches = config.sample.batch_size * config.num_generations // config.train.batch_size
        timesteps = torch.stack([call["inputs"][1] for call in observer.calls])
        ran_others = handle and (handle.config.skip_forwards or handle.config.self_check)
        ran_all = not config.num_epochs and not ran_others
        return {
            "weights": local_weights(pipeline.unet),
            "rng": torch.get_rng_state(),
            "gradients": observer.gradients,
            "passes": observer.passes,
            "forwards": observer.forwards,
            "refusals": refused,
            "checks": checks,
            "stats": handle.stats.as_dict() if handle else None,
            "timesteps": timesteps.unflatten(0, (config.train.num_inner_epochs, n_batches, -1)) if ran_all else None,
            "logged": list(logged),
            "rollout_seconds": list(rollout_seconds),
            "calls": observer.calls,
            "is_bf16": config.mixed_precision == "bf16",
        }

    records = {name: run(*given) for name, given in UNPATCHED.items()}
    for name, settings in PATCHED.items():
        source = name.split()[0]
        unpatched, record = records[source], run(*UNPATCHED[source], settings)
        records[name] = record
        record["exact_errors"] = list(map(relative_error, record["gradients"], unpatched["gradients"]))
        if "W=" in name or "default" in name or "knots" in name:
            unet = sd_standins.build_pipeline(UNPATCHED[source][1]).unet
            expected = oracle_gradients(unet, unpatched, JaggConfig(**settings))
            record["oracle_errors"] = list(map(relative_error, record["gradients"], expected))
    for name in SKIPS:
        record = run(*UNPATCHED[name.split()[0]], PATCHED[name] | dict(skip_forwards=True))
        records[f"{name} skip"] = record | {"skips": comparison(record, records[name])}
    records |= {name: run(EPOCHS, torch.float64, settings) for name, settings in PROBED.items()}
    dist.barrier()
    record = records["epochs probed"]
    record["log"] = read_log(Path("epochs.jsonl"))
    record["agreements"] = probe_agreements(sd_standins.build_pipeline(torch.float64).unet, records["all"], record["log"])
    for record in records.values():
        del record["calls"]

    def refusal(settings):
        try:
            run({}, torch.float32, settings)
        except JaggError as error:
            return str(error)

    records["refused"] = {"unsorted": refusal(dict(frac=0, probe_every=1))}
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "4"  # beats what the trainer asks for
    records["refused"]["accumulation"] = refusal({})
    torch.save(records, os.path.join(out, f"rank{dist.get_rank()}.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
