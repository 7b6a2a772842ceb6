"""DistributedDataParallel, also under accelerate. It prepares its reduction in the forward."""

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
    def looks_for_unused_parameters(self):
        return any(module.find_unused_parameters for module in self._wrapped)
