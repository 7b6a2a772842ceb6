"""The lines that rank 0 prints: at start version, trainer, settings, plan, predicted saving; later what they came to."""

from . import __version__
from .config import AUTO
from .loop.schedule import MEASURED_UPDATES
from .loop.watcher import Watcher
from .method.cost import backward_passes, forward_passes, knot_probe_cost, probe_cost, training_step_cost, update_cost
from .method.plan import (
    ENDPOINTS_FIRST,
    LOOK_AHEAD,
    forwards_a_group,
    groups_of,
    least_forwards,
    places,
    plan_groups,
    whole_groups,
)

MEMORY = {
    "joint": "a second graph, whole gradients, and under FSDP1 with resharding whole weights, more than unpatched",
    "sequential": "as unpatched",
    "auto": f"as unpatched for {MEASURED_UPDATES} optimizer steps (sequential); then joint, if what they have left free holds it",
}

FORWARDS = {
    ENDPOINTS_FIRST: "{together} a {whose} (one more where DDP syncs the last one's gradients)",
    LOOK_AHEAD: "{alone} a {whose}, counted above; {together} in the joint schedule",
}


def banner(trainer, config, args):
    """The start-up text for `trainer` under `config` and the trainer's parsed `args`."""
    head = f"JAGG {__version__} on {trainer.name}"
    if not config.enabled:
        return f"{head}: off"
    sampled, trainable, visited = trainer.steps(args)
    groups = plan_groups(visited, config)
    settings = plan_settings(config) + [f"aggregation {config.aggregation}", f"schedule {config.schedule}"]
    if config.cuts:
        settings.append(f"cuts {','.join(map(str, config.cuts))}")
    settings += [f"{name} 1" for name in ("skip_forwards", "retain") if getattr(config, name)]
    describe = describe_knots if config.has_knots else describe_plan
    lines = [f"{head}: {', '.join(settings)}", f"  plan: {describe(trainable, visited, groups)}"]
    if groups or config.retain:
        cost = trainer.step_cost(args)
        forwards = forwards_a_group(config.skip_forwards, config.schedule)
        first, n_samples = trainer.first_samples(args) if config.retain else (0, 1)
        plans = ((), cost), (groups, cost, forwards, first / n_samples)
        update = [update_cost(visited, *plan) for plan in plans]
        whole = [training_step_cost(visited, sampled, *plan) for plan in plans]
        lines.append(
            f"  predicted per sample, in forwards: update {update[0]:g} -> {update[1]:g} ({update[0] / update[1]:.2f}x), "
            f"with sampling {whole[0]:g} -> {whole[1]:g} ({whole[0] / whole[1]:.2f}x)"
        )
        if config.retain:
            lines.append(describe_retaining(first, n_samples))
        largest = max((len(gap) for group in groups for gap in group.gaps), default=0)
        if config.skip_forwards and largest > least_forwards(config.schedule):
            lines.append(
                f"  forwards: {describe_forwards(config, visited, groups, forwards)}, the others are estimated from the "
                "rollout's; its first sample is compared"
            )
        if config.has_knots and visited < trainable:
            n_knots = backward_passes(visited, groups)
            every = update_cost(trainable, groups_of((*range(n_knots - 1), trainable - 1)), cost)
            lines.append(f"  all {trainable} steps with as many backward passes: update {every:g} (--timestep_fraction 1)")
        if update[0] == update[1]:
            lines.append("  groups of two are exact and save no backward pass, only communication in the joint schedule")
        lines.append(f"  memory: {MEMORY[config.schedule]} (jagg_patch/loop/README.md)")
    if config.probe_every:
        measured, cost = f"every {config.probe_every} training steps, one sample on every rank", trainer.step_cost(args)
        if config.has_knots:
            lines.append(f"  probe: {measured}, some {knot_probe_cost(visited, groups, cost):g} forwards")
        else:
            forwards = probe_cost(whole_groups(visited, config), cost)
            lines.append(
                f"  probe: {measured}, {forwards:g} forwards for "
                f"groups of about {config.group_size}, and about as many for another size"
            )
    return "\n".join(lines)


def describe_retaining(first, n_samples):
    """How many of a rollout's samples can do without forwards, and what would make it all."""
    more = "; a larger gradient_accumulation_steps makes it more" if first < n_samples else ""
    return (
        f"  retained graphs: {first} of {n_samples} samples of a rank's update come before its first optimizer step and need no "
        f"forward, as far as memory holds their graphs, which is measured first{more}"
    )


