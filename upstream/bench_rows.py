"""What upstream/bench.py measures: cases, each in several modes, trained in rounds; and what their seconds come to."""

import random
import resource
import types
from collections import defaultdict
from statistics import median
from typing import NamedTuple

import bench_loop
import torch
from bench_models import RECOMPUTE, set_checkpointing

from jagg_patch.config import JaggConfig
from jagg_patch.errors import JaggError
from jagg_patch.evidence.log import now
from jagg_patch.evidence.stats import Stats
from jagg_patch.install import make_session
from jagg_patch.loop.schedule import MEASURED_UPDATES
from jagg_patch.method.cost import StepCost, backward_passes, forward_passes, training_step_cost, update_cost
from jagg_patch.method.plan import forwards_a_group, knots_of, plan_groups

MODES = {
    "exact": {"frac": 0},
    "jagg": {"schedule": "joint"},
    "skip": {"schedule": "joint", "skip_forwards": True},
    "sequential": {"schedule": "sequential"},
    "retain": {"schedule": "joint", "retain": True},
    "exact, retain": {"frac": 0, "schedule": "sequential", "retain": True},
}
OF_EXACT = "exact", "exact, retain", "exact, on host"  # modes of cases without groups
RETAINED = {  # in the place of those
    "exact": MODES["exact"],
    "retain": MODES["retain"],
    "on host": MODES["retain"] | {"retain_on": "host"},
    "exact, retain": MODES["exact, retain"],
    "exact, on host": MODES["exact, retain"] | {"retain_on": "host"},
}
AS_LATER = {"self_check": False}  # a run's is over after its first optimizer steps; here none comes, so it would go on
NAMES = {"exact": "exact", "jagg": "JAGG", "skip": "JAGG, skipped", "sequential": "sequential", "retain": "JAGG, retained"}
NAMES |= {"exact, retain": "exact, retained", "on host": "on host", "exact, on host": "exact, on host"}
PARTS = ("update", "training_step")


class Case(NamedTuple):
    """What is trained, and how it is grouped: in the same way for all of `group_sizes`, or as `n_knots` are placed."""

    checkpointing: str
    steps: tuple
    frac: float = 0.0
    group_sizes: tuple = ()
    groups: tuple = ()
    n_knots: int = 0

    @property
    def settings(self):
        """Places are named: those that a run measures would have the rows differ by more than how long they take."""
        if self.n_knots:
            return {"knots_at": self.knots}
        return {"group_size": self.group_sizes[0], "frac": self.frac} if self.groups else {}

    @property
    def knots(self):
        return knots_of(self.visited, self.groups)

    @property
    def visited(self):
        return int(self.steps[0] * self.steps[1])

    @property
    def cell(self):
        """What it has in common with the exact one."""
        return self.checkpointing, self.steps

    @property
    def name(self):
        return " ".join(str(self).split())

    def __str__(self):
        steps = f"{self.visited} of {self.steps[0]}" if self.visited < self.steps[0] else f"{self.visited}"
        grouped = f"W={','.join(map(str, self.group_sizes)):4} frac {self.frac:g}" if self.groups else ""
        grouped = f"{self.n_knots} knots" if self.n_knots else grouped
        return f"{self.checkpointing:5}{steps:>7}  {grouped:15}"


def cases(wanted, wanted_knots):
    """Those `wanted`, after an exact one of each cell; group sizes that split the steps alike are one case.

    Knots are placed for noise levels that fall evenly.
    """
    found = []
    for checkpointing, steps, group_sizes, frac in wanted:
        alike = defaultdict(list)
        for size in group_sizes:
            alike[plan_groups(Case(checkpointing, steps).visited, JaggConfig(group_size=size, frac=frac))].append(size)
        found += [Case(checkpointing, steps, frac, tuple(sizes), groups) for groups, sizes in alike.items()]
    for checkpointing, steps, n_knots in wanted_knots:
        groups = plan_groups(Case(checkpointing, steps).visited, JaggConfig(knots=n_knots))
        found.append(Case(checkpointing, steps, groups=groups, n_knots=n_knots))
    for cell in dict.fromkeys(case.cell for case in found):
        yield Case(*cell)
        yield from (case for case in found if case.cell == cell)


