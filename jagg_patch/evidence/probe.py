"""The probe: inside a run, how near JAGG's gradient is to the exact one.

Every so many training steps it keeps the first sample's training forwards and the upstream gradients that the trainer's losses
gave. Right before the next optimizer step, when the engine is done with its gradients, it runs those forwards again, through the
engine, with one backward a step for the exact gradient and one a knot for JAGG's, and compares. The update's own gradients are
set aside meanwhile, and random numbers put back, so that training goes on as if nothing had been.
"""

import math
from dataclasses import replace

import torch

from ..engines import engine_of
from ..errors import JaggError, no_probe
from ..loop.watcher import Watcher
from ..loop.weights import is_of
from ..method.folding import fold, shares
from ..method.plan import groups_of, knots_of, places, whole_groups
from ..method.quality import added, agreement
from ..ranks import gathered
from .log import now
from .replay import KeptForward, backward_as_trained, compare, nothing_changed, reach, why_no_replay

OTHER_SIZES = (3, 4, 5, 6, 8)  # of groups: one of them is measured at each probe beside the run's own


class Probe(Watcher):
    """Keeps the forwards of one sample, or micro-batch, of a training step, and measures them. A subclass says what.

    `stats` counts training steps, `say` is called with what users should know.
    result: what the record of the training step gets, a list of dicts, None where it wasn't probed. seconds: what that took.
    """

    def __init__(self, config, stats, say):
        self._config, self._stats, self._say = config, stats, say
        self._n_probes = 0
        self.begin(0, 0)

    def begin(self, training_step, n_visited):
        """A training step's update, of `n_visited` steps a sample, is about to begin."""
        every = self._config.probe_every
        self._n_awaited = n_visited if every and training_step % every == 0 and n_visited > 1 else 0
        self._forwards = []
        self._reached = {}  # by the first forward's graph
        self.is_measuring = False
        self.seconds = 0.0
        self.result = None

    def forget(self, session):
        self.begin(0, 0)

    def update_begins(self, session, step):
        if self._config.probe_every:
            why_not = engine_of(step.model).no_replay
            if why_not is not None:
                raise no_probe(why_not)
            if len(step.indices) > 1 and not session.order.routes:
                raise JaggError(
                    "the probe can't sort the steps of a batch whose samples have their own orders, if nothing is grouped\n"
                    "set JAGG_FRAC above 0 (or fewer JAGG_KNOTS), or unset JAGG_PROBE_EVERY"
                )
        self.begin(self._stats.training_steps + 1, session.order.n_visited)

    def step_begins(self, session, visit):
        if self.is_due and not self._is_ready:
            self._forwards.append(KeptForward.of(visit))

    def model_output(self, session, visit, output):
        self._look_at_graph(visit, output)

    def proxy_given(self, session, visit, value):
        """Its gradient is the step's s_j."""
        self._look_at_graph(visit, value)  # the model's, in an exact step
        if self._forwards and self._forwards[-1].visit is visit and value.requires_grad:
            self._forwards[-1].output = value.detach().clone()
            self._forwards[-1].keep_gradient(value)

    def _look_at_graph(self, visit, output):
        if self.is_due and len(self._forwards) == 1:
            self._reached |= reach(output, engine_of(visit.step.model))

    def optimizer_steps(self, session, optimizer):
        if self.is_measuring:
            raise JaggError(
                "an optimizer stepped inside the probe's backward passes, as one does that steps in gradient hooks\n"
                "the probe would train: run without JAGG_PROBE_EVERY"
            )
        if self.is_due and self._is_ready and is_of(optimizer, self._forwards[0].step.model):
            why_not = why_no_replay(optimizer, self._forwards[0].step.model, self._reached)
            if why_not is not None:
                raise no_probe(why_not)
            self._measure(session, optimizer)

    def update_ends(self, session):
        if self.is_due:
            self._say(f"JAGG: no probe at training step {self._stats.training_steps}: the optimizer didn't step in it")

    @property
    def is_due(self):
        return self._n_awaited > 0 and self.result is None

    @property
    def _is_ready(self):
        return len(self._forwards) == self._n_awaited

    def _measure(self, session, optimizer):
        """Compare; all ranks at once. `optimizer` is the one that is about to step. Sets `result` and `seconds`."""
        start = now()
        forwards = sorted(self._forwards, key=lambda forward: forward.step.indices)  # as they come, where nothing is routed
        missing = [n for n, forward in enumerate(forwards) if forward.upstream_grad is None]
        if missing:
            raise JaggError(
                f"probe: no gradient arrived for visited step {missing[0]} of the training step's first sample\n"
                "every step's loss needs its own .backward() before the optimizer step: run without JAGG_PROBE_EVERY"
            )
        plans = self._plans(session)
        self._n_probes += 1
        self.is_measuring = True
        try:
            with nothing_changed(forwards, optimizer) as aside:
                mine = self._compared(session, forwards, plans, aside)
        finally:
            self.is_measuring = False
        everyone = gathered(mine)  # added up in the same order everywhere, so that all ranks get the same
        found = [[agreement(added(sums)) for sums in zip(*plan, strict=True)] for plan in zip(*everyone, strict=True)]
        self.result = self._described(session, forwards, plans, found)
        self._forwards = []
        self.seconds = now() - start

    def _plans(self, session):
        """What is to be compared with the exact gradient: a list, the run's own plan first."""
        raise NotImplementedError

    def _compared(self, session, forwards, plans, aside):
        """This rank's `quality.sums`, a list of them for each plan; every rank runs the same forwards and backwards."""
        raise NotImplementedError

    def _described(self, session, forwards, plans, found):
        """The dicts to log, of the `Agreement`s that the sums of all ranks come to."""
        raise NotImplementedError

    def _as_trained(self, session, forwards, group, aside):
        """Run a `Group` as training does. Whether its gradient is defined, and every forward was what the update had."""
        members = [forwards[position] for position in group]
        timesteps = torch.stack([forward.step.timesteps.reshape(-1) for forward in members])
        knots = [position - group.knots[0] for position in group.knots]
        try:
            counts, known = shares(timesteps, knots, self._config.aggregation), True
        except JaggError:  # not defined there; in groups that aren't routed, training doesn't mind
            counts, known = torch.zeros(len(knots), *timesteps.shape), False
        upstream_grads = [forward.upstream_grad for forward in members]
        return known & backward_as_trained(session, members, group, fold(upstream_grads, counts), aside)


