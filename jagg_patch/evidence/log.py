"""The log of a run: one record a training step, as a line of JSON and in the trainer's own wandb run."""

import json
import os
import sys
import time
from pathlib import Path

import torch

from ..errors import JaggError


def now():
    """Seconds on a clock that waits for the GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Stopwatch:
    """Seconds of a training step's rollout and update; `waits` for the GPU where somebody will read them."""

    def __init__(self, waits):
        self._now = now if waits else time.perf_counter
        self._began = self._update_began = None

    def rollout_begins(self):
        """A batch of it; the first one counts."""
        if self._began is None:
            self._began = self._now()

    def update_begins(self):
        self.rollout_begins()
        self._update_began = self._now()

    def seconds(self):
        """`(rollout, update)` up to now."""
        return self._update_began - self._began, self._now() - self._update_began


class Log:
    """Appends to the file at `path`, where one is named. Raises `JaggError` if it `is_checked` and can't be written to."""

    def __init__(self, path, is_checked=True):
        self._path = None
        self._is_begun = self._wandb_has_failed = False
        self._defined_in = None  # the wandb run that knows our x axis
        if path:
            try:
                self._path = Path(path).expanduser().absolute()  # the trainer may change its folder
                if is_checked:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    open(self._path, "ab").close()
            except (OSError, RuntimeError, ValueError) as error:
                raise JaggError(f"the log can't be written: {error}\ngive JAGG_LOG the path of a file, or unset it") from None

    def write(self, record):
        if self._path is not None:
            try:
                with open(self._path, "ab+") as file:
                    if not self._is_begun and is_cut_off(file):
                        file.write(b"\n")
                    file.write(json.dumps(record).encode() + b"\n")
                self._is_begun = True
            except OSError as error:
                print(f"JAGG: the log can't be written any more: {error}\nthe run goes on without it", flush=True)
                self._path = None
        if not self._wandb_has_failed:
            try:
                self._to_wandb(record)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                print(f"JAGG: wandb doesn't take JAGG's numbers: {why}\nthe run goes on without them", flush=True)
                self._wandb_has_failed = True

    def _to_wandb(self, record):
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            return
        if run is not self._defined_in:
            run.define_metric("jagg/*", step_metric="jagg/training_step")
            self._defined_in = run
        values = {name: value for name, value in record.items() if isinstance(value, (int, float))}
        for probe in record["probe"] or ():
            values = cosines(probe) | values  # the run's own come first, and others of the same name mustn't overwrite them
        # Not committed: the trainer's own steps go on as they are.
        run.log({f"jagg/{name}": value for name, value in values.items()}, commit=False)


def cosines(probe):
    """By name: those of a `GroupProbe`'s groups, or a `KnotProbe`'s one of the whole update."""
    if "groups" in probe:
        found = {f"cosine_W{probe['group_size']}/{n}": group["cosine"] for n, group in enumerate(probe["groups"])}
    else:
        plan = f"W{probe['group_size']}" if probe["group_size"] else f"knots{len(probe['knots'])}"
        found = {f"cosine_{plan}": probe["cosine"]}
    return {name: cosine for name, cosine in found.items() if cosine is not None}


def is_cut_off(file):
    """Whether a killed run has left its last line unfinished."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read() != b"\n"
