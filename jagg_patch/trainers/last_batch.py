"""accelerate ends its accumulation in the last batch of a loader: there every step syncs gradients, and the optimizer steps."""

import sys

from ..loop.watcher import Watcher


class LastBatch(Watcher):
    """Groups nothing in an update of a loader's last batch. `say` is called on every rank."""

    def __init__(self, say=lambda line: None):
        self._say = say

    def update_begins(self, session, step):
        if syncs_every_step() and session.order.groups:
            session.order.group_nothing()
            self._say("JAGG: nothing is grouped in this update: accelerate syncs every step of the last batch of a loader")


def syncs_every_step():
    kind = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    return kind is not None and bool(kind._shared_state) and kind().sync_with_dataloader and kind().end_of_dataloader
