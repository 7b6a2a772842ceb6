"""When a group's endpoints run their backward passes: in one call at its last step, or the first one's before the last's forward.

`joint` runs both in one autograd call, which gathers and reduces sharded weights once, and holds two graphs. `sequential` holds
one graph at a time, as the unpatched trainer does. `auto` is sequential until it has measured whether joint would fit.
"""

from contextlib import contextmanager

import torch.distributed as dist

from .memory import free_bytes, graph_bytes, joint_excess

MEASURED_UPDATES = 2  # the optimizer allocates its state in the first


class Schedule:
    """The schedule of the next group. `say` is called on every rank with the line that tells what `auto` has come to."""

    def __init__(self, name, say=lambda line: None):
        self.name = name  # auto until it is decided
        self._say = say
        self._n_updates = self._n_groups = self._graph_bytes = 0

    @property
    def is_joint(self):
        return self.name == "joint"

    def before_optimizer_step(self, n_groups):
        """`n_groups` have been closed so far. An optimizer that steps twice without a group between counts once."""
        self._n_updates += n_groups > self._n_groups
        self._n_groups = n_groups

    def before_group(self, model):
        """Decide, if it is time to. All ranks get here after equally many groups and updates, so they may talk."""
        if self.name == "auto" and self._n_updates >= MEASURED_UPDATES:
            mine = free_bytes(), joint_excess(model, self._graph_bytes)
            everyone = [mine]
            if dist.is_available() and dist.is_initialized():
                everyone = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, mine)
            rank, (free, needed) = min(enumerate(everyone), key=lambda entry: entry[1][0] - entry[1][1])
            name = "joint" if free >= needed else "sequential"
            self.settle(
                name, f"joint needs {in_gb(needed)} more than unpatched, {in_gb(free)} are free on the fullest rank ({rank})"
            )

    @contextmanager
    def measuring(self, model):
        """Around the forward of a first endpoint."""
        if self.name != "auto":
            yield
            return
        with graph_bytes(model) as found:
            yield
        self._graph_bytes = max(self._graph_bytes, found[0])

    def settle(self, name, why):
        self.name = name
        self._say(f"JAGG: schedule {name} from here on: {why}")


def in_gb(n_bytes):
    return f"{n_bytes / 1e9:.3g} GB"
