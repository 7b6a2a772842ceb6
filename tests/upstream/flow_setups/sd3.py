"""A tiny Stable Diffusion 3 pipeline; the trainer takes 9 of 10 steps, with guidance."""

import os
from importlib.util import find_spec
from pathlib import Path

import flow_standins as standins
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

PIPELINE = "StableDiffusion3Pipeline"  # the class that main loads
CONFIG = {}  # beside that of flow_cells.py
TRAINS_WINDOW = False
FULL = {"use_lora": False, "train.beta": 0.0}
FP16 = {"mixed_precision": "fp16"}
BF16 = {"mixed_precision": "bf16"}
CELLS = {  # beside those of flow_cells.py
    "frac 0 probed": ({}, dict(frac=0, probe_every=1)),
    "full unpatched": (FULL, None),
    "full W=2": (FULL, dict(group_size=2, frac=1, schedule="joint")),
    "full W=4": (FULL, dict(frac=1, schedule="joint")),
    "bf16 unpatched": (BF16, None),
    "bf16 W=2": (BF16, dict(group_size=2, frac=1, schedule="joint")),
    "bf16 W=4": (BF16, dict(frac=1, schedule="joint")),
    "fp16 unpatched": (FP16, None),
    "fp16 W=2": (FP16, dict(group_size=2, frac=1, schedule="joint")),
    "fp16 W=4": (FP16, dict(frac=1, schedule="joint")),
}
SAME_LATENT = {  # all samples of a batch are of one prompt, and begin alike
    "sample.same_latent": True,
    "sample.num_image_per_prompt": 2 * int(os.environ.get("WORLD_SIZE", 1)),
}
TRAINER = Path(find_spec("flow_grpo").origin).parents[1] / "scripts/train_sd3.py"
if "unique_prompt_per_epoch" in TRAINER.read_text():  # the pin repeats a prompt in all of an epoch
    SAME_LATENT |= {
        "sample.num_image_per_prompt": 4 * int(os.environ.get("WORLD_SIZE", 1)),
        "sample.unique_sample_per_epoch": 1,
        "sample.unique_prompt_per_epoch": 1,
    }
SKIPS = {  # beside those of flow_cells.py
    "same latent": (SAME_LATENT, dict(frac=1, schedule="joint")),
    "inner W=4": ({"train.num_inner_epochs": 2}, dict(frac=1, schedule="joint")),
    "no guidance": ({"train.cfg": False}, dict(frac=1, schedule="joint")),  # in training; the rollout has it
}
SKIPS_EPOCHS = True

TINY_SD3 = dict(
    sample_size=8,
    patch_size=2,
    in_channels=16,
    num_layers=2,
    attention_head_dim=8,
    num_attention_heads=4,
    joint_attention_dim=32,
    caption_projection_dim=32,
    pooled_projection_dim=16,
    pos_embed_max_size=8,
)


def build():
    """A new pipeline, with the same weights each time."""
    torch.manual_seed(0)
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(**TINY_SD3),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKL(**standins.TINY_VAE),
        text_encoder=standins.TextEncoder(),
        tokenizer=standins.Tokenizer(),
        text_encoder_2=standins.TextEncoder(),
        tokenizer_2=standins.Tokenizer(),
        text_encoder_3=standins.TextEncoder(),
        tokenizer_3=standins.Tokenizer(),
    )


def encode_prompt(text_encoders, tokenizers, prompt, max_sequence_length):
    return standins.prompt_embeddings(prompt, standins.PROMPT_LENGTH, 32), standins.prompt_embeddings(prompt, 16)
