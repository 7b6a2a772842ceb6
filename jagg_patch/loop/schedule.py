"""Which way of knots.py the next group takes: `joint`, `sequential`, or `auto`.

`auto` is sequential until it has measured whether joint would fit into memory.
"""

from contextlib import contextmanager, nullcontext

from ..errors import JaggError
from ..method.proxy import graph_nodes
from ..ranks import gathered
from .knots import Joint, Sequential
from .memory import free_bytes, graph_bytes, in_gb, joint_excess
from .watcher import Watcher
from .weights import hides_weights, is_of

MEASURED_UPDATES = 2  # the optimizer allocates its state in the first


class Schedule(Watcher):
    """`say` is called on every rank with the line that tells what `auto` has come to."""

    def __init__(self, name, say=lambda line: None):
        self.name = name  # auto until it is decided
        self._say = say
        self._n_updates = self.graph_bytes = 0
        self._is_new = False  # a group has ended since the last optimizer step; one that steps twice counts once
        self._model = None  # of the last group
        self._has_own = self._others_step = False  # an optimizer of its weights has stepped; another has, in this update
        self._joint_is_possible = False  # as far as the first endpoint's graph tells

    def way(self, engine):
        """How the knots of the next group run their backward passes. All ranks get here after equally many groups and updates."""
        self._model = engine.model
        if engine.looks_for_unused_parameters:
            self._rule_out_joint("DDP looks for unused parameters", "unset find_unused_parameters")
        self._decide(engine)
        return Joint() if self.name == "joint" else Sequential()

    def _decide(self, engine):
        """If it is time to."""
        if self.name != "auto" or self._n_updates < MEASURED_UPDATES:
            return
        # Hooks may be on one rank alone.
        everyone = gathered((free_bytes(), joint_excess(engine.model, self.graph_bytes), engine.has_hooks))
        if any(has_hooks for *_, has_hooks in everyone):
            self.settle("sequential", "a hook on a parameter's gradient would get both passes' at once")
            return
        rank, (free, needed, _) = min(enumerate(everyone), key=lambda entry: entry[1][0] - entry[1][1])
        name = "joint" if free >= needed else "sequential"
        self.settle(name, f"joint needs {in_gb(needed)} more than unpatched, {in_gb(free)} are free on the fullest rank ({rank})")

    def group_ends(self, session, group):
        self._is_new = True

    def optimizer_steps(self, session, optimizer):
        """Another network's may step on one rank alone, and isn't counted."""
        if self._model is None or not is_of(optimizer, self._model):
            self._others_step = True
            return
        self._has_own = True
        self._count()

    def update_ends(self, session):
        if self._others_step and not self._has_own:
            self._count()  # that of copies of the weights, or of parts (DeepSpeed): at least once
        self._others_step = False

    def _count(self):
        self._n_updates += self._is_new
        self._is_new = False

    def around_forward(self, session, visit):
        is_needed = self.name == "auto" or session.retaining.trial.is_on
        return self.measuring(visit.step.model) if is_needed else nullcontext()

    @contextmanager
    def measuring(self, model):
        """Around the forward of a first endpoint."""
        with graph_bytes(model) as found:
            yield
        self.graph_bytes = max(self.graph_bytes, found[0])

    def model_output(self, session, visit, output):
        if visit.place.is_first and self.name != "sequential" and not self._joint_is_possible:
            if recomputes_reentrantly(output):
                why = "the model recomputes activations with reentrant checkpointing"
                self._rule_out_joint(why, "pass use_reentrant=False (CheckpointImpl.NO_REENTRANT)")
            else:
                self._joint_is_possible = True

    def _rule_out_joint(self, why, remedy):
        if self.name == "joint":
            raise JaggError(f"{why}, which the joint schedule can't have\n{remedy}, or run with JAGG_SCHEDULE=sequential")
        if self.name == "auto":
            self.settle("sequential", why)

    def settle(self, name, why):
        self.name = name
        self._say(f"JAGG: schedule {name} from here on: {why}")


def recomputes_reentrantly(output):
    """Whether the graph of `output` runs backward passes inside the backward; FSDP1 then loses gradients when two are joined."""
    return any(map(hides_weights, graph_nodes([output])))
