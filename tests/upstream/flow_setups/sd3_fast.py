"""Stable Diffusion 3 that trains an SDE window of 3 of 10 steps."""

import os

from .sd3 import PIPELINE, build, encode_prompt

CONFIG = {}
TRAINS_WINDOW = True
SAME_LATENT = {  # all samples of a batch are of one prompt, and begin alike
    "sample.same_latent": True,
    "sample.num_image_per_prompt": 2 * int(os.environ.get("WORLD_SIZE", 1)),
    "sample.sde_window_size": 4,
}
SKIPS = {"window 4 same latent": (SAME_LATENT, dict(frac=1))}  # beside those of flow_cells.py

__all__ = ["CONFIG", "PIPELINE", "SKIPS", "TRAINS_WINDOW", "build", "encode_prompt"]
