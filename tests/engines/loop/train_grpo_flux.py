"""The shape of DanceGRPO's training loop around a tiny Flux; how the model is wrapped, run backward and stepped is the engine's.

JAGG is installed into this file as it is into upstream's of that name.
"""

import math

import torch
import torch.distributed as dist

N_TOKENS, CHANNELS, PROMPT_LENGTH, WIDTH = 4, 16, 3, 8


def flux_step(model_output, latents, eta, sigmas, index, prev_sample, grpo, sde_solver):
    step = sigmas[index + 1] - sigmas[index]
    mean = latents + step * model_output
    std = eta * math.sqrt(-step)
    if prev_sample is None:
        prev_sample = mean + std * torch.randn_like(mean)
    return prev_sample, mean, (-((prev_sample.detach() - mean) ** 2) / (2 * std**2)).flatten(1).mean(1)


def predict_velocity(args, transformer, latents, timesteps, encoder_hidden_states, pooled_prompt_embeds):
    with torch.autocast("cpu", args.autocast, enabled=args.autocast is not None):
        return transformer(
            hidden_states=latents,
            timestep=timesteps / 1000,
            encoder_hidden_states=encoder_hidden_states,
            pooled_projections=pooled_prompt_embeds,
            img_ids=torch.cartesian_prod(torch.zeros(1), torch.arange(2.0), torch.arange(2.0)),
            txt_ids=torch.zeros(PROMPT_LENGTH, 3),
            return_dict=False,
        )[0]


def grpo_one_step(
    args, latents, pre_latents, encoder_hidden_states, pooled_prompt_embeds, transformer, timesteps, i, sigma_schedule
):
    velocity = predict_velocity(args, transformer, latents, timesteps, encoder_hidden_states, pooled_prompt_embeds)
    return flux_step(velocity, latents, args.eta, sigma_schedule, i, pre_latents, grpo=True, sde_solver=True)[2]


def run_sample_step(args, z, sigmas, transformer, embeds):
    all_latents, all_log_probs = [z], []
    for i in range(args.sampling_steps):
        timesteps = torch.full([len(z)], int(sigmas[i] * 1000))
        velocity = predict_velocity(args, transformer, z, timesteps, *embeds)
        z, _, log_prob = flux_step(velocity, z, args.eta, sigmas, i, None, grpo=True, sde_solver=True)
        all_latents.append(z)
        all_log_probs.append(log_prob)
    return torch.stack(all_latents, 1), torch.stack(all_log_probs, 1)


def sample_reference_model(args, transformer, *embeds):
    linear = torch.linspace(1, 0, args.sampling_steps + 1)
    sigmas = args.shift * linear / (1 + (args.shift - 1) * linear)
    z = torch.randn(args.n_samples, N_TOKENS, CHANNELS)
    batches = zip(*(tensor.split(getattr(args, "rollout_batch", len(z))) for tensor in (z, *embeds)), strict=True)
    with torch.no_grad():
        found = [run_sample_step(args, part, sigmas, transformer, rest) for part, *rest in batches]
    latents, log_probs = (torch.cat(parts) for parts in zip(*found, strict=True))
    return latents[:, -1].mean((1, 2)), latents, log_probs, sigmas


def train_one_step(args, engine):
    """One optimizer step over all samples."""
    embeds = torch.randn(args.n_samples, PROMPT_LENGTH, WIDTH), torch.randn(args.n_samples, WIDTH)
    rewards, latents, log_probs, sigmas = sample_reference_model(args, engine.transformer, *embeds)
    all_rewards = [torch.empty_like(rewards) for _ in range(dist.get_world_size())]
    dist.all_gather(all_rewards, rewards)
    advantages = (rewards - torch.cat(all_rewards).mean()) / torch.cat(all_rewards).std()

    n_steps = args.sampling_steps - 1
    timesteps = torch.tensor([int(sigma * 1000) for sigma in sigmas[:n_steps]])
    perms = torch.stack([torch.randperm(n_steps) for _ in range(args.n_samples)])
    train_timesteps = int(n_steps * args.timestep_fraction)
    for i in range(args.n_samples):
        sample = slice(i, i + 1)
        for step in perms[i][:train_timesteps]:
            closes = i == args.n_samples - 1 and step == perms[i][train_timesteps - 1]
            with engine.accumulate(closes):
                new_log_probs = grpo_one_step(
                    args,
                    latents[sample, step],
                    latents[sample, step + 1],
                    *(embed[sample] for embed in embeds),
                    engine.transformer,
                    timesteps[step].view(1),
                    step,
                    sigmas,
                )
                ratio = torch.exp(new_log_probs - log_probs[sample, step])
                clipped = ratio.clamp(1 - args.clip_range, 1 + args.clip_range)
                loss = torch.maximum(-advantages[sample] * ratio, -advantages[sample] * clipped).mean()
                engine.backward(loss / (args.n_samples * train_timesteps))
                engine.step(closes)
