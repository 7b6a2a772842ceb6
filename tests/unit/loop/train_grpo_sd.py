"""The shape of DanceGRPO's Stable Diffusion loop around a small model: everything in main, batches, a pass per inner epoch.

`FLAGS` stands in for absl's; the tests set its config. The model predicts noise, and guidance doubles its batch.
"""

from types import SimpleNamespace

import torch
from accelerate import Accelerator

FLAGS = SimpleNamespace(config=None)


class UNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def forward(self, sample, timestep, embeds):
        return SimpleNamespace(sample=self.layers(torch.cat([sample, timestep[:, None] / 1000, embeds], 1)))


def solver_step(noise, sample, prev_sample=None):
    mean = 0.9 * sample - 0.3 * noise
    if prev_sample is None:
        prev_sample = mean + 0.5 * torch.randn_like(mean)
    return prev_sample, -((prev_sample.detach() - mean) ** 2).mean(1)


def guided(unet, sample, timestep):
    embeds = torch.tensor([0.0, 1.0]).repeat_interleave(len(sample))[:, None]
    without, with_prompt = unet(torch.cat([sample] * 2), torch.cat([timestep] * 2), embeds).sample.chunk(2)
    return without + FLAGS.config.sample.guidance_scale * (with_prompt - without)


def pipeline_with_logprob(self, n_samples):
    latents, log_probs = [torch.randn(n_samples, 2)], []
    with torch.no_grad():
        for t in self.scheduler.timesteps:
            after, log_prob = solver_step(guided(self.unet, latents[-1], t.repeat(n_samples)), latents[-1])
            latents.append(after)
            log_probs.append(log_prob)
    return after.sum(1), None, latents, log_probs


def main(_):
    config = FLAGS.config
    n_train = int((config.sample.num_steps - 1) * config.train.timestep_fraction)
    accelerator = Accelerator(gradient_accumulation_steps=config.train.gradient_accumulation_steps * n_train, cpu=True)
    timesteps = torch.arange(config.sample.num_steps - 1, -1, -1) * 100 + 1
    pipeline = SimpleNamespace(unet=config.unet, scheduler=SimpleNamespace(timesteps=timesteps))
    unet, optimizer = accelerator.prepare(config.unet, config.optimizer)
    for _ in range(config.n_epochs):
        rolled = [pipeline_with_logprob(pipeline, 2) for _ in range(config.n_samples // 2)]
        latents = torch.cat([torch.stack(latents, 1) for _, _, latents, _ in rolled])
        samples = dict(
            timesteps=timesteps[:-1].repeat(config.n_samples, 1),
            latents=latents[:, :-2],
            next_latents=latents[:, 1:-1],
            log_probs=torch.cat([torch.stack(log_probs, 1) for *_, log_probs in rolled])[:, :-1],
        )
        rewards = torch.cat([rewards for rewards, *_ in rolled])
        for _ in range(config.train.num_inner_epochs):
            # fmt: off
            perms = torch.stack(
                [
                    torch.randperm(len(timesteps) - 1)
                    for _ in range(config.n_samples)
                ]
            )
            # fmt: on
            samples = {key: values[torch.arange(config.n_samples)[:, None], perms] for key, values in samples.items()}
            for start in range(0, config.n_samples, config.train.batch_size):
                batch = {key: values[start : start + config.train.batch_size] for key, values in samples.items()}
                advantages = rewards[start : start + config.train.batch_size] - rewards.mean()
                for j in range(n_train):
                    with accelerator.accumulate(unet):
                        config.visited.append(batch["timesteps"][:, j].tolist())
                        noise = guided(unet, batch["latents"][:, j], batch["timesteps"][:, j])
                        _, log_prob = solver_step(noise, batch["latents"][:, j], batch["next_latents"][:, j])
                        loss = -(advantages * torch.exp(log_prob - batch["log_probs"][:, j])).mean()
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()


def make_config(fraction=1.0, n_inner=1, n_epochs=1, num_steps=10):
    """Four samples in batches of two, ten steps of which nine can be trained; the optimizer changes nothing."""
    unet = UNet()
    optimizer = torch.optim.SGD(unet.parameters(), lr=0.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.cat([p.grad.flatten().clone() for p in unet.parameters()])))
    return SimpleNamespace(
        sample=SimpleNamespace(num_steps=num_steps, guidance_scale=3.0),
        train=SimpleNamespace(
            cfg=True, batch_size=2, gradient_accumulation_steps=2, timestep_fraction=fraction, num_inner_epochs=n_inner
        ),
        use_lora=False,
        n_samples=4,
        n_epochs=n_epochs,
        unet=unet,
        optimizer=optimizer,
        seen=seen,
        visited=[],
    )
