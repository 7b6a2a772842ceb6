"""A CPU-sized GRPO trainer with the file and function names of DanceGRPO's Flux trainer.

A tiny diffusers Flux draws 8x8 digits; the prompt is the digit, the reward a classifier's probability of it. Everything
else is the real thing: FSDP under torchrun, activation checkpointing, SDE rollouts, prompt groups, the clipped loss with
gradient accumulation. It knows nothing of JAGG: the patch for DanceGRPO applies to this file as it does to upstream's.
"""

import argparse
import functools
import json
import math
import os
import time
from pathlib import Path

import digits
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from safetensors.torch import save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from tqdm.auto import tqdm
from turns import in_turn

BLOCKS = (FluxTransformerBlock, FluxSingleTransformerBlock)
SHARDING = {
    "full": ShardingStrategy.FULL_SHARD,
    "zero2": ShardingStrategy.SHARD_GRAD_OP,
    "none": ShardingStrategy.NO_SHARD,
}


def sd3_time_shift(shift, t):
    """Move the noise levels `t` in 0-1 towards 1, as SD3 does for large images."""
    return shift * t / (1 + (shift - 1) * t)


def flux_step(model_output, latents, eta, sigmas, index, prev_sample, grpo, sde_solver):
    """One step from `sigmas[index]` to `sigmas[index + 1]` of the reverse SDE (of the ODE without `sde_solver`).

    `model_output` is the velocity `noise - image`, shaped like `latents`, `[B, 16, 4]`. With `grpo`, returns the next
    latents (drawn unless `prev_sample` gives them), the predicted image, and the mean log-density of the step, `[B]`.
    """
    sigma = sigmas[index]
    step = sigmas[index + 1] - sigma  # negative: towards the image
    image = latents - sigma * model_output
    mean = latents + step * model_output
    if sde_solver:
        score = ((1 - sigma) * image - latents) / sigma**2
        mean = mean - 0.5 * eta**2 * step * score
    if not grpo:
        return mean, image
    std = eta * math.sqrt(-step)
    if prev_sample is None:
        prev_sample = mean + std * torch.randn_like(mean)
    log_density = -((prev_sample.detach() - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
    return prev_sample, image, log_density.flatten(1).mean(1)


def autocast(device):
    """bf16 where the device is made for it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" and torch.cuda.is_bf16_supported())


def predict_velocity(transformer, latents, timesteps, encoder_hidden_states, pooled_prompt_embeds):
    """Model output `[B, 16, 4]` at integer `timesteps` `[B]` in 0-1000."""
    with autocast(latents.device):
        return transformer(
            hidden_states=latents,
            timestep=timesteps / 1000,
            encoder_hidden_states=encoder_hidden_states,
            pooled_projections=pooled_prompt_embeds,
            img_ids=digits.patch_ids().to(latents.device),
            txt_ids=torch.zeros(encoder_hidden_states.shape[1], 3, device=latents.device),
            return_dict=False,
        )[0]


def run_sample_step(args, z, progress_bar, sigma_schedule, transformer, encoder_hidden_states, pooled_prompt_embeds):
    """Roll out one batch. Returns images `[B, 16, 4]`, latents `[B, T + 1, 16, 4]` and log-probabilities `[B, T]`."""
    all_latents, all_log_probs = [z], []
    transformer.eval()
    for i in progress_bar:
        timesteps = torch.full([len(z)], int(sigma_schedule[i] * 1000), device=z.device)
        velocity = predict_velocity(transformer, z, timesteps, encoder_hidden_states, pooled_prompt_embeds)
        z, image, log_prob = flux_step(velocity, z, args.eta, sigma_schedule, i, None, grpo=True, sde_solver=True)
        all_latents.append(z)
        all_log_probs.append(log_prob)
    return image, torch.stack(all_latents, 1), torch.stack(all_log_probs, 1)


def grpo_one_step(
    args,
    latents,
    pre_latents,
    encoder_hidden_states,
    pooled_prompt_embeds,
    transformer,
    timesteps,
    i,
    sigma_schedule,
):
    """The training forward of one step: log-probability `[B]` of the recorded next latents `pre_latents`."""
    transformer.train()
    velocity = predict_velocity(transformer, latents, timesteps, encoder_hidden_states, pooled_prompt_embeds)
    _, _, log_prob = flux_step(velocity, latents, args.eta, sigma_schedule, i, pre_latents, grpo=True, sde_solver=True)
    return log_prob


def sample_reference_model(args, device, transformer, encoder_hidden_states, pooled_prompt_embeds, labels):
    """All rollouts of a training step, `micro_batch_size` samples at a time.

    Returns rewards `[N]`, latents `[N, T + 1, 16, 4]`, log-probabilities `[N, T]` and the noise levels `[T + 1]`.
    """
    sigma_schedule = sd3_time_shift(args.shift, torch.linspace(1, 0, args.sampling_steps + 1))
    rewards, latents, log_probs = [], [], []
    batches = torch.arange(len(labels)).split(args.micro_batch_size)
    for batch in tqdm(batches, desc="Sampling", leave=False, disable=dist.get_rank() > 0):
        noise = torch.randn(len(batch), 16, 4, device=device)
        with torch.no_grad():
            image, batch_latents, batch_log_probs = run_sample_step(
                args,
                noise,
                range(args.sampling_steps),
                sigma_schedule,
                transformer,
                encoder_hidden_states[batch],
                pooled_prompt_embeds[batch],
            )
        probabilities = digits.class_probabilities(digits.unpack_pixels(image))
        rewards.append(probabilities[torch.arange(len(batch)), labels[batch]].to(device))
        latents.append(batch_latents)
        log_probs.append(batch_log_probs)
    return torch.cat(rewards), torch.cat(latents), torch.cat(log_probs), sigma_schedule


def gather_tensor(tensor):
    """`tensor` of every rank, concatenated."""
    gathered = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.cat(gathered)


def train_one_step(args, device, transformer, optimizer, loader):
    """Rollouts, advantages within each prompt group, and the policy update. Returns the metrics of the training step."""
    start = time.perf_counter()
    optimizer.zero_grad()
    labels = next(loader)
    if args.use_group:
        labels = labels.repeat_interleave(args.num_generations)
    encoder_hidden_states, pooled_prompt_embeds = (embeds.to(device) for embeds in digits.prompt_embeds(labels))

    rewards, latents, old_log_probs, sigma_schedule = sample_reference_model(
        args, device, transformer, encoder_hidden_states, pooled_prompt_embeds, labels
    )
    all_rewards = gather_tensor(rewards)
    if args.use_group:
        prompt_groups = rewards.view(-1, args.num_generations)
        advantages = (prompt_groups - prompt_groups.mean(1, keepdim=True)) / (prompt_groups.std(1, keepdim=True) + 1e-8)
        advantages = advantages.flatten()
    else:
        advantages = (rewards - all_rewards.mean()) / (all_rewards.std() + 1e-8)
    advantages = advantages.clamp(-args.adv_clip_max, args.adv_clip_max)

    # The last step is never trained: it has no noise left to learn from.
    n_steps = args.sampling_steps - 1
    timesteps = torch.tensor([int(sigma * 1000) for sigma in sigma_schedule[:n_steps]], device=device)
    batches = torch.arange(len(rewards)).split(args.micro_batch_size)
    perms = torch.stack([torch.randperm(n_steps) for _ in batches])
    train_timesteps = int(n_steps * args.timestep_fraction)

    update_start = time.perf_counter()
    total_loss, first_ratio_error, grad_norm = 0.0, 0.0, float("nan")
    for number, batch in enumerate(tqdm(batches, desc="Update", leave=False, disable=dist.get_rank() > 0)):
        for step in perms[number][:train_timesteps]:
            new_log_probs = grpo_one_step(
                args,
                latents[batch, step],
                latents[batch, step + 1],
                encoder_hidden_states[batch],
                pooled_prompt_embeds[batch],
                transformer,
                timesteps[step].expand(len(batch)),
                step,
                sigma_schedule,
            )
            ratio = torch.exp(new_log_probs - old_log_probs[batch, step])
            clipped = ratio.clamp(1 - args.clip_range, 1 + args.clip_range)
            loss = torch.maximum(-advantages[batch] * ratio, -advantages[batch] * clipped).mean()
            loss = loss / (args.gradient_accumulation_steps * train_timesteps)
            loss.backward()
            total_loss += loss.item()
            if number < args.gradient_accumulation_steps:
                first_ratio_error = max(first_ratio_error, (ratio - 1).abs().max().item())
        if (number + 1) % args.gradient_accumulation_steps == 0:
            grad_norm = transformer.clip_grad_norm_(args.max_grad_norm).item()
            optimizer.step()
            optimizer.zero_grad()
    end = time.perf_counter()
    return {
        "reward": all_rewards.mean().item(),
        "reward_sem": all_rewards.std().item() / math.sqrt(len(all_rewards)),
        "loss": total_loss,
        "grad_norm": grad_norm,
        "first_ratio_error": first_ratio_error,
        "seconds": end - start,
        "update_seconds": end - update_start,
    }


def count_backward_passes(transformer):
    """A one-entry list that grows by one whenever a backward pass enters the transformer through its output."""
    count = [0]

    def entered(_):
        count[0] += 1

    def watch_output(_module, _inputs, output):
        if output[0].requires_grad:
            output[0].register_hook(entered)

    transformer.register_forward_hook(watch_output)
    return count


def save_checkpoint(transformer, rank, output_dir, step):
    """Full weights in diffusers' layout under `output_dir/checkpoint-STEP`."""
    # Not state_dict_type(FULL_STATE_DICT), and no offload on a CPU: FSDP1 then frees the storage it has just "offloaded".
    with FSDP.summon_full_params(transformer, writeback=False, rank0_only=True):
        if rank == 0:
            folder = Path(output_dir) / f"checkpoint-{step}"
            folder.mkdir(parents=True, exist_ok=True)
            weights = {}
            for name, tensor in transformer.named_parameters():
                name = name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")
                weights[name] = tensor.detach().clone().contiguous()
            save_file(weights, folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
            transformer.module.save_config(folder)


def prompts(args, rank, world_size):
    """Endless batches of prompts: every epoch shows each rank its share of the ten digits, in a new order."""
    dataset = list(range(10)) * math.ceil(args.train_batch_size * world_size / 10)
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=args.sampler_seed)
    loader = DataLoader(dataset, args.train_batch_size, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def build_transformer(args, device):
    """The pretrained Flux, sharded block by block, with activation checkpointing if asked for."""
    transformer = FluxTransformer2DModel.from_pretrained(
        args.pretrained_model_name_or_path, subfolder="transformer", torch_dtype=torch.float32
    )
    transformer = FSDP(
        transformer,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=set(BLOCKS)),
        sharding_strategy=SHARDING[args.fsdp_sharding_startegy],
        device_id=device,
    )
    if args.gradient_checkpointing:
        blocks = [module for module in transformer.modules() if isinstance(module, BLOCKS)]
        chosen = set(blocks[: round(len(blocks) * args.selective_checkpointing)])
        apply_activation_checkpointing(transformer, checkpoint_wrapper, check_fn=lambda module: module in chosen)
    return transformer


def main(args):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(args.seed + rank)
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)

    transformer = build_transformer(args, device)
    backward_passes = count_backward_passes(transformer)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    loader = prompts(args, rank, world_size)

    progress = tqdm(range(1, args.max_train_steps + 1), desc="Training steps", disable=rank > 0)
    for step in in_turn(progress, rank, dist.barrier):
        passes_before = backward_passes[0]
        metrics = train_one_step(args, device, transformer, optimizer, loader)
        metrics["backward_passes"] = backward_passes[0] - passes_before
        progress.set_postfix(reward=f"{metrics['reward']:.3f}", update=f"{metrics['update_seconds']:.2f}s")
        if rank == 0:
            with open(output_dir / "reward.txt", "a") as file:
                file.write(f"{metrics['reward']}\n")
            with open(output_dir / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step} | metrics) + "\n")
        if step % args.checkpointing_steps == 0 or step == args.max_train_steps:
            save_checkpoint(transformer, rank, output_dir, step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pretrained_model_name_or_path", default="data/flux", help="folder with transformer/")
    parser.add_argument("--output_dir", default="data/outputs/grpo", help="where reward.txt, metrics.jsonl, checkpoints go")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--sampler_seed", type=int, default=0)
    parser.add_argument("--train_batch_size", type=int, default=5, help="prompts per rank and training step")
    parser.add_argument("--num_generations", type=int, default=12, help="samples per prompt")
    parser.add_argument("--micro_batch_size", type=int, default=1, help="samples per forward, in rollout and update alike")
    parser.add_argument("--use_group", action="store_true", help="advantages within each prompt's samples")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per optimizer step")
    parser.add_argument("--max_train_steps", type=int, default=30)
    parser.add_argument("--checkpointing_steps", type=int, default=100)
    parser.add_argument("--gradient_checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--selective_checkpointing", type=float, default=1.0, help="share of blocks that recompute")
    parser.add_argument("--fsdp_sharding_startegy", default="full", choices=sorted(SHARDING), help="spelt as upstream does")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--weight_decay", type=float, default=1e-4)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--sampling_steps", type=int, default=16, help="steps of a trajectory, T; the last is never trained")
    parser.add_argument("--timestep_fraction", type=float, default=1.0, help="share of the T-1 steps that are trained")
    parser.add_argument("--eta", type=float, default=0.7, help="noise of the SDE")
    parser.add_argument("--shift", type=float, default=3.0, help="time shift of the noise schedule")
    parser.add_argument("--clip_range", type=float, default=1e-4)
    parser.add_argument("--adv_clip_max", type=float, default=5.0)
    args = parser.parse_args()
    main(args)
