"""Which visited steps become knots: those between which the least is lost by interpolation.

Between knots a and b, a step p loses in proportion to |s_p|² α_p (1 - α_p) (σ_a - σ_b) / σ_p: the states leave the chord by
noise (a bridge's variance, α (1 - α)), the longer the gap in σ the more, and the more it matters the larger the step's upstream
gradient s_p is, and the lower its noise level σ_p. THEOREM.md has where that comes from.
"""

import math
from itertools import pairwise


def best_knots(n_knots, sigmas, sizes=None):
    """The set of `n_knots` positions, the first and the last among them, whose gaps cost least together.

    Args:
        n_knots: from 2 to the number of positions.
        sigmas: the noise level of each position, positive and descending; any unit.
        sizes: |s_p|² of each position, in any unit; where they haven't been measured, 1 / σ_p stands for them.

    Returns:
        A tuple of positions, ascending. Of sets that cost the same the one with the earlier knots.
    """
    last = len(sigmas) - 1
    gap = gap_costs(sigmas, sizes)
    best = {0: (0.0, (0,))}  # by its last knot: the cheapest set of as many knots as there have been rounds
    for _ in range(n_knots - 1):
        best = {
            end: min((cost + gap[start, end], (*knots, end)) for start, (cost, knots) in best.items() if start < end)
            for end in range(1, last + 1)
            if any(start < end for start in best)
        }
    return best[last][1]


def cost_of(knots, sigmas, sizes=None):
    """What a set of knots loses, in the unit in which `best_knots` compares."""
    gap = gap_costs(sigmas, sizes)
    return sum(gap[pair] for pair in pairwise(knots))


def gap_costs(sigmas, sizes=None):
    """`{(a, b): cost}` of every gap."""
    sizes = [1 / sigma for sigma in sigmas] if sizes is None else sizes
    costs = {}
    for a, high in enumerate(sigmas):
        for b in range(a + 1, len(sigmas)):
            span = high - sigmas[b]
            between = zip(sigmas[a + 1 : b], sizes[a + 1 : b], strict=True)
            # α (1 - α) span = (σ_a - σ_p) (σ_p - σ_b) / span
            costs[a, b] = sum(size * (high - sigma) * (sigma - sigmas[b]) / span / sigma for sigma, size in between)
    return costs


def expected_sigmas(sigmas, n_visited):
    """The mean noise level of the p-th of `n_visited` steps that are drawn from a trajectory at random and sorted, for each p."""
    n_steps = len(sigmas)
    n_sets = math.comb(n_steps, n_visited)
    return [
        sum(
            sigma * math.comb(step, position) * math.comb(n_steps - 1 - step, n_visited - 1 - position)
            for step, sigma in enumerate(sigmas)
        )
        / n_sets
        for position in range(n_visited)
    ]
