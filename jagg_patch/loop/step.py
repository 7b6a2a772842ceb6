"""One training forward of the loop: as an adapter reads it off the call, and as a planned visit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..method.plan import Place


class Step(NamedTuple):
    """A training forward that the loop is about to run, as an adapter reads it off the call.

    index: the step's place in the trajectory, or a list of them, one for each sample of the batch.
    timesteps: `[B]`, what the model is fed.
    model: what runs the forward, as its engine wraps it.
    timesteps_at: `timesteps_at(indices)` is what the model would be fed, `[B]`, at those places in the trajectory, one a sample.
    latents, next_latents: `[B, ...]`, the samples at this step, and at the next one where the call has them.
    at: `at(indices, latents)` is how the forward's arguments would differ at those places, by name.
    following: `following(n)` are the places of this sample's `n` steps from this one on, a list; None where that isn't known.
    """

    index: int | list
    timesteps: torch.Tensor
    model: torch.nn.Module
    timesteps_at: Callable
    latents: torch.Tensor | None = None
    next_latents: torch.Tensor | None = None
    at: Callable | None = None
    following: Callable = lambda n_steps: None

    @property
    def indices(self):
        return [int(i) for i in self.index] if isinstance(self.index, list) else [int(self.index)]


@dataclass(eq=False)
class Visit:
    """A step while the loop is at it.

    forward: runs its training forward; called without arguments, or with those that are to be others, by name, where `model` is
        the model, whatever the trainer calls it.
    indices: `step.indices`.
    sample: which of the update's samples the batch begins with.
    expected: what the plan has in place of `indices`; None where there are no more samples.
    n_solver_calls: so far.
    """

    step: Step
    forward: Callable
    place: Place
    indices: list
    sample: int
    expected: list | None
    n_solver_calls: int = 0

    @property
    def name(self):
        return f"sample {self.sample}, visited step {self.place.position}"

    @property
    def where(self):
        """For messages."""
        steps = f"step {self.indices[0]}" if len(self.indices) == 1 else f"steps {self.indices}"
        return f"{self.name} (trajectory {steps})"

    @property
    def timesteps(self):
        """`[B]`, a copy: the trainer may change its own in place."""
        return self.step.timesteps.detach().reshape(-1).clone()
