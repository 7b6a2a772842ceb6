"""How near a gradient is to the exact one: cosine and relative error, from sums that add up over shards."""

import math
from typing import NamedTuple

import torch

CHUNK = 2**22  # elements that are in float64 at a time
SAME = 0.05  # relative: more than the kernels of a recorded and an unrecorded forward differ in bf16, less than other inputs do


class Agreement(NamedTuple):
    """Between an approximate gradient a and the exact one e; None where one of them is zero.

    `cosine` is `a·e / |a||e|`; it says how well the direction is kept, which is what an optimizer that rescales steps (Adam, a
    clipped norm) goes by. `relative_error` is `|a - e| / |e|`.
    """

    cosine: float | None
    relative_error: float | None


def sums(approximate, exact):
    """`[a·e, a·a, e·e, |a-e|²]` in float64 over pairs of tensors of equal shapes, on the exact one's device; shards add up.

    None in one of a pair stands for zeros.
    """
    total = [0.0] * 4
    for pair in zip(approximate, exact, strict=True):
        pair = [torch.zeros_like(other) if one is None else one for one, other in zip(pair, reversed(pair), strict=True)]
        for a, e in zip(*(tensor.flatten().split(CHUNK) for tensor in pair), strict=True):
            a, e = a.to(e.device).double(), e.double()
            difference = a - e
            for place, value in enumerate((a @ e, a @ a, e @ e, difference @ difference)):
                total[place] += value.item()
    return total


def added(vectors):
    """Their sum, place by place: `sums` of all shards, say."""
    return [sum(values) for values in zip(*vectors, strict=True)]


def agreement(totals):
    """The `Agreement` that `sums`, added up over shards, come to. Totals that aren't finite or are zero give None."""
    dot, approximate, exact, difference = totals = list(totals)
    if not (all(map(math.isfinite, totals)) and approximate > 0 and exact > 0):
        return Agreement(None, None)
    return Agreement(dot / math.sqrt(approximate * exact), math.sqrt(difference / exact))
