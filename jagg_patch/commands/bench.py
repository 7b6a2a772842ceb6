"""Time JAGG on this machine, in one process and in turns: exact, JAGG, JAGG with skipped forwards, JAGG's sequential schedule.

The loop has DanceGRPO's shape, and JAGG's own wrappers are on it. It rolls out and trains one sample, without reward and
optimizer, on a model with random weights: by default a Flux that is small enough for two CPU cores. Beside each measured ratio
stands its limit, what the forward and backward times of the same run would give if nothing else took time, and what the cost
model predicts. Writes bench.json and bench.png.
"""

import functools
import inspect
import json
import math
import random
import time
import types
from collections import defaultdict
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ..config import JaggConfig
from ..cost import StepCost, backward_passes, forward_passes, training_step_cost, update_cost
from ..errors import JaggError
from ..log import now
from ..plan import forwards_a_group, plan_groups
from ..session import Session
from ..trainers.dancegrpo import TRAINERS
from . import made_by, make_folder

TRAINER = TRAINERS["train_grpo_flux"]  # whose shape the measured loop has
RECOMPUTE = {"on": 1.0, "half": 0.5, "off": 0.0}  # share of the blocks under activation checkpointing
MODES = {
    "exact": {"frac": 0},
    "jagg": {"schedule": "joint"},
    "skip": {"schedule": "joint", "skip_forwards": True},
    "sequential": {"schedule": "sequential"},
}
NAMES = {"exact": "exact", "jagg": "JAGG", "skip": "JAGG, skipped", "sequential": "sequential"}
PARTS = ("update", "training_step")
PUBLISHED, LONG, UPSTREAM = STEPS = (20, 1.0), (24, 1.0), (15, 0.6)  # steps that can be trained, the fraction that is
GROUP_SIZES, FRACS = (3, 4, 6, 8), (0.6, 1.0)
ALL = tuple(product(RECOMPUTE, STEPS, [GROUP_SIZES], FRACS))
FULL_SIZE = (*product(["on"], [PUBLISHED], [(4,)], FRACS), ("on", LONG, (8,), 1.0))
SMALL = (
    *product(["on"], [PUBLISHED], [GROUP_SIZES], FRACS),
    ("on", LONG, (8,), 1.0),
    ("on", UPSTREAM, (4,), 0.6),
    *(row for name in ("half", "off") for row in (*product([name], [PUBLISHED], [(4,)], FRACS), (name, UPSTREAM, (4,), 0.6))),
)


class Model(NamedTuple):
    """A diffusers class and its configuration, what counts the blocks there, and what is measured on it."""

    kind: str
    config: dict
    blocks: tuple = ("num_layers",)
    side: int = 45  # of the square of image tokens: that of 720x720
    text: int = 512  # tokens
    cases: tuple = FULL_SIZE
    seconds: int = 300
    least_rounds: int = 1


FLUX, QWEN = "FluxTransformer2DModel", "QwenImageTransformer2DModel"
TINY = dict(in_channels=4, num_layers=0, num_single_layers=2, attention_head_dim=64, num_attention_heads=3)
TINY |= dict(joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(16, 24, 24))
MODELS = {
    "small": Model(FLUX, TINY, ("num_single_layers",), side=26, text=32, cases=SMALL, seconds=150, least_rounds=3),
    "flux": Model(FLUX, {"guidance_embeds": True}, ("num_layers", "num_single_layers")),
    "qwenimage": Model(QWEN, {}),
}


def flux_step(model_output, latents, eta, sigmas, index, prev_sample):
    """One step of the reverse SDE: the next latents, `prev_sample` if given, and their mean log-density `[B]` plus a constant."""
    sigma, step = sigmas[index], sigmas[index + 1] - sigmas[index]
    drift = 0.5 * eta**2 * step / sigma
    mean = (1 + drift) * latents + (step + drift * (1 - sigma)) * model_output
    std = eta * math.sqrt(-step)
    if prev_sample is None:
        prev_sample = mean + std * torch.randn_like(mean)
    return prev_sample, (prev_sample - mean).square().flatten(1).mean(1) * (-0.5 / std**2)


