"""The probe: inside a run, how near each group's gradient is to the exact one.

Every so many training steps it keeps the first sample's training forwards and the upstream gradients that the trainer's losses
gave. Right before the next optimizer step, when the engine is done with its gradients, it runs those forwards again, through the
engine, with one backward a step for the exact gradient and two a group for JAGG's, and compares. The update's own gradients are
set aside meanwhile, and random numbers put back, so that training goes on as if nothing had been.
"""

import math
from dataclasses import replace

import torch

from ..engines import engine_of
from ..errors import JaggError, no_probe
from ..loop.watcher import Watcher
from ..method.folding import endpoint_weights, weighted_sum
from ..method.plan import alphas, whole_groups
from ..method.quality import agreement
from ..ranks import gathered
from .log import now
from .replay import KeptForward, backward_as_trained, compare, is_of, nothing_changed, reach, why_no_replay

OTHER_SIZES = (3, 4, 5, 6, 8)  # of groups: one of them is measured at each probe beside the run's own


class Probe(Watcher):
    """Keeps the forwards of one sample, or micro-batch, of a training step, and measures its groups.

    `stats` counts training steps, `say` is called with what users should know.
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
                    "set JAGG_FRAC above 0, or unset JAGG_PROBE_EVERY"
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
            n_routed = sum(len(group) > 1 for group in session.order.groups)
            self.measure(session, optimizer, n_routed, session.order.planner.all_groups(session.order.n_visited))

    def update_ends(self, session):
        if self.is_due:
            self._say(f"JAGG: no probe at training step {self._stats.training_steps}: the optimizer didn't step in it")

    @property
    def is_due(self):
        return self._n_awaited > 0 and self.result is None

    @property
    def _is_ready(self):
        return len(self._forwards) == self._n_awaited

    def measure(self, session, optimizer, n_routed_groups, own_groups):
        """Compare; all ranks at once. Sets `result`, one dict a group size, and `seconds`.

        Args:
            optimizer: the one that is about to step.
            n_routed_groups: how many of `own_groups`, the first ones, are routed.
            own_groups: the groups of the run's own group size, those that aren't routed included.
        """
        start = now()
        forwards = sorted(self._forwards, key=lambda forward: forward.step.indices)  # as they come, where nothing is routed
        partitions = [(self._config.group_size, own_groups)]
        size_of = {whole_groups(len(forwards), replace(self._config, group_size=size)): size for size in reversed(OTHER_SIZES)}
        others = [(size, groups) for groups, size in reversed(size_of.items()) if groups != own_groups]
        partitions += [others[self._n_probes % len(others)]] if others else []
        self._n_probes += 1

        missing = [n for n, forward in enumerate(forwards) if forward.upstream_grad is None]
        if missing:
            raise JaggError(
                f"probe: no gradient arrived for visited step {missing[0]} of the training step's first sample\n"
                "every step's loss needs its own .backward() before the optimizer step: run without JAGG_PROBE_EVERY"
            )
        self.is_measuring = True
        try:
            with nothing_changed(forwards, optimizer) as aside:
                mine = [
                    [self._sums(session, forwards[group.start : group.stop], aside) for group in groups]
                    for _, groups in partitions
                ]
        finally:
            self.is_measuring = False
        everyone = gathered(mine)  # added up in the same order everywhere, so that all ranks get the same
        self.result = []
        for n, (size, groups) in enumerate(partitions):
            rows = []
            for m, group in enumerate(groups):
                cosine, error = agreement([sum(values) for values in zip(*(sums[n][m] for sums in everyone), strict=True)])
                members = forwards[group.start : group.stop]
                rows.append(
                    {
                        "start": group.start,
                        "steps": len(group),
                        "timesteps": [forward.step.timesteps.flatten()[0].item() for forward in members],
                        "routed": n == 0 and m < n_routed_groups,
                        "cosine": cosine,
                        "relative_error": error,
                    }
                )
            self.result.append({"group_size": size, "groups": rows})
        self._forwards = []
        self.seconds = now() - start

    def _sums(self, session, forwards, aside):
        """`quality.sums` of one group, over this rank's shard; without a number where JAGG's gradient isn't defined or known.

        Every rank runs the same forwards and backwards in any case.
        """
        timesteps = torch.stack([forward.step.timesteps.reshape(-1) for forward in forwards])
        try:
            weights, known = alphas(timesteps), True
        except JaggError:  # not defined there; in groups that aren't routed, training doesn't mind
            weights, known = torch.zeros(timesteps.shape), False
        upstream_grads = [forward.upstream_grad for forward in forwards]
        folded = [weighted_sum(upstream_grads, folding) for folding in endpoint_weights(weights, self._config.aggregation)]
        known &= backward_as_trained(session, forwards, folded, aside)
        jagg = aside.take("cpu")
        for forward, grad in zip(forwards, upstream_grads, strict=True):
            known &= forward.backward(session, grad, aside)
        return compare(jagg, aside.take()) if known else [math.nan] * 4
