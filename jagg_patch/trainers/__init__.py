"""Adapters: one module per shape of training loop, one table row per trainer."""

from pathlib import Path

from ..errors import JaggError
from . import dancegrpo, dancegrpo_sd, flow_grpo

TRAINERS = dancegrpo.TRAINERS | dancegrpo_sd.TRAINERS | flow_grpo.TRAINERS


def find_trainer(namespace):
    """The adapter of the trainer whose module globals `namespace` is. Raises `JaggError` when there is none."""
    name = Path(namespace.get("__file__") or namespace.get("__name__", "?")).stem
    if name not in TRAINERS:
        raise JaggError(
            f"no adapter for the trainer {name!r}: known are {', '.join(TRAINERS)}\n"
            "remove the hook from this file, or add a row to the table in jagg_patch/trainers (README.md there: Adding a trainer)"
        )
    return TRAINERS[name]
