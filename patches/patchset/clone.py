"""The checkouts that are meant where none is named, and cloning them at the pin."""

import os
import shutil
import subprocess

from . import git
from .checkout import require_own_trainers
from .errors import Refused
from .upstreams import UPSTREAMS


def default_places(only):
    """Those of the trainers in `only`; else those that are there; else the first."""
    found = [upstream for upstream in UPSTREAMS if (upstream.named(only) if only else upstream.place.exists())]
    return [str(upstream.place) for upstream in found or UPSTREAMS[:1]]


def clone_if_default(place, only):
    """Clone the upstream whose default place this is, if it is one; `only` are trainers that it has to have."""
    for upstream in UPSTREAMS:
        if os.path.realpath(place) == str(upstream.place):
            require_own_trainers(place, upstream, only)
            _clone(upstream)


def _clone(upstream):
    url, commit, folder = (upstream.pin(name) for name in ("url", "commit", "folder"))
    partial = upstream.place.with_name(f".{folder}.partial")
    print(f"cloning {url} at {commit[:12]} into upstream/{folder}")
    shutil.rmtree(partial, ignore_errors=True)
    command = ["git", "clone", "--config", "core.autocrlf=false", url, str(partial)]
    if subprocess.run(command).returncode or not _check_out(partial, commit):
        shutil.rmtree(partial, ignore_errors=True)
        raise Refused(
            f"could not clone {url}",
            f"where there is network: git clone {url} && git -C {folder} checkout {commit}",
            "then copy the folder here and run ./apply.sh DIR",
        )
    partial.rename(upstream.place)


def _check_out(clone, commit):
    """Even if the commit is on no branch."""
    arguments = ("checkout", "--quiet", "--detach", commit)
    if git.succeeds(clone, *arguments):
        return True
    return git.passes_on(clone, "fetch", "--quiet", "origin", commit) and git.passes_on(clone, *arguments)
