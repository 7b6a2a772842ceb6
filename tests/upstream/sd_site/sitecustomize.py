"""As ../site/sitecustomize.py, around the Stable Diffusion trainer."""

import atexit
import os
import sys

if "RANK" in os.environ and "OBSERVE_OUT" in os.environ:
    import sd_standins
    import torch
    from diffusers import StableDiffusionPipeline

    sd_standins.install(os.environ["OBSERVE_CHECKOUT"])
    pipeline = sd_standins.build_pipeline()
    StableDiffusionPipeline.from_pretrained = lambda *_, **__: pipeline
    seen = {"passes": 0}

    def count(grad):
        seen["passes"] += 1

    def watch_output(module, inputs, output):
        if output.requires_grad:
            output.register_hook(count)

    pipeline.unet.conv_out.register_forward_hook(watch_output)

    @atexit.register
    def write():
        seen["weights"] = pipeline.unet.state_dict()
        seen["rng"] = torch.get_rng_state()
        seen["module"] = getattr(sys.modules.get("jagg_patch"), "__file__", None)
        torch.save(seen, os.path.join(os.environ["OBSERVE_OUT"], f"rank{os.environ['RANK']}.pt"))
