"""How much shorter JAGG makes Flow-GRPO-Fast's update: its real train_sd3_fast.py, off and on in turn.

usage: torchrun --standalone --nproc_per_node 2 tests/upstream/flow_speed.py CHECKOUT OUT [PAIRS]

Two ranks under DDP, a small SD3. Per setting one pair of epochs to warm up, then PAIRS (default 9, at least 2) that start with
off and with on in turn. An update lasts from the first training forward to the optimizer step. Prints a table and writes
OUT/fast.json: the median of the pairs' off / on ratios with quartiles, beside the cost model's.
"""

import importlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
CHECKOUT, OUT = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
N_PAIRS = int(sys.argv[3]) if len(sys.argv) > 3 else 9
sys.path[:0] = map(str, (CHECKOUT, CHECKOUT / "scripts", HERE.parents[1], HERE.parent, HERE))

import flow_cells  # noqa: E402
import flow_standins as standins  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from flow_setups import sd3_fast  # noqa: E402
from flow_setups.sd3 import TINY_SD3  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402
from tqdm import tqdm  # noqa: E402

from jagg_patch import JaggConfig, __version__, install, plan_groups  # noqa: E402
from jagg_patch.method.cost import StepCost, update_cost  # noqa: E402

MODEL = dict(
    num_layers=4, num_attention_heads=6, attention_head_dim=32, caption_projection_dim=192, sample_size=16, pos_embed_max_size=16
)
# (window, LoRA, checkpointing, KL); the first is upstream's own setting
SETTINGS = [
    (3, True, False, False),
    (3, True, True, False),
    (3, False, False, False),
    (3, False, True, False),
    (4, True, False, False),
    (4, True, True, False),
    (4, False, True, False),
    (4, True, False, True),
    (5, True, False, False),
]


def update_seconds(trainer, config, checkpointed, settings):
    """One epoch of the trainer's `main`: how long its update took on this rank."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    pipeline = sd3_fast.build()
    if checkpointed:
        pipeline.transformer.enable_gradient_checkpointing()
    trainer.StableDiffusion3Pipeline = SimpleNamespace(from_pretrained=lambda *_, **__: pipeline)
    trainer.FLAGS = SimpleNamespace(config=config)
    compute_log_prob, times = trainer.compute_log_prob, []

    def timed_compute_log_prob(transformer, pipeline, sample, j, embeds, pooled_embeds, config):
        times.append(time.perf_counter())
        return compute_log_prob(transformer, pipeline, sample, j, embeds, pooled_embeds, config)

    trainer.compute_log_prob = timed_compute_log_prob
    hook = register_optimizer_step_pre_hook(lambda *_: times.append(time.perf_counter()))
    handle = install(vars(trainer), config=settings)
    try:
        trainer.main(None)
    except flow_cells.OneEpochIsOver:
        pass
    finally:
        hook.remove()
        handle.uninstall()
        trainer.compute_log_prob = compute_log_prob
    return times[-1] - times[0]


def measure(trainer, base, prompts, setting):
    window, use_lora, checkpointed, has_kl = setting
    config = base.get_config()
    own = {
        "use_lora": use_lora,
        "resolution": 128,
        "dataset": prompts,
        "logdir": prompts,
        "save_dir": prompts,
        "sample.sde_window_size": window,
        "train.beta": 0.04 if has_kl else 0.0,
    }
    config.update_from_flattened_dict(flow_cells.CONFIG | sd3_fast.CONFIG | own)
    on, off = JaggConfig(group_size=window, frac=1, schedule="joint"), JaggConfig(enabled=False)
    pairs = []
    for number in range(N_PAIRS + 1):
        order = (off, on) if number % 2 else (on, off)
        seconds = {settings.enabled: update_seconds(trainer, config, checkpointed, settings) for settings in order}
        pairs.append((seconds[False], seconds[True]))
    ratios = [before / after for before, after in pairs[1:]]
    cost = StepCost(backward=1 if use_lora else 2, recompute=float(checkpointed), reference=float(has_kl))
    return dict(
        window=window,
        lora=use_lora,
        checkpointed=checkpointed,
        kl=has_kl,
        predicted=update_cost(window, (), cost) / update_cost(window, plan_groups(window, on), cost),
        ratios=ratios,
        quartiles=statistics.quantiles(ratios, n=4),
        seconds=pairs[1:],
    )


def main():
    torch.set_num_threads(1)
    TINY_SD3.update(MODEL)
    standins.install()
    trainer = importlib.import_module("train_sd3_fast")
    base = importlib.import_module("config.base")
    trainer.eval = flow_cells.end_after_one_epoch
    trainer.encode_prompt = sd3_fast.encode_prompt
    trainer.tqdm = lambda items, **_: items
    is_first = os.environ["RANK"] == "0"
    if not is_first:
        sys.stdout = open(os.devnull, "w")
    prompts = Path(tempfile.mkdtemp())
    standins.write_prompts(prompts)
    printing, sys.stdout = sys.stdout, open(os.devnull, "w")
    rows = [measure(trainer, base, str(prompts), setting) for setting in tqdm(SETTINGS, disable=not is_first)]
    sys.stdout = printing
    print("| window | weights | checkpointed | KL | cost model | measured (quartiles) |\n|---|---|---|---|---|---|")
    for row in rows:
        low, median, high = map(shorter, row["quartiles"])
        print(
            f"| {row['window']} | {'LoRA' if row['lora'] else 'all'} | {'yes' if row['checkpointed'] else 'no'} "
            f"| {'yes' if row['kl'] else 'no'} | {shorter(row['predicted'])} | {median} ({low} to {high}) |"
        )
    if is_first:
        machine = dict(
            python=platform.python_version(), torch=torch.__version__, cpus=os.cpu_count(), ranks=dist.get_world_size(), gpu=None
        )
        command = "torchrun --standalone --nproc_per_node 2 tests/upstream/flow_speed.py CHECKOUT OUT"
        made_by = dict(jagg=__version__, command=command, date=str(date.today()), machine=machine)
        report = made_by | dict(pairs=N_PAIRS, model=TINY_SD3, rows=rows)
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / "fast.json").write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def shorter(ratio):
    return f"{1 - 1 / ratio:.1%}"


if __name__ == "__main__":
    main()
