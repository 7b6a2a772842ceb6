"""As flux.py, with adapters."""

from functools import partial

from . import flux

ARGS = flux.ARGS
build = partial(flux.build, lora=True)
