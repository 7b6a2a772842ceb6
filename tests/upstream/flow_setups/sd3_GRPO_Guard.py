"""Stable Diffusion 3 with GRPO-Guard's normalized ratio, which this trainer can't run without."""

from .sd3 import PIPELINE, build, encode_prompt

CONFIG = {"rationorm": True, "run_project": "flow_grpo"}
TRAINS_WINDOW = False

__all__ = ["CONFIG", "PIPELINE", "TRAINS_WINDOW", "build", "encode_prompt"]