def predict_velocity(args, transformer, latents, timesteps):
    """Model output `[B, L, C]` in float32, whatever dtype the model has, at `timesteps` `[B]` in 0-1000."""
    dtype = args.inputs["encoder_hidden_states"].dtype
    output = transformer(hidden_states=latents.to(dtype), timestep=timesteps.to(dtype) / 1000, **args.inputs, return_dict=False)
    return output[0].float()


def run_sample_step(args, z, sigma_schedule, transformer):
    """Latents `[B, T + 1, L, C]` and log-probabilities `[B, T]` of a rollout."""
    all_latents, all_log_probs = [z], []
    for i in range(args.sampling_steps):
        timesteps = torch.full([len(z)], int(sigma_schedule[i] * 1000), device=z.device)
        velocity = predict_velocity(args, transformer, z, timesteps)
        z, log_prob = flux_step(velocity, z, args.eta, sigma_schedule, i, None)
        all_latents.append(z)
        all_log_probs.append(log_prob)
    return torch.stack(all_latents, 1), torch.stack(all_log_probs, 1)


def sample_reference_model(args, transformer):
    t = torch.linspace(1, 0, args.sampling_steps + 1)
    sigma_schedule = (args.shift * t / (1 + (args.shift - 1) * t)).tolist()
    with torch.no_grad():
        return *run_sample_step(args, torch.randn_like(args.noise), sigma_schedule, transformer), sigma_schedule


def grpo_one_step(args, latents, pre_latents, transformer, timesteps, i, sigma_schedule):
    velocity = predict_velocity(args, transformer, latents, timesteps)
    return flux_step(velocity, latents, args.eta, sigma_schedule, i, pre_latents)[1]


def train_one_step(args, transformer):
    latents, old_log_probs, sigma_schedule = sample_reference_model(args, transformer)
    args.meter.begin("update")
    n_steps = args.sampling_steps - 1
    perms = torch.randperm(n_steps)
    for step in perms[: int(n_steps * args.timestep_fraction)].tolist():
        timesteps = torch.full([len(latents)], int(sigma_schedule[step] * 1000), device=latents.device)
        now_and_next = latents[:, step], latents[:, step + 1]
        new_log_probs = grpo_one_step(args, *now_and_next, transformer, timesteps, step, sigma_schedule)
        ratio = torch.exp(new_log_probs - old_log_probs[:, step])
        loss = torch.maximum(-ratio, -ratio.clamp(1 - args.clip_range, 1 + args.clip_range)).mean()  # an advantage of 1
        with args.meter.timing("backward"):
            loss.backward()
        loss.item()


LOOP = (flux_step, run_sample_step, sample_reference_model, grpo_one_step, train_one_step)


class Meter:
    """The seconds of a training step's phases, and of each forward and backward in them. The clock waits for the GPU."""

    def __init__(self, model):
        self.phase = None
        model.register_forward_pre_hook(self._forward_begins)
        model.register_forward_hook(self._forward_ends)

    def begin(self, phase):
        """`phase`, or None: the training step is over."""
        ended = now()
        if self.phase is None:
            self.seconds, self.calls, self._n_backward = {}, defaultdict(list), 0
        else:
            self.seconds[self.phase] = ended - self._began
        self.phase, self._began = phase, ended

    def _forward_begins(self, model, args):
        self._forward_began = now()

    def _forward_ends(self, model, args, output):
        kind = "recorded" if torch.is_grad_enabled() else "unrecorded"
        self.calls[self.phase, kind].append(now() - self._forward_began)
        if output[0].requires_grad:
            output[0].register_hook(self._backward_enters)

    def _backward_enters(self, grad):
        self._n_backward += 1

    @contextmanager
    def timing(self, kind):
        began = now()
        yield
        self.calls[self.phase, kind].append(now() - began)

    @property
    def passes(self):
        """Transformer forwards and backward passes of the update."""
        return sum(len(self.calls["update", kind]) for kind in ("recorded", "unrecorded")), self._n_backward


