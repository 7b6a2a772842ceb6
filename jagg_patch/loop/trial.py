"""Whether the rollout's forwards are the training's, so that their graphs can be kept: a run's first updates show it.

These updates run their own forwards, which must give what the rollout's gave, and the size of a graph is measured. The last one
comes after an optimizer step: until then an adapter may do nothing, in whatever way it is used.
"""

from typing import NamedTuple

from ..engines.engine import Engine
from ..method.plan import knots_of
from ..method.proxy import graph_nodes
from ..ranks import first_of, gathered
from . import checkpointed
from .alike import Alike, why_not_equal
from .between import entries_of
from .memory import free_bytes, host_bytes, joint_excess
from .room import Measured
from .schedule import MEASURED_UPDATES
from .watcher import Watcher
from .weights import hides_weights, is_of

HOST_SHARE = 0.5  # of a rank's share of what is available


class Shown(NamedTuple):
    """By the first updates, of all ranks.

    alike: what training's graphs are.
    n_trajectory, n_visited, is_shuffled: an update's plan, and whether orders are drawn. n_rows: of a training batch.
    n_knots: of a sample. is_in_order: whether the update takes the rollout's samples one after the other.
    """

    engine: Engine
    alike: Alike
    n_trajectory: int
    n_visited: int
    is_shuffled: bool
    n_rows: int
    n_knots: int
    is_in_order: bool
    measured: Measured


class Trial(Watcher):
    """is_on: until it ends, on all ranks at once.

    `ends` is called then, with what the updates have `Shown` or with why no graphs can be kept (str).
    """

    def __init__(self, is_on, recording, ends):
        self.is_on = is_on
        self._recording, self._ends = recording, ends
        self._doubt = None  # why not
        self._alike = Alike()
        self._engine = self._stand_in = None  # the last group's
        self._n_updates = self._n_before = 0  # optimizer steps so far, and before this update
        self._n_rows = None  # of the last batch
        self._syncs = []  # of the samples before an optimizer step, whether they sync what their own forwards have to prepare
        self._n_first = None  # samples before the first optimizer step
        self._is_in_order = True
        self.forget(None)

    def forget(self, session):
        self._n_seen = 0  # samples, in this update

    def update_begins(self, session, step):
        self._n_before = self._n_updates

    def step_begins(self, session, visit):
        if not self.is_on or visit.place.position:
            return
        self._n_rows = len(visit.step.latents)  # of one index where the trainer's loop has one for the batch
        entries, = entries_of(session, visit, [0])
        numbers = [self._recording.records.number(entry) for entry in entries or ()]
        self._is_in_order &= numbers == list(range(self._n_seen, self._n_seen + self._n_rows))
        self._n_seen += self._n_rows

    def group_begins(self, session, visit):
        if not self.is_on:
            return
        self._engine, self._stand_in = session.group.engine, session.group.stand_in
        if visit.place.position == 0:
            self._syncs.append(self._engine.prepares_sync_in_forward and self._engine.syncs_gradients())

    def model_output(self, session, visit, output):
        if not self.is_on or not visit.place.is_knot:
            return
        if any(map(hides_weights, graph_nodes([output]))):
            self._doubts("activations are checkpointed reentrantly: pass use_reentrant=False (CheckpointImpl.NO_REENTRANT)")
        self._alike.show(session.group.engine.model, output)

    def proxy_given(self, session, visit, value):
        if not self.is_on or self._recording.policy_has_moved:
            return
        records = self._recording.records
        entries, = entries_of(session, visit, [visit.place.position])
        self._doubts(why_not_equal(entries and records.outputs(entries), value.detach()))
        if entries is not None and records.batch_of(entries) is None:
            self._doubts("the update's batches aren't the rollout's")

    def optimizer_steps(self, session, optimizer):
        if self.is_on and session.in_update and self._engine is not None and is_of(optimizer, self._engine.model):
            self._n_updates += 1
            if any(self._syncs[:-1]):
                self._doubts("DDP prepares each reduction in a forward, and reduces after every step: accumulate (no_sync)")
            self._syncs.clear()
            self._n_first = self._n_first or self._n_seen

    def update_ends(self, session):
        if self.is_on and self._n_seen:
            if session.order.n_visited < 2:
                self._end("of each sample a single step is trained")
            elif self._engine is not None:  # else nothing was grouped in this update
                self._decide(session)
        self.forget(session)

    def _doubts(self, why):
        self._doubt = self._doubt or why

    def _decide(self, session):
        """All ranks alike."""
        order, engine, stand_in = session.order, self._engine, self._stand_in
        if self._n_rows > 1 and order.is_shuffled and order.n_visited < order.n_trajectory:
            self._doubts(f"{self._n_rows} samples are trained at a time, each at steps of its own")
        if stand_in is None or not stand_in.is_ready:
            self._doubts("the training forward doesn't call the model that it is given")
        elif stand_in.has_reference:
            self._doubts("the training forward calls the model for an output without a gradient too (a reference's?)")
        self._doubts(engine.no_retaining)
        graph, free = session.schedule.graph_bytes, free_bytes()
        if session.schedule.name == "auto":
            free -= joint_excess(engine.model, graph)  # which it may take
        samples = self._n_seen, self._n_first or self._n_seen, self._recording.records.n_samples
        host = int(HOST_SHARE * host_bytes()) if checkpointed.is_known else 0
        is_over = self._n_updates >= MEASURED_UPDATES and self._n_before > 0
        mine = self._doubt, is_over, samples, self._is_in_order, graph, free, host
        doubts, over, samples, in_order, graphs, frees, hosts = zip(*gathered(mine), strict=True)
        rank, doubt = first_of(doubts)
        if doubt is not None:
            self._end(f"rank {rank}: {doubt}")
        elif all(over):
            measured = Measured(*map(min, zip(*samples, strict=True)), max(graphs), min(frees), min(hosts))
            plan = order.n_trajectory, order.n_visited, order.is_shuffled
            n_knots = len(knots_of(order.n_visited, order.planned))
            self._end(Shown(engine, self._alike, *plan, self._n_rows, n_knots, all(in_order), measured))

    def _end(self, shown):
        self.is_on = False
        self._ends(shown)
