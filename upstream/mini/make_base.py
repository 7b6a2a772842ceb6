"""Make the mini trainer's base weights: a small Flux, flow matching on 8x8 digits, a share of the labels spoiled.

The spoiled labels leave the reinforcement learning something to gain: the model draws good digits, but not always the
one that was asked for. `python upstream/mini/make_base.py OUT` rewrites the shipped weights (about ten minutes on two cores).
"""

import argparse
import sys
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).parent / "fastvideo"))
import digits  # noqa: E402

MODEL = dict(
    in_channels=4,
    num_layers=1,
    num_single_layers=2,
    attention_head_dim=24,
    num_attention_heads=4,
    joint_attention_dim=digits.PROMPT_DIM,
    pooled_projection_dim=digits.PROMPT_DIM,
    guidance_embeds=False,
    axes_dims_rope=(4, 10, 10),
)


def velocity(model, tokens, sigmas, labels):
    """Predicted `noise - image`, `[N, 16, 4]`, at `tokens [N, 16, 4]` and `sigmas [N]` in 0-1."""
    sequence, pooled = digits.prompt_embeds(labels)
    return model(
        hidden_states=tokens,
        timestep=sigmas,
        encoder_hidden_states=sequence,
        pooled_projections=pooled,
        img_ids=digits.patch_ids(),
        txt_ids=torch.zeros(sequence.shape[1], 3),
        return_dict=False,
    )[0]


@torch.no_grad()
def draw(model, labels, generator, n_steps=16, shift=3.0):
    """Images `[N, 8, 8]` of the asked digits by the deterministic Euler solver."""
    sigmas = torch.linspace(1, 0, n_steps + 1)
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    z = torch.randn(len(labels), 16, 4, generator=generator)
    for now, then in zip(sigmas[:-1], sigmas[1:], strict=True):
        z = z + (then - now) * velocity(model, z, now.expand(len(labels)), labels)
    return digits.unpack_pixels(z)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder that gets transformer/")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--spoiled", type=float, default=0.45, help="share of labels replaced by a random digit")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = FluxTransformer2DModel(**MODEL)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.steps, pct_start=0.1)
    images, labels = digits.images_and_labels()
    tokens = digits.pack_pixels(images)

    progress = tqdm(range(args.steps))
    for step in progress:
        pick = torch.randint(len(tokens), (args.batch,))
        spoiled = torch.rand(args.batch) < args.spoiled
        asked = torch.where(spoiled, torch.randint(10, (args.batch,)), labels[pick])
        sigma = torch.sigmoid(torch.randn(args.batch) + 0.5)
        noise = torch.randn(args.batch, 16, 4)
        z = torch.lerp(tokens[pick], noise, sigma[:, None, None])
        loss = (velocity(model, z, sigma, asked) - (noise - tokens[pick])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        if step % 100 == 99:
            progress.set_postfix(loss=f"{loss.item():.3f}")

    model = average.module.eval()
    asked = torch.arange(10).repeat_interleave(100)
    probabilities = digits.class_probabilities(draw(model, asked, torch.Generator().manual_seed(args.seed + 1)))
    right = (probabilities.argmax(-1) == asked).float().mean()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    print(f"{right:.1%} of 1000 samples show the asked digit, mean reward {probabilities[range(1000), asked].mean():.3f}")
    model.save_pretrained(args.out / "transformer")


if __name__ == "__main__":
    main()
