"""Running git."""

import os
import shutil
import subprocess

from .errors import Refused

# For commands that read or write the trainers' text: byte for byte, whatever the user has configured.
PLAIN = ("-c", "core.autocrlf=false", "-c", "apply.whitespace=nowarn")


def prepare():
    """The directory that is named decides, not what a git hook or the shell left in the environment."""
    if shutil.which("git") is None:
        raise Refused("git is not installed")
    left = subprocess.run(["git", "rev-parse", "--local-env-vars"], capture_output=True, text=True).stdout.split()
    for name in [*left, "CDPATH"]:
        os.environ.pop(name, None)


def run(folder, *arguments, **options):
    """git in `folder`, with what it prints captured unless `options` of subprocess.run say otherwise."""
    return subprocess.run(["git", "-C", folder, *arguments], **({"capture_output": True} | options))


def succeeds(folder, *arguments):
    """Whether git exits with 0. Nothing is shown."""
    return run(folder, *arguments).returncode == 0


def output(folder, *arguments):
    """The text that git prints, or None if it fails. No line end is changed."""
    done = run(folder, *arguments)
    return None if done.returncode else os.fsdecode(done.stdout)


def passes_on(folder, *arguments, **options):
    """Whether git exits with 0. What it prints goes where errors go."""
    return run(folder, *arguments, capture_output=False, stdout=2, **options).returncode == 0
