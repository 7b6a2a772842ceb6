"""Adapters: one module per shape of training loop, one table row per trainer."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import JaggError
from . import dancegrpo, dancegrpo_sd, flow_grpo
from .intercept import text_of

TRAINERS = dancegrpo.TRAINERS | dancegrpo_sd.TRAINERS | flow_grpo.TRAINERS


@dataclass(frozen=True)
class Unknown:
    """A file of a name that no adapter has: JAGG can be off in it, and refuses to start."""

    name: str

    in_main = False

    @property
    def contract(self):
        """Asked for where JAGG is on."""
        raise JaggError(
            f"no adapter for the trainer {self.name!r}: known are {', '.join(TRAINERS)}\n"
            "give the file one of these names, train with JAGG_ENABLED=0, or take the hook out of it (a new trainer:"
            " jagg_patch/trainers/README.md)"
        )

    def start(self, namespace, begin):
        """Nothing begins in it."""
        return {}


def find_trainer(namespace):
    """The adapter of the trainer whose module globals `namespace` is: by its file's name, or that of what a link leads to."""
    file = Path(namespace.get("__file__") or namespace.get("__name__", "?"))
    names = [file.stem, file.resolve().stem]
    trainer = next((TRAINERS[name] for name in names if name in TRAINERS), Unknown(file.stem))
    with suppress(JaggError):  # of a text that can't be read, which is said where it is relied on
        return trainer.as_written(text_of(namespace)) if hasattr(trainer, "as_written") else trainer
    return trainer
