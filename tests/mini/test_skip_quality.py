"""How good gradients are that rest on skipped forwards, once the policy has moved: the mini trainer's own training step.

One training step with four windows of a prompt's samples each. After each of the first three comes an optimizer step, each larger
than the last; its gradient is the unpatched run's in every run, so that all train the next window from the same policy, which has
moved further from the rollout's each time. Their gradients are compared with the exact one, group by group: JAGG's with all
forwards, with skipped ones, and with the rollout's outputs left as they were. Nothing is clipped; what would be is counted.

usage: PYTHONPATH=.:tests:upstream python tests/mini/test_skip_quality.py OUT.json
"""

import argparse
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.distributed as dist
from launch import ROOT
from observe import local_gradient, local_weights
from results import made_by

from jagg_patch import JaggConfig, install, plan_groups

MINI = ROOT / "upstream/mini"
LEARNING_RATES = (2.5e-4, 2e-3, 4e-3)  # of the optimizer steps
ETAS = (0.3, 0.7)  # the last is the demo's
CLIP_RANGES = (1e-4, 1e-2)  # the first is the trainer's default, and upstream's
SAMPLES = 8
N_STEPS = 15
JAGG = dict(frac=1, schedule="joint")
RUNS = {"exact": None, "all": JAGG, "skipped": JAGG | {"skip_forwards": True}, "stale": JAGG | {"skip_forwards": True}}
GROUPS = plan_groups(N_STEPS, JaggConfig(**JAGG))
ESTIMATED = [position for group in GROUPS for position in group[1:-1]]
SETTINGS = dict(
    pretrained_model_name_or_path=str(MINI / "data/flux"),
    train_batch_size=len(LEARNING_RATES) + 1,
    num_generations=SAMPLES,
    micro_batch_size=SAMPLES,
    use_group=True,
    gradient_accumulation_steps=1,
    gradient_checkpointing=False,
    fsdp_sharding_startegy="full",
    max_grad_norm=1e9,
    sampling_steps=N_STEPS + 1,
    timestep_fraction=1.0,
    shift=3.0,
    clip_range=1e9,
    adv_clip_max=5.0,
    sampler_seed=0,
)


