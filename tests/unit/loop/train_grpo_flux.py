"""The shape of DanceGRPO's training loop around a three-weight model: real calls, no transformer, no processes.

The tests install JAGG into this file, whole or with one line changed. The full-sized counterpart is upstream/mini.
"""

import argparse

import torch

TOTAL = 16


def flux_step(model_output, latents, eta, sigmas, index, prev_sample, grpo, sde_solver):
    mean = latents + (sigmas[index + 1] - sigmas[index]) * model_output
    if prev_sample is None:
        prev_sample = mean + eta * torch.randn_like(mean)
    return prev_sample, mean, -((prev_sample.detach() - mean) ** 2).mean(1) / (2 * eta**2)


def run_model(model, latents, timesteps):
    return model(torch.cat([latents, timesteps[:, None] / 1000], 1))


def grpo_one_step(args, latents, pre_latents, transformer, timesteps, i, sigma_schedule):
    velocity = run_model(transformer, latents, timesteps)
    return flux_step(velocity, latents, args.eta, sigma_schedule, i, pre_latents, grpo=True, sde_solver=True)[2]


def run_sample_step(args, z, sigmas, model):
    all_latents, all_log_probs = [z], []
    for i in range(args.sampling_steps):
        timesteps = torch.full([len(z)], int(sigmas[i] * 1000))
        z, _, log_prob = flux_step(run_model(model, z, timesteps), z, args.eta, sigmas, i, None, True, True)
        all_latents.append(z)
        all_log_probs.append(log_prob)
    return torch.stack(all_latents, 1), torch.stack(all_log_probs, 1)


def sample_reference_model(args, model):
    sigmas = torch.linspace(1, 0, args.sampling_steps + 1)
    with torch.no_grad():
        latents, log_probs = run_sample_step(args, torch.randn(args.n_samples, 2), sigmas, model)
    return latents[:, -1].sum(1), latents, log_probs, sigmas


def train_one_step(args, model, optimizer):
    rewards, latents, log_probs, sigmas = sample_reference_model(args, model)
    shuffled = torch.randperm(len(rewards))  # over samples, not over time: not ours to touch
    rewards, latents, log_probs = rewards[shuffled], latents[shuffled], log_probs[shuffled]
    advantages = (rewards - rewards.mean()) / rewards.std()
    n = args.sampling_steps - 1
    timesteps = torch.tensor([int(s * 1000) for s in sigmas[:n]])
    # fmt: off
    perms = torch.stack(
        [
            torch.randperm(n)
            for _ in range(args.n_samples)
        ]
    )
    # fmt: on
    train_timesteps = int(n * args.timestep_fraction)
    visited = []
    for i in range(args.n_samples):
        for j in range(train_timesteps):
            step = perms[i][j]
            visited.append(int(step))
            new_log_probs = grpo_one_step(
                args,
                latents[i : i + 1, step],
                latents[i : i + 1, step + 1],
                model,
                timesteps[step : step + 1],
                step,
                sigmas,
            )
            ratio = torch.exp(new_log_probs - log_probs[i : i + 1, step])
            loss = -(advantages[i] * ratio).mean() / (args.n_samples * train_timesteps)
            loss.backward()
        if (i + 1) % args.gradient_accumulation_steps == 0:
            optimizer.step()
    return visited


def make_args(**settings):
    defaults = dict(sampling_steps=TOTAL, timestep_fraction=1.0, eta=0.5, n_samples=2, gradient_accumulation_steps=2)
    defaults |= dict(gradient_checkpointing=True, selective_checkpointing=1.0)
    return argparse.Namespace(**(defaults | settings))
