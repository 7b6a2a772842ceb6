"""What one rank has to know of the others."""

import os

import torch
import torch.distributed as dist


def gathered(value):
    """`value` of every rank, in the order of ranks, the same list everywhere; of this process where there are no others."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def first_of(values):
    """The first rank whose value isn't None, and that; None twice where there is none."""
    return next(((rank, value) for rank, value in enumerate(values) if value is not None), (None, None))


def least(numbers, device):
    """Of each of these whole numbers the least on any rank, the same list everywhere."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return [int(number) for number in numbers]
    found = torch.tensor([int(number) for number in numbers], dtype=torch.int32, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return found.tolist()


def is_first_rank():
    """As far as is known by now: some trainers find out their rank inside `main`."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return int(os.environ.get("RANK", "0")) == 0


def may_be_first_rank():
    """Before the process group is there, under SLURM: a file may be on the first node alone."""
    return is_first_rank() and int(os.environ.get("SLURM_PROCID", "0") if "RANK" not in os.environ else 0) == 0
