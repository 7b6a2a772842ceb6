"""What JAGG has patches for: an upstream is a folder beside this one with `series`, patches, `pin.ini` and `lock.json`."""

import json
import os
from functools import cached_property
from pathlib import Path, PurePosixPath

from . import git

ROOT = Path(__file__).resolve().parents[2]  # of the patch set


class Upstream:
    """One folder of patches."""

    def __init__(self, folder):
        self.folder, self.name = folder, folder.name
        lines = (folder / "series").read_text().splitlines()
        self.trainers = [line.removesuffix(".patch") for line in lines if line.endswith(".patch") and line[0] != "#"]

    @cached_property
    def _pin(self):
        values = {}
        for entry in (git.output(ROOT, "config", "--file", self.pin_file, "--list", "-z") or "").split("\0")[:-1]:
            key, _, value = entry.partition("\n")
            values.setdefault(key, []).append(value)
        return values

    def pin(self, name):
        """The value of `name` in the pin."""
        return self.pins(name)[0]

    def pins(self, name):
        """All of them, where it stands several times."""
        return self._pin.get(f"upstream.{name}", [])

    @property
    def pin_file(self):
        """Where its files and the commit are named that the patches were made against."""
        return self.folder / "pin.ini"

    @property
    def lock_file(self):
        """Where the fingerprints are of what JAGG relies on."""
        return self.folder / "lock.json"

    def lock(self):
        """`{trainer: {"commit": …, "symbols": {symbol: fingerprint}}}`."""
        return json.loads(self.lock_file.read_text()) if self.lock_file.is_file() else {}

    def patch_file(self, trainer):
        """The trainer's patch."""
        return self.folder / f"{trainer}.patch"

    def file(self, trainer):
        """The path of the trainer in a checkout."""
        return str(PurePosixPath(self.pin("module")).with_name(f"{trainer}.py"))

    def named(self, only):
        """Those of the trainers that `only` names."""
        return [trainer for trainer in self.trainers if trainer in only]

    @property
    def place(self):
        """Where its checkout is unless another is named."""
        return ROOT / "upstream" / self.pin("folder")


UPSTREAMS = [Upstream(series.parent) for series in sorted((ROOT / "patches").glob("*/series"))]


def all_trainers():
    """Of every upstream."""
    return [trainer for upstream in UPSTREAMS for trainer in upstream.trainers]


def upstreams_in(directory):
    """Those that `directory` has a trainer of."""
    return [one for one in UPSTREAMS if any(os.path.isfile(os.path.join(directory, file)) for file in one.pins("file"))]
