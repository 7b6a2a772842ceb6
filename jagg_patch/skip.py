"""Skipped forwards: a group's intermediate model outputs are estimated from the rollout's, and the model isn't called for them.

Whether that is right here is checked, and agreed by all ranks, since one rank that ran its forwards alone would deadlock.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from .plan import ENDPOINTS_FIRST, LOOK_AHEAD, least_forwards
from .quality import SAME
from .recorded import Records


def estimated_output(recorded, alpha, first_change, last_change):
    """A step's model output under the policy as it is now, `recorded + (1 - α) first_change + α last_change`.

    Args:
        recorded: the rollout's output at that step, `[B, ...]`.
        alpha: `[]` or `[B]`, as `plan.alphas` has it for the step.
        first_change, last_change: how much the outputs at the group's endpoints have changed since the rollout, `[B, ...]`,
            in the dtype to compute in.

    Exact while the policy hasn't changed; after that it assumes what the joint backward does, that the change is linear in t.
    """
    alpha = alpha.to(first_change)
    alpha = alpha.view(-1, *[1] * (recorded.ndim - 1)) if alpha.ndim else alpha
    return recorded.to(first_change) + (1 - alpha) * first_change + alpha * last_change


class StandIn:
    """In the model's place in a forward that is skipped: any call returns what the model returned at the group's first step."""

    def __init__(self, model):
        self._model = model
        self._output = None
        self.is_called = False

    def returned(self, output):
        self._output = tree_map(_detached, output)

    @property
    def is_ready(self):
        return self._output is not None

    def __call__(self, *args, **kwargs):
        self.is_called = True
        return tree_map(_cloned, self._output)

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


def _detached(leaf):
    return leaf.detach() if torch.is_tensor(leaf) else leaf


def _cloned(leaf):
    return leaf.clone() if torch.is_tensor(leaf) else leaf


class Skipping:
    """The rollout's records, and whether they can stand for forwards. `say` is called on every rank."""

    def __init__(self, config, say=lambda line: None):
        self.is_on = config.enabled and config.skip_forwards and config.frac != 0 and config.group_size > 2
        self.records = Records(config.offload_records)
        self._compared = set()  # groups of which one sample has run all forwards, to compare
        self._say = say
        self._has_stated_memory = self._has_begun = False
        self.is_recording = self._is_paused = False
        self.policy_has_moved = False  # since the rollout
        self._doubt = None  # why not

    @contextmanager
    def recording(self):
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

    def update_begins(self, largest, schedule):
        """`largest` is the size of the largest group that there is or can be."""
        if self.is_on and largest <= least_forwards(schedule):
            self.is_on = False
            self._say(f"JAGG: no forwards are skipped: the largest group has {largest} steps, the schedule is {schedule}")
        if self.is_on and not self._has_stated_memory:
            self._has_stated_memory = True
            where = "in the host's memory" if self.records.is_on_host else "on the device (in the host's: JAGG_OFFLOAD_RECORDS=1)"
            self._say(f"JAGG: the rollout's recorded outputs take {self.records.n_bytes / 1e9:.3g} GB on a rank, {where}")

    def update_ends(self):
        self.records.clear()

    def must_compare(self, group):
        """Whether all forwards of this group, a range of positions, have to be compared before it skips any."""
        return group not in self._compared

    def was_compared(self, group, device):
        """All its forwards have been. Every rank must say so."""
        if self.is_agreed(device) and not self.policy_has_moved:  # after which only shapes can be compared
            self._compared.add(group)

    def forwards_of_group(self, n_steps, is_endpoints_first):
        """How many forwards a group of that size takes with skipping; None if that saves none, or it is off."""
        forwards = ENDPOINTS_FIRST if is_endpoints_first else LOOK_AHEAD
        return forwards if self.is_on and n_steps > forwards else None

    def compare(self, recorded, output):
        """Note it if `recorded`, the rollout's output or None, isn't what the training forward gives under the same policy."""
        if recorded is None:
            self.doubts("the update has samples or steps that the rollout hadn't")
        elif recorded.shape != output.shape:
            shapes = f"{list(recorded.shape)} there, {list(output.shape)} here"
            self.doubts(f"the rollout calls the model with other inputs: its outputs are {shapes}")
        elif not self.policy_has_moved:
            error, size = ((rows.detach().float().flatten(1).norm(dim=1)) for rows in (recorded.to(output) - output, output))
            if not (error <= SAME * size).all():
                difference = (error / size).max().item()
                self.doubts(
                    f"the rollout's model outputs differ by {difference:.0%} from the training forward's before the policy moved "
                    "(other guidance, a cached or approximate rollout?)"
                )

    def begins(self):
        """A group skips its forwards."""
        if not self._has_begun:
            self._has_begun = True
            self._say("JAGG: forwards are skipped from here on: what has been compared agrees with the rollout's")

    def doubts(self, why):
        self._doubt = self._doubt or why

    def is_agreed(self, device):
        """Whether no rank has a doubt; if one has, forwards aren't skipped from here on. Every rank must ask."""
        doubts = [self._doubt]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            flags = torch.tensor([self._doubt is None, not self.policy_has_moved], dtype=torch.int32, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MIN)
            agreed, unmoved = flags.tolist()
            self.policy_has_moved = not unmoved  # on one rank, where that trains another model too
            if agreed:
                return True
            doubts = [None] * dist.get_world_size()
            dist.all_gather_object(doubts, self._doubt)
        for rank, doubt in enumerate(doubts):
            if doubt is not None:
                self.is_on = False
                self._say(f"JAGG: no forwards are skipped from here on: rank {rank}: {doubt}")
                return False
        return True
