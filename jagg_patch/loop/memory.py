"""How much memory the joint schedule takes on top of the unpatched trainer's, and how much there is. Bytes, of this rank."""

import os
from contextlib import contextmanager

import torch

from ..engines import engine_of
from .checkpointed import arguments_saved

RESERVE = 0.05  # of the device, for fragmentation and for what the measured steps didn't see

CHANGED = "modified by an inplace operation"  # as torch has it


def free_bytes():
    """What the steps so far have left unused at their peak (on a CPU: what is unused now); 0 where that can't be told."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated() - int(RESERVE * total)
    return int((1 - RESERVE) * host_bytes())


def host_bytes():
    """This rank's share of the host's available memory; 0 where that can't be told."""
    try:
        with open("/proc/meminfo") as file:
            kilobytes = {name: int(value.split()[0]) for name, value in (line.split(":") for line in file)}
        available = 1024 * kilobytes["MemAvailable"]
    except (OSError, KeyError):
        return 0
    return available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def graph_bytes(model):
    """Yields a one-entry list: once it is over, the bytes that a forward of `model` inside keeps for its backward.

    Without CUDA 0 where somebody's hooks run at gradients: torch 2.6 drops them from a weight that a Python autograd function
    gets from hooks on what is saved.
    """
    found = [0]
    engine = engine_of(model)
    if torch.cuda.is_available():
        before = _bytes_beside_weights(engine)
        yield found
        found[0] = _bytes_beside_weights(engine) - before
        return
    if engine.has_hooks:
        yield found
        return
    kept = {}

    def pack_counted(tensor):
        if tensor.layout is torch.strided:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack_counted, unpack), arguments_saved():
        yield found
    for weights in storages_of_weights(engine):
        kept.pop(weights, None)
    found[0] = sum(storage.nbytes() for storage in kept.values())  # now: what has been resharded since is empty


def pack(tensor):
    """What autograd keeps of a tensor that it saves."""
    if tensor.layout is not torch.strided:
        return tensor, tensor._version
    return tensor.detach(), tensor._version  # itself, it would be kept alive by the node that made it


def unpack(packed):
    tensor, version = packed
    if tensor._version != version:  # torch looks at it where nothing is packed
        raise RuntimeError(f"{CHANGED}: a tensor of shape {list(tensor.shape)}")
    return tensor


def storages_of_weights(engine):
    """The identities of those of the model's weights, and of gathered ones."""
    own = [parameter.untyped_storage() for parameter in engine.model.parameters()]
    return {storage._cdata for storage in (*own, *engine.gathered_weights())}


def _bytes_beside_weights(engine):
    return torch.cuda.memory_allocated() - sum(weights.nbytes() for weights in engine.gathered_weights())


def joint_excess(model, graph):
    """At most what the joint schedule takes on top of the sequential one, whose peak is the unpatched trainer's.

    Args:
        model: as its engine wraps it.
        graph: bytes of one step's graph; the joint schedule holds two.

    The second graph shrinks while what waits grows, so that equal blocks need the larger of the two. The sum is safe for all.
    """
    gradients, weights = engine_of(model).waiting_bytes()
    return graph + gradients + weights


def in_gb(n_bytes):
    return f"{n_bytes / 1e9:.3g} GB"
