"""`fully_shard`. Its parameters are DTensors, and it keeps gradients that it has accumulated without reducing them."""

from ..errors import JaggError
from .engine import Engine


class Fsdp2(Engine):
    def __init__(self, model, wrapped):
        super().__init__(model)
        groups = [module._get_fsdp_state()._fsdp_param_group for module in wrapped]
        self._groups = [group for group in groups if group is not None]

    @classmethod
    def find(cls, model):
        wrapped = [module for module in model.modules() if hasattr(module, "set_requires_gradient_sync")]
        if not all(hasattr(module, "_get_fsdp_state") for module in wrapped):
            raise JaggError(
                "the model is replicated by torch's composable `replicate`, which JAGG doesn't know\n"
                "wrap it in DistributedDataParallel, or run with JAGG_ENABLED=0"
            )
        return cls(model, wrapped) if wrapped else None

    def parameters(self):
        """The sharded ones. Between a forward and its backward the model has the gathered ones in some modules instead."""
        sharded = {id(gathered): parameter for gathered, parameter in self._pairs()}
        return [sharded.get(id(parameter), parameter) for parameter in super().parameters()]

    @property
    def rounds_gradients(self):
        dtypes = [group.mp_policy.reduce_dtype or group.mp_policy.param_dtype for group in self._groups]
        return any(dtype is not None and dtype.itemsize < 4 for dtype in dtypes)

    def is_own(self, leaf):
        return any(leaf is gathered for gathered, _ in self._pairs())

    def _pairs(self):
        """Each gathered parameter, once there is one, and the sharded one."""
        parameters = [parameter for group in self._groups for parameter in group.fsdp_params]
        return [(getattr(parameter, "_unsharded_param", None), parameter.sharded_param) for parameter in parameters]

    def gathered_weights(self):
        return [gathered.untyped_storage() for gathered, _ in self._pairs() if gathered is not None]

    def leaves_whole_gradients(self):
        return all(group.reduce_grads for group in self._groups)

    def drop_gradients(self):
        return False
