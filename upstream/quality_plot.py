"""The figure of upstream/quality.py."""

from itertools import product
from statistics import mean

import torch
from quality_measure import FRACS, VISITED, VISITED_SHARE, demo_setting, select, splits
from quality_probe import AGGREGATIONS

STYLES = ("o-", "s--")  # of the figure's lines, for two fracs or two aggregations


def plot(results, args, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(13, 9), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[0.5 + 0.32 * len(args.group_sizes), 2.8])
    plot_groups(top.subplots(), results, args)
    left, right = bottom.subplots(1, 2)
    plot_along_trajectory(left, results, args)
    plot_whole_updates(right, results, args)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_groups(axis, results, args):
    """A row per W and aggregation; each group spans its steps."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    eta, shift, _ = demo_setting(args).values()
    n_trainable = args.sampling_steps - 1
    colors = ScalarMappable(Normalize(0.5, 1), colormaps["viridis"])
    kinds = list(product(AGGREGATIONS, splits(args.group_sizes, n_trainable).items()))
    for y, (aggregation, (groups, _)) in enumerate(kinds):
        for group in groups:
            cell = dict(eta=eta, shift=shift, visited="all", aggregation=aggregation, positions=list(group))
            cosine = select(results["groups"], **cell)[0]["cosine"]["mean"]
            place = (group.start - 0.5, y - 0.5)
            axis.add_patch(Rectangle(place, len(group), 1, facecolor=colors.to_rgba(cosine), edgecolor="w", linewidth=2))
            middle = (group[0] + group[-1]) / 2
            axis.text(middle, y, f"{cosine:.3f}", ha="center", va="center", color="w" if cosine < 0.8 else "k")
    axis.set(xlim=(-0.5, n_trainable - 0.5), xticks=range(n_trainable), xlabel="step of the trajectory, noise to image")
    axis.set_ylim(len(kinds) - 0.5, -0.5)
    axis.set_yticks(range(len(kinds)), [f"{aggregation}, {label}" for aggregation, (_, label) in kinds])
    axis.set_title(f"a  Cosine of each group's gradient to the exact one, eta {eta:g}, shift {shift:g}")
    axis.figure.colorbar(colors, ax=axis, label="mean cosine", extend="min", pad=0.01)


def plot_along_trajectory(axis, results, args):
    _, shift, size = demo_setting(args).values()
    for number, eta in enumerate(args.etas):
        for aggregation, style in zip(AGGREGATIONS, STYLES, strict=True):
            cell = dict(eta=eta, shift=shift, visited="all", group_size=size, aggregation=aggregation)
            rows = select(results["groups"], **cell)
            middle = [mean(row["positions"]) for row in rows]
            cosine = torch.tensor([row["cosine"]["mean"] for row in rows])
            sd = torch.tensor([row["cosine"]["sd"] or 0 for row in rows])
            label = f"eta {eta:g}" if aggregation == AGGREGATIONS[0] else None
            axis.plot(middle, cosine, style, color=f"C{number}", label=label, markersize=4)
            axis.fill_between(middle, cosine - sd, cosine + sd, color=f"C{number}", alpha=0.1, linewidth=0)
    for aggregation, style in zip(AGGREGATIONS, STYLES, strict=True):
        axis.plot([], [], style, color="k", label=aggregation, markersize=4)
    ticks = [0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999]
    axis.set_yscale("logit", nonpositive="clip")
    axis.set_yticks(ticks, ticks)
    axis.set_yticks([], minor=True)
    axis.set(xlim=(-0.5, args.sampling_steps - 1.5), ylim=(ticks[0], ticks[-1]))
    axis.set(xlabel="step of the group's middle", ylabel="cosine (band: sd over prompt groups)")
    axis.set_title(f"b  Cosine along the trajectory, W={size}, shift {shift:g}")
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize="small", ncols=3, loc="lower center")


def plot_whole_updates(axis, results, args):
    _, shift, size = demo_setting(args).values()
    for (number, visited), (frac, style) in product(enumerate(VISITED), zip(FRACS, STYLES, strict=True)):
        cell = dict(shift=shift, visited=visited, group_size=size, frac=frac, aggregation="interpolate")
        rows = select(results["updates"], **cell)
        eta, height = ([row["eta"] for row in rows], [row["relative_error"]["mean"] for row in rows])
        bar = [(row["relative_error"]["sd"] or 0) / row["n"] ** 0.5 for row in rows]
        label = f"{visited if visited == 'all' else f'{visited} {VISITED_SHARE:.0%} of'} steps, frac {frac:g}"
        axis.errorbar(eta, height, bar, fmt=style, color=f"C{number}", label=label, markersize=4)
    axis.set(ylim=(0, None), xlabel="eta", ylabel="relative error (bar: standard error)")
    axis.set_title(f"c  Error of the whole update, interpolate, W={size}, shift {shift:g}")
    axis.legend(fontsize="small")
