"""What JAGG must know of the engine that a model runs on: DDP, FSDP, DeepSpeed, or none. Read off the model that is called."""

from functools import partial

from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

GATHERED_IN_BACKWARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


def syncs_gradients(model):
    """Whether the backward of a forward that begins now reduces gradients; True where the engine's forward doesn't matter.

    DDP alone prepares its reduction in the forward, so a step that syncs without a recorded forward would leave the ranks apart.
    """
    return getattr(model, "require_backward_grad_sync", True)


def link_parameter(model):
    """The parameter that every backward pass has to reach, or None where none has to.

    DeepSpeed's ZeRO stage 2 fails on a backward pass that reaches no parameter, as those of a group's first steps do.
    """
    stage = getattr(model, "zero_optimization_stage", None)
    if stage is None or stage() != 2:
        return None
    return min((p for p in model.parameters() if p.requires_grad), key=lambda p: p.numel())


def hold_micro_step(model):
    """A function that puts DeepSpeed's count of micro-steps back to what it is now; for other engines it does nothing.

    ZeRO-3, and ZeRO-2 with an offloaded optimizer, overwrite their gradients in what they count as a window's first micro-step.
    If its backward reaches no graph, as those of a group's first steps, the window before's gradients stay, and are added to.
    """
    optimizer = getattr(model, "optimizer", None)
    if not hasattr(optimizer, "micro_step_id"):
        return lambda: None
    return partial(setattr, optimizer, "micro_step_id", optimizer.micro_step_id)


def waiting_bytes(model):
    """Bytes of the whole gradients, and of the gathered weights, that wait in a joint backward for its second graph.

    On every engine autograd adds up a parameter's gradients from both graphs before the engine gets to see them. Weights wait
    under FSDP1 alone, which frees a block's when its gradient has come; FSDP2 and ZeRO-3 do so after each pass through the block.
    """
    gradients = weights = 0
    for unit in FSDP.fsdp_modules(model):
        handle = unit._handle
        if handle is None:
            continue
        size = handle.flat_param._unpadded_unsharded_size.numel() * handle._fwd_bwd_param_dtype.itemsize
        gradients += size * handle.flat_param.requires_grad
        weights += size * (unit.sharding_strategy in GATHERED_IN_BACKWARD)
    if gradients or weights:
        return gradients, weights
    for parameter in model.parameters():
        n_elements = getattr(parameter, "ds_numel", parameter.numel())  # ZeRO-3 empties it; a DTensor counts as a whole
        gradients += n_elements * parameter.element_size() * parameter.requires_grad
    return gradients, weights


def gathered_weights(model):
    """The storages into which FSDP1 gathers weights, some of which stay full between a forward and its backward."""
    padded = [getattr(unit._handle.flat_param, "_full_param_padded", None) for unit in FSDP.fsdp_modules(model) if unit._handle]
    return [weights.untyped_storage() for weights in padded if weights is not None]
