"""How the model outputs of the steps between two knots are got: one class for each way.

By running the model, or, with skipped forwards, by an estimate from the rollout's records and from how much the outputs at both
knots have changed since. For that the knot after is looked at when the knot before has been run: without a graph, or with the
one that its backward pass will need.
"""

from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import JaggError
from ..method.folding import estimated_output
from ..method.plan import ENDPOINTS_FIRST, LOOK_AHEAD, alphas, are_together
from .guards import require_one_solver_call


class Forwards:
    """By the model's forwards."""

    has_last = False  # whether the forward of the knot after has been run

    def is_at(self, visit):
        """Whether `visit` is of the sample that the group began with, as far as can be told."""
        return True

    def run(self, session, visit):
        """The training forward of `visit`, or what there is in its place; returns what it returns."""
        return visit.forward()

    def begin(self, session, visit):
        """The knot before has been run, in `visit`."""

    def output(self, session, visit, output):
        """The model output of `visit`; its forward, or the stand-in's, gave `output`."""
        return output

    def end(self, session):
        """All steps up to the knot after have been visited."""


class _Recorded(Forwards):
    """`gap` is the range of positions from the knot before to the knot after.

    `entries` are those of its steps in the rollout's records, `[W][B]`, None for a step that isn't there.
    """

    def __init__(self, group, gap, skipping, entries):
        self._group, self._gap, self._skipping, self._entries = group, gap, skipping, entries

    def _index(self, place):
        return place.position - self._gap[0]

    def _recorded(self, place):
        """What the rollout's model gave at `place`, `[n * B, ...]`; None where there is nothing."""
        entries = self._entries[self._index(place)]
        return entries and self._skipping.records.outputs(entries)


class Compared(_Recorded):
    """By the model's forwards, each of which is compared with the rollout's."""

    _device = None

    def begin(self, session, visit):
        if visit.place.closes:  # else it has gone through `output`
            self._compare(visit.place, self._group.knots[visit.place.position].output)

    def output(self, session, visit, output):
        self._compare(visit.place, output)
        return output

    def _compare(self, place, output):
        self._device = output.device
        self._skipping.compare(self._recorded(place), output)

    def end(self, session):
        self._skipping.was_compared(self._gap, self._device)


class LookAhead(_Recorded):
    """By estimates; the knot after is looked at without a graph, so that one is alive at a time."""

    n_forwards = LOOK_AHEAD
    keeps_graph = False

    def __init__(self, group, gap, skipping, entries):
        super().__init__(group, gap, skipping, entries)
        self._alphas = alphas(group.timesteps_of(gap))
        self._changes = None  # of the knots' outputs since the rollout; until they are known, forwards are run
        self._last = None  # the output of the knot after, with its graph

    @property
    def has_last(self):
        return self._last is not None

    def _skips(self, position):
        return self.has_last if position == self._gap[-1] else self._changes is not None

    def is_at(self, visit):
        entries = self._entries[self._index(visit.place)]
        return self._changes is None or self._skipping.records.are_at(entries, visit.step.latents)

    def run(self, session, visit):
        if not self._skips(visit.place.position):
            return visit.forward()
        session.tell("forwards_skipped", 1)
        return self._group.stand_in.run(visit, "JAGG_SKIP_FORWARDS=0")

    def output(self, session, visit, output):
        place = visit.place
        if not self._skips(place.position):
            return output
        if place.position == self._gap[-1]:
            return self._last
        first = self._group.knots[self._gap[0]].output
        alpha = self._alphas[self._index(place)]
        return estimated_output(self._recorded(place).to(first.device), alpha, *self._changes).to(first.dtype)

    def begin(self, session, visit):
        """Look at the knot after, so that what lies between can be estimated, if all ranks can."""
        skipping = self._skipping
        first, last = [entries and skipping.records.outputs(entries) for entries in (self._entries[0], self._entries[-1])]
        output = self._group.knots[self._gap[0]].output
        skipping.compare(None if last is None else first, output)
        if not self._group.stand_in.is_ready:
            skipping.doubts("the training forward doesn't call the model that it is given")
        if self._group.stand_in.has_reference:
            skipping.doubts("the training forward calls the model for an output without a gradient too (a reference's?)")
        if not skipping.is_agreed(output.device):
            return
        ahead = self._run_last(session, visit, skipping.records.latents(self._entries[-1]).to(output.device))
        session.tell("forwards_skipped", -1)
        skipping.compare(last, ahead)
        if skipping.policy_has_moved or skipping.is_agreed(output.device):
            skipping.begins()
            wide = torch.promote_types(ahead.dtype, torch.float32)
            ends = (output, first), (ahead, last)
            self._changes = [now.detach().to(wide) - then.to(now.device, wide) for now, then in ends]
            self._last = ahead if self.keeps_graph else None

    def _run_last(self, session, visit, latents):
        """The model output of the knot after, whose `latents` the rollout has recorded."""
        changed = visit.step.at(session.order.expected(len(visit.indices), self._gap[-1]), latents)
        return run_apart(session, visit, self.keeps_graph, **changed)


