"""Start the mini trainer's own script: one run, or several that train in turn (mini/fastvideo/turns.py), a training step each."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from tqdm.auto import tqdm

SCRIPT = ["bash", "scripts/finetune/finetune_flux_grpo.sh"]
POLL = 0.2  # seconds between looks at whether a run has died
GRACE = 40  # seconds for a run to end: torchrun gives its workers 30
TAIL = 20  # lines of what a failed run printed


def environment(folder, seed, jagg):
    """The environment of a run into `folder`; `jagg` are the `JAGG_*` settings, a dict."""
    settings = {key: value for key, value in os.environ.items() if not key.startswith("JAGG_")}
    return settings | jagg | {
        "OUTPUT_DIR": str(folder),
        "SEED": str(seed),
        "CUDA_VISIBLE_DEVICES": "",  # two processes, whatever the machine has
        "OMP_NUM_THREADS": "1",  # torchrun's own default, said here so that it does not print a warning
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def read_metrics(folder):
    """The metrics of a run, one dict a training step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train(trainer, folder, title, seed, jagg, *flags):
    """Run the trainer's own script into `folder`, with `flags` more; its bars go to the terminal. Returns the metrics."""
    shutil.rmtree(folder, ignore_errors=True)
    if subprocess.run([*SCRIPT, *flags], cwd=trainer, env=environment(folder, seed, jagg), check=False).returncode:
        sys.exit(f"the training run with {title} failed; what it printed stands above\nits files are in {folder}")
    return read_metrics(folder)


class Run:
    """The trainer's own script, started into `folder`; what it prints goes to `folder`.log. It trains when it is given a turn."""

    def __init__(self, trainer, folder, title, seed, jagg, flags):
        shutil.rmtree(folder, ignore_errors=True)
        self.folder, self.title, self.log = folder, title, folder.with_suffix(".log")
        self.n_left = None  # training steps
        self._listener, self._connection, self._lines = socket.create_server(("127.0.0.1", 0)), None, None
        turns = {"MINI_TURNS": "{}:{}".format(*self._listener.getsockname())}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*SCRIPT, *flags],
                cwd=trainer,
                env=environment(folder, seed, jagg) | turns,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C reaches it through end(), after what it writes is no longer waited for
            )

    def stands(self):
        """Whether it has said, within `POLL` seconds, that it stands before its next training step, or at its end."""
        source = self._connection or self._listener
        if not select.select([source], [], [], POLL)[0]:
            return False
        if self._connection is None:
            self._connection, _ = self._listener.accept()
            self._lines = self._connection.makefile()
            return False
        line = self._lines.readline()
        if not line:  # it has closed the connection, and is about to end
            time.sleep(POLL)
            return False
        self.n_left = int(line)
        return True

    def go(self):
        with suppress(OSError):  # that it has died is seen where it is waited for
            self._connection.send(b".")

    def close(self):
        """Workers that outlive the script, whatever ended it, end when they next ask for a turn."""
        for end in (self._lines, self._connection, self._listener):
            if end is not None:
                end.close()

    def tail(self):
        """The last lines that it printed; of a line that a progress bar wrote over, the last state."""
        lines = self.log.read_text(errors="replace").rstrip().split("\n")[-TAIL:]
        return "\n".join(line.rstrip("\r").rsplit("\r")[-1] for line in lines)


def end(runs):
    """End those that haven't ended, all their processes, as Ctrl-C would; by force where that takes longer than `GRACE`."""
    alive = [run for run in runs if run.process.poll() is None]
    for run in alive:
        os.killpg(run.process.pid, signal.SIGINT)
    for run in runs:
        run.close()
    for run in alive:
        try:
            run.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()


def wait_for(run, runs):
    """Wait until `run` stands before a training step, or at its end; False if it has ended. SystemExit if any of `runs` fails."""
    while not run.stands():
        for other in runs:
            status = other.process.poll()
            if status:
                print(other.tail(), file=sys.stderr)
                rest = ", ".join(each.title for each in runs if each is not other)
                sys.exit(
                    f"the training run with {other.title} failed (exit status {status}), so {rest} was ended too\n"
                    f"the last that it printed stands above, all of it in {other.log}"
                )
        if run.process.poll() is not None:
            return False
    return True


def take_turns(runs):
    """One training step of each run after the other, none while another trains; then each run's end in the same way."""
    standing = deque(run for run in runs if wait_for(run, runs))  # all are there before the first begins
    with tqdm(total=sum(run.n_left for run in standing), desc="Training steps") as progress:
        while standing:
            run = standing.popleft()
            run.go()
            if wait_for(run, runs):
                standing.append(run)
                last = read_metrics(run.folder)[-1]
                progress.set_postfix_str(f"{run.title}: reward {last['reward']:.3f}, {last['seconds']:.2f} s", refresh=False)
                progress.update()


def train_in_turn(trainer, wanted, seed, *flags):
    """Run the trainer's own script once for each of `wanted`, in turn.

    Args:
        wanted: `{folder: (title, JAGG_* settings, flags...)}`; the folders are made, the flags added to the script's own.
        flags: of all runs.

    Returns:
        The metrics of each run, in the order of `wanted`.
    """
    runs = []
    try:
        for folder, (title, jagg, *own) in wanted.items():
            runs.append(Run(trainer, folder, title, seed, jagg, [*flags, *own]))
        take_turns(runs)
    finally:
        end(runs)
    return [read_metrics(run.folder) for run in runs]
