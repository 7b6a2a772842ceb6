"""A group's losses reach weights through the model's outputs, or by terms that the loop computes itself.

What a training forward leaves beside its output (an auxiliary loss of the model's, a critic on its hidden states) has a graph at
the knots alone: at the steps between it is a constant, and its gradient would be lost. It is told by when its nodes were made.
"""

import functools
import threading
from bisect import bisect

import torch
from torch.autograd.graph import GradientEdge

from ..errors import JaggError
from ..method.proxy import nodes_from
from .watcher import Watcher
from .weights import hides_weights, is_weight, lead_to_weights


class Beside(Watcher):
    """Walks through the graph of every backward, up to the proxies, from an update's first group to the update's end.

    A loss may be kept for later than its group. Only what torch numbers is looked at: nodes of this thread.

    is_reached: whether the loss whose backward is running reaches weights; None where it isn't `torch.autograd.backward`'s.
    is_bare: whether it reaches nothing but proxies, as far as its graph tells, and has run no backward inside.
    """

    def __init__(self):
        self._backward = self._noting = None  # torch's own, and what is in its place meanwhile
        self.is_reached, self.is_bare = None, False
        self.forget(None)

    def forget(self, session):
        self._session = self._begun = self._where = None
        self._spans = []  # numbers of the nodes that the knots' forwards have made, but for those of the solver step
        if torch.autograd.backward is self._noting:  # and not somebody else's
            torch.autograd.backward = self._backward
        self._backward = self._noting = None

    def update_ends(self, session):
        self.forget(session)

    def step_begins(self, session, visit):
        self._begin(visit)

    def group_begins(self, session, visit):
        self._session, self._thread = session, threading.get_ident()
        if torch.autograd.backward is not self._noting:
            self._backward = torch.autograd.backward
            self._noting = functools.wraps(self._backward)(functools.partial(self._note, self._backward))
            torch.autograd.backward = self._noting

    def _note(self, backward, tensors, *args, **kwargs):
        tensors = (tensors,) if isinstance(tensors, (torch.Tensor, GradientEdge)) else tuple(tensors)
        before = self.is_reached
        is_ours = self._session is not None and threading.get_ident() == self._thread
        is_outermost = is_ours and before is None  # and none that checkpointing runs inside
        self.is_bare = False
        if is_outermost:
            self._session.tell("backward_begins")
        try:
            if is_ours and (self._spans or self._session.group is not None):
                self._look(root.node if isinstance(root, GradientEdge) else root.grad_fn for root in tensors)
            backward(tensors, *args, **kwargs)
        finally:
            self.is_reached = before
        if is_outermost:
            self._session.tell("backward_ends")

    def _look(self, roots):
        nodes = list(nodes_from(roots))
        self.is_bare = self.is_reached is None and not any(hasattr(node, "variable") or hides_weights(node) for node in nodes)
        self.is_reached = any(map(is_weight, nodes))
        of_forwards = [node for node in nodes if self._is_of_a_forward(node)]
        if lead_to_weights(nodes_from(of_forwards)):
            with self._session.failing(self._where):
                raise reached_beside(self._where)

    def _is_of_a_forward(self, node):
        """Whether `node` was made in the forward of a knot."""
        number = node._sequence_nr()
        last = bisect(self._spans, (number,)) - 1  # which begins before it: they come one after the other
        return last >= 0 and number < self._spans[last][1]

    def _begin(self, visit):
        if visit.place.is_knot and not visit.place.is_exact:
            self._begun = next_number()

    def _end(self, session, visit):
        if visit.place.is_knot and not visit.place.is_exact and not session.has_whole_graphs:
            self._spans.append((self._begun, next_number()))
            self._where = session.group.where

    def model_output(self, session, visit, output):
        self._end(session, visit)

    def solver_ends(self, session, visit):
        self._begin(visit)

    def step_returns(self, session, visit):
        self._end(session, visit)


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