class Row:
    """A case in one mode: a session on a loop of its own, and what its training steps have taken, a dict each."""

    def __init__(self, case, mode, model, meter, settings):
        config = JaggConfig(**case.settings | (MODES | RETAINED)[mode] | AS_LATER)
        self.case, self.mode, self.taken, self.is_out_of_memory = case, mode, [], False
        self.sampled = case.steps[0] + 1
        plan = (
            case.groups,
            StepCost(recompute=RECOMPUTE[case.checkpointing]),
            forwards_a_group(config.skip_forwards, config.schedule),
            float(config.retain),
        )
        update, training_step = update_cost(case.visited, *plan), training_step_cost(case.visited, self.sampled, *plan)
        self.predicted = {"update": update, "training_step": training_step}  # in forwards
        self.passes = forward_passes(case.visited, case.groups, plan[2]), backward_passes(case.visited, case.groups)
        self.is_retained = config.retain
        self.n_warm_ups = MEASURED_UPDATES if config.retain else int(config.skip_forwards)
        self._model, self._meter = model, meter
        self._args = types.SimpleNamespace(**settings, meter=meter)
        self._args.sampling_steps, self._args.timestep_fraction = self.sampled, case.steps[1]
        self._namespace = dict(vars(bench_loop))  # in it the loop's functions find one another, wrapped for this row
        for function in bench_loop.LOOP:
            self._namespace[function.__name__] = types.FunctionType(function.__code__, self._namespace, function.__name__)
        stats = Stats()
        self._own_seconds = bench_loop.wrap_and_time(self._namespace, make_session(config, stats), stats)

    def __str__(self):
        return f"{self.case} {NAMES[self.mode]:14}"

    def train(self, is_warm_up=False):
        """One training step, on top of gradients, as in the midst of an accumulation. Returns its seconds, if it had memory."""
        if self.is_out_of_memory:
            return None
        self._own_seconds.clear()
        # What retaining measures ends with an optimizer step.
        self._args.optimizer = torch.optim.SGD(self._model.parameters(), lr=0.0) if is_warm_up and self.is_retained else None
        try:
            set_checkpointing(self._model, RECOMPUTE[self.case.checkpointing])
            for parameter in self._model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
            used = resource.getrusage(resource.RUSAGE_SELF)
            self._meter.begin("rollout")
            self._namespace["train_one_step"](self._args, self._model)
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - used.ru_minflt
        except torch.cuda.OutOfMemoryError:
            self.is_out_of_memory = True
        finally:
            self._meter.begin(None)
        if self.is_out_of_memory:  # out of the handler, whose exception holds the graph
            self._model.zero_grad()
            torch.cuda.empty_cache()
            return None
        taken = self._meter.seconds | {"training_step": sum(self._meter.seconds.values())}
        if not is_warm_up:  # of a run's first update, which runs all forwards to compare them with the rollout's
            planned = (0, self.passes[1]) if self.is_retained else self.passes
            if self._meter.passes != planned:
                raise JaggError(
                    f"{self}: an update took {self._meter.passes} forwards and backward passes, planned were {planned}\n"
                    "its time would say nothing: please report this"
                )
            peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
            found = {"calls": self._meter.calls, "own": list(self._own_seconds), "peak_bytes": peak, "page_faults": faults}
            self.taken.append(taken | found)
        return taken["training_step"]


