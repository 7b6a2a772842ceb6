"""Setting aside the gradients that an engine has left in the parameters, for the probe and the self-check."""

from contextlib import nullcontext, suppress
from functools import reduce

import torch
from torch.distributed.tensor import DTensor


class GradientsSetAside:
    """Inside, no parameter has a gradient; after it, each has the one that it had before, in every bit.

    Meanwhile they are in the host's memory, and leave a device's unless an engine of `engines` reuses it. Each engine must be one
    that leaves gradients in `.grad`, and be done with its reduction: as it is before an optimizer step. After an exception
    gradients are dropped where they can't be put back.
    """

    def __init__(self, parameters, engines):
        self._frees = not any(engine.reuses_gradients for engine in engines)
        self._kept = {}  # parameter: its gradient
        self._memories = {}
        self.are_back = False
        self.also(parameters)

    def also(self, parameters):
        """These as well, from here on; none of them has got a gradient inside yet."""
        for parameter in parameters:
            if parameter not in self._kept:
                grad = self._kept[parameter] = parameter.grad
                parameter.grad = None
                if grad is not None and grad.layout is torch.strided:
                    self._save(own_part(grad).untyped_storage())

    def _save(self, storage):
        """Once, though several gradients may be views of it."""
        if storage._cdata not in self._memories:
            self._memories[storage._cdata] = _Memory(storage, self._frees and not on_host(storage))

    def take(self, device=None):
        """This rank's part of the gradients that have been accumulated since it was last called.

        By parameter, for those that have got one: copies on a device if it is given one, else good until the next backward.
        """
        taken = gradients_of(self._kept, device)
        self._clear()
        return taken

    def _clear(self):
        for parameter in self._kept:
            parameter.grad = None

    def _put_back(self):
        for memory in self._memories.values():
            memory.put_back()
        for parameter, grad in self._kept.items():
            parameter.grad = grad

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self._clear()
        # After an exception FSDP1 is left with gathered weights, which don't take a shard's gradient.
        with suppress(RuntimeError) if kind else nullcontext():
            self._put_back()
            self.are_back = True


class _Memory:
    """All of a `storage`, copied: into it an engine may write the next gradients, or it is emptied in the meantime."""

    def __init__(self, storage, empties):
        self._storage, self._n_bytes = storage, storage.nbytes()
        self._copy = as_bytes(storage).to("cpu", copy=True)
        if empties:
            storage.resize_(0)

    def put_back(self):
        if not self._storage.nbytes():
            self._storage.resize_(self._n_bytes)
        as_bytes(self._storage).copy_(self._copy)


def on_host(storage):
    return storage.device.type == "cpu"


def as_bytes(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def gradients_of(parameters, device=None):
    """This rank's part of the gradients of `parameters`, by parameter; dense and real. Copies, if a device is given."""
    taken = {parameter: plain(own_part(parameter.grad)) for parameter in parameters if parameter.grad is not None}
    return taken if device is None else {parameter: grad.to(device, copy=True) for parameter, grad in taken.items()}


def norms_of(tensors):
    """By the same keys, as floats. NaN equals nothing, not even itself, so that it is -1, which is no norm."""
    if not tensors:
        return {}
    parts = [plain(tensor) for tensor in tensors.values()]
    wide = reduce(torch.promote_types, {part.dtype for part in parts}, torch.float32)
    norms = torch._foreach_norm(parts, 2, wide)
    # On one device: to the host they go at once.
    values = torch.stack([norm.to(norms[0]) for norm in norms]).nan_to_num(-1, torch.inf)
    return dict(zip(tensors, values.tolist(), strict=True))


def plain(gradient):
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return torch.view_as_real(dense) if dense.is_complex() else dense


def own_part(tensor):
    """This rank's shard of a DTensor; any other tensor itself. Detached."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
