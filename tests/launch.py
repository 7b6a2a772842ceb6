"""Start processes under torchrun, as the user's script does, and say what they printed when they fail."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def torchrun(n_ranks, *command, cwd, env=(), timeout=900):
    """Run `command` on `n_ranks` local processes with a free port; returns what they printed. AssertionError if they fail.

    The time limit is for those that hang: the processor is shared.
    """
    settings = {key: value for key, value in os.environ.items() if not key.startswith("JAGG_")}
    settings |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | dict(env)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", n_ranks, *command]
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=settings, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))} failed:\n{done.stdout[-6000:]}"
    return done.stdout
