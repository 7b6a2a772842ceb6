"""Runs under torchrun: the real Hunyuan trainer where its best-of-n selection keeps as many samples as each has trained steps.

The permutation that shuffles the selection is then as long as those that order the timesteps. usage: torchrun ... best_of_n.py
CHECKOUT OUT; writes OUT/records.pt. The tests that read it are in test_hunyuan.py.
"""

import argparse
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import cells
import standins
import torch
import torch.distributed as dist
from observe import Observer, local_weights, oracle_gradient, recorded_steps, relative_error
from setups import hunyuan
from skips import comparison, refusals

from jagg_patch import JaggConfig, install
from jagg_patch.loop.retaining import Retaining
from jagg_patch.trainers.intercept import ForwardingModule

# Three optimizer steps, so that the first one's gradient says which samples came first.
ARGS = cells.ARGS | hunyuan.ARGS | dict(num_generations=10, bestofn=9, gradient_accumulation_steps=3)
N_VISITED = ARGS["sampling_steps"] - 1
CONFIGS = {
    "off": JaggConfig(enabled=False),
    "W=3": JaggConfig(group_size=3, frac=1, self_check=False),
    "W=4": JaggConfig(frac=1, self_check=False),
    "knots": JaggConfig(knots_at="0,4,7,8", self_check=False),
}
SKIPS = JaggConfig(frac=1, skip_forwards=True, self_check=False)
JOINT = JaggConfig(frac=1, schedule="joint", self_check=False)


def sorted_randperm(*args, **kwargs):
    return torch.randperm(*args, **kwargs).sort().values


@contextmanager
def graphs_left():
    """A list of how many samples' graphs there were before and after those that aren't trained were let go of."""
    left, let_go = [], Retaining._let_go_of_others

    def counted(retaining, numbers):
        before = {batch for batch, _ in retaining._outputs}
        let_go(retaining, numbers)
        left.append((len(before), len({batch for batch, _ in retaining._outputs})))

    Retaining._let_go_of_others = counted
    try:
        yield left
    finally:
        Retaining._let_go_of_others = let_go


def main(checkout, out):
    torch.set_num_threads(1)
    standins.install(checkout)
    dist.init_process_group("gloo")
    trainer, transformer, train_arguments = hunyuan.build("fastvideo.train_grpo_hunyuan")
    observer, real_torch = Observer(transformer), trainer.torch
    initial = [parameter.detach().clone() for parameter in transformer.parameters()]

    def restore():
        for parameter, value in zip(transformer.parameters(), initial, strict=True):
            parameter.data.copy_(value)
        transformer.zero_grad()

    def run(config=None, n_training_steps=1):
        restore()
        torch.manual_seed(42)
        optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-5)
        arguments = train_arguments() | dict(
            args=argparse.Namespace(**ARGS),
            transformer=transformer,
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
            max_grad_norm=1e9,
        )
        handle = install(vars(trainer), config=config) if config else None
        with observer.watching() as seen, recorded_steps(trainer) as steps, refusals() as refused:
            for _ in range(n_training_steps):
                trainer.train_one_step(**arguments | {"loader": train_arguments()["loader"]})  # which has one batch
        if handle:
            handle.uninstall()
        return {
            "weights": local_weights(transformer),
            "rng": torch.get_rng_state(),
            "gradients": seen.gradients,
            "forwards": seen.forwards,
            "passes": seen.passes,
            "stats": handle.stats.as_dict() if handle else None,
            "refusals": refused,
            "steps": steps,
        }

    records = {"unpatched": run()} | {cell: run(config) for cell, config in CONFIGS.items()}
    skips = comparison(run(SKIPS), records["W=4"])
    own = run(JOINT, n_training_steps=3)
    with graphs_left() as left:
        retained = run(replace(JOINT, retain=True), n_training_steps=3)
    trainer.torch = ForwardingModule(torch, randperm=sorted_randperm)
    records["every draw sorted"] = run()
    trainer.torch = real_torch

    restore()
    first_window = records["unpatched"]["steps"][: ARGS["gradient_accumulation_steps"] * N_VISITED]
    for cell in ("W=3", "W=4", "knots"):
        expected = oracle_gradient(trainer, transformer, first_window, N_VISITED, CONFIGS[cell])
        records[cell]["oracle_error"] = relative_error(records[cell]["gradients"][0], expected)
    for record in records.values():
        # [sample, visited step]: its place in the trajectory, and the latents that it is given.
        taken = [step["arguments"] for step in record.pop("steps")]
        record["order"] = torch.stack([arguments["i"] for arguments in taken]).unflatten(0, (-1, N_VISITED))
        record["latents"] = torch.cat([arguments["latents"] for arguments in taken]).unflatten(0, (-1, N_VISITED))
    records["W=4"]["skips"] = skips
    records["W=4"]["retained"] = {
        "left": left,
        "errors": [relative_error(*pair) for pair in zip(retained["gradients"], own["gradients"], strict=True)],
        "fewer": own["forwards"] - retained["forwards"],
        "retained": retained["stats"]["retained_forwards"],
        "alike": torch.equal(retained["rng"], own["rng"]) and torch.equal(retained["weights"], own["weights"]),
    }
    torch.save(records, os.path.join(out, "records.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
