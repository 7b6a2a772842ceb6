"""What DanceGRPO's Flux trainer imports or calls and a CPU box can't have: CUDA, NCCL, torchvision's users, a reward model.

Everything else is the real thing: the trainer file, its FSDP wrapping and checkpointing helpers, its data set and loader,
diffusers' model and VAE classes, wandb (switched off).
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock


class TinyReward(torch.nn.Module):
    """In the place of HPSv2: embeds an image and a caption into four numbers each."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.image = torch.nn.Parameter(torch.randn(3 * 8 * 8, 4, generator=generator) / 10)
        self.text = torch.nn.Parameter(torch.randn(16, 4, generator=generator))

    def forward(self, image, text):
        pixels = torch.nn.functional.adaptive_avg_pool2d(image, 8).flatten(1)
        return {"image_features": pixels @ self.image, "text_features": self.text[text].mean(1)}


def preprocess(image):
    """A PIL image to float32 `[3, H, W]` in 0-1."""
    pixels = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).permute(2, 0, 1).float() / 255


def tokenize(captions):
    return torch.tensor([[ord(letter) % 16 for letter in caption[:8].ljust(8)] for caption in captions])


def module(name, **attributes):
    """Put a module of that name and content in `sys.modules`."""
    made = types.ModuleType(name)
    vars(made).update(attributes)
    sys.modules[name] = made
    return made


def load_source(name, path):
    """That of the module `imp`, which Python 3.12 no longer has."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(checkout):
    """Make `checkout`'s Flux trainers importable and runnable here. Call before anything of fastvideo is imported."""
    cpu = torch.device("cpu")
    torch.cuda.set_device = lambda device: None
    torch.cuda.current_device = lambda: cpu

    init_process_group = dist.init_process_group
    dist.init_process_group = lambda backend, *args, **kwargs: init_process_group("gloo", *args, **kwargs)

    all_reduce = dist.all_reduce

    def all_reduce_or_average(tensor, op=dist.ReduceOp.SUM, **kwargs):
        """torch 2.5's gloo can't average; upstream averages the loss that it prints."""
        averages = op == dist.ReduceOp.AVG
        work = all_reduce(tensor, op=dist.ReduceOp.SUM if averages else op, **kwargs)
        if averages:
            tensor /= dist.get_world_size()
        return work

    dist.all_reduce = all_reduce_or_average

    autocast_init, load = torch.autocast.__init__, torch.load
    torch.autocast.__init__ = lambda self, device_type, *args, **kwargs: autocast_init(self, "cpu", *args, **kwargs)
    torch.load = lambda *args, **kwargs: load(*args, **(kwargs | {"map_location": "cpu"}))

    # fastvideo.dataset's own __init__ imports torchvision; its modules don't.
    package = module("fastvideo.dataset")
    package.__path__ = [str(Path(checkout) / "fastvideo/dataset")]
    # Pinning memory, which needs CUDA, hands the captions on as a list; upstream's loop relies on that.
    datasets = importlib.import_module("fastvideo.dataset.latent_flux_rl_datasets")
    collate = datasets.latent_collate_function
    datasets.latent_collate_function = lambda batch: (*collate(batch)[:3], list(collate(batch)[3]))

    module("fastvideo.utils.validation", log_validation=None)
    module("fastvideo.utils.dataset_utils", LengthGroupedSampler=None)
    module("fastvideo.models.mochi_hf.modeling_mochi", MochiTransformerBlock=type("MochiTransformerBlock", (), {}))
    blocks = (FluxTransformerBlock, FluxSingleTransformerBlock)
    module("fastvideo.utils.load", load_transformer=None, get_no_split_modules=lambda transformer: blocks)

    open_clip = dict(
        create_model_and_transforms=lambda *_, **__: (TinyReward(), None, preprocess), get_tokenizer=lambda name: tokenize
    )
    module("hpsv2").__path__ = []
    module("hpsv2.src").__path__ = []
    module("hpsv2.src.open_clip", **open_clip)
    module("hpsv2.utils", root_path="", hps_version_map={})
    return importlib.import_module("fastvideo")


TINY_FLUX = dict(
    in_channels=64,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=4,
    joint_attention_dim=32,
    pooled_projection_dim=16,
    guidance_embeds=True,
    axes_dims_rope=(4, 6, 6),
)
TINY_VAE = dict(
    block_out_channels=(8, 8, 8, 8),
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    layers_per_block=1,
    latent_channels=16,
    norm_num_groups=4,
    sample_size=64,
)
PROMPT_LENGTH = 6


def make_prompt(seed):
    """Random embeddings of one prompt as the data set stores them: `[6, 32]`, `[16]`, text ids `[3]`, caption."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(PROMPT_LENGTH, 32, generator=generator),
        torch.randn(16, generator=generator),
        torch.zeros(3),
        f"prompt {seed}",
    )
