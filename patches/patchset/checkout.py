"""A checkout or unpacked tarball of an upstream: its trainers, and what git knows of it."""

import os
from contextlib import suppress
from pathlib import Path

from . import git
from .errors import Refused
from .mail import ended_as
from .upstreams import UPSTREAMS, upstreams_in


class Checkout:
    """The directory that the user calls `given`, of which the trainers in `only` are meant, or if it is empty all that are there.

    Raises:
        Refused: it isn't one, or git can't read it.
    """

    def __init__(self, given, only):
        self.only, self.upstream = only, _upstream_of(given)
        done = git.run(given, "rev-parse", "--git-path", "info/exclude", "--show-prefix")
        exclude, self.prefix = os.fsdecode(done.stdout).split("\n")[:2] if done.returncode == 0 else ("", "")
        is_top = os.path.exists(os.path.join(given, ".git"))
        if is_top and done.returncode:
            raise Refused(f"{given}: git can't read it", os.fsdecode(done.stderr).rstrip("\n"))
        self.directory = Path(os.path.realpath(given))
        self.exclude = self.directory / exclude if exclude else None  # it may be that of a repository around it
        self.module = self.directory / self.upstream.pin("module")

    @property
    def trainers(self):
        """The names of those that are meant, in the order of the series."""
        if self.only:
            return self.upstream.named(self.only)
        return [trainer for trainer in self.upstream.trainers if self.has(trainer)]

    def file(self, trainer):
        """Its path below the directory."""
        return self.upstream.file(trainer)

    def path(self, trainer):
        """Its path."""
        return self.directory / self.file(trainer)

    def has(self, trainer):
        """Whether something is at its path."""
        return os.path.lexists(self.path(trainer))

    def others(self):
        """The names of the other Python files beside the trainers; `file` and `path` take them too."""
        names = sorted(path.stem for path in self.module.parent.glob("*.py"))
        return [name for name in names if name not in self.upstream.trainers]

    def absent(self):
        """The upstream's trainers that it doesn't have, unless some were named."""
        return [] if self.only else [trainer for trainer in self.upstream.trainers if not self.has(trainer)]

    def git_path(self, name):
        """Where `name` is in its own .git."""
        return self.directory / git.output(self.directory, "rev-parse", "--git-path", name).rstrip("\n")

    def patch(self, *trainers):
        """Their patches as one text: git apply writes nothing unless every hunk of its input fits."""
        return b"".join(ended_as(self.upstream.patch_file(trainer).read_bytes(), self._text(trainer)) for trainer in trainers)

    def _text(self, trainer):
        path = self.path(trainer)
        return path.read_bytes() if path.is_file() else b""

    def apply_command(self, *name):
        """git apply or git am, which without --directory skip every file of a checkout inside another repository."""
        return (*git.PLAIN, *name, f"--directory={self.prefix}")

    def committed(self, trainers, what):
        """Those of `trainers` that have `what` in the last commit."""
        files = {self.file(trainer): trainer for trainer in trainers}
        command = ("-c", "grep.fullName=false", "grep", "-lzF", "-e", what, "HEAD", "--", *files)
        found = (git.output(self.directory, *command) or "") if files else ""
        return [trainer for file, trainer in files.items() if f"HEAD:{file}" in found.split("\0")]

    def first_without(self, trainers, *question):
        """The first trainer for whose file git answers `question` with a failure; None if there is none."""
        if not trainers or git.succeeds(self.directory, *question, *map(self.file, trainers)):
            return None
        return next((one for one in trainers if not git.succeeds(self.directory, *question, self.file(one))), None)


def _upstream_of(given):
    if not os.path.isdir(given):
        raise Refused(f"{given}: no such directory", "name your checkout, or let ./apply.sh without an argument clone one")
    found = upstreams_in(given)
    if not found:
        files = [file for upstream in UPSTREAMS for file in upstream.pins("file")]
        raise Refused(f"{given} is neither a DanceGRPO nor a Flow-GRPO checkout: it has none of", *files)
    if len(found) > 1:
        names = " ".join(upstream.name for upstream in found)
        raise Refused(f"{given} has trainers of several upstreams ({names})", "give each a folder of its own")
    return found[0]


def require_own_trainers(given, upstream, only):
    """Refuse if `only` names trainers of another upstream."""
    others = [trainer for trainer in only if trainer not in upstream.trainers]
    if others:
        raise Refused(
            f"{given}: {upstream.pin('folder')} has no {' '.join(others)}", f"its trainers are {' '.join(upstream.trainers)}"
        )


def give(path, owner, mode):
    """Give the file at `path` to the owner that the stat result `owner` names, and that mode."""
    with suppress(OSError):  # only root may give files away
        os.chown(path, owner.st_uid, owner.st_gid)
    os.chmod(path, mode & 0o7777)


def is_read_only(path):
    """Root can write anywhere, so the mode counts too."""
    return not os.access(path, os.W_OK) or not os.stat(path).st_mode & 0o200
