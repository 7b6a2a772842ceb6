"""What `python -m jagg_patch` offers, a module a command: each has `add_arguments(parser)` and `run(args)`."""

import os
import platform
from datetime import date
from tempfile import TemporaryFile

import torch

from .. import __version__
from ..errors import JaggError


def make_folder(path):
    """Make it if it isn't there, and raise `JaggError` if no file can be put into it, before the minutes of measuring."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path).close()
    except OSError as error:
        raise JaggError(f"the folder can't be made or written to: {error}\ngive --out another one") from None


def made_by(command, **more):
    """Where a result file comes from."""
    machine = f"{platform.machine()}, {os.cpu_count()} processors"
    versions = {"jagg": __version__, "torch": torch.__version__}
    return {"command": command, "date": date.today().isoformat(), "machine": machine} | versions | more
