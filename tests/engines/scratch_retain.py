import argparse, gc, sys, traceback, warnings, logging
import torch, torch.distributed as dist
from engines import LEARNING_RATE
from matrix import ENGINES, Cell, N_SAMPLES
from matrix_cells import ARGS, Collectives, build, loop
from observe import first_layer
from jagg_patch import JaggConfig, install

def run(name, cell, settings, windows=4, two=False):
    n_vis = 6
    n_samples = 3
    engine = build(name, cell, n_samples * n_vis)
    args = ARGS | dict(n_samples=n_samples, sampling_steps=7, timestep_fraction=1.0, autocast=cell.autocast, rollout_batch=1)
    handle = install(vars(loop), config=JaggConfig(**settings)) if settings is not None else None
    calls = [0]
    first_layer(engine.transformer).register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    step, n = engine.step, 0
    def own_step(closes):
        nonlocal n
        n += 1
        step(n % (3 * n_vis) in (2 * n_vis, 0))
    if two: engine.step = own_step
    torch.manual_seed(42 + dist.get_rank())
    counts = []
    try:
        for w in range(windows):
            for g in engine.optimizer.param_groups: g["lr"] = 1.0 if w < windows - 1 else LEARNING_RATE
            before = engine.trained_weights(); c = calls[0]
            coll = Collectives()
            with coll:
                loop.train_one_step(argparse.Namespace(**args), engine)
            counts.append((calls[0] - c - n_samples * 7, dict(coll.counts)))
    finally:
        if handle: handle.uninstall()
    return engine.trained_weights() - before, counts

def main(*names):
    torch.set_num_threads(1); warnings.simplefilter("ignore"); logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    for name in names or ["FSDP1 FULL_SHARD", "FSDP1 SHARD_GRAD_OP", "FSDP1 NO_SHARD", "FSDP1 HYBRID_SHARD", "FSDP2", "DDP"]:
        for label, cell in {"LoRA ckpt": Cell(lora=True, checkpointing=True), "acc ckpt": Cell(accumulates=True, checkpointing=True)}.items():
            for two in (False, True,):
                if two and "acc" in label: continue
                base = None
                for what, settings in {"unpatched": None, "exact": dict(frac=0, retain=True, schedule="sequential"),
                        "exact joint": dict(frac=0, retain=True, schedule="joint"),
                        "W": dict(group_size=3, frac=1, schedule="sequential"), "W ret": dict(group_size=3, frac=1, retain=True, schedule="sequential"),
                        "W joint": dict(group_size=3, frac=1, schedule="joint"), "W joint ret": dict(group_size=3, frac=1, retain=True, schedule="joint")}.items():
                    gc.collect()
                    try:
                        update, counts = run(name, cell, settings, two=two)
                    except Exception:
                        if dist.get_rank() == 0: print(name, label, two, what, "FAILED", traceback.format_exc().splitlines()[-12:], flush=True)
                        continue
                    if what in ("unpatched", "W", "W joint"): base = update
                    err = ((update - base).norm() / base.norm()).item()
                    if dist.get_rank() == 0: print(f"{name:20} {label:5} two={two} {what:12} err {err:.2e} {[c for c, _ in counts]} {counts[-1][1]}", flush=True)
    dist.destroy_process_group()
main(*sys.argv[1:])
