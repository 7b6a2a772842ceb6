"""What the commands that write results share."""

import argparse
import os
import platform
import sys
from datetime import date
from tempfile import TemporaryFile

import torch

from jagg_patch import JaggError, __version__


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


def add_with_default(parser, flag, default, help, **more):
    """A flag of `parser` whose help says its default."""
    shown = " ".join(f"{value:g}" for value in default) if isinstance(default, list) else default
    parser.add_argument(flag, default=default, help=f"{help} (default {shown})", **more)


def command_line(description, add_arguments, run):
    """Run a command with what it was called with; a `JaggError` ends it without a traceback."""
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser)
    try:
        run(parser.parse_args())
    except JaggError as error:
        sys.exit(str(error))
