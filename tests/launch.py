"""Start processes: under torchrun, as the user's script does, or forked from one that has made the imports."""

import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
multiprocessing.set_forkserver_preload(["diffusers.models.transformers.transformer_flux", "torch.distributed.fsdp"])


def settings(env):
    """The environment of what is started: nothing of JAGG's from outside, one thread, no GPU, no flight recorder, and `env`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("JAGG_")}
    # The recorder's traces take a tenth of a small collective.
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_FR_BUFFER_SIZE": "0"} | dict(env)


def torchrun(n_ranks, *command, cwd, env=(), timeout=900):
    """Run `command` on `n_ranks` local processes with a free port; returns what they printed. AssertionError if they fail.

    The time limit is for those that hang: the processor is shared.
    """
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", n_ranks, *command]
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=settings(env),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))} failed:\n{done.stdout[-6000:]}"
    return done.stdout


def forked(n_ranks, script, *arguments, cwd, env=(), timeout=900):
    """What `torchrun` does, for one of the tests' own scripts: the same environment, and the tests' modules to import.

    Each process is forked from one that has imported torch and diffusers, which is most of what a short launch takes.
    """
    from torch.distributed import TCPStore
    from torch.multiprocessing.spawn import ProcessException, start_processes

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's agent has one for its processes too
    ranks = {"WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    ranks |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    environment = {key: str(value) for key, value in (settings(env) | ranks).items()}
    words = [str(word) for word in (script, *arguments)]
    printed = [Path(cwd, f"printed{rank}") for rank in range(n_ranks)]
    os.environ |= {"OMP_NUM_THREADS": "1"}  # read when torch is imported
    run = start_processes(_be_rank, (environment, cwd, words, printed), n_ranks, join=False, start_method="forkserver")
    deadline = time.monotonic() + timeout
    try:
        while not run.join(max(0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(words, timeout, "".join(map(said, printed)))
    except ProcessException as error:
        last = "".join(said(file)[-3000:] for file in printed)
        raise AssertionError(f"{' '.join(words)} failed:\n{last}{error}") from None
    finally:
        for process in run.processes:
            process.kill()
    return "".join(map(said, printed))


def said(file):
    return file.read_text(errors="replace") if file.exists() else ""


def _be_rank(rank, environment, cwd, words, printed):
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(cwd)
    with open(printed[rank], "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.path[:0] = [str(Path(words[0]).parent), str(ROOT), str(ROOT / "tests")]
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
