"""What Flow-GRPO's trainers load or call and a CPU box can't have: text encoders, tokenizers, reward models, video files.

Everything else is the real thing: the trainer file with its `main`, upstream's rollout, solver step, samplers, statistics and
EMA, accelerate, peft, diffusers' model, VAE, scheduler and pipeline classes, wandb (switched off).
"""

import os
import sys
import types
import zlib
from pathlib import Path

import standins
import torch

N_PROMPTS = 16
PROMPT_LENGTH = 6
SCALE = 2.0**16  # of the loss with fp16


class TextEncoder(torch.nn.Identity):
    """What the trainers ask of a text encoder whose embeddings come from `prompt_embeddings`."""

    dtype, device = torch.float32, torch.device("cpu")


class Tokenizer:
    """One token a character, so that the trainers get their prompts back."""

    model_max_length = PROMPT_LENGTH

    def __call__(self, prompts, max_length, **_):
        tokens = [[ord(letter) for letter in prompt.ljust(max_length, "\0")] for prompt in prompts]
        return types.SimpleNamespace(input_ids=torch.tensor(tokens))

    def batch_decode(self, tokens, **_):
        return ["".join(chr(int(token)) for token in row if token) for row in tokens]


def prompt_embeddings(prompts, *shape):
    """Random numbers `[len(prompts), *shape]`, the same for the same prompt."""
    prompts = [prompts] if isinstance(prompts, str) else prompts
    return torch.stack([torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(p.encode()))) for p in prompts])


def multi_score(device, weights):
    """In the place of upstream's reward models: how bright an image or a video is, which differs for any two."""

    def score(images, prompts, metadata, ref_images=None, only_strict=True):
        return {"avg": images.flatten(1).double().mean(1).tolist()}, {}

    return score


def with_scaler(accelerator):
    """The class `accelerator`, but with fp16, which accelerate refuses on a CPU, it scales losses alone."""

    def __init__(self, *args, mixed_precision, **kwargs):
        accelerator.__init__(self, *args, mixed_precision=mixed_precision.replace("fp16", "no"), **kwargs)
        if mixed_precision == "fp16":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    return type("Accelerator", (accelerator,), {"__init__": __init__})


def with_trained_adapter(get_peft_model):
    """The same, but B of every LoRA layer isn't zero: the model differs from its reference, as after some training."""

    def get_trained_peft_model(model, config):
        made = get_peft_model(model, config)
        generator = torch.Generator().manual_seed(3)
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.2, generator=generator)
        return made

    return get_trained_peft_model


def write_prompts(folder):
    """Prompts for training and for evaluation, in upstream's layout."""
    folder.mkdir(exist_ok=True)
    for split in ("train", "test"):
        (folder / f"{split}.txt").write_text("".join(f"prompt {number}\n" for number in range(N_PROMPTS)))


def install():
    """Call before a trainer is imported, and after diffusers, which looks for imageio's module spec."""
    import flow_grpo.rewards
    import wandb

    os.environ["ACCELERATE_USE_CPU"] = "true"  # DDP over gloo
    wandb.init(mode="disabled")  # the GRPO-Guard trainer logs without it
    flow_grpo.rewards.multi_score = multi_score
    video_writer = types.ModuleType("imageio")
    video_writer.mimsave = lambda path, frames, **_: Path(path).touch()
    sys.modules["imageio"] = video_writer


TINY_VAE = standins.TINY_VAE | dict(shift_factor=0.1)
