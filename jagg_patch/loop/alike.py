"""Whether a rollout's forward with its graph is the training forward: what it gives, what it reaches, and in which mode."""

import torch

from .weights import weights_reached

SAME, SAME_IN_HALF = 1e-5, 1e-3  # relative difference of two outputs of one forward, of which half precision has a coarse one


class Alike:
    """Training forwards are shown to it first, and the rollout's graphs are held to them."""

    def __init__(self):
        self._reached, self._modes = set(), set()

    def show(self, model, output):
        """A training forward of `model` has given `output`, with its graph."""
        self._reached.add(weights_reached(output))
        self._modes.add(dropout_modes(model))

    def why_other(self, model, output):
        """Why the rollout's `output`, with its graph, isn't a training forward's; None where it may be."""
        if dropout_modes(model) not in self._modes:
            return "dropout is on in training alone (or in the rollout): its forwards are others"
        if weights_reached(output) not in self._reached:
            return "the rollout's forwards don't go through all weights that training's do (a cache, or another adapter?)"
        return None


def dropout_modes(model):
    """Of each of its layers that drops something, whether it does now."""
    return tuple(layer.training for layer in model.modules() if getattr(layer, "p", 0) and "Dropout" in type(layer).__name__)


def why_other(recorded, output, same):
    """Why `recorded`, the rollout's output or None, isn't the training forward's; None where it is.

    Args:
        same: the relative difference up to which it is; None where the policy has moved, and only their shapes are compared.
    """
    if recorded is None:
        return "the update has samples or steps that the rollout hadn't"
    if recorded.shape != output.shape:
        shapes = f"{list(recorded.shape)} there, {list(output.shape)} here"
        return f"the rollout calls the model with other inputs: its outputs are {shapes}"
    if same is None:
        return None
    error, size = ((rows.detach().float().flatten(1).norm(dim=1)) for rows in (recorded.to(output) - output, output))
    if not torch.isfinite(size).all():
        return "a model output isn't finite (NaN or inf)"
    if (error <= same * size).all():
        return None
    difference = (error / size).max().item()
    percent = f"{100 * difference:.2g}%" if difference < 1 else f"{difference:.0%}"
    return (
        f"the rollout's model outputs differ by {percent} from the training forward's before the policy moved "
        "(other guidance or precision, a cached or approximate rollout?)"
    )


def why_not_equal(recorded, output):
    """`why_other`, of outputs that are one up to rounding."""
    if recorded is not None and recorded.dtype != output.dtype:
        return f"the rollout's model outputs are {recorded.dtype}, and {output.dtype} in training"
    return why_other(recorded, output, SAME if output.dtype in (torch.float32, torch.float64) else SAME_IN_HALF)
