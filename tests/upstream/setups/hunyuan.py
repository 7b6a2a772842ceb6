"""A tiny model of upstream's own HunyuanVideo class, wrapped by upstream's own helpers as its main() does.

The rollout is the real one: it decodes with diffusers' VAE and writes mp4 files. Stood in for are flash-attn (plain attention),
the Mochi classes (their import needs a CUDA kernel library) and VideoAlign, which here reads its two rewards off the mp4.
"""

import importlib
import os
import sys

import cv2
import numpy
import standins
import torch
import torch.distributed as dist
from diffusers import AutoencoderKLHunyuanVideo
from torch.nn import functional as F

# One prompt, as in upstream's script; the best two and the worst two of its five samples are trained.
ARGS = dict(t=5, fps=8, use_same_noise=True, use_videoalign=True, num_generations=5, bestofn=4, vq_coef=1.0, mq_coef=0.5)

TINY_HUNYUAN = dict(
    in_channels=16,
    out_channels=16,
    num_attention_heads=4,
    attention_head_dim=16,
    num_layers=1,
    num_single_layers=1,
    num_refiner_layers=1,
    text_embed_dim=32,
    pooled_projection_dim=16,
    rope_axes_dim=(4, 6, 6),
)
TINY_VAE = dict(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4)
PROMPT_LENGTH = 6


def unpad_input(padded, mask):
    """The rows of `[B, S, ...]` that `mask` has, their places, where each sequence starts, the longest one, all lengths."""
    lengths = mask.sum(1, dtype=torch.int32)
    places = mask.flatten().nonzero().flatten()
    return padded.flatten(0, 1)[places], places, F.pad(lengths.cumsum(0), (1, 0)), int(lengths.max()), lengths


def pad_input(rows, places, batch_size, length):
    padded = rows.new_zeros(batch_size * length, *rows.shape[1:])
    return padded.index_copy(0, places, rows).unflatten(0, (batch_size, length))


def flash_attn_varlen_qkvpacked_func(qkv, starts, longest, dropout_p=0.0, softmax_scale=None, causal=False):
    """Attention of each sequence with itself: `[rows, 3, heads, channels]` to `[rows, heads, channels]`."""
    heads_first = [sequence.permute(1, 2, 0, 3) for sequence in qkv.tensor_split(starts[1:-1].tolist())]
    attended = [F.scaled_dot_product_attention(q, k, v, None, dropout_p, causal, scale=softmax_scale) for q, k, v in heads_first]
    return torch.cat([sequence.transpose(0, 1) for sequence in attended])


class TinyVideoAlign:
    """In the place of VideoAlign: a video's visual and motion quality are its brightness and how much its frames differ."""

    def reward(self, paths, captions, use_norm):
        capture = cv2.VideoCapture(paths[0])
        frames = numpy.stack([capture.read()[1] for _ in range(int(capture.get(cv2.CAP_PROP_FRAME_COUNT)))]) / 255
        return [{"VQ": frames.mean(), "MQ": abs(numpy.diff(frames, axis=0)).mean()}]


def make_prompt(seed, length):
    """Random embeddings of one prompt as the data set stores them: `[1 + 6, 32]`, pooled first, and a mask with `length` of 6."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1 + PROMPT_LENGTH, 32, generator=generator), torch.arange(PROMPT_LENGTH) < length


def build(name, **changes):
    """The trainer's module, the wrapped model, and the arguments of train_one_step that every cell gets anew."""
    standins.module("flash_attn", flash_attn_varlen_qkvpacked_func=flash_attn_varlen_qkvpacked_func)
    standins.module("flash_attn.bert_padding", pad_input=pad_input, unpad_input=unpad_input)
    importlib.import_module("fastvideo.models.flash_attn_no_pad")
    del sys.modules["flash_attn"]  # transformers asks for its module spec
    sys.modules["fastvideo.models.mochi_hf.modeling_mochi"].MochiTransformer3DModel = type("MochiTransformer3DModel", (), {})
    del sys.modules["fastvideo.utils.load"]  # the real one names the blocks of upstream's own classes
    trainer = importlib.import_module(name)
    fsdp_util = importlib.import_module("fastvideo.utils.fsdp_util")
    model = importlib.import_module("fastvideo.models.hunyuan_hf.modeling_hunyuan").HunyuanVideoTransformer3DModel
    os.makedirs("videos", exist_ok=True)

    torch.manual_seed(0)
    transformer = model(**(TINY_HUNYUAN | changes))
    kwargs, blocks = fsdp_util.get_dit_fsdp_kwargs(transformer, "full", False, False, "fp32")
    transformer = torch.distributed.fsdp.FullyShardedDataParallel(transformer, **kwargs)
    fsdp_util.apply_fsdp_checkpointing(transformer, blocks, 1)

    torch.manual_seed(1)
    vae = AutoencoderKLHunyuanVideo(**TINY_VAE)
    embeds, mask = make_prompt(10 * dist.get_rank(), length=4)

    def arguments():
        return dict(
            device=torch.device("cpu"),
            vae=vae,
            inferencer=TinyVideoAlign(),
            loader=iter([(embeds[None], mask[None], ["a prompt"])]),
            step=1,
        )

    return trainer, transformer, arguments
