"""What DanceGRPO's Stable Diffusion trainer needs beside standins.py: a download of the weights and of the tokenizer.

Real are the UNet, scheduler, VAE, text encoder and pipeline classes, tiny, and upstream's own rollout and solver step.
"""

import os
import sys
from types import SimpleNamespace

import standins
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch.utils._pytree import tree_map_only
from transformers import CLIPTextConfig, CLIPTextModel

TINY_UNET = dict(  # of the trainer's own 64x64 latents
    sample_size=64,
    block_out_channels=(4, 4, 4),
    down_block_types=("DownBlock2D", "DownBlock2D", "CrossAttnDownBlock2D"),
    mid_block_type=None,
    up_block_types=("UpBlock2D", "UpBlock2D", "UpBlock2D"),
    layers_per_block=1,
    cross_attention_dim=16,
    attention_head_dim=2,
    norm_num_groups=2,
)
TINY_VAE = dict(block_out_channels=(4,), norm_num_groups=2, sample_size=64)  # images of 64x64 as well
TINY_TEXT = dict(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=8,
    bos_token_id=0,
    eos_token_id=1,
)
SCHEDULER = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1)


class Tokenizer:
    """In the place of CLIP's, whose vocabulary is a download."""

    model_max_length = 8

    def __call__(self, prompts, **_):
        return SimpleNamespace(input_ids=standins.tokenize(prompts))


def in_own_dtype(module, args, kwargs):
    """The trainer draws its latents in bf16 whatever the precision, which other weights refuse without autocast."""
    dtype = next(module.parameters()).dtype
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))


def build_pipeline(dtype=torch.float32):
    """The same weights every time, the UNet's in `dtype`; the random numbers that the trainer draws aren't touched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet, vae = UNet2DConditionModel(**TINY_UNET).to(dtype), AutoencoderKL(**TINY_VAE)
        text_encoder = CLIPTextModel(CLIPTextConfig(**TINY_TEXT))
    for module in (unet, vae.post_quant_conv):
        module.register_forward_pre_hook(in_own_dtype, with_kwargs=True)
    absent = dict(safety_checker=None, feature_extractor=None, requires_safety_checker=False)
    return StableDiffusionPipeline(vae, text_encoder, Tokenizer(), unet, DDIMScheduler(**SCHEDULER), **absent)


def install(checkout):
    """Make `checkout`'s trainer importable and runnable here. Call before anything of fastvideo is imported."""
    standins.install(checkout)
    if sys.version_info >= (3, 12):  # upstream's settings use a module that is gone
        standins.module("imp", load_source=standins.load_source)
    # Without the first, accelerate takes no notice of torchrun's ranks on a CPU.
    os.environ |= {"ACCELERATE_USE_CPU": "1", "WANDB_MODE": "disabled"}


def write_working_directory(folder, n_prompts):
    """The files that the trainer reads by a fixed path, and the folders that it writes to."""
    for name in ("assets", "hps_ckpt", "images_same"):
        (folder / name).mkdir(parents=True)
    (folder / "assets/prompts.txt").write_text("".join(f"{number} prompt\n" for number in range(n_prompts)))
    reward = standins.TinyReward().state_dict()
    reward["image"] -= reward["image"].mean(0)  # else bf16 rounds the difference between two samples away
    torch.save({"state_dict": reward}, folder / "hps_ckpt/HPS_v2.1_compressed.pt")
