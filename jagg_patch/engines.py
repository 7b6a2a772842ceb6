"""What JAGG must know of the engine that a model runs on: DDP, FSDP, DeepSpeed, or none. Found in the model that is called."""

from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from .errors import JaggError

GATHERED_IN_BACKWARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


def _ddp(model):
    return [module for module in model.modules() if isinstance(module, DDP)]


def _deepspeed(model):
    """DeepSpeed's engine, or None. Raises `JaggError` if there must be one and it isn't in `model`."""
    engine = next((module for module in model.modules() if hasattr(module, "zero_optimization_stage")), None)
    if engine is None and any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise JaggError(
            "the training forward is given a model without the DeepSpeed engine that has partitioned its weights\n"
            "gradients would be summed up wrongly: call the engine that deepspeed.initialize returned, or run with JAGG_ENABLED=0"
        )
    return engine


def syncs_gradients(model):
    """Whether the backward of a forward that begins now reduces gradients; True where the engine's forward doesn't matter.

    DDP alone prepares its reduction in the forward, so a step that syncs without a recorded forward would leave the ranks apart.
    """
    return all(module.require_backward_grad_sync for module in _ddp(model))


def prepares_sync_in_forward(model):
    """Whether the backward of a micro-step that syncs needs a forward in that micro-step."""
    return bool(_ddp(model))


def looks_for_unused_parameters(model):
    """Whether DDP does so: in the last forward's graph alone, though the first endpoint's may reach other parameters."""
    return any(module.find_unused_parameters for module in _ddp(model))


def link_parameter(model):
    """The parameter that every backward pass has to reach, or None where none has to.

    DeepSpeed's ZeRO stage 2 fails on a backward pass that reaches no parameter, as those of a group's first steps do.
    """
    engine = _deepspeed(model)
    if engine is None or engine.zero_optimization_stage() != 2:
        return None
    return min((p for p in engine.parameters() if p.requires_grad), key=lambda p: p.numel(), default=None)


def hold_micro_step(model):
    """A function that puts DeepSpeed's count of micro-steps back to what it is now, where that matters.

    ZeRO-3, and ZeRO-2 with an offloaded optimizer, overwrite their gradients in what they count as a window's first micro-step.
    If its backward reaches no graph, as those of a group's first steps, the window before's gradients stay, and are added to.
    """
    engine = _deepspeed(model)
    optimizer = getattr(engine, "optimizer", None)
    if not hasattr(optimizer, "micro_step_id") or not (engine.zero_optimization_stage() == 3 or optimizer.cpu_offload):
        return lambda: None
    return partial(setattr, optimizer, "micro_step_id", optimizer.micro_step_id)


def drop_gradients(model):
    """Drop all gradients of `model` and return True; False where some are kept that `zero_grad()` doesn't reach."""
    if _deepspeed(model) is not None or any(hasattr(module, "set_requires_gradient_sync") for module in model.modules()):
        return False  # DeepSpeed's own buffers; what FSDP2 has accumulated without reducing it
    model.zero_grad()
    return True


NO_PROBE_ON_DEEPSPEED = (
    "the probe can't run on DeepSpeed, whose engine keeps the gradients of the update where they can't be set aside\n"
    "unset JAGG_PROBE_EVERY, or probe a run of the same model on DDP or FSDP"
)


def require_gradients_in_place(model):
    """Raise `JaggError` on an engine that doesn't leave gradients in the parameters."""
    if _deepspeed(model) is not None:
        raise JaggError(NO_PROBE_ON_DEEPSPEED)


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
