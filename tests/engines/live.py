"""How much memory a training step takes: bytes that autograd has saved, and bytes of all tensors, now and at the peak."""

import weakref
from collections import Counter
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from jagg_patch.loop.checkpointed import arguments_saved


class Mode(TorchDispatchMode):
    """Every operation passes through it, so that a wrapper around it, against torch.compile, costs as much as it does itself."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False


class Saved:
    """What the graphs made while `watching()` hold: each storage counts once, until the last node that saved it is gone."""

    class _Packed:
        def __init__(self, tensor):
            self.tensor = tensor.detach()  # a node's own output would keep the node

    def __init__(self):
        self.alive = self.peak = 0
        self._uses = Counter()

    def _pack(self, tensor):
        packed, storage = self._Packed(tensor), tensor.untyped_storage()
        key = storage._cdata, storage.nbytes()
        if not self._uses[key]:
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)
        self._uses[key] += 1
        weakref.finalize(packed, self._drop, key)
        return packed

    def _drop(self, key):
        self._uses[key] -= 1
        if not self._uses[key]:
            self.alive -= key[1]

    @contextmanager
    def watching(self):
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed.tensor), arguments_saved():
            yield


def tensors(values):
    """Those in an operation's arguments or results."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors(value)


class Allocated(Mode):
    """Bytes of the tensors that were made since it was entered, counted after every operation.

    torch.profiler records the CPU allocator's events, but not those of other threads, and gloo's free most of what FSDP gathers.
    On CUDA it is the allocator's own peak.
    """

    def __init__(self):
        super().__init__()
        self.alive = self._peak = 0
        self._sizes = {}

    @property
    def peak(self):
        return torch.cuda.max_memory_allocated() - self._before if torch.cuda.is_available() else self._peak

    def _grow(self, storage, n_bytes):
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._drop, key)
        self._sizes[key] += n_bytes
        self.alive += n_bytes
        self._peak = max(self._peak, self.alive)

    def _drop(self, key):
        self.alive -= self._sizes.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if types and any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # asked again for the local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            return result  # a copy for the host, where the model is on a device
        for tensor in tensors((result,)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sizes:
                old = {tensor.untyped_storage()._cdata for tensor in tensors((args, tuple(kwargs.values())))}
                if storage._cdata not in old:
                    self._grow(storage, storage.nbytes())
        return result

    @contextmanager
    def watching(self):
        """FSDP empties and refills the storages of gathered weights, which is no operation."""
        resize = torch.UntypedStorage.resize_

        def watched_resize(storage, size):
            before = storage.nbytes()
            result = resize(storage, size)
            self._grow(storage, storage.nbytes() - before)
            return result

        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        torch.UntypedStorage.resize_ = watched_resize
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize
