"""Graphs of the rollout's forwards, kept for the update, which then runs none for those samples.

Until the first optimizer step after a rollout the policy hasn't moved, and a training forward repeats one of the rollout's. So
gradients are on in those forwards of the rollout whose steps will have a backward pass, and the update's losses go on from there.

That begins when a `Trial` has ended well: the samples that come before the first optimizer step are retained, as many of them as
memory holds.
"""

import math
from bisect import bisect
from contextlib import contextmanager
from itertools import pairwise

import torch

from ..engines.gradients import norms_of, own_part
from ..method.plan import knots_of
from ..ranks import first_of, gathered, least
from .alike import why_not_equal
from .between import Retained, entries_of, must_run_forward, run_apart
from .checkpointed import arguments_saved
from .drawn import Drawn
from .memory import graph_bytes, in_gb
from .offload import on_host
from .room import NONE, described, room
from .trial import Trial
from .watcher import Watcher

MOST_UNUSED = 3  # updates in a row
MOST_LARGER = 1.5  # times a training forward's
LOOK_EVERY = 10  # updates: one of its forwards is run again


class Retaining(Watcher):
    """`say` is called on every rank.

    is_on: whether graphs are retained, or will be. trial: which shows whether they can be.
    sample: how the sample that is being visited gets its outputs; None where that isn't a retained one.
    orders_samples: whether the trainer asks for its order of a rollout's samples; an adapter says so.
    """

    orders_samples = False

    def __init__(self, config, recording, say=lambda line: None):
        self.is_on = config.enabled and config.retain
        self.trial = Trial(self.is_on, recording, self._begin)
        self._config, self._recording, self._say = config, recording, say
        recording.users.append(self)
        self._shown = None  # by the trial
        self._room, self._n_knots = NONE, 0  # and for samples of how many knots that is
        self._stand_ins = {}  # for the model in a training forward that isn't run, by the shape of what the solver step gets
        self._is_with_grad = False  # whether the rollout's solver steps are
        self._doubt = None  # why graphs aren't used any more
        self._n_unused = self._n_used_in = 0  # updates in a row of which none could be, and updates in which they were
        self._drawn = Drawn()
        self.forget(None)

    def forget(self, session):
        self.sample = None
        self._drawn.forget()
        self._given = []  # numbers of the rollout's samples whose orders the trainer has got
        self._steps, self._n_taken = (), 0  # of the running batch: trained steps that are retained, and how many it has taken
        self._is_on_host = False  # whether its graphs are
        self._keeping, self._n_bytes = None, [0]  # what is entered from a forward's begin to its solver step, and counts there
        self._outputs = {}  # by batch and step of the records, `[B, ...]` with its graph
        self._weights = {}  # what each batch of the rollout had
        self._why_none = None  # why that has left no graph
        self._n_seen = 0  # samples, in this update
        self._is_refused = False  # whether a rank had none for a sample of this update

    @property
    def has_compared(self):
        """Whether all of a rollout's outputs are the training forwards'."""
        return self._shown is not None

    def _begin(self, shown):
        """The trial has ended."""
        if isinstance(shown, str):
            self.is_on = False
            self._say(f"JAGG: no graphs are retained from here on: {shown}")
            return
        self._shown = shown
        self._choose(shown.n_knots)

    def _choose(self, n_knots):
        """How many samples, of so many knots each, are retained, and where."""
        engine, measured, n_rows = self._shown.engine, self._shown.measured, self._shown.n_rows
        n_syncing = n_rows if engine.prepares_sync_in_forward else 0  # the batch that may sync
        places = {"device": (1, 0), "host": (0, 1), "auto": (1, int(torch.cuda.is_available()))}[self._config.retain_on]
        if engine.has_hooks:  # as for `graph_bytes`
            measured = measured._replace(on_host=0)
        is_known, cap = self._shown.is_in_order or self.orders_samples, 1e9 * self._config.retain_gb or math.inf
        self._room, self._n_knots = room(measured, n_knots, n_rows, n_syncing, is_known, places, cap), n_knots
        self.is_on = self._room.n_retained > 0
        self._say(described(self._room, measured, n_knots, n_syncing))

    # -- in the rollout

    @contextmanager
    def batch(self, session):
        """Around the rollout of a batch."""
        is_on = self.is_on and self._shown is not None and self._recording.is_recording
        if is_on and self._recording.records.n_batches == 1:
            self._follow_plan(session)
        place = self._place(self._recording.records.n_samples)
        if not (is_on and self.is_on and 0 <= place < self._room.n_retained):
            yield
            return
        number, n_orders, before = self._recording.records.n_batches - 1, len(self._drawn.orders), torch.is_grad_enabled()
        self._steps, self._n_taken = self._steps_of(session), 0
        self._is_on_host = place >= self._room.n_on_device
        self._weights[number] = self._weights_now()
        # FSDP2's own asks for the mode. The rollout may call what the engine has wrapped.
        hooks = [module.register_forward_pre_hook(self._forward_begins, prepend=True) for module in wrapped(self._model)]
        try:
            yield
        except BaseException:
            self._drop(number, n_orders)
            raise
        finally:
            for hook in hooks:
                hook.remove()
            self._forward_ends()
            torch.set_grad_enabled(before)
            self._steps = ()

    @property
    def _model(self):
        return self._shown.engine.model

    def _drop(self, number, n_orders):
        """What the batch of that number has left: it may be drawn again."""
        del self._drawn.orders[n_orders:]
        self._weights.pop(number)
        self._outputs = {place: output for place, output in self._outputs.items() if place[0] != number}

    def _follow_plan(self, session):
        """Under `auto` samples may come to have more knots than memory was reckoned for."""
        n_visited = self._shown.n_visited
        n_knots = len(knots_of(n_visited, session.order.planner.groups(n_visited)))
        if n_knots > self._n_knots:
            self._choose(n_knots)

    def _place(self, number):
        """Of the rollout's sample of that number among those that may be retained: the first, or the last if it orders them."""
        return number - (self._room.n_sampled - self._room.n_retained) if self.orders_samples else number

    def _steps_of(self, session):
        """Which of the trained steps of the batch that begins will have a backward pass."""
        shown = self._shown
        order = range(shown.n_visited)
        if shown.is_shuffled:
            device = shown.engine.parameters()[0].device.type
            drawn = [self._drawn.draw(shown.n_trajectory, device) for _ in range(shown.n_rows)]
            if shown.n_visited < shown.n_trajectory:  # of one row, as the trial has seen
                order = drawn[-1][: shown.n_visited].sort().values.tolist()
        return {order[knot] for knot in knots_of(shown.n_visited, session.order.planner.groups(shown.n_visited))}

    def _forward_begins(self, model, args):
        if self._keeping is not None and not torch.is_grad_enabled():
            self._why_none = "a forward of the rollout is under no_grad by itself (of guidance?)"
        if self._n_taken not in self._steps or self._keeping is not None or self._why_none:
            return
        torch.clear_autocast_cache()  # of casts that were made without a graph
        torch.set_grad_enabled(True)
        if self._is_on_host:
            self._keeping = on_host(self._shown.engine)
        else:  # of each rollout, the first one's size is looked at
            self._keeping = on_device() if self._outputs else graph_bytes(self._model)
        self._n_bytes = self._keeping.__enter__()

    def _forward_ends(self):
        if self._keeping is not None:
            self._keeping.__exit__(None, None, None)
            self._keeping = None
            torch.set_grad_enabled(self._is_with_grad)
            torch.clear_autocast_cache()
            self._require_size(self._n_bytes[0], self._shown.measured.graph)

    def _require_size(self, found, expected):
        """A model may be checkpointed in training mode alone."""
        if found > MOST_LARGER * expected:
            self._why_none = f"a forward of the rollout keeps {in_gb(found)}, one of training {in_gb(expected)}: another mode?"

    def solver_input(self, output, is_trained):
        """What the rollout's solver step gets in place of the model's `output`, whose graph is kept if that is due.

        Whether a step `is_trained` isn't known before its solver step, where the rollout draws a window of them.
        """
        records, is_due = self._recording.records, self._n_taken in self._steps
        self._n_taken += is_trained
        if not self._steps:
            self._is_with_grad = torch.is_grad_enabled()
        if not is_due:
            return output
        with torch.enable_grad():  # where the model alone is under no_grad, it isn't any more
            kept = output.clone() if output.requires_grad else None  # the trainer may change its own in place
        self._forward_ends()
        if not is_trained or self._why_none:
            return output.detach()
        if kept is None:
            self._why_none = "the rollout's forwards leave no graph (under inference mode, or by another model?)"
            return output
        self._why_none = self._shown.alike.why_other(self._model, kept)
        self._outputs[records.n_batches - 1, records.n_steps] = kept
        return output.detach()

    def ordered(self, permutation, selected=None):
        """In place of the trainer's `permutation` of a sample's steps the one that its rollout went by.

        `selected` are the latents of all trained samples, `[B, T, ...]`, where these aren't the rollout's one after the other.
        """
        number, orders = len(self._given), self._drawn.orders
        if selected is not None:
            row = selected[number : number + 1]
            found = self._recording.records.find(row[:, 0], row[:, 1], number) if len(row) else None
            number = self._recording.records.number(found[0]) if found else len(orders)
        self._given.append(number)
        return orders[number] if number < len(orders) else permutation

    def ordered_samples(self, permutation):
        """The trainer's order of a rollout's samples, `[N]`, kept to whole batches of it; those that are retained come first."""
        first_numbers = self._recording.records.first_numbers
        n_samples = self._recording.records.n_samples
        if not self.is_on or len(permutation) != n_samples:  # some are left out
            return permutation
        batches = [range(*ends) for ends in pairwise((*first_numbers, n_samples))]
        drawn = dict.fromkeys(bisect(first_numbers, number) - 1 for number in permutation.tolist())
        order = sorted(drawn, key=lambda batch: self._place(first_numbers[batch]) < 0)
        return permutation.new_tensor([number for batch in order for number in batches[batch]])

    # -- in the update

    def update_begins(self, session, step):
        if self._given and self._shown is not None and not self._shown.is_in_order:
            self._let_go_of_others(set(self._given))

    def _let_go_of_others(self, numbers):
        """Of the graphs of samples that aren't trained."""
        first_numbers = self._recording.records.first_numbers
        for batch, step in list(self._outputs):
            if not numbers.intersection(range(first_numbers[batch], first_numbers[batch] + self._shown.n_rows)):
                del self._outputs[batch, step]

    def step_begins(self, session, visit):
        if not self.is_on or visit.place.position:
            return
        is_due = self._n_seen < self._room.n_used and not self._is_refused
        self.sample = self._find(session, visit) if is_due else None
        self._n_seen += len(visit.step.latents)

    def _find(self, session, visit):
        """The ranks go on together: one that ran its forwards alone would deadlock."""
        is_first = not self._n_seen
        self._n_used_in += is_first
        is_looked_at = is_first and not self._n_used_in % LOOK_EVERY
        again = run_apart(session, visit) if is_looked_at else None  # on all ranks in the same updates
        entries = entries_of(session, visit, range(session.order.n_visited))
        outputs = {}
        why = self._why_none or self._doubt or self._why_not_found(session, entries, outputs)
        has_changed = False
        if why is None and is_looked_at:
            why = why_not_equal(outputs[0], again)
            has_changed = why is not None
        all_have, = least([why is None], visit.step.latents.device)
        if all_have:
            self._n_unused = 0
            return Retained(self._stand_ins[outputs[0].shape], self._recording.records, entries, outputs)
        self._is_refused = True
        self._outputs.clear()
        self._n_unused += 1
        whys, changed = zip(*gathered((why, has_changed)), strict=True)
        rank, why = first_of(whys)
        ends = any(changed) or self._n_unused == MOST_UNUSED  # what a look has found, other updates wouldn't find again
        self.is_on = not ends
        self._say(f"JAGG: graphs aren't used in {'any update from here on' if ends else 'this update'}: rank {rank}: {why}")
        return None

    def _why_not_found(self, session, entries, outputs):
        """Puts the outputs of the knots of the sample at `entries` into `outputs`; returns why it can't, or None."""
        if None in entries:
            return "the update has samples or steps that the rollout hadn't"
        if must_run_forward(self._shown.engine) and session.order.n_visited > 1:
            return "its first micro-step reduces gradients, and those that do run their own forward (is no_sync() missing?)"
        if self._recording.policy_has_moved or self._weights.get(entries[0][0].batch) not in (None, self._weights_now()):
            return "its weights have changed since the rollout"
        for position in knots_of(session.order.n_visited, session.order.planned):
            outputs[position] = self._outputs.pop(self._recording.records.batch_of(entries[position]), None)
        if None in outputs.values():
            return "the update has other batches, or needs other steps, than the rollout was asked for"
        stand_in = self._stand_ins.get(outputs[0].shape)
        if stand_in is None:
            return f"no training forward has had outputs of this size before: {list(outputs[0].shape)}"
        if stand_in.has_reference:
            return "the training forward calls the model for an output without a gradient too (a reference's?)"
        return None

    def doubts_now(self, why):
        """Graphs aren't used any more from the next update on, which says `why`."""
        self._doubt = why

    def proxy_given(self, session, visit, value):
        group = session.group
        if self.is_on and self.sample is None and group is not None and group.stand_in is not None and group.stand_in.is_ready:
            self._stand_ins[value.shape] = group.stand_in

    def step_returns(self, session, visit):
        group = session.group
        if self.sample is not None and group is not None and visit.place.position in group.ready:
            self._shown.engine.arm()

    def update_ends(self, session):
        self.forget(session)

    def _weights_now(self):
        """Of those that are trained versions, and norms: what is changed through `.data` keeps its version."""
        trained = [weight for weight in self._shown.engine.parameters() if weight.requires_grad]
        return [weight._version for weight in trained], norms_of({weight: own_part(weight) for weight in trained})


@contextmanager
def on_device():
    """As `on_host`, for graphs that stay where they are."""
    with arguments_saved():
        yield [0]


def wrapped(model):
    """`model`, and what its engine's wrappers hold."""
    while model is not None:
        yield model
        model = getattr(model, "module", None) if isinstance(getattr(model, "module", None), torch.nn.Module) else None
