"""Setting aside the gradients that an engine has left in the parameters, for the probe and the self-check."""

from contextlib import nullcontext, suppress

from torch.distributed.tensor import DTensor


class GradientsSetAside:
    """Inside, no parameter has a gradient; after it, each has the one that it had before, in every bit.

    The engine must be one that leaves gradients in `.grad`, and be done with its reduction: as it is before an optimizer step.
    After an exception gradients are dropped where they can't be put back.
    """

    def __init__(self, parameters):
        self._kept = {}  # parameter: its gradient, and a copy of that
        self.are_back = False
        self.also(parameters)

    def also(self, parameters):
        """These as well, from here on; none of them has got a gradient inside yet."""
        for parameter in parameters:
            if parameter not in self._kept:
                grad = parameter.grad
                # An engine may write the next gradient into the same memory (DDP's bucket views, FSDP1's offloaded gradients).
                self._kept[parameter] = grad, None if grad is None else _local(grad).to("cpu", copy=True)
                parameter.grad = None

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
        for parameter, (grad, copy) in self._kept.items():
            parameter.grad = grad
            if grad is not None:
                _local(grad).copy_(copy)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self._clear()
        # After an exception FSDP1 is left with gathered weights, which don't take a shard's gradient.
        with suppress(RuntimeError) if kind else nullcontext():
            self._put_back()
            self.are_back = True


def gradients_of(parameters, device=None):
    """This rank's part of the gradients of `parameters`, by parameter; copies, if a device is given."""
    taken = {parameter: _local(parameter.grad) for parameter in parameters if parameter.grad is not None}
    return taken if device is None else {parameter: grad.to(device, copy=True) for parameter, grad in taken.items()}


def _local(tensor):
    """This rank's shard of a DTensor; any other tensor itself. Detached."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
