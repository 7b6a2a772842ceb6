"""Graphs of the rollout's forwards, kept for the update, which then runs none for those samples.

Until the first optimizer step after a rollout the policy hasn't moved, and a training forward repeats one of the rollout's. So
gradients are on in those forwards of the rollout whose steps will have a backward pass, and the update's losses go on from there.

A run's first updates run their own forwards, and are watched: these must give what the rollout's gave, and their graphs are
measured. From then on the samples that come before the first optimizer step are retained, as many of them as memory holds.
"""

import hashlib
import math
from bisect import bisect
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch

from ..engines.gradients import norms_of, own_part
from ..method.plan import knots_of
from ..method.proxy import graph_nodes
from ..ranks import first_of, gathered, least
from . import checkpointed
from .alike import Alike, why_not_equal
from .between import Retained, entries_of, run_apart
from .memory import free_bytes, graph_bytes, host_bytes, in_gb, joint_excess
from .offload import on_host
from .schedule import MEASURED_UPDATES
from .watcher import Watcher
from .weights import hides_weights, is_of

MOST_UNUSED = 3  # updates in a row
MOST_LARGER = 1.5  # times a training forward's
LOOK_EVERY = 10  # updates: one of its forwards is run again
HOST_SHARE = 0.5  # of a rank's share of what is available


class Measured(NamedTuple):
    """What the first updates have shown, of all ranks the least, and of graphs the largest.

    n_seen, n_first, n_sampled: samples of an update, of those before its first optimizer step, and of its rollout.
    graph, on_device, on_host: bytes of a step's graph, and what may be taken.
    """

    n_seen: int
    n_first: int
    n_sampled: int
    graph: int
    on_device: int
    on_host: int