def wrap_and_time(namespace, session):
    """Put JAGG's wrappers on `namespace`. Returns a list that gets the seconds that they take themselves in each exact step."""
    steps, balance = [], [0.0]

    def count(name, sign, begins_step=False):
        function = namespace[name]

        @functools.wraps(function)
        def counted(*args, **kwargs):
            n_exact, began = session.stats.exact_steps, time.perf_counter()
            if begins_step:
                balance[0] = 0.0
            result = function(*args, **kwargs)
            balance[0] += sign * (time.perf_counter() - began)
            if begins_step and session.stats.exact_steps > n_exact:
                steps.append(balance[0])
            return result

        namespace[name] = counted

    TRAINER.check(namespace)
    for name in ("grpo_one_step", "flux_step"):
        count(name, -1)
    namespace.update(TRAINER.wrappers(namespace, session))
    count("flux_step", 1)
    count("grpo_one_step", 1, begins_step=True)
    return steps


class Case(NamedTuple):
    """What is trained, and how it is grouped; in the same way for all of `group_sizes`."""

    checkpointing: str
    steps: tuple
    frac: float = 0.0
    group_sizes: tuple = ()
    groups: tuple = ()

    @property
    def visited(self):
        return int(self.steps[0] * self.steps[1])

    @property
    def cell(self):
        """What it has in common with the exact one."""
        return self.checkpointing, self.steps

    def __str__(self):
        steps = f"{self.visited} of {self.steps[0]}" if self.visited < self.steps[0] else f"{self.visited}"
        grouped = f"W={','.join(map(str, self.group_sizes)):4} frac {self.frac:g}" if self.groups else ""
        return f"{self.checkpointing:5}{steps:>7}  {grouped:15}"


def cases(wanted):
    """Those `wanted`, with an exact one before the first of a cell; group sizes that split the steps alike are one case."""
    cells = set()
    for checkpointing, steps, group_sizes, frac in wanted:
        exact, found = Case(checkpointing, steps), defaultdict(list)
        if exact.cell not in cells:
            cells.add(exact.cell)
            yield exact
        for size in group_sizes:
            found[plan_groups(exact.visited, JaggConfig(group_size=size, frac=frac))].append(size)
        for groups, sizes in found.items():
            yield Case(checkpointing, steps, frac, tuple(sizes), groups)


class Row:
    """A case in one mode: a session on a loop of its own, and what its training steps have taken, a dict each."""

    def __init__(self, case, mode, model, meter, settings):
        grouped = {"group_size": case.group_sizes[0], "frac": case.frac} if case.groups else {}
        config = JaggConfig(**grouped | MODES[mode])
        self.case, self.mode, self.taken, self.is_out_of_memory = case, mode, [], False
        self.sampled = case.steps[0] + 1
        plan = (
            case.groups,
            StepCost(recompute=RECOMPUTE[case.checkpointing]),
            forwards_a_group(config.skip_forwards, config.schedule),
        )
        update, training_step = update_cost(case.visited, *plan), training_step_cost(case.visited, self.sampled, *plan)
        self.predicted = {"update": update, "training_step": training_step}  # in forwards
        self.passes = forward_passes(case.visited, case.groups, plan[-1]), backward_passes(case.visited, case.groups)
        self._model, self._meter = model, meter
        self._args = types.SimpleNamespace(**settings, meter=meter)
        self._args.sampling_steps, self._args.timestep_fraction = self.sampled, case.steps[1]
        self._namespace = dict(globals())  # in it the loop's functions find one another, wrapped for this row
        for function in LOOP:
            self._namespace[function.__name__] = types.FunctionType(function.__code__, self._namespace, function.__name__)
        self._own_seconds = wrap_and_time(self._namespace, Session(config))

    def __str__(self):
        return f"{self.case} {NAMES[self.mode]:14}"

    def train(self, is_warm_up=False):
        """One training step, on top of gradients, as in the midst of an accumulation. Returns its seconds, if it had memory."""
        if self.is_out_of_memory:
            return None
        self._own_seconds.clear()
        try:
            set_checkpointing(self._model, RECOMPUTE[self.case.checkpointing])
            for parameter in self._model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
            if torch.cuda.is_initialized():
                torch.cuda.reset_peak_memory_stats()
            self._meter.begin("rollout")
            self._namespace["train_one_step"](self._args, self._model)
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
            if self._meter.passes != self.passes:
                raise JaggError(
                    f"{self}: an update took {self._meter.passes} forwards and backward passes, planned were {self.passes}\n"
                    "its time would say nothing: please report this"
                )
            peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
            self.taken.append(taken | {"calls": self._meter.calls, "own": list(self._own_seconds), "peak_bytes": peak})
        return taken["training_step"]


