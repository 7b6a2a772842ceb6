"""A group has the same weights from its first forward to its backward passes.

A group's gradient goes through two graphs. Weights that another step's forward uses, or that are trained at some of the steps
only, would get another share of it than theirs.
"""

import torch

from ..engines import engine_of
from ..errors import JaggError
from ..method.proxy import graph_nodes
from .watcher import Watcher

MOST_KEPT = 1000  # timesteps, where every sample has its own


class SameWeights(Watcher):
    """Which weights are trained, and their versions, are compared at every step of a group.

    Unless `walks` is False: which of them the knots' graphs reach. That is looked at where a timestep is a knot's for the first
    time, since it takes a walk through a graph.
    """

    def __init__(self, walks=True):
        self._walks = walks
        self._reached_at = {}  # by model, a knot's timesteps and what is trained there: what its graph reaches
        self._known = ()  # the weights of which that was
        self.others = set()  # weights among these that aren't the model's: a text encoder's that is trained with it, say
        self.forget(None)

    def forget(self, session):
        self._first = None  # the visit that the group began with
        self._weights = self._trained = self._versions = ()
        self._reached = None

    def group_begins(self, session, visit):
        self.forget(session)
        self._first = visit

    def group_ends(self, session, group):
        self.forget(session)

    def step_begins(self, session, visit):
        if self._weights and visit.place.before is not None:
            self._require_unchanged(session.group, visit.where)

    def model_output(self, session, visit, output):
        if visit.place.is_first:
            engine = session.group.engine
            self._weights = engine.parameters()
            self._trained = self._trained_now()
            self._versions = self._versions_now()
            self._reached = self._reach(session, visit, output)
            return
        is_whole = session.group.is_exact  # its gradient is, if each graph is whole
        if self._trained_now() != self._trained and not is_whole:
            what = "which weights are trained (requires_grad, or the adapter that is active)"
            raise weights_change(session.config, self._first, visit, what)
        if visit.place.closes and not is_whole and self._reach(session, visit, output) != self._reached:
            raise weights_change(session.config, self._first, visit, "which weights the model's output depends on")

    def _trained_now(self):
        return [weight.requires_grad for weight in self._weights]

    def _versions_now(self):
        """Of those that are trained: a model may count in a frozen one."""
        return [weight._version for weight, is_trained in zip(self._weights, self._trained, strict=True) if is_trained]

    def _reach(self, session, visit, output):
        """The weights that the graph of a knot's `output` reaches, as `weights_reached` has them."""
        key = id(visit.step.model), tuple(visit.timesteps.tolist()), tuple(self._trained)
        if len(self._reached_at) == MOST_KEPT or not same_tensors(self._weights, self._known):
            self._reached_at.clear()
            self._known = self._weights
        if key not in self._reached_at:
            self._reached_at[key] = weights_reached(output) if self._walks else None
            reached = leaves([output], session.group.engine)
            self.others |= {leaf for leaf in reached if isinstance(leaf, torch.nn.Parameter)} - set(self._weights)
        return self._reached_at[key]

    def gradient_comes(self, session, group, place, ready):
        if group is not session.group:
            return  # a second backward, which the knots refuse
        if ready:
            self._require_unchanged(group, group.where)
            is_own = list(ready) == [group.knots.get(place.position)]  # the others' are over, or haven't begun
            if self._trained_now() != self._trained and not (is_own and place.is_last):
                raise JaggError(
                    f"{group.where}: which weights are trained has changed between the group's forward and its backward\n"
                    "they would get another gradient than theirs: change it after whole samples only, or run with JAGG_ENABLED=0"
                )

    def _require_unchanged(self, group, where):
        is_whole = group.is_exact and group.knots[group.plan.knots[0]].is_done
        if self._versions_now() != self._versions and not is_whole:
            raise JaggError(
                f"{where}: weights were changed in place since the group that began at {self._first.where} (swapped for their "
                "average?)\n"
                "its backward passes need them as they were: change them after whole samples only, or run with JAGG_ENABLED=0"
            )


def weights_reached(output):
    """What a backward from `output` reaches: the identities of weights, each with the number of a part.

    The parts are for FSDP1, which keeps a block's weights in one, and splits it.
    """
    nodes = list(graph_nodes([output]))
    entrances = {}
    for node in nodes:
        found = [id(next_.variable) for next_, _ in node.next_functions if is_weight(next_)]
        if found:
            entrances[node] = found
    edges = [(output.grad_fn, output.output_nr), *(edge for node in nodes for edge in node.next_functions)]
    parts = {(weight, part) for node, part in edges for weight in entrances.get(node, ())}
    return frozenset(parts | {(id(node.variable), None) for node in nodes if is_weight(node)})


def is_of(optimizer, model):
    """Whether `optimizer` steps weights of `model`, and not another network's, nor copies."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return not held.isdisjoint(engine_of(model).parameters())


def same_tensors(some, others):
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def leaves(outputs, engine):
    """In whose `.grad` a backward from `outputs` leaves gradients, but for what stands for parameters of the `engine`'s model."""
    found = [node.variable for node in graph_nodes(outputs) if hasattr(node, "variable")]
    return [leaf for leaf in found if not engine.is_own(leaf)]


def is_weight(node):
    """Whether `node` adds up the gradient of a model's parameter, and not of another tensor that asks for one."""
    return isinstance(getattr(node, "variable", None), torch.nn.Parameter)


def hides_weights(node):
    """Whether what is behind `node` is run in its backward alone: a block that is checkpointed reentrantly."""
    return node.name() == "CheckpointFunctionBackward"


def lead_to_weights(nodes):
    return any(is_weight(node) or hides_weights(node) for node in nodes)


def weights_change(config, first, visit, what):
    """The `JaggError` to raise when the group that began with `first` comes, by `visit`, to other weights."""
    return JaggError(
        f"{visit.where}: {what} changes in the group that began at {first.where}\n"
        f"each would get another gradient than its own: {new_group(config)}, or run with JAGG_ENABLED=0"
    )


def new_group(config):
    """What to do where another group should begin."""
    if config.has_knots:
        return "name the steps on both sides as knots (JAGG_KNOTS_AT)"
    return "begin a new group there (JAGG_CUTS)"
