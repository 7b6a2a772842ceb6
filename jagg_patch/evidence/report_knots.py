"""The report's page for knots: the cosine of a whole update against what it costs, and how many knots keep it."""

from collections import defaultdict
from statistics import fmean, pstdev

from ..method.cost import StepCost, training_step_cost, update_cost
from ..method.plan import groups_of

THRESHOLD = 0.98  # the least mean cosine of a whole update's gradient
FEW = 3  # probes: nothing is recommended on fewer, unless there are no more


def cosines(probed):
    """`({"group_size", "passes", "knots"}, cosines)` for each number of knots, and each size of published groups.

    `knots` are those of the last probe: they may move from one to the next.
    """
    found, knots = defaultdict(list), {}
    for record in probed:
        for row in record["probe"]:
            way = row["group_size"], len(row["knots"])
            knots[way] = row["knots"]
            found[way] += [row["cosine"]] * (row["cosine"] is not None)
    ways = sorted(found, key=lambda way: (way[0] is not None, way[1]))
    return [({"group_size": way[0], "passes": way[1], "knots": knots[way]}, found[way]) for way in ways]


def choices(found, record, threshold, forwards=None):
    """What the numbers of knots with a mean cosine of `threshold` or more cost, fewest first."""
    visited, sampled, cost = record["visited"], record["sampled_steps"], StepCost(**record["step_cost"])
    options = []
    for entry, values in found:
        if entry["group_size"] is None and values and fmean(values) >= threshold:
            plan = groups_of(entry["knots"])
            options.append(
                entry
                | {
                    "mean_cosine": fmean(values),
                    "probes": len(values),
                    "update": [update_cost(visited, groups, cost, forwards) for groups in ((), plan)],
                    "training_step": [
                        training_step_cost(visited, sampled or 0, groups, cost, forwards) for groups in ((), plan)
                    ],
                }
            )
    return options


def describe(first, found, options, forwards, threshold):
    """Lines; `first` is the first record that was probed."""
    cost = StepCost(**first["step_cost"])
    skipped = f" ({forwards} from knot to knot, the others skipped)" if forwards else ""
    exact = update_cost(first["visited"], (), cost)
    lines = [
        "cosine of the whole update's gradient to the exact one, mean ± sd (lowest) over the probes; update in forwards per",
        f"sample by the cost model{skipped}, {exact:g} exact",
    ]
    for entry, values in found:
        update = update_cost(first["visited"], groups_of(entry["knots"]), cost, forwards)
        name = f"{entry['passes']} knots" if entry["group_size"] is None else f"{entry['passes']} with W={entry['group_size']}"
        shown = f"{fmean(values):.3f} ± {pstdev(values):.3f} ({min(values):.3f})" if values else "unknown"
        places = ",".join(map(str, entry["knots"])) if entry["group_size"] is None else "published groups of all steps"
        lines.append(f"  {name:<12} {shown:<23} n={len(values):<4} update {update:g} ({exact / update:.2f}x)   {places}")
    lines += ["", f"the fewest knots that keep a mean cosine of {threshold:g}"]
    if not options:
        return [*lines, "  none of these: probe a run with more, or give a lower --threshold"]
    best = next((option for option in options if option["probes"] >= FEW), options[0])
    whole, new_whole = best["training_step"]
    if first["sampled_steps"]:
        lines.append(f"  a training step with sampling {whole:g} -> {new_whole:g} ({whole / new_whole:.2f}x)")
    # Places that were named are measured alone, and may be where nothing can be placed.
    how = f"JAGG_KNOTS_AT={','.join(map(str, best['knots']))}" if first.get("knots_at") else f"JAGG_KNOTS={best['passes']}"
    lines.append(f"recommended: {how}")
    if best is not options[0]:
        lines.append(f"  fewer were measured less than {FEW} times")
    if best["probes"] < FEW:
        lines.append(f"  measured {best['probes']} times only: probe more training steps before you rely on it")
    return lines


def draw(left, right, probed, found, options, threshold):
    """On two axes of matplotlib."""
    first = probed[0]
    cost = StepCost(**first["step_cost"])
    for is_published, marker in ((False, "o-"), (True, "s")):
        points = [
            (update_cost(first["visited"], groups_of(entry["knots"]), cost), fmean(values), pstdev(values))
            for entry, values in found
            if values and (entry["group_size"] is not None) is is_published
        ]
        if points:
            x, y, spread = zip(*sorted(points), strict=True)
            left.errorbar(x, y, yerr=spread, fmt=marker, capsize=3, label="published groups" if is_published else "knots")
    left.set(xlabel="update, in forwards per sample", ylabel="cosine to the exact gradient (bar: sd over probes)")
    numbers = sorted({len(row["knots"]) for record in probed for row in record["probe"] if row["group_size"] is None})
    for number in numbers:
        points = [
            (record["training_step"], row["cosine"])
            for record in probed
            for row in record["probe"]
            if row["group_size"] is None and len(row["knots"]) == number and row["cosine"] is not None
        ]
        if points:
            right.plot(*zip(*points, strict=True), "o-", label=f"{number} knots")
    right.set(xlabel="training step", ylabel="cosine")
    for axis in (left, right):
        axis.axhline(threshold, color="gray", linewidth=0.8, linestyle=":")
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=8)
