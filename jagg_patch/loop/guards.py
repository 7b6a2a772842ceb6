"""What refuses to go on: a gradient that would be lost, doubled or another one's stops the run, with what to do.

The way that a gradient takes can be read without this file.
"""

import sys
from itertools import zip_longest

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from ..errors import JaggError
from ..method.proxy import graph_nodes
from .beside import reached_beside
from .memory import CHANGED
from .watcher import Watcher
from .weights import lead_to_weights, same_tensors

# As torch has it where a loss reaches weights beside the model's output: of a graph that its own backward has freed, and of
# FSDP1's root, which hasn't been told that a backward begins.
BESIDE = "Trying to backward through the graph a second time", "expected to be in states [<TrainingState.FORWARD_BACKWARD"
# As DDP has it where it syncs, and a loss brings it gradients of some weights before the group's pass brings all.
UNREADY = "Expected to have finished reduction in the prior iteration", "Expected to mark a variable ready only once"
OFF_AND_REPORT = "run with JAGG_ENABLED=0 and report this upstream version"


class Guards(Watcher):
    """Watches a session before everyone else does. Every check raises `JaggError`."""

    def __init__(self):
        self._failed_at = None  # in this training step
        self._spoilt_at = None  # a group of which a part is among the gradients for good
        self._syncs = None  # whether gradients are synced at its first step
        self._constants = ()  # which tensors its first forward has returned without a graph

    # -- training steps

    def training_step_begins(self, session):
        if session.in_training_step:
            self.fails(session, "a training step inside this one")
            raise JaggError("a training step began inside another one\none session follows one loop: run with JAGG_ENABLED=0")
        if self._spoilt_at is not None:
            raise JaggError(
                f"{self._spoilt_at}: the group failed in an earlier training step, and this engine keeps a part of its gradient\n"
                "start again from the last checkpoint"
            )

    def training_step_ends(self, session):
        self._require_whole(session, "the training step ended")
        require_last_sample_visited(session.order, "the training step ended")

    def training_step_fails(self, session, error):
        group = session.group
        if group is not None and group.has_begun:
            # A part of the group has reached the weights. Some trainers zero gradients after an optimizer step only.
            for weight in session.weights.others:
                weight.grad = None
            if not group.engine.drop_gradients():
                self._spoilt_at = group.where
        if group is not None and any(words in str(error) for words in BESIDE):
            raise reached_beside(group.where) from error
        if group is not None and any(words in str(error) for words in UNREADY):
            raise JaggError(
                f"{group.where}: a loss of the group has given DDP gradients by another way than the model's output\n"
                "DDP reduces them at once, and those of the group's passes come later: accumulate (no_sync), run with "
                "JAGG_SCHEDULE=sequential JAGG_GROUP_SIZE=2, or with JAGG_ENABLED=0"
            ) from error
        if group is not None and (CHANGED in str(error) or isinstance(error, CheckpointError)):
            remedy = "pass broadcast_buffers=False to DDP" if group.engine.broadcasts_buffers else "let it keep a copy"
            remedy += ", leave out JAGG_RETAIN" * session.config.retain
            raise JaggError(
                f"{group.where}: a later forward has changed what the backward of an endpoint of the group reads (a buffer?)\n"
                f"{remedy}, or run with JAGG_ENABLED=0; torch's own message is above"
            ) from error

    def forget(self, session):
        self._failed_at = None

    def fails(self, session, where):
        self._failed_at = self._failed_at or where

    def plan_comes(self, session):
        require_closed(session.group, "a new rollout ended")
        require_last_sample_visited(session.order, "a new rollout ended")

    def optimizer_steps(self, session, optimizer):
        self._require_whole(session, "the optimizer was about to step")

    def _require_whole(self, session, event):
        self._require_no_failure(event)
        require_closed(session.group, event)

    def _require_no_failure(self, event):
        if self._failed_at is not None:
            raise JaggError(
                f"{event} although {self._failed_at} had failed: gradients of this training step are missing\n"
                "let the exception end the training step, or run with JAGG_ENABLED=0"
            )

    # -- steps

    def step_begins(self, session, visit):
        if not session.order.routes:
            return
        self._require_no_failure("the loop went on")
        if visit.indices != visit.expected:
            planned = "no further step" if visit.expected is None else f"trajectory step {', '.join(map(str, visit.expected))}"
            raise JaggError(
                f"{visit.where}: the plan expected {planned}, so the loop isn't the one that JAGG knows\n"
                f"nothing was trained on this step: {OFF_AND_REPORT}"
            )
        if visit.place.before is None:
            require_closed(session.group, f"{visit.where} came")
        else:
            self._require_continued(session.group, visit)

    def group_begins(self, session, visit):
        require_eager_backward()
        self._syncs = session.group.engine.syncs_gradients()
        self._require_scheduled(session.group, visit)
        require_trajectory_order(session.group)

    def _require_continued(self, group, visit):
        """A group's step after its first: everything that can be checked before its forward is paid for."""
        where, place = visit.where, visit.place
        model = group.engine.model
        is_same = visit.step.model is model or same_tensors(list(visit.step.model.parameters()), list(model.parameters()))
        if not is_same and not group.is_exact:
            raise JaggError(
                f"{where}: it is another model's than the group's first, which would get its share of the gradient\n"
                f"{OFF_AND_REPORT}"
            )
        if not is_same and group.way.holds_two_graphs and group.engine.runs_backward:
            raise JaggError(
                f"{where}: it is another engine's than the group's first, whose backward would run in this one's, unknown to it\n"
                "run with JAGG_SCHEDULE=sequential, or with JAGG_ENABLED=0"
            )
        require_gradient(group, place.position - 1)
        syncs = group.engine.syncs_gradients()
        # A window may close at the last step, if the forward that prepares for it is yet to come.
        may_begin_to_sync = place.is_last and not group.outputs.has_last
        if syncs != self._syncs and not (syncs and may_begin_to_sync):
            raise JaggError(
                f"{where}: whether gradients are synced between the ranks changed inside a group\n"
                "the ranks would drift apart: sync after whole samples only, or run with JAGG_ENABLED=0"
            )
        self._require_scheduled(group, visit)
        if not group.outputs.is_at(visit):
            raise JaggError(
                f"{where}: the sample isn't the one that the group began with, by the rollout's records\n"
                "its model outputs can't be estimated: run with JAGG_SKIP_FORWARDS=0, and report this upstream version"
            )
        if any(knot.has_begun and not knot.is_done for knot in group.knots.values()):
            raise JaggError(
                f"{group.where}: the backward pass of an endpoint of the group, in that of the step before {where}, failed\n"
                "its gradient is incomplete: let the exception end the training step, or run with JAGG_ENABLED=0"
            )

    @staticmethod
    def _require_scheduled(group, visit):
        expected, timesteps = group.timesteps[group.index(visit.place.position)], visit.timesteps
        if not torch.equal(expected, timesteps):
            raise JaggError(
                f"{visit.where}: the model is fed timesteps {timesteps.tolist()}, its schedule says {expected.tolist()}\n"
                f"JAGG can't look ahead here: {OFF_AND_REPORT}"
            )

    def model_output(self, session, visit, output):
        n_rows, n_timesteps = len(output) if output.ndim else 1, session.group.timesteps.shape[1]
        if n_timesteps not in (1, n_rows):
            raise JaggError(
                f"{visit.where}: the model output has {n_rows} rows, and the forward was given {n_timesteps} timesteps\n"
                "which row is of which timestep isn't known (frames or views in the batch?): run with JAGG_ENABLED=0"
            )
        if visit.place.is_knot and not output.requires_grad:
            raise JaggError(
                f"{session.group.where}: the model output of an endpoint has no graph, so no gradient could reach the "
                "weights\n"
                "is the model frozen, or the forward under no_grad? Unfreeze it or run with JAGG_ENABLED=0"
            )

    def step_ends(self, session, visit, result):
        """What a grouped forward returns must depend on the model output through the solver step alone."""
        if visit.place.is_exact:
            return
        require_one_solver_call(visit.where, visit.n_solver_calls)
        tensors = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
        if visit.place.is_first:
            # Its forward recorded everything, so a tensor without a graph doesn't depend on the weights (the noise level, say).
            self._constants = [not tensor.requires_grad for tensor in tensors]
            if not session.has_whole_graphs and lead_to_weights(graph_nodes(tensors)):
                raise JaggError(
                    f"{visit.where}: the training forward returned what depends on weights by another way than the model's "
                    "output\n"
                    f"the steps between would lose that gradient: {OFF_AND_REPORT}"
                )
            return
        for tensor, was_constant in zip_longest(tensors, self._constants):
            require_alike(visit, tensor, was_constant)


