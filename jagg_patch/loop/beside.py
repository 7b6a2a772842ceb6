"""A group's losses reach weights through the model's outputs, or by terms that the loop computes itself.

What a training forward leaves beside its output (an auxiliary loss of the model's, a critic on its hidden states) has a graph at
the knots alone: at the steps between it is a constant, and its gradient would be lost. It is told by when its nodes were made.
"""

import functools

import torch
from torch.autograd.graph import GradientEdge

from ..errors import JaggError
from ..method.proxy import nodes_from
from .watcher import Watcher
from .weights import is_weight


class Beside(Watcher):
    """Walks through the graph of each loss of a group, up to the proxies.

    is_reached: whether the last one reaches weights; None where its `torch.autograd.backward` hasn't been seen.
    """

    def __init__(self):
        self._backward = self._roots = None  # torch's own, and the nodes that it has been called for
        self.forget(None)

    def forget(self, session):
        self.is_reached = self._begun = None
        self._spans = []  # numbers of the nodes that the knots' forwards have made, but for those of the solver step
        if self._backward is not None and torch.autograd.backward is self._noting:
            torch.autograd.backward = self._backward
            self._backward = None

    def step_begins(self, session, visit):
        self._begin(visit)

    def group_begins(self, session, visit):
        begun = self._begun
        self.forget(session)
        self._begun = begun
        if self._backward is None:
            self._backward = torch.autograd.backward
            self._noting = functools.wraps(self._backward)(functools.partial(self._note, self._backward))
            torch.autograd.backward = self._noting

    def _note(self, backward, tensors, *args, **kwargs):
        tensors = (tensors,) if isinstance(tensors, (torch.Tensor, GradientEdge)) else tuple(tensors)
        before, self._roots = self._roots, [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in tensors]
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            self._roots = before

    def _begin(self, visit):
        if visit.place.is_knot and not visit.place.is_exact:
            self._begun = next_number()

    def _end(self, visit):
        if visit.place.is_knot and not visit.place.is_exact:
            self._spans.append((self._begun, next_number()))

    def model_output(self, session, visit, output):
        self._end(visit)

    def solver_ends(self, session, visit):
        self._begin(visit)

    def step_returns(self, session, visit):
        self._end(visit)

    def gradient_comes(self, session, group, place, ready):
        if group is not session.group or self._roots is None:
            self.is_reached = None
            return
        nodes = list(nodes_from(self._roots))
        self.is_reached = any(map(is_weight, nodes))
        if self.is_reached and not group.is_exact:  # else it is exact, if each graph is whole
            of_forwards = [node for node in nodes if any(first < node._sequence_nr() < last for first, last in self._spans)]
            if any(map(is_weight, nodes_from(of_forwards))):
                raise reached_beside(group.where)

    def group_ends(self, session, group):
        self.forget(session)


def next_number():
    """Nodes that this thread makes from here on have larger ones."""
    with torch.enable_grad():
        return torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr()


def reached_beside(where):
    """The `JaggError` to raise when a loss of the group reaches weights by another way than the model's output."""
    return JaggError(
        f"{where}: a loss of the group reaches weights by another way than the model's output (an auxiliary loss?)\n"
        "the steps between would lose that gradient: leave it out, or run with JAGG_ENABLED=0"
    )
