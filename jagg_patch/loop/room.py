"""Of how many samples of a rollout the graphs are kept, and where."""

import math
from typing import NamedTuple

from .memory import in_gb


class Measured(NamedTuple):
    """Of all ranks the least, and of graphs the largest.

    n_seen, n_first, n_sampled: samples of an update, of those before its first optimizer step, and of its rollout.
    graph, on_device, on_host: bytes of a step's graph, and what may be taken.
    """

    n_seen: int
    n_first: int
    n_sampled: int
    graph: int
    on_device: int
    on_host: int


class Room(NamedTuple):
    """Samples: of a rollout, of those whose graphs are kept, of these the ones on the device, and those that an update uses."""

    n_sampled: int
    n_retained: int
    n_on_device: int
    n_used: int


NONE = Room(0, 0, 0, 0)


def room(measured, n_knots, n_rows, n_syncing, is_known, places, cap):
    """The `Room` for samples of `n_knots` knots each.

    Args:
        n_rows: of a batch; whole ones are kept.
        n_syncing: samples before the first optimizer step that run their own forwards.
        is_known: whether the rollout can know which samples come first; else graphs of all of them are kept, or of none.
        places: whether the device may be used, and the host.
        cap: bytes, in all.
    """
    a_sample = measured.graph * n_knots
    could = measured.n_first - n_syncing
    wanted = could if is_known else measured.n_sampled

    def that_fit(n_bytes):
        n_samples = int(max(min(n_bytes, cap, wanted * a_sample), 0) // max(a_sample, 1))
        return n_samples - n_samples % n_rows

    free = measured.on_device, measured.on_host
    n_on_device, n_on_host = (is_one * that_fit(n_bytes) for is_one, n_bytes in zip(places, free, strict=True))
    held = min(n_on_device + n_on_host, that_fit(math.inf))
    if not is_known and held < wanted:
        held = 0
    return Room(measured.n_sampled, held, min(n_on_device, held), min(held, could))


def described(room, measured, n_knots, n_syncing):
    n_seen, n_first = measured.n_seen, measured.n_first
    own = f", {n_syncing} of them run their own forwards for DDP" if n_syncing else ""
    return (
        f"JAGG: graphs of {room.n_retained} samples of each rollout are retained from here on, {room.n_on_device} on the device "
        f"and {room.n_retained - room.n_on_device} in the host's memory: {in_gb(measured.graph * n_knots)} each\n"
        f"  {n_first} of an update's {n_seen} come before its first optimizer step{own}; on the fullest rank "
        f"{in_gb(measured.on_device)} are free on the device, and {in_gb(measured.on_host)} of the host's may be taken"
    )
