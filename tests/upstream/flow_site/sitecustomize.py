"""As ../site/sitecustomize.py, around Flow-GRPO's SD3 trainers: the run ends after its first optimizer step."""

import atexit
import os
import sys

if "RANK" in os.environ and "OBSERVE_OUT" in os.environ:
    import flow_standins
    import peft
    import torch
    from diffusers import StableDiffusion3Pipeline
    from flow_grpo.diffusers_patch import train_dreambooth_lora_sd3
    from flow_setups import sd3
    from standins import load_source, module
    from torch.optim.optimizer import register_optimizer_step_post_hook

    flow_standins.install()
    if sys.version_info >= (3, 12):  # upstream's settings use a module that is gone
        module("imp", load_source=load_source)
    torch.set_num_threads(1)
    pipeline = sd3.build()
    StableDiffusion3Pipeline.from_pretrained = lambda *_, **__: pipeline
    train_dreambooth_lora_sd3.encode_prompt = sd3.encode_prompt
    peft.get_peft_model = flow_standins.with_trained_adapter(peft.get_peft_model)
    seen = {"passes": 0}

    def count(grad):
        seen["passes"] += 1

    def watch_output(module, inputs, output):
        if output.requires_grad:
            output.register_hook(count)

    pipeline.transformer.proj_out.register_forward_hook(watch_output)

    def end(optimizer, *_):
        seen["weights"] = torch.cat([p.detach().flatten() for group in optimizer.param_groups for p in group["params"]])
        sys.exit()

    register_optimizer_step_post_hook(end)

    @atexit.register
    def write():
        seen["rng"] = torch.get_rng_state()
        seen["module"] = getattr(sys.modules.get("jagg_patch"), "__file__", None)
        torch.save(seen, os.path.join(os.environ["OBSERVE_OUT"], f"rank{os.environ['RANK']}.pt"))
