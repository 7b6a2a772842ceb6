"""Setting aside the gradients that an engine has left in the parameters, for the probe."""

from contextlib import contextmanager, suppress

import torch
from torch.distributed.tensor import DTensor


@contextmanager
def gradients_set_aside(parameters):
    """Inside, no parameter has a gradient; after it, each has the one that it had before, in every bit.

    Yields a function that returns this rank's part of the gradients that have been accumulated since it was last called, a list
    with a tensor for every one of `parameters`: copies on a device if it is given one, else good until the next backward. The
    engine must be one that leaves gradients in `.grad`, and be done with its reduction: as it is before an optimizer step. After
    an exception they are dropped where they can't be put back.
    """
    grads = [parameter.grad for parameter in parameters]
    # An engine may write the next gradient into the same memory (DDP's bucket views, FSDP1's offloaded gradients).
    copies = [None if grad is None else _local(grad).to("cpu", copy=True) for grad in grads]

    def clear():
        for parameter in parameters:
            parameter.grad = None

    def take(device=None):
        taken = [torch.zeros_like(_local(p)) if p.grad is None else _local(p.grad) for p in parameters]
        clear()
        return taken if device is None else [gradient.to(device, copy=True) for gradient in taken]

    def put_back():
        for parameter, grad, copy in zip(parameters, grads, copies, strict=True):
            parameter.grad = grad
            if grad is not None:
                _local(grad).copy_(copy)

    clear()
    try:
        yield take
    except BaseException:
        clear()
        with suppress(RuntimeError):  # FSDP1 is left with gathered weights, which don't take a shard's gradient
            put_back()
        raise
    put_back()


def _local(tensor):
    """This rank's shard of a DTensor; any other tensor itself. Detached."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