class Retaining(Watcher):
    """`say` is called on every rank.

    is_on: whether graphs are retained, or will be.
    stand_in: for the model, in training forwards that aren't run.
    sample: how the sample that is being visited gets its outputs; None where that isn't a retained one.
    orders_samples: whether the trainer asks for its order of a rollout's samples; an adapter says so.
    """

    orders_samples = False

    def __init__(self, config, recording, say=lambda line: None):
        self.is_on = self.is_watching = config.enabled and config.retain
        self._recording = recording
        recording.users.append(self)
        self._config, self._say = config, say
        self._doubt = None  # why not
        self._alike = Alike()
        self._engine = self.stand_in = None  # the last group's
        self._n_updates = 0  # optimizer steps so far
        self.has_compared = False  # whether all of a rollout's outputs are the training forwards'
        self._n_rows = self._plan = None  # of a training batch; its n_trajectory, n_visited and whether orders are drawn
        self._measured = None  # once these are known
        self._n_knots = 0  # of a sample, with which the number of samples was chosen
        self._syncs = []  # of the samples before an optimizer step, whether they sync what their own forwards have to prepare
        self._n_first = None  # samples before the first optimizer step
        self._is_in_order = True  # whether the update takes the rollout's samples one after the other
        self._n_sampled = self._n_retained = self._n_used = 0  # samples: of each rollout, and of its update
        self._n_on_device = 0  # of the first
        self._n_unused = self._n_used_in = 0  # updates in a row of which none could be, and updates in which they were
        self.forget(None)

    def forget(self, session):
        self.sample = self._generator = None
        self._orders, self._given = [], []  # of the rollout's samples, as drawn; numbers of those that the trainer has got
        self._steps, self._n_taken = (), 0  # of the running batch: trained steps that are retained, and how many it has taken
        self._is_on_host = False  # whether its graphs are
        self._keeping, self._n_bytes = None, [0]  # what is entered from a forward's begin to its solver step, and counts there
        self._outputs = {}  # by batch and step of the records, `[B, ...]` with its graph
        self._weights = {}  # what each batch of the rollout had
        self._why_none = None  # why that has left no graph
        self._n_seen = 0  # samples, in this update
        self._is_refused = False  # whether a rank had none for a sample of this update

    # -- in the rollout

    @contextmanager
    def batch(self, session):
        """Around the rollout of a batch."""
        if self.is_on and self._measured is not None and self._recording.is_recording and self._recording.records.n_batches == 1:
            self._follow_plan(session)
        place = self._place(self._recording.records.n_samples)
        if not (self.is_on and self._recording.is_recording and 0 <= place < self._n_retained):
            yield
            return
        number, n_orders, before = self._recording.records.n_batches - 1, len(self._orders), torch.is_grad_enabled()
        self._steps, self._n_taken = self._steps_of(session), 0
        self._is_on_host = place >= self._n_on_device
        self._weights[number] = self._weights_now()
        # FSDP2's own asks for the mode. The rollout may call what the engine has wrapped.
        hooks = [module.register_forward_pre_hook(self._forward_begins, prepend=True) for module in wrapped(self._engine.model)]
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

    def _drop(self, number, n_orders):
        """What the batch of that number has left: it may be drawn again."""
        del self._orders[n_orders:]
        self._weights.pop(number)
        self._outputs = {place: output for place, output in self._outputs.items() if place[0] != number}

    def _follow_plan(self, session):
        """Under `auto` samples may come to have more knots than memory was reckoned for."""
        _, n_visited, _ = self._plan
        n_knots = len(knots_of(n_visited, session.order.planner.groups(n_visited)))
        if n_knots > self._n_knots:
            self._choose(self._measured, n_knots)

    def _place(self, number):
        """Of the rollout's sample of that number among those that may be retained: the first, or the last if it orders them."""
        return number - (self._n_sampled - self._n_retained) if self.orders_samples else number

    def _steps_of(self, session):
        """Which of the trained steps of the batch that begins will have a backward pass."""
        n_trajectory, n_visited, shuffled = self._plan
        order = range(n_visited)
        if shuffled:
            self._orders += [self._draw(n_trajectory) for _ in range(self._n_rows)]
            if n_visited < n_trajectory:  # of one row: `_decide`
                order = self._orders[-1][:n_visited].sort().values.tolist()
        return {order[knot] for knot in knots_of(n_visited, session.order.planner.groups(n_visited))}

    def _draw(self, n_steps):
        """An order of the steps, as the trainer will draw it, if the rollout draws nothing from the CPU's generator.

        On a CPU it does: there it is another one, that shares no bits with the noise.
        """
        if self._generator is None:
            self._generator, state = torch.Generator(), torch.get_rng_state()
            if self._engine.parameters()[0].device.type == "cpu":
                self._generator.manual_seed(int.from_bytes(hashlib.sha256(state.numpy().tobytes()).digest()[:7], "big"))
            else:
                self._generator.set_state(state)
        return torch.randperm(n_steps, generator=self._generator)

    def _forward_begins(self, model, args):
        if self._keeping is not None and not torch.is_grad_enabled():
            self._why_none = "a forward of the rollout is under no_grad by itself (of guidance?)"
        if self._n_taken not in self._steps or self._keeping is not None or self._why_none:
            return
        torch.clear_autocast_cache()  # of casts that were made without a graph
        torch.set_grad_enabled(True)
        if self._is_on_host:
            self._keeping = on_host(self._engine)
        else:  # of each rollout, the first one's size is looked at
            self._keeping = nullcontext([0]) if self._outputs else graph_bytes(self._engine.model)
        self._n_bytes = self._keeping.__enter__()

    def _forward_ends(self):
        if self._keeping is not None:
            self._keeping.__exit__(None, None, None)
            self._keeping = None
            torch.set_grad_enabled(False)
            torch.clear_autocast_cache()
            self._require_size(self._n_bytes[0], self._measured.graph)

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
        if not is_due:
            return output
        kept = output.clone() if output.requires_grad else None  # the trainer may change its own in place
        self._forward_ends()
        if not is_trained or self._why_none:
            return output.detach()
        if kept is None:
            self._why_none = "the rollout's forwards leave no graph (under inference mode, or by another model?)"
            return output
        if not records.n_steps or not self._outputs:
            self._why_none = self._alike.why_other(self._engine.model, kept)
        self._outputs[records.n_batches - 1, records.n_steps] = kept
        return output.detach()

    def ordered(self, permutation, selected=None):
        """In place of the trainer's `permutation` of a sample's steps the one that its rollout went by.

        `selected` are the latents of all trained samples, `[B, T, ...]`, where these aren't the rollout's one after the other.
        """
        number = len(self._given)
        if selected is not None:
            row = selected[number : number + 1]
            found = self._recording.records.find(row[:, 0], row[:, 1], number) if len(row) else None
            number = self._recording.records.number(found[0]) if found else len(self._orders)
        self._given.append(number)
        return self._orders[number] if number < len(self._orders) else permutation

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
        if self._given and not self._is_in_order:
            self._let_go_of_others(set(self._given))

    def _let_go_of_others(self, numbers):
        """Of the graphs of samples that aren't trained."""
        first_numbers = self._recording.records.first_numbers
        for batch, step in list(self._outputs):
            if not numbers.intersection(range(first_numbers[batch], first_numbers[batch] + self._n_rows)):
                del self._outputs[batch, step]

    def step_begins(self, session, visit):
        if not self.is_on or visit.place.position:
            return
        self._n_rows = len(visit.step.latents)  # of one index where the trainer's loop has one for the batch
        is_due = self._n_seen < self._n_used and not self._is_refused
        self.sample = self._find(session, visit) if is_due else None
        if self.is_watching:
            self._watch_order(session, visit)
        self._n_seen += self._n_rows

    def _find(self, session, visit):
        """The ranks go on together: one that ran its forwards alone would deadlock."""
        is_first = not self._n_seen
        self._n_used_in += is_first
        is_looked_at = is_first and not self._n_used_in % LOOK_EVERY
        again = run_apart(session, visit) if is_looked_at else None  # on all ranks in the same updates
        entries = entries_of(session, visit, range(session.order.n_visited))
        outputs = {}
        why = self._why_none or self._doubt or self._why_not_found(session, entries, outputs)
        if why is None and is_looked_at:
            why = why_not_equal(outputs[0], again)
        all_have, = least([why is None], visit.step.latents.device)
        if all_have:
            self._n_unused = 0
            return Retained(self.stand_in, self._recording.records, entries, outputs)
        self._is_refused = True
        self._outputs.clear()
        self._n_unused += 1
        rank, why = first_of(gathered(why))
        ends = self._n_unused == MOST_UNUSED
        self.is_on = not ends
        self._say(f"JAGG: graphs aren't used in {'any update from here on' if ends else 'this update'}: rank {rank}: {why}")
        return None

    def _why_not_found(self, session, entries, outputs):
        """Puts the outputs of the knots of the sample at `entries` into `outputs`; returns why it can't, or None."""
        if None in entries:
            return "the update has samples or steps that the rollout hadn't"
        if self._recording.policy_has_moved or self._weights.get(entries[0][0].batch) not in (None, self._weights_now()):
            return "its weights have changed since the rollout"
        for position in knots_of(session.order.n_visited, session.order.planned):
            outputs[position] = self._outputs.pop(self._place_of(entries[position]), None)
        if None in outputs.values():
            return "the update has other batches, or needs other steps, than the rollout was asked for"
        return None

    def doubts_now(self, why):
        """Graphs aren't used any more from the next update on, which says `why`."""
        self._doubt = why

    def _watch_order(self, session, visit):
        entries, = entries_of(session, visit, [0])
        numbers = [self._recording.records.number(entry) for entry in entries or ()]
        self._is_in_order &= numbers == list(range(self._n_seen, self._n_seen + self._n_rows))

    def step_returns(self, session, visit):
        group = session.group
        if self.sample is not None and group is not None and visit.place.position in group.ready:
            self._engine.arm()

    def optimizer_steps(self, session, optimizer):
        if self.is_watching and session.in_update and self._engine is not None and is_of(optimizer, self._engine.model):
            self._n_updates += 1
            if any(self._syncs[:-1]):
                self._doubts("DDP prepares each reduction in a forward, and reduces after every step: accumulate (no_sync)")
            self._syncs.clear()
            self._n_first = self._n_first or self._n_seen

    def update_ends(self, session):
        if self.is_watching and self._n_seen:
            if session.order.n_visited < 2:
                self._retains_none("of each sample a single step is trained")
            elif self._engine is not None:  # else nothing was grouped in this update
                self._decide(session)
        self.forget(session)

    # -- watching

    def group_begins(self, session, visit):
        if self._engine is None or self._engine.model is not session.group.engine.model:
            self._engine = session.group.engine
        if self.is_watching:
            self.stand_in = session.group.stand_in
            if visit.place.position == 0:
                self._syncs.append(self._engine.prepares_sync_in_forward and self._engine.syncs_gradients())

    def model_output(self, session, visit, output):
        if self.is_watching and visit.place.is_knot and any(map(hides_weights, graph_nodes([output]))):
            self._doubts("activations are checkpointed reentrantly: pass use_reentrant=False (CheckpointImpl.NO_REENTRANT)")
        if self.is_watching and visit.place.is_knot:
            self._alike.show(session.group.engine.model, output)

    def proxy_given(self, session, visit, value):
        if not self.is_watching or self._recording.policy_has_moved:
            return
        entries, = entries_of(session, visit, [visit.place.position])
        self._doubts(why_not_equal(entries and self._recording.records.outputs(entries), value.detach()))
        if entries is not None and self._place_of(entries) is None:
            self._doubts("the update's batches aren't the rollout's")

    def _doubts(self, why):
        self._doubt = self._doubt or why

    def _decide(self, session):
        """Whether to retain, and how many samples, all ranks alike."""
        order = session.order
        self._plan = order.n_trajectory, order.n_visited, order.is_shuffled
        if self._n_rows > 1 and order.is_shuffled and order.n_visited < order.n_trajectory:
            self._doubts(f"{self._n_rows} samples are trained at a time, each at steps of its own")
        if self.stand_in is None or not self.stand_in.is_ready:
            self._doubts("the training forward doesn't call the model that it is given")
        elif self.stand_in.has_reference:
            self._doubts("the training forward calls the model for an output without a gradient too (a reference's?)")
        self._doubts(self._engine.no_retaining)
        n_knots = len(knots_of(order.n_visited, order.planned))
        graph, free = session.schedule.graph_bytes, free_bytes()
        if session.schedule.name == "auto":
            free -= joint_excess(self._engine.model, graph)  # which it may take
        n_sampled = self._recording.records.n_samples
        samples = self._n_seen, self._n_first or self._n_seen, n_sampled
        host = int(HOST_SHARE * host_bytes()) if checkpointed.is_known else 0
        mine = self._doubt, self._n_updates, samples, self._is_in_order, graph, free, host
        doubts, updates, samples, in_order, graphs, frees, hosts = zip(*gathered(mine), strict=True)
        rank, doubt = first_of(doubts)
        if doubt is not None:
            self._retains_none(f"rank {rank}: {doubt}")
        elif min(updates) >= MEASURED_UPDATES:
            self.is_watching, self.has_compared, self._is_in_order = False, True, all(in_order)
            self._measured = Measured(*map(min, zip(*samples, strict=True)), max(graphs), min(frees), min(hosts))
            self._choose(self._measured, n_knots)

    def _retains_none(self, why):
        self.is_on = self.is_watching = False
        self._say(f"JAGG: no graphs are retained from here on: {why}")

    def _choose(self, measured, n_knots):
        """How many samples, of so many knots each, are retained, and where."""
        n_seen, n_first, n_sampled, graph, on_device, on_host = measured
        self._n_knots, a_sample = n_knots, graph * n_knots
        could = n_first - (self._n_rows if self._engine.prepares_sync_in_forward else 0)  # the one that may sync
        self._n_sampled, is_known = n_sampled, self._is_in_order or self.orders_samples
        wanted = could if is_known else n_sampled  # any of them may come first
        cap = 1e9 * self._config.retain_gb or math.inf
        places = {"device": (1, 0), "host": (0, 1), "auto": (1, int(torch.cuda.is_available()))}[self._config.retain_on]

        def that_fit(n_bytes):
            n_samples = int(max(min(n_bytes, cap, wanted * a_sample), 0) // max(a_sample, 1))
            return n_samples - n_samples % self._n_rows  # whole batches

        n_on_device, n_on_host = (is_one * that_fit(room) for is_one, room in zip(places, (on_device, on_host), strict=True))
        held = min(n_on_device + n_on_host, that_fit(math.inf))
        if not is_known and held < wanted:
            held = 0
        self._n_on_device = min(n_on_device, held)
        self._n_retained, self._n_used = held, min(held, could)
        self.is_on = held > 0
        self._say(
            f"JAGG: graphs of {held} samples of each rollout are retained from here on, {self._n_on_device} on the device and "
            f"{held - self._n_on_device} in the host's memory: {in_gb(a_sample)} each\n"
            f"  {n_first} of an update's {n_seen} come before its first optimizer step"
            f"{f', {n_first - could} of them run their own forwards for DDP' if could < n_first else ''}; on the fullest rank "
            f"{in_gb(on_device)} are free on the device, and {in_gb(on_host)} of the host's may be taken"
        )

    def _place_of(self, entries):
        """The batch and the step of the records that have just these rows, in this order; None where none has."""
        first = entries[0]
        whole = [first._replace(row=row) for row in range(self._recording.records.n_rows(first.batch))]
        return (first.batch, first.step) if entries == whole else None

    def _weights_now(self):
        """Of those that are trained versions, and norms: what is changed through `.data` keeps its version."""
        trained = [weight for weight in self._engine.parameters() if weight.requires_grad]
        return [weight._version for weight in trained], norms_of({weight: own_part(weight) for weight in trained})


def wrapped(model):
    """`model`, and what its engine's wrappers hold."""
    while model is not None:
        yield model
        model = getattr(model, "module", None) if isinstance(getattr(model, "module", None), torch.nn.Module) else None