def set_checkpointing(model, share):
    """Recompute the activations of the first `share` of the blocks."""
    blocks = [(siblings, i) for name, siblings in model.named_children() if "blocks" in name for i in range(len(siblings))]
    for number, (siblings, i) in enumerate(blocks):
        block = getattr(siblings[i], "_checkpoint_wrapped_module", siblings[i])
        siblings[i] = checkpoint_wrapper(block) if number < round(share * len(blocks)) else block


def build(name, args):
    """A model with random weights, all trained, and what its forward and the loop are given."""
    try:
        import diffusers
        import matplotlib  # noqa: F401  before the minutes of measuring
        import tqdm  # noqa: F401
    except ImportError as error:
        raise JaggError(f"the bench needs {error.name}\npip install diffusers matplotlib tqdm") from error
    known = MODELS[name]
    if not hasattr(diffusers, known.kind):
        raise JaggError(f"diffusers {diffusers.__version__} has no {known.kind}\npip install --upgrade diffusers")
    config = known.config | (dict.fromkeys(known.blocks, args.layers) if args.layers else {})
    config |= {"num_attention_heads": args.heads} if args.heads else {}
    side, text = args.side or known.side, args.text or known.text
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if args.device == "cuda" else torch.float32)
    try:
        with torch.device(args.device):
            model = getattr(diffusers, known.kind)(**config)
            inputs = {"encoder_hidden_states": torch.randn(1, text, model.config.joint_attention_dim)}
            if known.kind == QWEN:
                inputs["img_shapes"] = [[(1, side, side)]]
                if "txt_seq_lens" in inspect.signature(model.forward).parameters:  # of earlier versions
                    inputs |= {"txt_seq_lens": [text], "encoder_hidden_states_mask": torch.ones(1, text, dtype=torch.long)}
            else:
                inputs["pooled_projections"] = torch.randn(1, model.config.pooled_projection_dim)
                inputs["img_ids"] = torch.cartesian_prod(torch.zeros(1), *[torch.arange(float(side))] * 2)
                inputs["txt_ids"] = torch.zeros(text, 3)
                inputs |= {"guidance": torch.full([1], 3.5)} if model.config.guidance_embeds else {}
            noise = torch.zeros(1, side**2, model.config.in_channels, dtype=torch.float32)
    finally:
        torch.set_default_dtype(before)
    return model.train(), {"inputs": inputs, "noise": noise, "eta": 0.3, "shift": 3.0, "clip_range": 1e-4}


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
        while sum(row.predicted["training_step"] * (least + (row.mode == "skip")) for row in rows) > left and len(rows) > 2:
            rows.pop()
    rounds, longest, draw = 0, 0.0, random.Random(0).random
    with tqdm(desc="training steps", total=len(rows) * least) as progress:
        for row in rows:
            if row.mode == "skip":
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
    update = backwards * (seconds["recorded"] + seconds["backward"]) + (forwards - backwards) * seconds["unrecorded"]
    return {"update": update, "training_step": update + row.sampled * seconds["unrecorded"]}


