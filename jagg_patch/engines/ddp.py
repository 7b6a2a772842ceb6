"""DistributedDataParallel, also under accelerate. It prepares its reduction in the forward."""

from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as DDP

from .engine import Engine


class Ddp(Engine):
    # A step that syncs without a recorded forward would leave the ranks apart.
    prepares_sync_in_forward = True

    def __init__(self, model, wrapped):
        super().__init__(model)
        self._wrapped = wrapped

    @classmethod
    def find(cls, model):
        wrapped = [module for module in model.modules() if isinstance(module, DDP)]
        return cls(model, wrapped) if wrapped else None

    def syncs_gradients(self):
        return all(module.require_backward_grad_sync for module in self._wrapped)

    @property
    def no_replay(self):
        if any(state is not None and not isinstance(state, ProcessGroup) for _, state in self._hooks()):
            return "DDP's communication hook has a state of its own, which every backward changes"
        return super().no_replay

    @property
    def reuses_gradients(self):
        return any(module.gradient_as_bucket_view for module in self._wrapped)

    @property
    def rounds_gradients(self):
        return bool(self._hooks())  # most of them compress

    def _hooks(self):
        return [hook for module in self._wrapped for hook in getattr(module, "_comm_hooks", ())]

    @property
    def broadcasts_buffers(self):
        return any(module.broadcast_buffers and any(True for _ in module.module.buffers()) for module in self._wrapped)

    @property
    def waits_for_all_weights(self):
        return not self.looks_for_unused_parameters

    @property
    def looks_for_unused_parameters(self):
        return any(module.find_unused_parameters for module in self._wrapped)
