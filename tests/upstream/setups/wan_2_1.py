"""A tiny Wan 2.1 with guidance, neither sharded nor replicated: upstream trains one model a rank and never reduces gradients.

Real: the trainer with its rollout, upstream's checkpointing of every block, diffusers' transformer and VAE, OpenCV's mp4 of the
video. Unlike upstream's bf16, weights are fp32.
"""

import importlib
from functools import partial
from pathlib import Path

import standins
import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, WanTransformer3DModel

ARGS = dict(cfg_infer=5.0)


def build(name):
    """The trainer's module, the model, and the arguments of train_one_step that every cell gets anew."""
    trainer = importlib.import_module(name)
    Path("videos").mkdir(exist_ok=True)
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        num_layers=2, attention_head_dim=16, num_attention_heads=4, text_dim=32, ffn_dim=128, rope_max_seq_len=64
    )
    trainer.apply_fsdp_checkpointing(transformer, trainer.WanTransformerBlock, 1)

    torch.manual_seed(1)
    vae = AutoencoderKLWan(base_dim=8, num_res_blocks=1).to(torch.bfloat16)
    embeds, _, _, captions = zip(*(standins.make_prompt(10 * dist.get_rank() + number) for number in range(2)), strict=True)
    given = dict(
        device=torch.device("cpu"),
        vae=vae,
        reward_model=standins.TinyReward(),
        tokenizer=standins.tokenize,
        encoder_hidden_states=torch.stack(embeds),
        negative_prompt_embeds=torch.stack([standins.make_prompt(100)[0]] * 2),
        caption=list(captions),
        noise_scheduler=None,
        preprocess_val=standins.preprocess,
    )
    return trainer, transformer, partial(dict, given)
