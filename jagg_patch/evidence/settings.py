"""What a model keeps outside of its weights and buffers: plain attributes of its modules, which a forward may go by or change."""

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

ENGINES = DistributedDataParallel, FullyShardedDataParallel  # whose attributes say where a backward is
PLAIN = bool, int, float, str, type(None), torch.dtype, torch.device


def modules_of(model):
    return [module for module in model.modules() if not isinstance(module, ENGINES)]


def settings_of(model):
    """For `put_settings`: numbers, names and the like, the states of generators, and whether each module is training."""
    return [
        (module, {name: _kept(value) for name, value in vars(module).items() if _is_plain(value)}) for module in modules_of(model)
    ]


def put_settings(settings):
    for module, kept in settings:
        now = vars(module)
        for name, value in kept.items():
            if isinstance(now.get(name), torch.Generator):
                now[name].set_state(value)
            elif type(now.get(name)) is not type(value) or now[name] != value:
                now[name] = _kept(value)


def attributes_of(model):
    """For `put_attributes`: everything that `modules_of` hold, by identity, and what their buffers' names stand for."""
    return [(module, dict(vars(module)), dict(module._buffers)) for module in modules_of(model)]


def put_attributes(attributes):
    for module, kept, buffers in attributes:
        now = vars(module)
        for name in set(now) - set(kept):
            del now[name]
        now.update({name: value for name, value in kept.items() if now.get(name) is not value})
        module._buffers.clear()
        module._buffers.update(buffers)


def _is_plain(value):
    return isinstance(value, (*PLAIN, torch.Generator)) or isinstance(value, (list, tuple)) and all(
        isinstance(one, PLAIN) for one in value
    )


def _kept(value):
    if isinstance(value, torch.Generator):
        return value.get_state()
    return list(value) if isinstance(value, list) else value
