"""The models that upstream/bench.py trains, with random weights, and what is measured on each."""

import inspect
from itertools import product
from typing import NamedTuple

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from jagg_patch.errors import JaggError

RECOMPUTE = {"on": 1.0, "half": 0.5, "off": 0.0}  # share of the blocks under activation checkpointing
PUBLISHED, LONG, UPSTREAM = STEPS = (20, 1.0), (24, 1.0), (15, 0.6)  # steps that can be trained, the fraction that is
GROUP_SIZES, FRACS, N_KNOTS = (3, 4, 6, 8, 10), (0.6, 1.0), (4, 5, 7)
WHOLE = (15, 1.0)  # upstream's, none left out
ALL = tuple(product(RECOMPUTE, STEPS, [GROUP_SIZES], FRACS))
ALL_KNOTS = tuple(product(RECOMPUTE, [PUBLISHED, WHOLE], N_KNOTS))
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
    knots: tuple = (("on", PUBLISHED, 5),)
    seconds: int = 300
    least_rounds: int = 1


FLUX, QWEN = "FluxTransformer2DModel", "QwenImageTransformer2DModel"
TINY = dict(in_channels=4, num_layers=0, num_single_layers=2, attention_head_dim=64, num_attention_heads=3)
TINY |= dict(joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(16, 24, 24))
MODELS = {
    "small": Model(
        FLUX, TINY, ("num_single_layers",), side=26, text=32, cases=SMALL, knots=ALL_KNOTS[:6], seconds=150, least_rounds=3
    ),
    "flux": Model(FLUX, {"guidance_embeds": True}, ("num_layers", "num_single_layers")),
    "qwenimage": Model(QWEN, {}),
}


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
