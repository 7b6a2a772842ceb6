"""A tiny QwenImage pipeline; the trainer takes an SDE window of 3 of 10 steps, with guidance.

Prompts have different numbers of tokens, so batches are padded at sampling and trimmed again at training.
"""

import inspect
import zlib

import flow_standins as standins
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline, QwenImageTransformer2DModel
from setups.qwenimage import without_text_lengths

PIPELINE = "DiffusionPipeline"  # the class that main loads
CONFIG = {  # beside that of flow_cells.py
    "activation_checkpointing": True,
    "fsdp_optimizer_offload": True,
    "train.ema": False,  # main has no averaged weights, and fails when it is asked for them
}
FULL = {"use_lora": False}
BF16 = {"mixed_precision": "bf16"}
WINDOW_0 = {"sample.sde_window_size": 0}
CELLS = {  # beside those of flow_cells.py
    "window 0 W=2": (WINDOW_0, dict(group_size=2, frac=1, schedule="joint")),  # 2 + 2 + 2 + 2, then 1 exact
    "window 0 W=3": (WINDOW_0, dict(group_size=3, frac=1, schedule="joint")),  # 3 + 3 + 3
    "window 0 W=4": (WINDOW_0, dict(frac=1, schedule="joint")),  # 5 + 4
    "full unpatched": (FULL, None),
    "full W=2": (FULL, dict(group_size=2, frac=1, schedule="joint")),
    "full default": (FULL, {}),
    "bf16 unpatched": (BF16, None),
    "bf16 W=2": (BF16, dict(group_size=2, frac=1, schedule="joint")),
    "bf16 default": (BF16, {}),
}


def build_transformer(seed):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        transformer = QwenImageTransformer2DModel(
            num_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32, axes_dims_rope=(4, 6, 6)
        )
    if "txt_seq_lens" not in inspect.signature(transformer.forward).parameters:
        transformer.register_forward_pre_hook(without_text_lengths, with_kwargs=True)
    return transformer


def build_reference():
    """Not the weights that `build` gives, as if those had been trained."""
    return build_transformer(1)


def build(pipeline_class=QwenImagePipeline, **components):
    """A new pipeline, with the same weights each time; main's own seed stays."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        vae = AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 2, 4, 4], num_res_blocks=1)
    pipeline = pipeline_class(
        transformer=build_transformer(0),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=standins.TextEncoder(),
        tokenizer=standins.Tokenizer(),
        **components,
    )
    pipeline.encode_prompt = encode_prompt
    return pipeline


def encode_prompt(prompt, **_):
    """In the place of the pipeline's: 2 to 6 tokens a prompt, padded to the longest, and the mask."""
    lengths = torch.tensor([2 + zlib.crc32(p.encode()) % 5 for p in prompt])
    mask = torch.arange(lengths.max()) < lengths[:, None]
    return standins.prompt_embeddings(prompt, standins.PROMPT_LENGTH, 32)[:, : mask.shape[1]] * mask[:, :, None], mask.long()
