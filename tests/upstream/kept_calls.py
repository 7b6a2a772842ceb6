"""The training forwards of a script that nobody may edit, kept as they were called: what their gradient is with knots."""

from functools import partial

import torch
from observe import folded, local_gradient


class KeptCalls:
    """Give `watch` the outputs of a model's training forwards; `gradient_with` takes those since it was last called."""

    def __init__(self):
        self._calls, self._is_replaying = [], False

    def watch(self, args, kwargs, output):
        """A forward's arguments and its output `[B, ...]`."""
        if self._is_replaying:
            return
        autocast = dict(device_type="cpu", dtype=torch.get_autocast_dtype("cpu"), enabled=torch.is_autocast_enabled("cpu"))
        call = {"args": args, "kwargs": kwargs, "autocast": autocast}
        output.register_hook(partial(call.__setitem__, "grad"))
        self._calls.append(call)

    def gradient_with(self, model, knots):
        """This rank's shard of the gradient that a backward at each of a sample's `knots` gives; the model's own is put back."""
        calls, self._calls, self._is_replaying = self._calls, [], True
        own = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        n_visited = knots[-1] + 1
        for start in range(0, len(calls), n_visited):
            sample = sorted(calls[start : start + n_visited], key=lambda call: -call["kwargs"]["timestep"].item())
            # As the loop has them, whole: a bit of α turns the rounding to bfloat16.
            timesteps = [(1000 * call["kwargs"]["timestep"]).round() for call in sample]
            grads = [call["grad"] for call in sample]
            for knot, grad in folded(knots, timesteps, grads):
                call = sample[knot]
                with torch.autocast(**call["autocast"]):
                    output, *_ = model(*call["args"], **call["kwargs"])
                output.backward(grad.to(output.dtype))
        gradient = local_gradient(model)
        for parameter, grad in zip(model.parameters(), own, strict=True):
            parameter.grad = grad
        self._is_replaying = False
        return gradient