def require_alike(visit, tensor, was_constant):
    """A tensor that a later forward of a group returns, None where the first returned one more, has a graph where that had."""
    shape = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
    if tensor is None or was_constant is None or not (was_constant or tensor.requires_grad):
        raise JaggError(
            f"{visit.where}: the training forward returned a tensor without a graph, {shape}, unlike the group's first\n"
            f"a loss on it would lose its gradient: {OFF_AND_REPORT}"
        )
    if visit.place.closes and was_constant and tensor.requires_grad:
        raise JaggError(
            f"{visit.where}: the training forward returned a tensor with a graph, {shape}, that the group's first had without\n"
            f"the steps between may have lost its gradient: {OFF_AND_REPORT}"
        )


def require_eager_backward():
    """Raise `JaggError` where torch compiles the backward: it can't trace what happens to a gradient here."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "compiled_autograd_enabled", False):
        raise JaggError(
            "the backward is compiled (compiled autograd), and JAGG's part of it can't be\n"
            "switch that off (torch._dynamo.config.compiled_autograd), or run with JAGG_ENABLED=0"
        )


def require_trajectory_order(group):
    """Timesteps that go up and down are those of a loop that has put a sample's steps into another order."""
    moves = group.timesteps.diff(dim=0)
    if not ((moves >= 0).all(dim=0) | (moves <= 0).all(dim=0)).all():
        raise JaggError(
            f"{group.where}: the timesteps of the group aren't in the order of a trajectory: {group.timesteps.tolist()}\n"
            "does the loop shuffle the steps of a sample in time? Leave them in the rollout's order, or run with JAGG_ENABLED=0"
        )


