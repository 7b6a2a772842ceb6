"""As hunyuan.py, with a first frame and classifier-free guidance.

Stood in for besides: the FLUX.1 pipeline that draws the first frame, and torchvision's transforms, which read it.
"""

from functools import reduce
from types import SimpleNamespace

import standins
import torch
from PIL import Image

from . import hunyuan

ARGS = dict(t=5, fps=8, use_videoalign=True, num_generations=4, cfg_infer=5.0)


class TinyFluxPipeline:
    def to(self, device):
        return self

    def __call__(self, caption, height, width, **_):
        return SimpleNamespace(images=[Image.radial_gradient("L").resize((width, height))])


def normalize(mean, std):
    return lambda pixels: (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def compose(steps):
    return lambda image: reduce(lambda value, step: step(value), steps, image)


def build(name):
    """The trainer's module, the wrapped model, and the arguments of train_one_step that every cell gets anew."""
    transforms = standins.module(
        "torchvision.transforms", Compose=compose, ToTensor=lambda: standins.preprocess, Normalize=normalize
    )
    standins.module("torchvision", transforms=transforms)
    trainer, transformer, hunyuan_arguments = hunyuan.build(name, in_channels=32)  # the first frame's latents come along
    embeds, mask = hunyuan.make_prompt(99, length=2)

    def arguments():
        unconditional = dict(empty_cond_hidden_states=embeds, empty_cond_attention_mask=mask)
        return hunyuan_arguments() | unconditional | dict(pipe_flux=TinyFluxPipeline())

    return trainer, transformer, arguments