class EndpointsFirst(LookAhead):
    """By estimates; the forward of the knot after is run before the steps between, so that two graphs are alive."""

    n_forwards = ENDPOINTS_FIRST
    keeps_graph = True


class Retained(Forwards):
    """A whole sample's, by the rollout's: with its graph at a knot, which `outputs` has by position, else as recorded.

    `entries` are those of its steps in the `records`. The policy is the rollout's. A knot whose micro-step reduces gradients runs
    its own forward where the engine wants one for that: an accumulation may end sooner than in the run's first updates.
    """

    def __init__(self, stand_in, records, entries, outputs):
        self._stand_in, self._records, self._entries, self._outputs = stand_in, records, entries, outputs

    def is_at(self, visit):
        return self._records.are_at(self._entries[visit.place.position], visit.step.latents)

    def run(self, session, visit):
        place = visit.place
        if place.is_knot and must_run_forward(session.group.engine):
            del self._outputs[place.position]
            return visit.forward()
        session.tell("forwards_retained", 1)
        return self._stand_in.run(visit, "JAGG_RETAIN=0", place.is_knot)

    def output(self, session, visit, output):
        position = visit.place.position
        if position in self._outputs:
            return self._outputs.pop(position)  # a knot lets go of it when its pass begins
        if visit.place.is_knot:
            return output
        return self._records.outputs(self._entries[position]).to(output.device)


def must_run_forward(engine):
    """Whether gradients are reduced in the micro-step that begins, and not unless it has a forward."""
    return engine.prepares_sync_in_forward and engine.syncs_gradients()


def outputs_between(session, visit, group, gap):
    """How the steps from the knot that `visit` is at to the next, the last of `gap`, get their outputs."""
    if session.retaining.sample is not None:
        return session.retaining.sample
    kind = _kind(session, group, gap)
    return kind() if kind is Forwards else kind(group, gap, session.skipping, entries_of(session, visit, gap))


def compares(session, group):
    """Whether some of the `group`'s forwards run to be compared that are to be skipped later."""
    return session.retaining.sample is None and any(_kind(session, group, gap) is Compared for gap in group.plan.gaps)


def _kind(session, group, gap):
    """Decided by the gap's size, its place and the engine alone, so that all ranks decide alike."""
    skipping, engine = session.skipping, group.engine
    # The micro-step that syncs has to run a forward, and a sample's last one may be it.
    is_free = engine.syncs_gradients() or gap[-1] + 1 < session.order.n_visited or not engine.prepares_sync_in_forward
    kind = EndpointsFirst if group.way.holds_two_graphs and are_together(gap, group.ready) and is_free else LookAhead
    if not skipping.is_on or len(gap) <= kind.n_forwards:
        return Forwards
    return Compared if skipping.must_compare(gap) and not session.retaining.has_compared else kind


