"""Flux that trains an SDE window of 3 of 10 steps."""

from .flux import PIPELINE, build, encode_prompt

CONFIG = {}
TRAINS_WINDOW = True

__all__ = ["CONFIG", "PIPELINE", "TRAINS_WINDOW", "build", "encode_prompt"]
