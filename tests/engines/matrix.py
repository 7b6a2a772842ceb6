"""Which engines, cells and runs there are, as data, and their launch; for the launched processes and the tests."""

import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import engines
import torch
from launch import forked

HERE = Path(__file__).parent
N_RANKS, N_SAMPLES, N_VISITED, N_BLOCKS = 2, 2, 6, 2


@dataclass(frozen=True)
class Cell:
    """`checkpointing`: of which share of the blocks, the first ones.

    `accumulates`: only the last micro-step of a window syncs, which some engines always do, and have no cell of it.

    `windows`: how many of them, each with its own data and optimizer step; what is compared and counted is the last.
    """

    checkpointing: float = 0.0
    lora: bool = False
    autocast: torch.dtype | None = None  # float16 with the engine's gradient scaler
    accumulates: bool = False
    windows: int = 1
    frac: float = 5 / 6

    @property
    def has_knots(self):
        """Whether it is run with knots as well."""
        return self.accumulates or (self.checkpointing > 0 and not self.lora and self.autocast is None)


CELLS = {
    "full": Cell(),
    "full, checkpointing": Cell(checkpointing=1.0),
    "LoRA": Cell(lora=True),
    "LoRA, checkpointing": Cell(lora=True, checkpointing=1.0),
    "second window": Cell(windows=2),
}
FEW_CELLS = ("full, checkpointing", "LoRA", "second window")
MORE_CELLS = {
    "fp16": Cell(autocast=torch.float16),
    "bf16": Cell(autocast=torch.bfloat16, checkpointing=1.0),
    "accumulation": Cell(accumulates=True, frac=1.0),  # the micro-step that syncs closes a group
}

# Positions of the visited steps under W=3, written out.
GROUPS = {5 / 6: ((0, 1, 2), (3, 4), (5,)), 1.0: ((0, 1, 2), (3, 4, 5))}

# Of a run with knots, of which four steps are between the first and the others; the last one closes a window.
KNOTS = (0, 3, 5)
PASSES_AT = {"joint": [0, 0, 0, 0, 2, 1], "sequential": [0, 0, 1, 0, 1, 1]}  # in which step's backward

# The runs of a cell beside "unpatched" and "reference", the two exact backwards a group.
PATCHED = {schedule: dict(schedule=schedule, group_size=3) for schedule in ("joint", "sequential")}
PAIRED = {  # in cells with checkpointing; the self-check takes as long as a run
    f"{schedule}, groups of two": dict(schedule=schedule, group_size=2, frac=1, self_check=False)
    for schedule in ("joint", "sequential")
}

KNOT_RUNS = {f"{schedule}, knots": dict(schedule=schedule, knots_at=KNOTS) for schedule in ("joint", "sequential")}

# Skipped forwards (skip_cells.py): five visited steps under W=4 are a group of five, or one of four and an exact step. In half
# precision one sample a window, so that the rollout's batch is as large as the training forward's, and the same bits come out.
N_VISITED_SKIPPING = 5
SKIP_CELLS = {
    "full, checkpointing": Cell(checkpointing=1.0, frac=1.0),
    "LoRA": Cell(lora=True, frac=4 / 5),
    "fp16": replace(MORE_CELLS["fp16"], windows=2, frac=1.0),
    "bf16": replace(MORE_CELLS["bf16"], windows=2, frac=1.0),
    "accumulation": replace(MORE_CELLS["accumulation"], windows=2),
}
SKIP_RUNS = {
    f"{schedule}{', skipping' * skips}": dict(schedule=schedule, skip_forwards=skips)
    for schedule in ("joint", "sequential")
    for skips in (False, True)
}
# With knots six steps are visited, three and four of them from a knot to the next.
SKIP_KNOTS = (0, 2, 5)
SKIP_KNOT_RUNS = {label: settings | {"knots_at": SKIP_KNOTS} for label, settings in SKIP_RUNS.items()}
# Retained graphs (retain_cells.py): three samples of a rollout, with an optimizer step after the second and the third; where
# the last micro-step alone syncs, after the third.
RETAIN_SAMPLES = 3
RETAIN_STEPS_AFTER = (2 * N_VISITED, 0)  # micro-steps of the rollout's
RETAIN_RUNS = {"unpatched": None, "exact": dict(frac=0, retain=True, schedule="joint")} | {
    f"{label}{', retained' * retains}": dict(retain=retains, **settings)
    for label, settings in {
        "sequential": dict(schedule="sequential", group_size=3, frac=1),
        "joint, knots": dict(schedule="joint", knots_at=KNOTS),
    }.items()
    for retains in (False, True)
}
LOOKED_AT = "sequential, retained, looked at"  # each update runs one forward again
RETAIN_RUNS[LOOKED_AT] = RETAIN_RUNS["sequential, retained"]
CHECKED = "joint, knots, retained, checked"
RETAIN_RUNS[CHECKED] = RETAIN_RUNS["joint, knots, retained"] | dict(self_check=True)
RETAIN_KINDS = CELLS | {
    f"{name}, half checkpointed": replace(CELLS[f"{name}, checkpointing"], checkpointing=0.5) for name in ("full", "LoRA")
}
RETAIN_CELLS = {
    engine: {name: RETAIN_KINDS[name] for name in names}
    for engine, names in {
        "FSDP1 FULL_SHARD": ("full", "full, checkpointing", "full, half checkpointed", "LoRA, checkpointing"),
        "FSDP1 SHARD_GRAD_OP": ("full", "LoRA, half checkpointed"),
        "FSDP1 NO_SHARD": ("full", "full, half checkpointed"),
        "FSDP1 HYBRID_SHARD": ("full, half checkpointed", "LoRA"),
        "FSDP2": ("full", "full, checkpointing", "full, half checkpointed", "LoRA", "LoRA, checkpointing"),
    }.items()
} | {"DDP": {"accumulation": MORE_CELLS["accumulation"]}}
for engine in ("FSDP1 FULL_SHARD", "FSDP2"):
    RETAIN_CELLS[engine] |= {"accumulation": MORE_CELLS["accumulation"]}