@contextmanager
def mini_trainer():
    """Its module and model, in a process group of one; torch on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sys.path.insert(0, str(MINI / "fastvideo"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        import train_grpo_flux as trainer

        yield trainer, trainer.build_transformer(argparse.Namespace(**SETTINGS), torch.device("cpu"))
    finally:
        dist.destroy_process_group()
        sys.path.remove(str(MINI / "fastvideo"))
        torch.set_num_threads(threads)


class Run:
    """A training step of the trainer, by the settings of one of `RUNS`.

    gradients: at each optimizer step `[P]`. parts: of each window, those of each group `[groups, P]`. ratios: `[4, steps, B]`.
    better: `[4, 1, B]`, 1 for samples with a positive advantage, -1 for the others.
    """

    def __init__(self, trainer, transformer, settings, eta, given=()):
        args = argparse.Namespace(**SETTINGS, eta=eta)
        self.transformer, self.given, self.gradients = transformer, given, []
        self.parts = torch.zeros(len(LEARNING_RATES) + 1, len(GROUPS), len(local_gradient(transformer)))
        self.ratios, self.last = torch.zeros(len(self.parts), N_STEPS, SAMPLES), 0
        optimizer = torch.optim.AdamW(transformer.parameters(), weight_decay=0)
        optimizer.register_step_pre_hook(self._before_optimizer_step)
        self.handle = None if settings is None else install(vars(trainer), config=JaggConfig(self_check=False, **settings))
        with pytest.MonkeyPatch.context() as context:
            context.setattr(trainer, "grpo_one_step", self._step(trainer.grpo_one_step))
            context.setattr(trainer, "sample_reference_model", self._rollout(trainer.sample_reference_model))
            context.setattr(torch.Tensor, "backward", self._backward(torch.Tensor.backward))
            torch.manual_seed(0)
            trainer.train_one_step(args, torch.device("cpu"), transformer, optimizer, trainer.prompts(args, 0, 1))
        if self.handle is not None:
            self.handle.uninstall()

    def _rollout(self, function):
        def roll_out(*args):
            rewards, latents, log_probs, sigmas = function(*args)
            self.old = log_probs.view(-1, SAMPLES, N_STEPS + 1)
            self.better = (rewards.view(-1, SAMPLES) - rewards.view(-1, SAMPLES).mean(1, keepdim=True)).sign()[:, None]
            return rewards, latents, log_probs, sigmas

        return roll_out

    def _step(self, function):
        def step(*args):
            log_probs, window = function(*args), len(self.gradients)
            self.step = int(args[-2])
            self.ratios[window, self.step] = torch.exp(log_probs.detach() - self.old[window, :, self.step])
            return log_probs

        return step

    def _backward(self, function):
        def backward(*args, **options):
            function(*args, **options)
            group = next(n for n, group in enumerate(GROUPS) if self.step in group)
            before, self.last = self.last, local_gradient(self.transformer)
            self.parts[len(self.gradients), group] += self.last - before

        return backward

    def _before_optimizer_step(self, optimizer, *_):
        window, self.last = len(self.gradients), 0
        self.gradients.append(local_gradient(self.transformer))
        optimizer.param_groups[0]["lr"] = (*LEARNING_RATES, 0.0)[window]
        if self.given:
            write(self.given[window], [parameter.grad for parameter in self.transformer.parameters()])


def write(flat, tensors):
    """The inverse of flattening: into `tensors`, in place."""
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.data.copy_(values.view_as(tensor))


def measure(trainer, transformer, eta):
    """A row for each window but the first: how far the policy has moved, and what that does to the estimates and gradients."""
    initial, runs = local_weights(transformer), {}
    for name, settings in RUNS.items():
        write(initial, list(transformer.parameters()))
        transformer.zero_grad()
        with pytest.MonkeyPatch.context() as context:
            if name == "stale":
                context.setattr("jagg_patch.loop.between.estimated_output", lambda recorded, *_: recorded.float())
            runs[name] = Run(trainer, transformer, settings, eta, runs["exact"].gradients if runs else ())
    write(initial, list(transformer.parameters()))
    exact, full = runs.pop("exact"), runs["all"]
    n_skipped = sum(len(group) - 2 for group in GROUPS)
    assert [run.handle.stats.skipped_forwards for run in runs.values()] == [0] + [len(LEARNING_RATES) * n_skipped] * 2
    rows = []
    for window in range(1, len(exact.parts)):

        def clipped(run, clip_range, window=window):
            return (run.better[window] * (run.ratios[window] - 1) > clip_range)[ESTIMATED]

        rows.append(
            {
                "eta": eta,
                "drift": (exact.ratios[window] - 1).abs().mean().item(),
                "drift_of_estimated_steps": (exact.ratios[window, ESTIMATED] - 1).abs().mean().item(),
                "ratio_error": {
                    name: (runs[name].ratios - full.ratios)[window, ESTIMATED].abs().mean().item()
                    for name in ("skipped", "stale")
                },
                "cosine": {
                    name: mean(torch.cosine_similarity(run.parts[window], exact.parts[window]).tolist())
                    for name, run in runs.items()
                },
                "clip_decisions_that_differ": {
                    str(clip_range): (clipped(runs["skipped"], clip_range) != clipped(full, clip_range)).float().mean().item()
                    for clip_range in CLIP_RANGES
                },
            }
        )
    return rows


pytestmark = pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # in one process, as it is here


@pytest.fixture(scope="module")
def rows():
    with mini_trainer() as (trainer, transformer):
        return measure(trainer, transformer, ETAS[-1])


def test_the_policy_moves_by_about_a_thousandth_a_hundredth_and_seven_hundredths(rows):
    assert [row["drift"] for row in rows] == [pytest.approx(drift, rel=0.5) for drift in (0.001, 0.01, 0.07)]


def test_gradients_are_as_near_the_exact_one_as_with_all_forwards(rows):
    for row in rows:
        assert 0.9 < row["cosine"]["all"] < 1
        assert row["cosine"]["skipped"] > row["cosine"]["all"] - 0.002


def test_estimates_are_better_than_the_rollout_s_own_outputs(rows):
    """Whose ratios are 1, so that their error is the drift itself."""
    for row in rows:
        assert row["ratio_error"]["stale"] == pytest.approx(row["drift_of_estimated_steps"], rel=1e-2)
        assert row["ratio_error"]["skipped"] < row["ratio_error"]["stale"]
    for row in rows[1:]:
        assert row["cosine"]["skipped"] > row["cosine"]["stale"]


if __name__ == "__main__":
    out = Path(sys.argv[1])
    with mini_trainer() as (trainer, transformer):
        measured = [row for eta in ETAS for row in measure(trainer, transformer, eta)]
    command = "PYTHONPATH=.:tests:upstream python tests/mini/test_skip_quality.py OUT.json"
    settings = {name: value for name, value in SETTINGS.items() if not isinstance(value, str)}
    settings |= {"learning_rates": LEARNING_RATES, "groups": [len(group) for group in GROUPS]}
    results = {"made_by": made_by(command), "settings": settings, "rows": measured}
    out.write_text(json.dumps(results, indent=1) + "\n")
