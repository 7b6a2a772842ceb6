"""What JAGG must know of the engine that a model runs on. One file an engine, which answers the questions of `engine.Engine`."""

import torch

from ..errors import JaggError
from .ddp import Ddp
from .deepspeed import DeepSpeed
from .engine import Engine
from .fsdp1 import Fsdp1
from .fsdp2 import Fsdp2

ENGINES = (DeepSpeed, Fsdp1, Fsdp2, Ddp)  # the first that finds itself in a model counts


def engine_of(model):
    """The `Engine` that `model`, as the training forward calls it, runs on.

    Raises `JaggError` where DeepSpeed's isn't in it, and where it is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise JaggError(
            f"the training forward is given a {type(model).__name__} for a model, whose weights can't be looked at\n"
            "pass the module itself (torch.compile(model), not of its forward), or run with JAGG_ENABLED=0"
        )
    return next((engine for kind in ENGINES if (engine := kind.find(model)) is not None), Engine(model))
