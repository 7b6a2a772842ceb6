"""The cost model, in units of one transformer forward: a plan goes in, the predicted saving comes out.

The published arithmetic (W=4, activation checkpointing): 16 units a group exact, 10 with JAGG; 8 with skipped forwards.
"""

from dataclasses import dataclass

from .plan import ENDPOINTS_FIRST, LOOK_AHEAD, are_together, passes


@dataclass(frozen=True)
class StepCost:
    """What one denoising step costs in forward units, beside its forward.

    `backward` is for the gradients of the activations (1) and of the weights (1, none where they are frozen), `recompute` the
    share of blocks under activation checkpointing, `reference` the forwards of a reference model (a KL term).
    """

    backward: float = 2.0
    recompute: float = 1.0
    reference: float = 0.0

    @property
    def full_backward(self):
        return self.backward + self.recompute


def backward_passes(n_steps, groups=()):
    """Transformer backward passes of one trajectory's update: one a step, in a `Group` one a knot."""
    return n_steps - sum(len(group) - len(group.knots) for group in groups)


def forward_passes(n_steps, groups=(), a_group=None):
    """Transformer forwards of one trajectory's update: `a_group` at most for each group where the others are skipped.

    In one of several gaps, that is for each; and `LOOK_AHEAD` for those whose two knots' passes aren't run together.
    """
    if not a_group:
        return n_steps
    saved = 0
    for group in groups:
        ready = passes(group, holds_two_graphs=a_group == ENDPOINTS_FIRST)
        saved += sum(max(0, len(gap) - (a_group if are_together(gap, ready) else LOOK_AHEAD)) for gap in group.gaps)
    return n_steps - saved


def update_cost(n_steps, groups=(), cost=StepCost(), forwards_a_group=None, retained=0.0):
    """Forward units of one trajectory's update; without groups, the unpatched trainer's.

    Args:
        forwards_a_group: `a_group` above.
        retained: the share of trajectories whose graphs the rollout has kept: they need no forward.
    """
    forwards = (1 - retained) * forward_passes(n_steps, groups, forwards_a_group) + n_steps * cost.reference
    return forwards + backward_passes(n_steps, groups) * cost.full_backward


def training_step_cost(n_steps, sampling_steps, groups=(), cost=StepCost(), forwards_a_group=None, retained=0.0):
    """Forward units of one trajectory's rollout (`sampling_steps` forwards) and update."""
    return sampling_steps + update_cost(n_steps, groups, cost, forwards_a_group, retained)


def knot_probe_cost(n_steps, groups, cost=StepCost()):
    """Forward units of a probe of one sample under knots: all steps by themselves, and four plans of about as many knots."""
    return n_steps * (1 + cost.full_backward) + 4 * update_cost(n_steps, groups, cost)


def probe_cost(groups, cost=StepCost()):
    """Forward units of a probe of one sample: each step of its `groups` by itself, and each group once more as it is trained."""
    whole = sum(len(group) + 2 for group in groups if len(group) > 1) * (1 + cost.full_backward)
    return whole + sum(max(0, len(group) - 2) for group in groups)
