"""Training forwards that can be run again, right before an optimizer step, so that training goes on as if nothing had been."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from ..engines.gradients import gradients_set_aside
from ..errors import JaggError
from ..method.quality import SAME


@dataclass(eq=False)
class KeptForward:
    """A training forward as it was called, in what autocast and random state.

    output: what the model gave, `[B, ...]`. upstream_grad: its loss's s_j, once that has come.
    """

    visit: object
    autocast: list
    random: list
    output: torch.Tensor | None = None
    upstream_grad: torch.Tensor | None = None

    @classmethod
    def of(cls, visit):
        cached = torch.is_autocast_cache_enabled()
        autocast = [
            dict(
                device_type=device,
                dtype=torch.get_autocast_dtype(device),
                enabled=torch.is_autocast_enabled(device),
                cache_enabled=cached,
            )
            for device in ("cpu", "cuda")
        ]
        random = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])
        return cls(visit, autocast, random)

    def keep(self, value):
        """`value` stands for the model output in the solver step, so its gradient is s_j."""
        self.output = value.detach().clone()
        value.register_hook(self._add)

    def _add(self, grad):
        self.upstream_grad = grad if self.upstream_grad is None else self.upstream_grad + grad

    @property
    def step(self):
        return self.visit.step

    def run(self, session):
        """The model output again, `[B, ...]`, with a graph where gradients are on."""
        with session.capturing() as outputs, ExitStack() as stack:
            for state in self.autocast:
                if state["enabled"]:
                    stack.enter_context(torch.autocast(**state))
            torch.set_rng_state(self.random[0])
            if len(self.random) > 1:
                torch.cuda.set_rng_state(self.random[1])
            self.visit.forward()
        if len(outputs) != 1:
            raise JaggError(
                f"probe: the solver step ran {len(outputs)} times in one training forward, not once\n"
                "its gradient can't be told apart: run without JAGG_PROBE_EVERY"
            )
        return outputs[0]

    def was(self, output):
        """Whether `run` gave again what the update had; it doesn't if the loop changes its samples in place, say."""
        difference = (output.detach() - self.output).float().norm()
        return bool(difference <= SAME * self.output.float().norm())


@contextmanager
def nothing_changed(model, optimizer):
    """Inside, forwards and backward passes of `model` may run: gradients, buffers and random state are put back after it.

    Yields what `gradients_set_aside` does.
    """
    trained = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    parameters = list(dict.fromkeys(parameter for parameter in trained if parameter.requires_grad))
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # running statistics, say
    try:
        with torch.random.fork_rng(devices), torch.enable_grad(), gradients_set_aside(parameters) as take:
            yield take
    finally:
        for buffer, kept in buffers:
            buffer.detach().copy_(kept)
