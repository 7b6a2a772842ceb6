"""What a checkpointed block is given by keyword, or in a list: torch keeps it in a closure.

There hooks on saved tensors don't see it, and nothing notices that it has been changed in place.
"""

from contextlib import contextmanager
from functools import partial

import torch
from torch.utils import checkpoint
from torch.utils._pytree import tree_map

NAME = "_checkpoint_without_reentrant_generator"  # torch 2.1 to 2.13 at least
is_known = hasattr(checkpoint, NAME)


class _Saved:
    """In the place of a tensor: that of that number in `tensors`. Another `arguments_saved` around has a list of its own."""

    def __init__(self, tensors, number):
        self.tensors, self.number = tensors, number


@contextmanager
def arguments_saved():
    """Inside, tensors that are given so are saved as those that are given by position. Without effect unless `is_known`."""
    if not is_known:
        yield
        return
    generator = getattr(checkpoint, NAME)

    def with_positions(function, *args, **kwargs):
        tensors = []

        def taken(leaf):
            if not isinstance(leaf, torch.Tensor):
                return leaf
            tensors.append(leaf)
            return _Saved(tensors, len(tensors) - 1)

        def back(leaf, given):
            return given[leaf.number] if type(leaf) is _Saved and leaf.tensors is tensors else leaf

        def run(*args, **kwargs):
            n_args = len(args) - len(tensors)
            args, kwargs = tree_map(partial(back, given=args[n_args:]), (args[:n_args], kwargs))
            return function(*args, **kwargs)

        args, kwargs = [arg if isinstance(arg, torch.Tensor) else tree_map(taken, arg) for arg in args], tree_map(taken, kwargs)
        return generator(run, *args, *tensors, **kwargs)

    setattr(checkpoint, NAME, with_positions)
    try:
        yield
    finally:
        setattr(checkpoint, NAME, generator)
