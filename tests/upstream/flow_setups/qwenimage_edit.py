"""As qwenimage.py, with an image to edit, of 32x32 in the place of upstream's 1024x1024."""

import flow_grpo.diffusers_patch.qwenimage_edit_pipeline_with_logprob as rollout
import flow_standins as standins
from diffusers import QwenImageEditPipeline

from . import qwenimage
from .flux_kontext import write_prompts
from .qwenimage import CELLS, build_reference

PIPELINE = "QwenImageEditPipeline"
# Main replaces the optimizer by the handles of its offloading hooks, and can't step it.
CONFIG = qwenimage.CONFIG | {"fsdp_optimizer_offload": False}

__all__ = ["CELLS", "CONFIG", "PIPELINE", "build", "build_reference", "prepare", "write_prompts"]


def prepare(trainer):
    trainer.calculate_dimensions = rollout.calculate_dimensions = lambda area, ratio: (32, 32, None)


def build():
    return qwenimage.build(QwenImageEditPipeline, processor=standins.Tokenizer())
