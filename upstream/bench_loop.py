"""The loop that upstream/bench.py times: DanceGRPO's functions for one sample, JAGG's wrappers on them, and the clock."""

import functools
import math
import time
from collections import defaultdict
from contextlib import contextmanager

import torch

from jagg_patch.evidence.log import now
from jagg_patch.trainers.dancegrpo import TRAINERS

TRAINER = TRAINERS["train_grpo_flux"]  # whose shape the measured loop has


def flux_step(model_output, latents, eta, sigmas, index, prev_sample):
    """One step of the reverse SDE: the next latents, `prev_sample` if given, and their mean log-density `[B]` plus a constant."""
    sigma, step = sigmas[index], sigmas[index + 1] - sigmas[index]
    drift = 0.5 * eta**2 * step / sigma
    mean = (1 + drift) * latents + (step + drift * (1 - sigma)) * model_output
    std = eta * math.sqrt(-step)
    if prev_sample is None:
        prev_sample = mean + std * torch.randn_like(mean)
    return prev_sample, (prev_sample - mean).square().flatten(1).mean(1) * (-0.5 / std**2)


def predict_velocity(args, transformer, latents, timesteps):
    """Model output `[B, L, C]` in float32, whatever dtype the model has, at `timesteps` `[B]` in 0-1000."""
    dtype = args.inputs["encoder_hidden_states"].dtype
    output = transformer(hidden_states=latents.to(dtype), timestep=timesteps.to(dtype) / 1000, **args.inputs, return_dict=False)
    return output[0].float()


def run_sample_step(args, z, sigma_schedule, transformer):
    """Latents `[B, T + 1, L, C]` and log-probabilities `[B, T]` of a rollout."""
    all_latents, all_log_probs = [z], []
    for i in range(args.sampling_steps):
        timesteps = torch.full([len(z)], int(sigma_schedule[i] * 1000), device=z.device)
        velocity = predict_velocity(args, transformer, z, timesteps)
        z, log_prob = flux_step(velocity, z, args.eta, sigma_schedule, i, None)
        all_latents.append(z)
        all_log_probs.append(log_prob)
    return torch.stack(all_latents, 1), torch.stack(all_log_probs, 1)


def sample_reference_model(args, transformer):
    t = torch.linspace(1, 0, args.sampling_steps + 1)
    sigma_schedule = (args.shift * t / (1 + (args.shift - 1) * t)).tolist()
    with torch.no_grad():
        return *run_sample_step(args, torch.randn_like(args.noise), sigma_schedule, transformer), sigma_schedule


def grpo_one_step(args, latents, pre_latents, transformer, timesteps, i, sigma_schedule):
    velocity = predict_velocity(args, transformer, latents, timesteps)
    return flux_step(velocity, latents, args.eta, sigma_schedule, i, pre_latents)[1]


def train_one_step(args, transformer):
    latents, old_log_probs, sigma_schedule = sample_reference_model(args, transformer)
    args.meter.begin("update")
    n_steps = args.sampling_steps - 1
    perms = torch.randperm(n_steps)
    for step in perms[: int(n_steps * args.timestep_fraction)].tolist():
        timesteps = torch.full([len(latents)], int(sigma_schedule[step] * 1000), device=latents.device)
        now_and_next = latents[:, step], latents[:, step + 1]
        new_log_probs = grpo_one_step(args, *now_and_next, transformer, timesteps, step, sigma_schedule)
        ratio = torch.exp(new_log_probs - old_log_probs[:, step])
        loss = torch.maximum(-ratio, -ratio.clamp(1 - args.clip_range, 1 + args.clip_range)).mean()  # an advantage of 1
        with args.meter.timing("backward"):
            loss.backward()
        loss.item()
    if args.optimizer is not None:
        args.optimizer.step()


LOOP = (flux_step, run_sample_step, sample_reference_model, grpo_one_step, train_one_step)


class Meter:
    """The seconds of a training step's phases, and of each forward and backward in them. The clock waits for the GPU."""

    def __init__(self, model):
        self.phase = None
        model.register_forward_pre_hook(self._forward_begins)
        model.register_forward_hook(self._forward_ends)

    def begin(self, phase):
        """`phase`, or None: the training step is over."""
        ended = now()
        if self.phase is None:
            self.seconds, self.calls, self._n_backward = {}, defaultdict(list), 0
        else:
            self.seconds[self.phase] = ended - self._began
        self.phase, self._began = phase, ended

    def _forward_begins(self, model, args):
        self._forward_began = now()

    def _forward_ends(self, model, args, output):
        kind = "recorded" if torch.is_grad_enabled() else "unrecorded"
        self.calls[self.phase, kind].append(now() - self._forward_began)
        if output[0].requires_grad:
            output[0].register_hook(self._backward_enters)

    def _backward_enters(self, grad):
        self._n_backward += 1

    @contextmanager
    def timing(self, kind):
        began = now()
        yield
        self.calls[self.phase, kind].append(now() - began)

    @property
    def passes(self):
        """Transformer forwards and backward passes of the update."""
        return sum(len(self.calls["update", kind]) for kind in ("recorded", "unrecorded")), self._n_backward


def wrap_and_time(namespace, session, stats):
    """Put JAGG's wrappers on `namespace`. Returns a list that gets the seconds that they take themselves in each exact step."""
    steps, balance = [], [0.0]

    def count(name, sign, begins_step=False):
        function = namespace[name]

        @functools.wraps(function)
        def counted(*args, **kwargs):
            n_exact, began = stats.exact_steps, time.perf_counter()
            if begins_step:
                balance[0] = 0.0
            result = function(*args, **kwargs)
            balance[0] += sign * (time.perf_counter() - began)
            if begins_step and stats.exact_steps > n_exact:
                steps.append(balance[0])
            return result

        namespace[name] = counted

    TRAINER.check(namespace)
    for name in ("grpo_one_step", "flux_step"):
        count(name, -1)
    namespace.update(TRAINER.wrappers(namespace, session))
    count("flux_step", 1)
    count("grpo_one_step", 1, begins_step=True)
    return steps
