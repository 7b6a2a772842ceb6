"""Measure on the mini trainer's model how near grouped gradients are to the exact ones.

Rollouts, advantages and losses are the mini trainer's own, in one process without FSDP. The gradient of each prompt group's
samples is compared with the exact one, over noise levels eta, time shifts, choices of visited steps and group sizes W. Writes
probe.json and probe.png.
"""

import json
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import NamedTuple

import torch

from ..config import JaggConfig
from ..errors import JaggError
from ..joint import endpoint_weights, weighted_sum
from ..plan import alphas, plan_groups
from ..quality import agreement, sums
from . import made_by, make_folder

VISITED = ("all", "random", "window")
VISITED_SHARE = 0.6  # of "random", as upstream's --timestep_fraction, and of "window"
FRACS = (0.6, 1.0)
AGGREGATIONS = ("interpolate", "endpoints")
STYLES = ("o-", "s--")  # of the figure's lines, for two fracs or two aggregations
ADV_CLIP_MAX = 5.0  # the trainer's default
DEMO = dict(eta=0.7, shift=3.0, group_size=4)  # what the figure and the single samples show, where it is among the given ones
SINGLE_SAMPLES = 2  # of each prompt group
SETTINGS = ("etas", "shifts", "group_sizes", "prompts", "samples", "sampling_steps", "seed")


class Setting(NamedTuple):
    eta: float
    shift: float
    visited: str


class Rollout(NamedTuple):
    """A prompt group's samples, `[B, ...]`; the last of the T steps is never trained."""

    latents: torch.Tensor  # [B, T + 1, 16, 4]
    log_probs: torch.Tensor  # [B, T]
    advantages: torch.Tensor  # [B]
    sequence: torch.Tensor  # [B, 1, 16]
    pooled: torch.Tensor  # [B, 16]

    def samples(self, chosen):
        return Rollout(*(tensor[chosen] for tensor in self))


class Probe:
    """The model, and the mini trainer's modules, which need what the demo needs."""

    def __init__(self, mini, n_steps):
        if not (mini / "fastvideo/train_grpo_flux.py").is_file():
            raise JaggError(
                f"no mini trainer in {mini}\n"
                "this command runs in JAGG's own checkout (or --mini DIR); a run of your own is probed with JAGG_PROBE_EVERY"
            )
        sys.path.insert(0, str(mini / "fastvideo"))
        try:
            import digits
            import train_grpo_flux
            from diffusers import FluxTransformer2DModel
        except ImportError as error:
            raise needs(error) from error
        finally:
            sys.path.remove(str(mini / "fastvideo"))
        self.digits, self.trainer = digits, train_grpo_flux
        self.transformer = FluxTransformer2DModel.from_pretrained(mini / "data/flux", subfolder="transformer")
        self.parameters = list(self.transformer.parameters())
        self.n_steps = n_steps

    def sigmas(self, shift):
        return self.trainer.sd3_time_shift(shift, torch.linspace(1, 0, self.n_steps + 1))

    @torch.no_grad()
    def roll_out(self, digit, n_samples, eta, shift):
        """`n_samples` rollouts of one prompt by the trainer's sampler, with its advantages within the prompt group."""
        sequence, pooled = self.digits.prompt_embeds(torch.full([n_samples], digit))
        images, latents, log_probs = self.trainer.run_sample_step(
            SimpleNamespace(eta=eta),
            torch.randn(n_samples, 16, 4),
            range(self.n_steps),
            self.sigmas(shift),
            self.transformer,
            sequence,
            pooled,
        )
        rewards = self.digits.class_probabilities(self.digits.unpack_pixels(images))[:, digit]
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-8)).clamp(-ADV_CLIP_MAX, ADV_CLIP_MAX)
        return Rollout(latents, log_probs, advantages, sequence, pooled)

    def forward(self, rollout, steps, timesteps):
        """The model output for each sample at its own step, with the graph. `steps` and `timesteps` are `[B]`."""
        latents = rollout.latents[torch.arange(len(steps)), steps]
        return self.trainer.predict_velocity(self.transformer, latents, timesteps, rollout.sequence, rollout.pooled)

    def loss(self, v_hat, rollout, steps, eta, sigmas):
        """The policy loss before the first optimizer step, where nothing is clipped: mean over samples of -A * ratio."""
        total = 0.0
        for step in steps.unique().tolist():  # the trainer's step function takes one index
            chosen = steps == step
            now, then = (rollout.latents[chosen, place] for place in (step, step + 1))
            _, _, log_probs = self.trainer.flux_step(v_hat[chosen], now, eta, sigmas, step, then, grpo=True, sde_solver=True)
            ratio = torch.exp(log_probs - rollout.log_probs[chosen, step])
            total = total - (rollout.advantages[chosen] * ratio).sum()
        return total / len(steps)

    def gradients(self, rollout, steps, eta, shift, groups):
        """The gradient of each position of the trajectory, and of each group as JAGG has it.

        Args:
            rollout: B samples.
            steps: `[k, B]`, the steps that each sample visits, in trajectory order.
            groups: `range`s over the k positions.

        Returns:
            The exact gradients `[k, P]`, and `{(group, aggregation): gradient [P]}`.
        """
        sigmas = self.sigmas(shift)
        timesteps = torch.tensor([int(sigma * 1000) for sigma in sigmas[:-1]])[steps]
        outputs = [self.forward(rollout, *where) for where in zip(steps, timesteps, strict=True)]
        upstream_grads = []
        for output, step in zip(outputs, steps, strict=True):
            v_hat = output.detach().requires_grad_()
            upstream_grads += torch.autograd.grad(self.loss(v_hat, rollout, step, eta, sigmas), v_hat)

        def vjp(positions, grads):
            ends = [outputs[position] for position in positions]
            found = torch.autograd.grad(ends, self.parameters, grads, retain_graph=True, materialize_grads=True)
            return torch.cat([grad.flatten() for grad in found])

        exact = torch.stack([vjp([position], [grad]) for position, grad in enumerate(upstream_grads)])
        grouped = {}
        for group in groups:
            inside = slice(group.start, group.stop)
            if len(group) == 1:  # an exact step
                grouped |= {(group, aggregation): exact[group.start] for aggregation in AGGREGATIONS}
                continue
            ends = (group[0], group[-1])
            weights = endpoint_weights(alphas(timesteps[inside]))
            folded = [weighted_sum(upstream_grads[inside], weight) for weight in weights]
            grouped[group, "interpolate"] = vjp(ends, folded)
            grouped[group, "endpoints"] = exact[list(ends)].sum(0)
        return exact, grouped