def measure(rows, seconds, least, most, drops):
    """Train every row in rounds, `least` to `most` of them, those of a cell in turns, as long as another would end in `seconds`.

    If it `drops` rows, the last first, until `least` rounds would. Returns those that are left, and how many rounds there were.
    """
    from tqdm.auto import tqdm

    began, rows, least = now(), list(rows), min(least, most)
    for _ in range(2):
        first = rows[0].train(is_warm_up=True)
    if first and drops:
        left = (seconds - now() + began) * rows[0].predicted["training_step"] / first  # in forwards
        while sum(row.predicted["training_step"] * (least + row.n_warm_ups) for row in rows) > left and len(rows) > 2:
            rows.pop()
    rounds, longest, draw = 0, 0.0, random.Random(0).random
    with tqdm(desc="training steps", total=len(rows) * least) as progress:
        for row in rows:
            for _ in range(row.n_warm_ups):
                row.train(is_warm_up=True)
        while rounds < most and (rounds < least or now() - began + longest < seconds):
            round_began, place = now(), defaultdict(draw)
            progress.total = max(progress.total, len(rows) * (rounds + 1))
            for row in sorted(rows, key=lambda row: (place[row.case.cell], draw())):
                row.train()
                progress.update()
            rounds, longest = rounds + 1, max(longest, now() - round_began)
    return rows, rounds


def call_seconds(rows):
    """The median forward and backward of the exact rows, for each checkpointing."""
    calls = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for taken in row.taken if row.mode == "exact" else ():
            for phase, kind in (("rollout", "unrecorded"), ("update", "recorded"), ("update", "backward")):
                calls[row.case.checkpointing][kind] += taken["calls"][phase, kind]
    return {name: {kind: median(values) for kind, values in kinds.items()} for name, kinds in calls.items()}


def least_seconds(row, seconds):
    """Of the update and of the training step, if forwards and backward passes take `seconds` and nothing else any."""
    forwards, backwards = row.passes
    if row.is_retained:  # the rollout records
        update = backwards * seconds["backward"]
        rollout = backwards * seconds["recorded"] + (row.sampled - backwards) * seconds["unrecorded"]
        return {"update": update, "training_step": update + rollout}
    update = backwards * (seconds["recorded"] + seconds["backward"]) + (forwards - backwards) * seconds["unrecorded"]
    return {"update": update, "training_step": update + row.sampled * seconds["unrecorded"]}


def describe(row, exact, seconds):
    """A row of the JSON file. `exact` is what it is compared with, `seconds` those of the calls, None if they aren't known."""
    case = row.case
    entry = {"row": str(row), "mode": row.mode, "checkpointing": case.checkpointing, "trainable": case.steps[0]}
    entry |= {"visited": case.visited, "group_sizes": case.group_sizes, "frac": case.frac, "groups": list(map(len, case.groups))}
    entry["knots"] = case.knots if case.n_knots else ()
    forwards = 0 if row.is_retained else row.passes[0]
    entry |= {"forwards": forwards, "backward_passes": row.passes[1], "out_of_memory": row.is_out_of_memory}
    entry |= {f"{part}_seconds": [taken[part] for taken in row.taken] for part in ("rollout", *PARTS)}
    entry["peak_bytes"] = max((taken["peak_bytes"] or 0 for taken in row.taken), default=0) or None
    entry["page_faults"] = median([taken["page_faults"] for taken in row.taken] or [0])  # of memory that is new to the process
    own = [step for taken in row.taken for step in taken["own"]]
    if own and exact.taken:
        entry["own_share"] = median(own) * case.visited / median(taken["update"] for taken in exact.taken)  # were all steps exact
    for part in PARTS:
        entry[part] = {"predicted": exact.predicted[part] / row.predicted[part]}
        ratios = [then[part] / taken[part] for then, taken in zip(exact.taken, row.taken, strict=False)]
        if ratios:
            entry[part]["limit"] = least_seconds(exact, seconds)[part] / least_seconds(row, seconds)[part]
            spread = torch.tensor(ratios).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
            entry[part] |= dict(zip(("q1", "median", "q3"), spread, strict=True))
    return entry