def describe(row, exact, seconds):
    """A row of the JSON file. `exact` is what it is compared with, `seconds` those of the calls, None if they aren't known."""
    case = row.case
    entry = {"row": str(row), "mode": row.mode, "checkpointing": case.checkpointing, "trainable": case.steps[0]}
    entry |= {"visited": case.visited, "group_sizes": case.group_sizes, "frac": case.frac, "groups": list(map(len, case.groups))}
    entry |= {"forwards": row.passes[0], "backward_passes": row.passes[1], "out_of_memory": row.is_out_of_memory}
    entry |= {f"{part}_seconds": [taken[part] for taken in row.taken] for part in ("rollout", *PARTS)}
    entry["peak_bytes"] = max((taken["peak_bytes"] or 0 for taken in row.taken), default=0) or None
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


def compared(results):
    """The rows that have a ratio."""
    return [row for row in results["rows"] if row["mode"] != "exact" and "limit" in row["update"]]


def table(results):
    heads = "".join(f"{f'{name} (quartiles)':>26}{'limit':>7}{'of it':>7}{'model':>7}" for name in ("update", "training step"))
    lines = [f"{'checkpointing, steps, grouping, mode':44}{'groups':17}{heads}{'  peak GB' * torch.cuda.is_initialized()}"]
    for row in results["rows"]:
        line = f"{row['row']:44}{'+'.join(map(str, row['groups'])):17}"
        for part in PARTS:
            if row["mode"] == "exact":
                line += f"{median(row[f'{part}_seconds'] or [math.nan]):>24.4g} s{'':21}"
            elif "limit" in row[part]:
                line += f"{'{median:.3f} ({q1:.3f}-{q3:.3f})'.format(**row[part]):>26}{row[part]['limit']:>7.3f}"
                line += f"{row[part]['median'] / row[part]['limit']:>7.1%}{row[part]['predicted']:>7.3f}"
        line += f"{row['peak_bytes'] / 1e9:>9.1f}" if row["peak_bytes"] else ""
        lines.append(line + "  out of memory" * row["out_of_memory"])
    for name, seconds in results["call_seconds"].items():
        calls = ", ".join(f"{kind} {value * 1e3:.4g} ms" for kind, value in seconds.items())
        lines.append(f"checkpointing {name}: forward {calls}")
    rows = compared(results)
    for name, other in (("the limit", "limit"), ("the cost model", "predicted")):
        off = [row[part]["median"] / row[part][other] - 1 for row in rows for part in PARTS]
        lines += [f"measured against {name}: {min(off):+.1%} to {max(off):+.1%}"] if off else []
    own = [row["own_share"] for row in results["rows"] if "own_share" in row]
    lines += [f"JAGG's own time in exact steps: at most {max(own):.2%} of an exact update"] if own else []
    return "\n".join(lines)