def needs(error):
    return JaggError(f"the probe needs {error.name}\ninstall what the demo has: tests/venv.sh demo (or setup.cfg, [demo])")


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


def table(results, args):
    size = demo_setting(args)["group_size"]
    lines = [
        "mean cosine over groups, interpolate and endpoints; relative error of the whole update (interpolate and endpoints) at "
        f"W={size}",
        f"{'shift':>5} {'eta':>5} {'visited':8}"
        + "".join(f"{f'W={W}':>14}" for W in args.group_sizes)
        + "".join(f"{f'frac {frac:g}':>16}" for frac in FRACS),
    ]
    for shift, eta, visited in product(args.shifts, args.etas, VISITED):
        cell = dict(eta=eta, shift=shift, visited=visited)
        line = f"{shift:>5g} {eta:>5g} {visited:8}"
        for W in args.group_sizes:
            pair = [group_mean(select(results["groups"], **cell, group_size=W, aggregation=a)) for a in AGGREGATIONS]
            line += f"{'{:.3f} {:.3f}'.format(*pair):>14}"
        for frac in FRACS:
            rows = [select(results["updates"], **cell, group_size=size, frac=frac, aggregation=a)[0] for a in AGGREGATIONS]
            line += f"{'{:.3f} {:.3f}'.format(*(row['relative_error']['mean'] for row in rows)):>16}"
        lines.append(line)
    for n_steps in (args.sampling_steps - 1, int((args.sampling_steps - 1) * VISITED_SHARE)):
        sizes = (
            f"{label}: {' '.join(str(len(group)) for group in groups)}"
            for groups, label in splits(args.group_sizes, n_steps).items()
        )
        lines.append(f"groups of all {n_steps} steps: {'; '.join(sizes)}")
    return "\n".join(lines)


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


def add_arguments(parser):
    def add(flag, default, help, **more):
        shown = " ".join(f"{value:g}" for value in default) if isinstance(default, list) else default
        parser.add_argument(flag, default=default, help=f"{help} (default {shown})", **more)

    parser.add_argument("--out", type=Path, required=True, help="a folder that gets probe.json and probe.png")
    add("--etas", [0.1, 0.3, 0.7, 1.0], "noise levels of the SDE", type=float, nargs="+")
    add("--shifts", [1.0, 3.0], "time shifts of the noise schedule", type=float, nargs="+")
    add("--group-sizes", [3, 4, 5, 6, 8], "steps per group, W", type=int, nargs="+")
    add("--prompts", 10, "prompt groups, a digit each", type=int)
    add("--samples", 12, "samples per prompt group", type=int)
    add("--sampling-steps", 16, "steps of a trajectory; the last is never trained", type=int)
    add("--seed", 0, "of the rollouts", type=int)
    mini = Path(__file__).resolve().parents[2] / "upstream/mini"
    parser.add_argument("--mini", type=Path, default=mini, help="the mini trainer's folder, with data/flux")


def run(args):
    least = (args.prompts, 1), (args.samples, 2), (args.sampling_steps, 5), (min(args.group_sizes), 2)
    if any(given < needed for given, needed in least) or min(args.etas + args.shifts) <= 0:
        raise JaggError("the probe needs 1 prompt group, 2 samples, 5 sampling steps and W=2 at least, and eta and shift above 0")
    probe = Probe(args.mini, args.sampling_steps)
    try:
        import matplotlib  # noqa: F401  before the minutes of measuring
        import tqdm  # noqa: F401
    except ImportError as error:
        raise needs(error) from error
    make_folder(args.out)
    torch.set_num_threads(1)  # the model is too small for more to help, and on a busy machine they hinder a lot
    results = measure(probe, args)
    settings = {name: vars(args)[name] for name in SETTINGS}
    results = {"made_by": made_by("python -m jagg_patch probe --out OUT"), "settings": settings} | results
    (args.out / "probe.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, args, args.out / "probe.png")
    print(f"{table(results, args)}\n\nin {args.out}: probe.json, probe.png")
