"""A tiny QwenImage, wrapped and checkpointed by upstream's own helpers; for the edit trainer with an image to edit.

Real: the trainer with its rollout, FSDP over gloo, its script's share of checkpointed blocks, diffusers' transformer and VAE.
FSDP's mixed precision is fp32: upstream's bf16 also reduces gradients, and its own then depend on the order of the steps.
"""

import importlib
import inspect
from functools import partial

import standins
import torch
import torch.distributed as dist
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock

ARGS = {}  # beside those of cells.py


def without_text_lengths(module, args, kwargs):
    """Upstream passes them, and newer versions of diffusers take them from the embeddings alone."""
    del kwargs["txt_seq_lens"]
    return args, kwargs


def build(name, edit=False):
    """The trainer's module, the wrapped model, and the arguments of train_one_step that every cell gets anew."""
    trainer = importlib.import_module(name)
    fsdp_util = importlib.import_module("fastvideo.utils.fsdp_util_qwenimage")
    cpu = torch.device("cpu")
    torch.cuda.device_count = lambda: 1  # upstream takes the rank modulo this for FSDP's device
    fsdp_util.FSDP = lambda model, **kwargs: trainer.FSDP(model, **(kwargs | {"device_id": cpu}))

    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        num_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32, axes_dims_rope=(4, 6, 6)
    )
    if "txt_seq_lens" not in inspect.signature(transformer.forward).parameters:
        transformer.register_forward_pre_hook(without_text_lengths, with_kwargs=True)
    config = trainer.FSDPConfig(mixed_precision_dtype=torch.float32)
    transformer = trainer.fsdp_wrapper(transformer, config)
    trainer.apply_fsdp_checkpointing(transformer, QwenImageTransformerBlock, 1 if edit else 0.5)

    torch.manual_seed(1)
    vae = AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 2, 4, 4], num_res_blocks=1).to(torch.bfloat16)
    embeds, _, _, captions = zip(*(standins.make_prompt(10 * dist.get_rank() + number) for number in range(2)), strict=True)
    lengths = torch.tensor([6, 4])
    given = dict(
        device=cpu,
        vae=vae,
        reward_model=standins.TinyReward(),
        tokenizer=standins.tokenize,
        prompt_embeds=torch.stack(embeds),
        prompt_attention_masks=(torch.arange(6) < lengths[:, None]).long(),
        caption=list(captions),
        original_length=lengths,
        noise_scheduler=None,
        preprocess_val=standins.preprocess,
        ema_handler=None,
    )
    if edit:
        size = torch.tensor([32, 32])
        given |= dict(image_latents=torch.randn(2, 16, 1, 4, 4), calculated_height=size, calculated_width=size)
    return trainer, transformer, partial(dict, given)
