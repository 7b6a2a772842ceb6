"""Let several runs of the trainer train in turn, a training step each, so that what else the machine does meets all alike.

No part of DanceGRPO, and nothing to do with JAGG: whoever compares runs (upstream/demo.py) listens at MINI_TURNS, `HOST:PORT`,
and hands out the turns. Without that variable nothing waits.
"""

import os
import socket
from contextlib import nullcontext


def in_turn(steps, rank, barrier):
    """Yield each of `steps` when it is this run's turn. A run whose turns are no longer handed out ends.

    Rank 0 says how many steps are left, a line, and waits for one byte; the others wait for it at the `barrier`, which also
    holds the turn until every rank's step is done. After the last step the run waits once more: its end is a turn too.
    """
    address = os.environ.get("MINI_TURNS")
    if address is None:
        yield from steps
        return
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) if rank == 0 else nullcontext() as referee:

        def wait(n_left):
            barrier()
            if referee is not None:
                referee.sendall(f"{n_left}\n".encode())
                if not referee.recv(1):
                    raise SystemExit("whoever hands out the turns has gone\nthis run ends with it")
            barrier()

        for number, step in enumerate(steps):
            wait(len(steps) - number)
            yield step
        wait(0)
