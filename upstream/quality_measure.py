"""How near groups' gradients are to the exact ones, over the settings of upstream/quality.py; and how to find that again."""

from collections import defaultdict
from itertools import product
from statistics import mean, stdev
from typing import NamedTuple

import torch
from quality_probe import AGGREGATIONS

from jagg_patch.config import JaggConfig
from jagg_patch.method.plan import plan_groups
from jagg_patch.method.quality import agreement, sums

VISITED = ("all", "random", "window")
VISITED_SHARE = 0.6  # of "random", as upstream's --timestep_fraction, and of "window"
FRACS = (0.6, 1.0)
DEMO = dict(eta=0.7, shift=3.0, group_size=4)  # what the figure and the single samples show, where it is among the given ones
SINGLE_SAMPLES = 2  # of each prompt group


class Setting(NamedTuple):
    eta: float
    shift: float
    visited: str


def visited_steps(visited, n_trainable, n_samples):
    """Which steps each sample visits, in trajectory order: `[k, B]`. "random" is what upstream draws."""
    n_visited = int(n_trainable * VISITED_SHARE)
    if visited == "all":
        drawn = [torch.arange(n_trainable)] * n_samples
    elif visited == "random":
        drawn = [torch.randperm(n_trainable)[:n_visited].sort().values for _ in range(n_samples)]
    else:
        starts = torch.randint(n_trainable - n_visited + 1, [n_samples]).tolist()
        drawn = [torch.arange(start, start + n_visited) for start in starts]
    return torch.stack(drawn, 1)


def compare(probe, rollout, steps, setting, group_sizes, fracs=FRACS):
    """How near one prompt group's gradients are to the exact ones.

    Returns:
        Two dicts of `Agreement`s: of groups, by (W, aggregation, group), where all visited steps are grouped; and of whole
        updates, by (W, frac, aggregation), where the steps outside groups are exact.
    """
    plans = {
        (size, frac): plan_groups(len(steps), JaggConfig(group_size=size, frac=frac))
        for size, frac in product(group_sizes, fracs)
    }
    distinct = sorted({group for plan in plans.values() for group in plan}, key=lambda group: (group.start, group.stop))
    exact, grouped = probe.gradients(rollout, steps, setting.eta, setting.shift, distinct)
    whole = exact.sum(0)
    near = {}
    for (group, aggregation), gradient in grouped.items():
        near[group, aggregation] = agreement(sums([gradient], [exact[group.start : group.stop].sum(0)]))
    groups, updates = {}, {}
    for ((size, frac), plan), aggregation in product(plans.items(), AGGREGATIONS):
        if frac == 1:
            groups |= {(size, aggregation, group): near[group, aggregation] for group in plan}
        if (plan, aggregation) not in near:
            rest = exact[plan[-1].stop if plan else 0 :].sum(0)
            update = sum((grouped[group, aggregation] for group in plan), rest)
            near[plan, aggregation] = agreement(sums([update], [whole]))
        updates[size, frac, aggregation] = near[plan, aggregation]
    return groups, updates


def summary(agreements):
    """Mean, standard deviation and worst over prompt groups; those with a gradient of zero are left out."""
    defined = [found for found in agreements if None not in found]
    rows = {"n": len(defined)}
    for name, worst in (("cosine", min), ("relative_error", max)):
        values = [getattr(found, name) for found in defined]
        if values:
            rows[name] = {"mean": mean(values), "sd": stdev(values) if len(values) > 1 else None, "worst": worst(values)}
    return rows


def measure(probe, args):
    """All numbers of the JSON file."""
    from tqdm.auto import tqdm

    n_trainable = args.sampling_steps - 1
    demo = demo_setting(args)
    groups, updates, single, visits = (defaultdict(list) for _ in range(4))
    cells = list(product(args.etas, args.shifts, range(args.prompts)))
    with tqdm(total=len(cells) * len(VISITED), desc="cells x prompt groups") as progress:
        for eta, shift, prompt in cells:
            torch.manual_seed(args.seed * 1000 + prompt)  # the same noise at every eta and shift
            rollout = probe.roll_out(prompt % 10, args.samples, eta, shift)
            for visited in VISITED:
                setting = Setting(eta, shift, visited)
                steps = visited_steps(visited, n_trainable, args.samples)
                visits[setting].append(steps)
                of_groups, of_updates = compare(probe, rollout, steps, setting, args.group_sizes)
                for found, into in ((of_groups, groups), (of_updates, updates)):
                    for key, near in found.items():
                        into[setting, *key].append(near)
                progress.update()
            if (eta, shift) != (demo["eta"], demo["shift"]):
                continue
            setting, steps = Setting(eta, shift, "all"), visited_steps("all", n_trainable, 1)
            for sample in range(SINGLE_SAMPLES):
                alone = rollout.samples(slice(sample, sample + 1))
                for key, near in compare(probe, alone, steps, setting, [demo["group_size"]], fracs=[1.0])[0].items():
                    single[setting, *key].append(near)

    def group_rows(found):
        for (setting, size, aggregation, group), agreements in found.items():
            key = {"group_size": size, "aggregation": aggregation, "positions": list(group)}
            yield setting._asdict() | key | summary(agreements)

    def update_rows(found):
        for (setting, size, frac, aggregation), agreements in found.items():
            yield setting._asdict() | {"group_size": size, "frac": frac, "aggregation": aggregation} | summary(agreements)

    def visit_rows():
        for setting, steps in visits.items():
            times = torch.cat([step.flatten() for step in steps]).bincount(minlength=n_trainable)
            yield setting._asdict() | {"share_of_samples": (times / (args.prompts * args.samples)).tolist()}

    return {
        "groups": list(group_rows(groups)),
        "updates": list(update_rows(updates)),
        "per_sample": list(group_rows(single)),
        "steps_visited": list(visit_rows()),
    }


def demo_setting(args):
    """The demo's eta, shift and W, each the first of the given ones where it isn't among them."""
    given = dict(eta=args.etas, shift=args.shifts, group_size=args.group_sizes)
    return {name: value if value in given[name] else given[name][0] for name, value in DEMO.items()}


def select(rows, **wanted):
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def splits(group_sizes, n_steps):
    """How all of `n_steps` are grouped, and by which of `group_sizes`: `{groups: "W=..."}`."""
    found = defaultdict(list)
    for size in group_sizes:
        found[plan_groups(n_steps, JaggConfig(group_size=size, frac=1))].append(size)
    return {groups: f"W={', '.join(map(str, sizes))}" for groups, sizes in found.items()}


def group_mean(rows):
    return mean(row["cosine"]["mean"] for row in rows)
