"""A tiny Wan 2.1 pipeline for video; the trainer takes 9 of 10 steps, and calls the model twice a step for guidance."""

import flow_standins as standins
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

PIPELINE = "WanPipeline"
CONFIG = {"frames": 5, "height": 32, "width": 32, "sample.sample_time_per_prompt": 1, "sample.kl_reward": 0}
TRAINS_WINDOW = False
CALLS_PER_STEP = 2
# The rollout takes the solver step a second time, with the reference's output. Upstream's can't be guided then.
REWARDED = {"sample.kl_reward": 0.1, "sample.guidance_scale": 1.0}
SKIPS = {"KL in the reward": (REWARDED, dict(frac=1, schedule="joint"))}  # beside those of flow_cells.py

TINY_WAN = dict(
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=16,
    out_channels=16,
    text_dim=32,
    freq_dim=32,
    ffn_dim=32,
    num_layers=2,
    rope_max_seq_len=32,
)
TINY_VAE = dict(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True])


def build():
    """A new pipeline, with the same weights each time."""
    torch.manual_seed(0)
    return WanPipeline(
        transformer=WanTransformer3DModel(**TINY_WAN),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        vae=AutoencoderKLWan(**TINY_VAE),
        text_encoder=standins.TextEncoder(),
        tokenizer=standins.Tokenizer(),
    )


def encode_prompt(text_encoder, tokenizer, prompt, max_sequence_length):
    return standins.prompt_embeddings(prompt, standins.PROMPT_LENGTH, 32)
