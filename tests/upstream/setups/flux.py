"""A tiny Flux, wrapped by upstream's own helpers as its main() does; with LoRA for the trainer of that name."""

import importlib
from contextlib import contextmanager

import standins
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, FluxTransformer2DModel

ARGS = {}  # beside those of cells.py


@contextmanager
def cached_on_rank_1(transformer):
    """Every second call in a rollout gives the output of the call before, as a caching rollout would, on rank 1 alone."""
    cached = []

    def hook(module, inputs, output):
        if module.training or dist.get_rank() != 1:
            return output
        return cached.pop() if cached else cached.append(output) or output

    handle = transformer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


W_4, W_4_SKIP = dict(frac=1, schedule="joint"), dict(frac=1, schedule="joint", skip_forwards=True)
TWO_WINDOWS = dict(gradient_accumulation_steps=2)  # optimizer steps on one rollout
CELLS = {  # as well
    "default skip": ({}, dict(skip_forwards=True)),
    "fraction W=4 skip": (dict(timestep_fraction=0.6), W_4_SKIP),
    "windows W=4": (TWO_WINDOWS, W_4),
    "windows W=4 skip": (TWO_WINDOWS, W_4_SKIP),
    "cached W=4": ({}, W_4, 1, cached_on_rank_1),
    "cached W=4 skip": ({}, W_4_SKIP, 1, cached_on_rank_1),
    "W=2 probed": ({}, dict(group_size=2, frac=1, schedule="joint", probe_every=1, log="W=2.jsonl")),
    "frac 0 probed": ({}, dict(frac=0, probe_every=1, log="frac 0.jsonl")),
}


def build(name, lora=False):
    """The trainer's module, the wrapped model, and the arguments of train_one_step that every cell gets anew."""
    trainer = importlib.import_module(name)
    fsdp_util = importlib.import_module("fastvideo.utils.fsdp_util")
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(**standins.TINY_FLUX)
    if lora:
        from peft import LoraConfig

        transformer.requires_grad_(False)
        targets = ["to_k", "to_q", "to_v", "to_out.0"]
        transformer.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian", target_modules=targets))
    kwargs, blocks = fsdp_util.get_dit_fsdp_kwargs(transformer, "full", lora, False, "fp32")
    if lora:
        transformer._no_split_modules = [block.__name__ for block in blocks]
        kwargs["auto_wrap_policy"] = kwargs["auto_wrap_policy"](transformer)
        kwargs["sync_module_states"] = False  # every rank drew the same weights; on a CPU FSDP1 can't broadcast them
    transformer = torch.distributed.fsdp.FullyShardedDataParallel(transformer, **kwargs)
    fsdp_util.apply_fsdp_checkpointing(transformer, blocks, 1)

    torch.manual_seed(1)
    vae = AutoencoderKL(**standins.TINY_VAE).to(torch.bfloat16)
    prompts = [standins.make_prompt(10 * dist.get_rank() + number) for number in range(2)]
    *embeds, captions = zip(*prompts, strict=True)
    batch = (*(torch.stack(embed) for embed in embeds), list(captions))

    def arguments():
        given = dict(
            device=torch.device("cpu"),
            vae=vae,
            reward_model=standins.TinyReward(),
            tokenizer=standins.tokenize,
            loader=iter([batch]),
            noise_scheduler=None,
            preprocess_val=standins.preprocess,
        )
        return given if lora else given | dict(ema_handler=None)

    return trainer, transformer, arguments
