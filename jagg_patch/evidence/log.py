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
    """Appends to the file at `path`, where one is named. Raises `JaggError` if it can't be written to."""

    def __init__(self, path):
        self._path = None
        self._defined_in = None  # the wandb run that knows our x axis
        if path:
            try:
                self._path = Path(path).expanduser().absolute()  # the trainer may change its folder
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with open(self._path, "ab+") as file:
                    if file.tell():
                        file.seek(-1, os.SEEK_END)
                        if file.read() != b"\n":
                            file.write(b"\n")  # after a line that a killed run left unfinished
            except (OSError, RuntimeError, ValueError) as error:
                raise JaggError(f"the log can't be written: {error}\ngive JAGG_LOG the path of a file, or unset it") from None

    def write(self, record):
        if self._path is not None:
            try:
                with open(self._path, "a") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError as error:
                print(f"JAGG: the log can't be written any more: {error}\nthe run goes on without it", flush=True)
                self._path = None
        self._to_wandb(record)

    def _to_wandb(self, record):
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            return
        if run is not self._defined_in:
            run.define_metric("jagg/*", step_metric="jagg/training_step")
            self._defined_in = run
        values = {name: value for name, value in record.items() if isinstance(value, (int, float))}
        for probe in record["probe"] or ():
            prefix = f"cosine_W{probe['group_size']}"
            cosines = {f"{prefix}/{n}": group["cosine"] for n, group in enumerate(probe["groups"]) if group["cosine"] is not None}
            values = cosines | values  # the run's own groups come first, and another split of the same W mustn't overwrite them
        # Not committed: the trainer's own steps go on as they are.
        run.log({f"jagg/{name}": value for name, value in values.items()}, commit=False)
