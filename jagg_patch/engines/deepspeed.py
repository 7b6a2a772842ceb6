"""DeepSpeed's ZeRO stages. The engine counts micro-steps, and keeps gradients in buffers of its own."""

from functools import partial

from ..errors import JaggError
from .engine import Engine

NO_REPLAY = "DeepSpeed keeps the gradients of the update where they can't be set aside"


class DeepSpeed(Engine):
    no_replay = NO_REPLAY
    leaves_gradients = False
    runs_backward = True

    def __init__(self, model, engine):
        super().__init__(model)
        self._engine = engine

    no_retaining = "DeepSpeed's hooks count on each backward coming right after its own forward"

    @classmethod
    def find(cls, model):
        """Raises `JaggError` if there must be one and it isn't in `model`."""
        engine = next((module for module in model.modules() if hasattr(module, "zero_optimization_stage")), None)
        if engine is not None:
            return cls(model, engine)
        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            raise JaggError(
                "the training forward is given a model without the DeepSpeed engine that has partitioned its weights\n"
                "gradients would be summed up wrongly: call the engine that deepspeed.initialize returned, or run with "
                "JAGG_ENABLED=0"
            )
        return None

    @property
    def has_hooks(self):
        """Those after each gradient are ZeRO's own."""
        return any(parameter._backward_hooks for parameter in self.parameters())

    @property
    def link(self):
        """ZeRO stage 2 fails on a backward pass that reaches no parameter, as those of a group's first steps do."""
        if self._engine.zero_optimization_stage() != 2:
            return None
        return min((p for p in self._engine.parameters() if p.requires_grad), key=lambda p: p.numel(), default=None)

    def hold_micro_step(self):
        """ZeRO-3, and ZeRO-2 with an offloaded optimizer, overwrite gradients in what they count as a window's first micro-step.

        If its backward reaches no graph, as those of a group's first steps, the window before's stay, and are added to.
        """
        optimizer = getattr(self._engine, "optimizer", None)
        if not hasattr(optimizer, "micro_step_id") or not (
            self._engine.zero_optimization_stage() == 3 or optimizer.cpu_offload
        ):
            return super().hold_micro_step()
        return partial(setattr, optimizer, "micro_step_id", optimizer.micro_step_id)

    def begin_without_pass(self):
        """Its bf16 optimizer adds up in float32, after each backward, what is in `.grad`, and clears it where the next begins.

        It knows that by the model's output: here the backward before would be counted once more. Raises `JaggError` where the
        loop calls `loss.backward()`, as it may from 0.18 on: then all of DeepSpeed goes by the output.
        """
        if not getattr(self._engine, "_running_engine_backward", True):
            raise JaggError(
                "the loop calls loss.backward(), in which DeepSpeed waits for the output of that step's own forward\n"
                "call the engine's: engine.backward(loss), or run with JAGG_ENABLED=0"
            )
        clear = getattr(getattr(self._engine, "optimizer", None), "clear_lp_grads", None)
        if clear is not None:
            clear()

    def drop_gradients(self):
        return False

    def n_elements(self, parameter):
        return getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 empties it
