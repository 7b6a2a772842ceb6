"""Retained graphs in the host's memory: what autograd saves is copied there, and back when its backward pass comes to it.

The copies run on the stream of the model, so that nothing has to wait for them, nor is overwritten before they are over. A step
of Flux at 720x720, all blocks checkpointed, saves some 0.9 GB: over a bus of 50 GB/s that is 18 ms each way.
"""

import weakref
from contextlib import contextmanager

import torch

from ..engines.gradients import as_bytes
from .checkpointed import arguments_saved
from .memory import pack, storages_of_weights, unpack


@contextmanager
def on_host(engine):
    """What a forward inside saves is kept in the host's memory, but for weights, also gathered ones.

    Yields a one-entry list: the bytes there.
    """
    weights, found = storages_of_weights(engine), [0]
    moved = {}  # by storage and version: it, so that no other comes to be in its place, and its copy

    def pack_on_host(tensor):
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        if storage is None or storage._cdata in weights:
            return None, pack(tensor)
        key = storage._cdata, tensor._version
        if key not in moved:
            moved[key] = storage, _Moved(storage)
            found[0] += storage.nbytes()
        return moved[key][1], (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def unpack_from_host(packed):
        copy, kept = packed
        return unpack(kept) if copy is None else copy.view(*kept)

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack_on_host, unpack_from_host), arguments_saved():
            yield found
    finally:
        moved.clear()


class _Moved:
    """A storage's bytes in the host's memory; on the device again while something that was saved of it is in use there."""

    def __init__(self, storage):
        self._device, self._back = storage.device, lambda: None
        self._bytes = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda)
        self._bytes.copy_(as_bytes(storage), non_blocking=True)

    def view(self, dtype, *place):
        storage = self._back()
        if storage is None:
            storage = self._bytes.to(self._device, copy=True, non_blocking=True).untyped_storage()
            self._back = weakref.ref(storage)
        return torch.empty(0, dtype=dtype, device=self._device).set_(storage, *place)