def run_apart(session, visit, keeps_graph=False, **changed):
    """The model output of a training forward that is no step of the loop: that of `visit`, with arguments `changed`."""
    torch.clear_autocast_cache()  # casts that both knots' graphs shared would be added up in the lower precision
    try:
        with session.capturing() as outputs, torch.set_grad_enabled(keeps_graph):
            visit.forward(**changed)
    finally:
        torch.clear_autocast_cache()
    require_one_solver_call(visit.where, len(outputs))
    return outputs[0]


def entries_of(session, visit, positions):
    """Where the rollout's records have the sample's steps: of each, the `Entry` of every row of the batch, or None."""
    step, n_samples = visit.step, len(visit.indices)
    first = session.recording.records.find(step.latents, step.next_latents, visit.sample)
    found = []
    for position in positions:
        expected = session.order.expected(n_samples, position)
        moves = [index - start for index, start in zip(expected, visit.indices, strict=True)]
        rows = moves * (len(step.latents) // len(moves))  # one index may be that of the whole batch
        found.append(first and [entry.moved(n) for entry, n in zip(first, rows, strict=True)])
    return found


class StandIn:
    """In the model's place in a forward that isn't run: any call returns what the model has returned at a knot.

    Where the forward is a knot's, a call without gradients is refused, and so is a loss that uses what is returned otherwise
    than in the solver step.
    """

    def __init__(self, model):
        self._model = model
        self._output = None
        self.is_called = self.has_reference = False
        self._knot = None  # whose forward isn't run

    def returned(self, output):
        """A knot's forward has called the model, with gradients on or, for a reference, off; a frozen one needn't be off."""
        tensors = [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf)]  # none in an object
        if torch.is_grad_enabled() and (not tensors or any(tensor.requires_grad for tensor in tensors)):
            self._output = tree_map(_as_leaf, output)
        else:
            self.has_reference = True  # for which the policy's output can't stand

    @property
    def is_ready(self):
        return self._output is not None

    def __call__(self, *args, **kwargs):
        self.is_called = True
        if self._knot is None:
            return tree_map(_copied, self._output)
        if not torch.is_grad_enabled():
            raise self._refused("calls the model for an output without a gradient too (a reference's?)")
        return tree_map(self._watched, self._output)

    def _watched(self, leaf):
        if not torch.is_tensor(leaf) or not leaf.requires_grad:
            return _copied(leaf)
        refused = self._refused("has a loss on the model's output besides the solver step (a penalty?)")

        def refuse(grad):
            raise refused

        output = leaf.detach().requires_grad_()
        output.register_hook(refuse)
        return output.clone()

    def _refused(self, what):
        return JaggError(f"{self._knot.where}: the training forward now {what}\nit can't be left out: run with JAGG_RETAIN=0")

    def run(self, visit, without, is_knot=False):
        """The training forward of `visit` with this in the model's place; the message recommends to run `without` that."""
        self._knot = visit if is_knot else None
        try:
            result = visit.forward(model=self)
        finally:
            self._knot = None
        if not self.is_called:
            raise JaggError(
                f"{visit.where}: a training forward didn't call the model that it was given (but another name of it?)\n"
                f"its forwards can't be left out: run with {without}, and report this upstream version"
            )
        return result

    def __getattr__(self, name):
        return getattr(self._model, name)


@contextmanager
def watched(model, returned):
    """Inside, `returned(output)` is called with what each call of `model` returns."""
    hook = model.register_forward_hook(lambda model, args, output: returned(output))
    try:
        yield
    finally:
        hook.remove()


def _as_leaf(leaf):
    return leaf.detach().requires_grad_(leaf.requires_grad) if torch.is_tensor(leaf) else leaf


def _copied(leaf):
    return leaf.detach().clone() if torch.is_tensor(leaf) else leaf
