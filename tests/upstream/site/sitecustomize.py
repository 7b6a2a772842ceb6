"""Python imports this at start-up when its folder is on PYTHONPATH: stand-ins and observers around an unchanged script.

Only in torchrun's workers (RANK is set) with OBSERVE_CHECKOUT and OBSERVE_OUT; at exit OBSERVE_OUT/rank{N}.pt has what was seen.
With OBSERVE_KNOTS, an unpatched script's file also has the gradient that its first optimizer step would have with those knots.
"""

import atexit
import os
import sys

if "RANK" in os.environ and "OBSERVE_OUT" in os.environ:
    import standins
    import torch
    import wandb
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.modules.module import register_module_forward_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    standins.install(os.environ["OBSERVE_CHECKOUT"])
    seen = {"passes": 0, "wandb": None, "forwards": [0], "gradients": []}  # at each optimizer step

    def count(grad):
        seen["passes"] += 1

    def watch_transformer(module, inputs, output):
        if type(module).__name__ == "FluxTransformer2DModel":
            seen["forwards"][-1] += module.training  # not the rollout's
            if output[0].requires_grad:
                output[0].register_hook(count)

    register_module_forward_hook(watch_transformer)

    clip = FullyShardedDataParallel.clip_grad_norm_

    def watch_gradient(transformer, *args, **kwargs):
        seen["gradients"].append(torch.cat([p.grad.flatten() for p in transformer.parameters()]))
        seen["forwards"].append(0)
        if kept_calls and len(seen["gradients"]) == 1:
            seen["with_knots"] = kept_calls.gradient_with(transformer, knots)
        return clip(transformer, *args, **kwargs)

    FullyShardedDataParallel.clip_grad_norm_ = watch_gradient
    kept_calls = None
    if "OBSERVE_KNOTS" in os.environ:
        from kept_calls import KeptCalls

        knots, kept_calls = tuple(map(int, os.environ["OBSERVE_KNOTS"].split(","))), KeptCalls()

        def keep_call(module, args, kwargs, output):
            if isinstance(module, FullyShardedDataParallel) and module._is_root and output[0].requires_grad:
                kept_calls.watch(args, kwargs, output[0])

        register_module_forward_hook(keep_call, with_kwargs=True)

    def keep_optimizer(optimizer, *_):
        seen["optimizer"] = optimizer

    register_optimizer_step_post_hook(keep_optimizer)
    wandb_init = wandb.init

    def recording_init(*args, **kwargs):
        seen["wandb"] = dict(vars(kwargs["config"]))
        return wandb_init(*args, **(kwargs | {"mode": "offline"}))

    wandb.init = recording_init

    @atexit.register
    def write():
        optimizer = seen.pop("optimizer", None)
        if optimizer is not None:
            weights = [p.detach().flatten() for group in optimizer.param_groups for p in group["params"]]
            seen["weights"] = torch.cat(weights).clone()
        seen["forwards"].pop()  # none after the last optimizer step
        seen["rng"] = torch.get_rng_state()
        seen["module"] = getattr(sys.modules.get("jagg_patch"), "__file__", None)
        torch.save(seen, os.path.join(os.environ["OBSERVE_OUT"], f"rank{os.environ['RANK']}.pt"))