def plot(results, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = compared(results)
    names = list(dict.fromkeys(row["row"][:29] for row in rows))
    figure, axes = plt.subplots(1, 2, figsize=(13, 1.6 + 0.5 * len(names)), sharey=True, layout="constrained")
    for axis, part in zip(axes, PARTS, strict=True):
        for number, mode in enumerate(list(MODES)[1:]):
            chosen = [row for row in rows if row["mode"] == mode]
            y = [names.index(row["row"][:29]) + 0.27 * (number - 1) for row in chosen]
            x, low, high, limit, model = (
                [row[part][key] for row in chosen] for key in ("median", "q1", "q3", "limit", "predicted")
            )
            bars = [[m - q for m, q in zip(x, low, strict=True)], [q - m for m, q in zip(x, high, strict=True)]]
            axis.plot(model, y, "x", color="0.5", markersize=7, label="cost model" if not number else None)
            axis.plot(limit, y, "|", color="k", markersize=11, label="limit, from measured passes" if not number else None)
            axis.errorbar(x, y, xerr=bars, fmt="o", color=f"C{number}", markersize=4, capsize=2, label=NAMES[mode])
        axis.set(xlabel=f"{part.replace('_', ' ')}: times faster than exact (bar: quartiles)")
        axis.axvline(1, color="0.8", linewidth=0.8)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(names)), names, family="monospace")
    axes[0].set(ylim=(len(names) - 0.5, -0.5), ylabel="checkpointing, steps, grouping")
    axes[1].legend(fontsize="small")
    figure.suptitle(results["title"])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def add_arguments(parser):
    parser.add_argument("--out", type=Path, required=True, help="a folder that gets bench.json and bench.png")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="float32 on the CPU, bfloat16 on one GPU")
    parser.add_argument("--model", choices=MODELS, help="flux and qwenimage at full size, 720x720 (default small, on cuda flux)")
    parser.add_argument("--all", action="store_true", help="every W, frac, number of steps and checkpointing")
    parser.add_argument(
        "--seconds",
        type=float,
        help="for measuring, but three rounds at least (default 150); at full size rows are dropped that don't fit (300)",
    )
    parser.add_argument("--rounds", type=int, help="at most, of a training step of every row")
    size = parser.add_argument_group("the model's size, instead of its own")
    size.add_argument("--layers", type=int, help="blocks, of each kind that it has")
    size.add_argument("--heads", type=int, help="attention heads, which set the width")
    size.add_argument("--side", type=int, help="image tokens along a side")
    size.add_argument("--text", type=int, help="text tokens")


def command(args):
    """The command line that `args` came from."""
    options = ("device", "model", "seconds", "rounds", "layers", "heads", "side", "text")
    given = [f"--{name} {getattr(args, name)}" for name in options if getattr(args, name) is not None]
    return " ".join(["python -m jagg_patch bench --out OUT", *["--all"] * args.all, *given])


def run(args):
    name = args.model or ("flux" if args.device == "cuda" else "small")
    sizes = args.rounds, args.layers, args.heads, args.side, args.text
    if min(size for size in (1, *sizes) if size is not None) < 1:
        raise JaggError("the bench needs 1 round, layer, head, image token and text token at least")
    if args.seconds is not None and not 0 < args.seconds < math.inf:
        raise JaggError(f"--seconds {args.seconds:g} is no time to measure in\ngive a number above 0, or leave it away")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise JaggError("torch finds no CUDA device\nrun with --device cpu, or install a torch with CUDA")
    if args.device == "cpu" and name != "small" and not args.layers:
        raise JaggError(f"{name} at full size is for a GPU\nadd --device cuda, or --layers 1, say, to try the command")
    torch.manual_seed(0)
    model, settings = build(name, args)
    make_folder(args.out)
    known, meter = MODELS[name], Meter(model)
    planned = [
        Row(case, mode, model, meter, settings)
        for case in cases(ALL if args.all else known.cases)
        for mode in MODES
        if (mode == "exact") != bool(case.groups)
    ]
    budget = known.seconds if args.seconds is None else args.seconds
    rows, rounds = measure(planned, budget, known.least_rounds, args.rounds or 10**6, name != "small")
    exact, seconds = {row.case.cell: row for row in rows if row.mode == "exact"}, call_seconds(rows)
    on = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.4g}M parameters, {settings['noise'].shape[1]} image tokens"
    results = {
        "made_by": made_by(command(args), on=on),
        "title": f"{name}, {size}, on {on}: {rounds} rounds",
        "rounds": rounds,
        "call_seconds": seconds,
        "rows": [describe(row, exact[row.case.cell], seconds.get(row.case.checkpointing)) for row in rows],
        "dropped": [str(row) for row in planned[len(rows) :]],
    }
    (args.out / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(results, args.out / "bench.png")
    for row in results["dropped"]:
        print(f"dropped, for lack of time: {row}")
    print(f"{results['title']}\n{table(results)}\n\nin {args.out}: bench.json, bench.png")
