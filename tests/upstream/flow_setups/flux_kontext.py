"""A tiny Flux Kontext pipeline, which edits images; the trainer takes 9 of 10 steps."""

import json

import flow_standins as standins
import numpy as np
from diffusers import FluxKontextPipeline
from PIL import Image

from . import flux
from .flux import encode_prompt

PIPELINE = "FluxKontextPipeline"
CONFIG = {}
TRAINS_WINDOW = False

__all__ = ["CONFIG", "PIPELINE", "TRAINS_WINDOW", "build", "encode_prompt", "write_prompts"]


def build():
    return flux.build(FluxKontextPipeline)


def write_prompts(folder):
    """Prompts with an image each, in upstream's layout."""
    folder.mkdir(exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (standins.N_PROMPTS, 64, 64, 3), np.uint8)
    entries = [{"prompt": f"prompt {number}", "image": f"{number}.png"} for number in range(standins.N_PROMPTS)]
    for entry, image in zip(entries, pixels, strict=True):
        Image.fromarray(image).save(folder / entry["image"])
    for split in ("train", "test"):
        (folder / f"{split}_metadata.jsonl").write_text("\n".join(map(json.dumps, entries)))
