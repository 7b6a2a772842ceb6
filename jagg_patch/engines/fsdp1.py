"""FullyShardedDataParallel. It frees a block's gathered weights when the block's gradient has come."""

from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, _runtime_utils

from .engine import Engine

GATHERED_IN_BACKWARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class Fsdp1(Engine):
    has_views_in_attributes = True
    _register = staticmethod(getattr(_runtime_utils, "_register_post_backward_hook", None))

    def __init__(self, model, units):
        super().__init__(model)
        self._units = [unit for unit in units if unit._handle is not None]
        self._views = {}  # by unit

    @classmethod
    def find(cls, model):
        units = FSDP.fsdp_modules(model)
        return cls(model, units) if units else None

    @property
    def no_retaining(self):
        if self._register is None or not all(hasattr(unit._handle, "_needs_pre_backward_unshard") for unit in self._units):
            return "this version of torch arms FSDP for a backward by other names"
        handles = [unit._handle for unit in self._units]
        if any(handle._use_orig_params and not handle.uses_sharded_strategy for handle in handles):
            return "FSDP's NO_SHARD with use_orig_params recomputes with other tensors then: use DDP"
        return None

    def arm(self):
        """It arms its hooks in a forward, once for all graphs, and disarms them after a backward.

        With the original parameters it lets go there of the last forward's views of them too, which recomputed blocks go through.
        """
        for unit in self._units:
            unit._handle._needs_pre_backward_unshard = True
            weights = unit._handle.flat_param
            if not hasattr(weights, "_post_backward_hook_state"):
                self._register(unit, unit._handle)
            views = getattr(weights, "_tensors", None) or []
            if None in views:
                views[:] = self._views[unit]
            else:
                self._views[unit] = list(views)

    def is_own(self, leaf):
        return any(leaf is unit._handle.flat_param for unit in self._units)

    @property
    def rounds_gradients(self):
        return any(unit._handle._reduce_dtype.itemsize < 4 for unit in self._units)

    def leaves_whole_gradients(self):
        return all(unit._sync_gradients for unit in self._units)

    def waiting_bytes(self):
        gradients = weights = 0
        for unit in self._units:
            handle = unit._handle
            size = handle.flat_param._unpadded_unsharded_size.numel() * handle._fwd_bwd_param_dtype.itemsize
            gradients += size * handle.flat_param.requires_grad
            # FSDP2 and ZeRO-3 free them after each pass through the block instead.
            weights += size * (unit.sharding_strategy in GATHERED_IN_BACKWARD)
        return (gradients, weights) if gradients or weights else super().waiting_bytes()

    def gathered_weights(self):
        padded = [getattr(unit._handle.flat_param, "_full_param_padded", None) for unit in self._units]
        return [weights.untyped_storage() for weights in padded if weights is not None]
