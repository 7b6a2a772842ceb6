"""What the model gave in a rollout: kept from its solver steps until its update is over."""

from contextlib import contextmanager

from .records import Records
from .watcher import Watcher


class Recording(Watcher):
    """The records of a rollout, for those in `users` that are on.

    is_recording: whether a batch of a rollout is being sampled.
    policy_has_moved: since the rollout, after which the model gives something else.
    """

    def __init__(self, on_host=False):
        self.records = Records(on_host)
        self.users = []
        self._is_paused = False
        self.is_recording = self.policy_has_moved = False

    @property
    def is_on(self):
        return any(user.is_on for user in self.users)

    @contextmanager
    def batch(self):
        """Around the rollout of a batch."""
        if not self.is_on or self._is_paused:
            yield
            return
        self.records.begin_batch()
        self.is_recording, self.policy_has_moved = True, False
        try:
            yield
        except BaseException:
            self.records.drop_batch()  # the trainer may begin again with the same noise
            raise
        finally:
            self.is_recording = False

    @contextmanager
    def paused(self):
        """Around rollouts that aren't trained on."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def optimizer_steps(self, session, optimizer):
        self.policy_has_moved |= session.in_update  # before it, another model's optimizer steps

    def update_ends(self, session):
        self.records.clear()

    def forget(self, session):
        self.records.clear()
