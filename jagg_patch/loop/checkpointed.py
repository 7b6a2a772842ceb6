"""What a checkpointed block is given by keyword: torch keeps it in a closure, where hooks on saved tensors don't see it."""

from contextlib import contextmanager

import torch
from torch.utils import checkpoint

NAME = "_checkpoint_without_reentrant_generator"  # torch 2.1 to 2.13 at least
is_known = hasattr(checkpoint, NAME)


@contextmanager
def keywords_saved():
    """Inside, tensors that are given so are saved as those that are given by position. Without effect unless `is_known`."""
    if not is_known:
        yield
        return
    generator = getattr(checkpoint, NAME)

    def with_positions(function, *args, **kwargs):
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}

        def run(*args, **others):
            n_args = len(args) - len(tensors)
            return function(*args[:n_args], **others, **dict(zip(tensors, args[n_args:], strict=True)))

        others = {name: value for name, value in kwargs.items() if name not in tensors}
        return generator(run, *args, *tensors.values(), **others)

    setattr(checkpoint, NAME, with_positions)
    try:
        yield
    finally:
        setattr(checkpoint, NAME, generator)