class GroupProbe(Probe):
    """Measures each group of the run's own size, grouped in the run or not, and those of one other size."""

    def _plans(self, session):
        """`(group size, groups)`."""
        n_visited = len(self._forwards)
        own_groups = session.order.planner.all_groups(n_visited)
        size_of = {whole_groups(n_visited, replace(self._config, group_size=size)): size for size in reversed(OTHER_SIZES)}
        others = [(size, groups) for groups, size in reversed(size_of.items()) if groups != own_groups]
        return [(self._config.group_size, own_groups), *([others[self._n_probes % len(others)]] if others else [])]

    def _compared(self, session, forwards, plans, aside):
        return [[self._sums(session, forwards, group, aside) for group in groups] for _, groups in plans]

    def _sums(self, session, forwards, group, aside):
        known = self._as_trained(session, forwards, group, aside)
        jagg = aside.take("cpu")
        for position in group:
            known &= forwards[position].backward(session, forwards[position].upstream_grad, aside)
        return compare(jagg, aside.take()) if known else [math.nan] * 4

    def _described(self, session, forwards, plans, found):
        n_routed = sum(len(group) > 1 for group in session.order.planned)  # the first of the run's own
        result = []
        for n, ((size, groups), agreements) in enumerate(zip(plans, found, strict=True)):
            rows = []
            for m, (group, (cosine, error)) in enumerate(zip(groups, agreements, strict=True)):
                rows.append(
                    {
                        "start": group.start,
                        "steps": len(group),
                        "timesteps": [forwards[position].step.timesteps.flatten()[0].item() for position in group],
                        "routed": n == 0 and m < n_routed,
                        "cosine": cosine,
                        "relative_error": error,
                    }
                )
            result.append({"group_size": size, "groups": rows})
        return result


class KnotProbe(Probe):
    """Measures the gradient of all steps together: with the run's knots, with one fewer and one more, and with published groups.

    These are of one size at a time.
    """

    def _plans(self, session):
        """`(group size or None, knots, groups)`."""
        n_visited = len(self._forwards)
        size = OTHER_SIZES[self._n_probes % len(OTHER_SIZES)]
        published = whole_groups(n_visited, replace(self._config, knots="", knots_at=(), group_size=size))
        sets = [(None, groups_of(knots)) for knots in session.order.planner.nearby(n_visited)]
        return [(size, knots_of(n_visited, groups), groups) for size, groups in [*sets, (size, published)]]

    def _compared(self, session, forwards, plans, aside):
        known = all([forward.backward(session, forward.upstream_grad, aside) for forward in forwards])
        exact = aside.take("cpu")
        return [[self._sums(session, forwards, groups, exact, aside) if known else [math.nan] * 4] for *_, groups in plans]

    def _sums(self, session, forwards, groups, exact, aside):
        known = all([self._as_trained(session, forwards, group, aside) for group in groups if len(group) > 1])
        for place in places(len(forwards), groups):
            if place.is_exact:
                forward = forwards[place.position]
                known &= forward.backward(session, forward.upstream_grad, aside)
        jagg = aside.take()
        return compare(jagg, exact) if known else [math.nan] * 4

    def _described(self, session, forwards, plans, found):
        rows = zip(plans, found, strict=True)
        return [
            {"group_size": size, "knots": knots, "cosine": agreement.cosine, "relative_error": agreement.relative_error}
            for (size, knots, _), (agreement,) in rows
        ]

    @property
    def cosines(self):
        """By number of knots: of the present set and of those beside it."""
        return {len(row["knots"]): row["cosine"] for row in self.result if row["group_size"] is None}