KEEPING = {engine: replace(MORE_CELLS["accumulation"], checkpointing=1.0) for engine in ("FSDP1 FULL_SHARD", "FSDP2", "DDP")}
MOVED = ("FSDP1 FULL_SHARD", "FSDP2", "DDP")  # with an optimizer step after each sample as well, and with knots
DISAGREEING = ("FSDP1 FULL_SHARD", "DDP")  # with what is spoilt in one rank's rollout: which sample, which step
SPOILT = {"a step that is compared": (0, 2), "a first endpoint": (1, 0), "a last endpoint": (2, 4)}


@dataclass(frozen=True)
class Engine:
    """`calls`: collectives of one exact backward: a gather a block, a reduction a block and one of the root's own weights.

    `one_bucket`: a reduction of all weights at once. `accumulates`: in every cell. `is_variant`: of another one here, with a few
    of its cells.
    """

    engine: type
    more_cells: tuple = ()
    calls: tuple = ()
    one_bucket: bool = False
    accumulates: bool = False
    is_variant: bool = False
    fails_with: str = ""  # the unpatched engine, somewhere

    @property
    def cells(self):
        few = {name: CELLS[name] for name in FEW_CELLS}
        return (few if self.is_variant else CELLS) | {name: MORE_CELLS[name] for name in self.more_cells}

    @property
    def skip_cells(self):
        return {name: cell for name, cell in SKIP_CELLS.items() if name not in MORE_CELLS or name in self.more_cells}

    def calls_of(self, kind, cell):
        if kind not in self.calls or self.one_bucket:
            return int(kind in self.calls)
        return N_BLOCKS + (kind != "allgather" and not cell.lora)


ENGINES = {
    "FSDP1 FULL_SHARD": Engine(engines.FSDP1, ("fp16", "bf16", "accumulation"), ("allgather", "reducescatter")),
    "FSDP1 SHARD_GRAD_OP": Engine(engines.ShardGradOp, ("accumulation",), ("reducescatter",), is_variant=True),
    "FSDP1 NO_SHARD": Engine(
        engines.NoShard,
        ("accumulation",),
        ("allreduce",),
        is_variant=True,
        fails_with="Cannot writeback when the parameter shape changes",  # torch 2.5, LoRA
    ),
    "FSDP1 HYBRID_SHARD": Engine(
        engines.HybridShard, ("accumulation",), ("allgather", "reducescatter", "allreduce"), is_variant=True
    ),
    "FSDP2": Engine(
        engines.FSDP2,
        ("bf16", "accumulation"),
        ("allgather", "reducescatter"),
        fails_with="FSDP requires CUDA for streams",  # torch 2.5
    ),
    "DDP": Engine(engines.Replicated, ("fp16", "bf16", "accumulation"), ("allreduce",), one_bucket=True),
    "accelerate": Engine(engines.Accelerated, ("bf16",), ("allreduce",), one_bucket=True, accumulates=True, is_variant=True),
    "ZeRO-0": Engine(engines.Zero0, (), ("allreduce",), one_bucket=True, accumulates=True, is_variant=True),
    "ZeRO-1": Engine(engines.Zero1, (), ("allreduce",), one_bucket=True, accumulates=True, is_variant=True),
    "ZeRO-2": Engine(engines.Zero2),
    "ZeRO-3": Engine(
        engines.Zero3,
        calls=("reducescatter",),
        one_bucket=True,
        fails_with="Recomputed values for the following tensors have different metadata",  # DeepSpeed 0.16, LoRA
    ),
}


def launch(names, out):
    """Run all cells of these engines; returns of each engine `{cell: {run: record}}` of each rank, or the error.

    One engine's failure ends the launch; those without records are then launched one by one.
    """
    error = None
    try:
        forked(N_RANKS, HERE / "matrix_cells.py", out, *names, cwd=out, env={"DS_ACCELERATOR": "cpu"}, timeout=900 * len(names))
    except (AssertionError, subprocess.TimeoutExpired) as failure:
        error = failure
    files = {name: [out / name / f"rank{rank}.pt" for rank in range(N_RANKS)] for name in names}
    missing = [name for name in names if not all(file.exists() for file in files[name])]
    if error and (len(names) == 1 or not missing):
        return dict.fromkeys(names, error)
    found = {name: [torch.load(file, weights_only=True) for file in files[name]] for name in names if name not in missing}
    for name in missing:
        alone = out / f"{name} alone"
        alone.mkdir()
        found |= launch([name], alone)
    return found


def by_group(record, cell):
    """What the backwards of each group's steps came to, a Counter each."""
    starts = range(0, N_SAMPLES * N_VISITED, N_VISITED)
    groups = [[start + position for position in group] for start in starts for group in GROUPS[cell.frac]]
    return [sum((Counter(record["backwards"][micro_step]) for micro_step in group), Counter()) for group in groups]


def relative_error(run, expected):
    return float((run["update"] - expected["update"]).norm() / expected["update"].norm())
