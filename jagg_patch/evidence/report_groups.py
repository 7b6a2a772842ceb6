"""The report's page for published groups: their cosines, and which W and frac keep them."""

import math
from collections import defaultdict
from statistics import fmean, pstdev

from ..config import JaggConfig
from ..method.cost import StepCost, training_step_cost, update_cost
from ..method.plan import Group, plan_groups

THRESHOLD = 0.8  # the least mean cosine of a group that is routed
FEW = 3  # probes: nothing is recommended on fewer, unless there are no more


def cosines(probed):
    """`({"group_size", "groups": [[start, steps], …]}, [cosines of each group, …])` for each way in which steps were grouped."""
    found = defaultdict(list)
    for record in probed:
        for probe in record["probe"]:
            found[probe["group_size"], tuple((group["start"], group["steps"]) for group in probe["groups"])].append(
                probe["groups"]
            )
    return [
        (
            {"group_size": size, "groups": groups},
            [[probe[n]["cosine"] for probe in probes if probe[n]["cosine"] is not None] for n in range(len(groups))],
        )
        for (size, groups), probes in sorted(found.items())
    ]


def choices(found, record, threshold, forwards=None):
    """Every `group_size` and `frac` whose groups were measured and have mean cosines of `threshold` or more, cheapest first.

    `forwards` is how many a group takes, None where none are skipped.
    """
    visited, sampled, cost = record["visited"], record["sampled_steps"], StepCost(**record["step_cost"])
    options = []
    for entry, values in found:
        groups = [Group((start, start + steps - 1)) for start, steps in entry["groups"]]
        for n in range(1, len(groups) + 1):
            if not values[n - 1] or fmean(values[n - 1]) < threshold:
                break
            frac = as_frac(groups[n - 1].stop, visited)
            config = JaggConfig(group_size=entry["group_size"], frac=frac, cuts=record.get("cuts", ()))  # none in older logs
            planned = [group for group in plan_groups(visited, config) if len(group) > 1]
            if planned != groups[:n] or sum(map(len, planned)) == 2 * len(planned):
                continue  # that many steps would be grouped otherwise than they were measured, or nothing would be saved
            options.append(
                {
                    "group_size": config.group_size,
                    "frac": config.frac,
                    "groups": [len(group) for group in planned],
                    "lowest_mean_cosine": min(map(fmean, values[:n])),
                    "probes": min(map(len, values[:n])),
                    "update": [update_cost(visited, plan, cost, forwards) for plan in ((), planned)],
                    "training_step": [training_step_cost(visited, sampled or 0, plan, cost, forwards) for plan in ((), planned)],
                }
            )
    return sorted(options, key=lambda option: (option["update"][1], -option["lowest_mean_cosine"]))


def as_frac(n_routed, n_visited):
    """The shortest decimal that routes `n_routed` of `n_visited` steps."""
    for digits in range(1, 10):
        frac = math.ceil(10**digits * n_routed / n_visited - 1e-9) / 10**digits
        if int(frac * n_visited + 1e-9) == n_routed:
            return frac
    raise AssertionError(f"{n_routed} of {n_visited}")


def describe(first, found, options, forwards, threshold):
    """Lines; `first` is the first record that was probed."""
    lines = ["cosine of a group's gradient to the exact one, mean ± sd (lowest) over the probes, noisiest group first"]
    for entry, values in found:
        sizes = "+".join(str(steps) for _, steps in entry["groups"])
        shown = "   ".join(
            f"{fmean(v):.3f} ± {pstdev(v):.3f} ({min(v):.3f})" if v else "unknown: its gradients were zero" for v in values
        )
        lines.append(f"  W={entry['group_size']:<3} {sizes:<12} {shown}   n={max(map(len, values))}")
    skipped = f" ({forwards} a group, the others skipped)" if forwards else ""
    lines += [
        "",
        f"what keeps every group's mean at {threshold:g}: cheapest first, in forwards per sample by the cost model{skipped}",
    ]
    for option in options:
        (update, new_update), (whole, new_whole) = option["update"], option["training_step"]
        sampling = f", with sampling {whole:g} -> {new_whole:g} ({whole / new_whole:.2f}x)" if first["sampled_steps"] else ""
        lines.append(
            f"  W={option['group_size']:<3} frac {option['frac']:<7g} {'+'.join(map(str, option['groups'])):<12} lowest "
            f"{option['lowest_mean_cosine']:.3f}   update {update:g} -> {new_update:g} ({update / new_update:.2f}x){sampling}"
        )
    if options:
        best = next((option for option in options if option["probes"] >= FEW), options[0])
        lines.append(f"recommended: JAGG_GROUP_SIZE={best['group_size']} JAGG_FRAC={best['frac']:g}")
        if best is not options[0]:
            lines.append(f"  the cheaper ones were measured less than {FEW} times")
        if best["probes"] < FEW:
            lines.append(f"  measured {best['probes']} times only: probe more training steps before you rely on it")
    else:
        lines.append("  nothing: run with JAGG_ENABLED=0, or look at the groups above with a lower --threshold")
    return lines


def draw(left, right, probed, found, options, threshold):
    """On two axes of matplotlib."""
    for entry, values in found:
        points = [(start + (steps - 1) / 2, v) for (start, steps), v in zip(entry["groups"], values, strict=True) if v]
        x, mean = [x for x, _ in points], [fmean(v) for _, v in points]
        spread = [pstdev(v) for _, v in points]
        sizes = "+".join(str(steps) for _, steps in entry["groups"])
        left.errorbar(x, mean, yerr=spread, marker="o", capsize=3, label=f"W={entry['group_size']}: {sizes}")
    left.set(
        xlabel="visited step, noisiest first (a group's middle)", ylabel="cosine to the exact gradient (bar: sd over probes)"
    )
    own = [(record["training_step"], record["probe"][0]["groups"]) for record in probed]
    for n in range(max(len(groups) for _, groups in own)):
        points = [(step, groups[n]) for step, groups in own if n < len(groups) and groups[n]["cosine"] is not None]
        if not points:
            continue
        (line,) = right.plot([step for step, _ in points], [group["cosine"] for _, group in points], label=f"group {n}")
        for routed, marker in ((True, "o"), (False, "x")):
            x, y = [s for s, g in points if g["routed"] is routed], [g["cosine"] for s, g in points if g["routed"] is routed]
            right.plot(x, y, marker, color=line.get_color())
    right.set(xlabel="training step", ylabel="cosine (dot: routed, cross: not)")
    for axis in (left, right):
        axis.axhline(threshold, color="gray", linewidth=0.8, linestyle=":")
        axis.legend(fontsize=8)