def require_gradient(group, position):
    """The loss of a group's step at `position` must have had its backward, which brings s_p."""
    if group.received != position:
        raise JaggError(
            f"{group.where}: no gradient arrived for step {position - group.positions[0]} of the group before the "
            "group went on\n"
            "every step's loss needs its own .backward() in the loop, without inputs=, right after the step: run with "
            "JAGG_ENABLED=0"
        )


def require_closed(group, event):
    if group is not None:
        raise JaggError(
            f"{event} while the group that began at {group.where} was still open: its gradient is incomplete\n"
            "does the loop end early, or step the optimizer inside a sample? Run with JAGG_ENABLED=0"
        )


def require_last_sample_visited(order, event):
    if order.routes and order.position:
        raise JaggError(
            f"{event} after {order.position} of the {order.n_visited} steps planned for its last sample\n"
            f"other steps than upstream's may have been trained: {OFF_AND_REPORT}"
        )


def require_one_solver_call(where, n_calls):
    if n_calls != 1:
        raise JaggError(
            f"{where}: the solver step ran {n_calls} times in one training forward, not once\n"
            "the proxy can't stand for the model output here: run with JAGG_ENABLED=0"
        )


def second_backward(where):
    """The `JaggError` to raise when a gradient comes too late."""
    return JaggError(
        f"{where}: a second backward reached the group, at an endpoint whose own had begun (retain_graph, or a loss used twice)\n"
        "its gradient would count double or be lost: run with JAGG_ENABLED=0"
    )
