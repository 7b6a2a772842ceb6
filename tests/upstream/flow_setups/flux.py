"""A tiny Flux pipeline; the trainer takes 9 of 10 steps."""

import flow_standins as standins
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from standins import TINY_FLUX

PIPELINE = "FluxPipeline"
CONFIG = {}
TRAINS_WINDOW = False


def build(pipeline_class=FluxPipeline):
    """A new pipeline, with the same weights each time."""
    torch.manual_seed(0)
    return pipeline_class(
        transformer=FluxTransformer2DModel(**TINY_FLUX),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=AutoencoderKL(**standins.TINY_VAE),
        text_encoder=standins.TextEncoder(),
        tokenizer=standins.Tokenizer(),
        text_encoder_2=standins.TextEncoder(),
        tokenizer_2=standins.Tokenizer(),
    )


def encode_prompt(text_encoders, tokenizers, prompt, max_sequence_length):
    embeddings = standins.prompt_embeddings(prompt, standins.PROMPT_LENGTH, 32)
    return embeddings, standins.prompt_embeddings(prompt, 16), torch.zeros(standins.PROMPT_LENGTH, 3)