def plan_settings(config):
    if config.knots_at:
        return [f"knots at {','.join(map(str, config.knots_at))}"]
    if config.knots:
        return [f"knots {config.knots}" + f" (cosine {config.knots_cosine:g})" * (config.knots == AUTO)]
    return [f"group_size {config.group_size}", f"frac {share(config.frac)}"]


def describe_forwards(config, n_visited, groups, at_most):
    """How many of a sample's forwards, or of a published group's, are run."""
    together, alone = ENDPOINTS_FIRST, LOOK_AHEAD
    if config.has_knots:
        together, alone = [forward_passes(n_visited, groups, a_group) for a_group in (together, alone)]
    return FORWARDS[at_most].format(together=together, alone=alone, whose="sample" if config.has_knots else "group")


def describe_knots(n_trajectory, n_visited, groups):
    """E.g. `15 of 15 steps visited, in trajectory order: 4 with a backward pass of their own, 11 between them`."""
    n_knots = backward_passes(n_visited, groups)
    if n_knots == n_visited:
        return describe_plan(n_trajectory, n_visited, ())
    return (
        f"{n_visited} of {n_trajectory} steps visited, in trajectory order: {n_knots} with a backward pass of their own, "
        f"{n_visited - n_knots} between them"
    )


def describe_plan(n_trajectory, n_visited, groups):
    """The plan in words, e.g. `9 of 15 steps visited, in trajectory order: 5 in 1 group (5), 4 exact`."""
    if not groups:
        return f"{n_visited} of {n_trajectory} steps visited, all exact: nothing is grouped, nothing is changed"
    sizes = [len(group) for group in groups if len(group) > 1]
    n_exact = sum(place.is_exact for place in places(n_visited, groups))
    return (
        f"{n_visited} of {n_trajectory} steps visited, in trajectory order: {sum(sizes)} in "
        f"{len(sizes)} group{'s' * (len(sizes) > 1)} ({'+'.join(map(str, sizes))}), {n_exact} exact"
    )


def describe_probe(record):
    """What the probe found, in a line: the cosines of the run's own groups, those that aren't routed in brackets."""
    groups = record["probe"][0]["groups"]
    cosines = ["unknown" if group["cosine"] is None else f"{group['cosine']:.3f}" for group in groups]
    shown = [cosine if group["routed"] else f"({cosine})" for cosine, group in zip(cosines, groups, strict=True)]
    brackets = ", in brackets what isn't grouped" if not all(group["routed"] for group in groups) else ""
    return (
        f"JAGG: probe at training step {record['training_step']}: cosine to the exact gradient {' '.join(shown)}{brackets} "
        f"({record['probe_seconds']:.1f} s)"
    )


def describe_knot_probe(record):
    """What the probe found, in a line: the cosines of the whole update by its number of backward passes, the run's own first."""
    own, *others = record["probe"]
    sizes = [f" (W={row['group_size']})" if row["group_size"] else "" for row in others]
    shown = [f"{cosine_of(row)} with {len(row['knots'])}{size}" for row, size in zip(others, sizes, strict=True)]
    return (
        f"JAGG: probe at training step {record['training_step']}: cosine to the exact gradient {cosine_of(own)} with "
        f"{len(own['knots'])} backward passes; {', '.join(shown)} ({record['probe_seconds']:.1f} s)"
    )


def cosine_of(row):
    return "unknown" if row["cosine"] is None else f"{row['cosine']:.3f}"


class FirstUpdate(Watcher):
    """Says after the first update with groups in it what the plan came to."""

    def __init__(self, stats, say):
        self._stats, self._say = stats, say
        self._is_said = False

    def optimizer_steps(self, session, optimizer):
        stats = self._stats
        if self._is_said or not stats.groups:
            return
        skipped = f", {stats.skipped_forwards} forwards skipped" if stats.skipped_forwards > 0 else ""
        self._say(
            f"JAGG: first optimizer step after {stats.backward_passes} backward passes through the model instead of "
            f"{stats.backward_passes_unpatched}{skipped}"
        )
        self._is_said = True


def share(frac):
    return frac if frac == AUTO else f"{frac:g}"
