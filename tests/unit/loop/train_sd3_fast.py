"""The shape of Flow-GRPO's training loop around a small model: everything in main, real accelerate, one process.

`FLAGS` stands in for absl's; the tests set its config. Every sample's window of the trajectory is trained in order.
"""

from types import SimpleNamespace

import torch
from accelerate import Accelerator

FLAGS = SimpleNamespace(config=None)


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def forward(self, latents, timesteps):
        return self.layers(torch.cat([latents, timesteps[:, None] / 1000], 1))


def sde_step_with_logprob(scheduler, model_output, timestep, sample, prev_sample=None, noise_level=0.7):
    mean = sample - model_output * scheduler.step
    std = noise_level * (timestep / 1000).sqrt()[:, None]
    if prev_sample is None:
        prev_sample = mean + std * torch.randn_like(mean)
    log_prob = (-((prev_sample.detach() - mean) ** 2) / (2 * std**2)).mean(1)
    return prev_sample, log_prob, mean, std


def compute_log_prob(transformer, scheduler, sample, j, config):
    output = transformer(sample["latents"][:, j], sample["timesteps"][:, j])
    return sde_step_with_logprob(
        scheduler,
        output,
        sample["timesteps"][:, j],
        sample["latents"][:, j],
        sample["next_latents"][:, j],
        config.sample.noise_level,
    )


def pipeline_with_logprob(policy, scheduler, config, n_steps):
    timesteps = torch.linspace(1000, 0, config.sample.num_steps + 1)[:n_steps].repeat(config.batch_size, 1)
    latents, log_probs = [torch.randn(config.batch_size, 2)], []
    with torch.no_grad():
        for j in range(n_steps):
            output = policy(latents[-1], timesteps[:, j])
            after, log_prob, _, _ = sde_step_with_logprob(scheduler, output, timesteps[:, j], latents[-1])
            latents.append(after)
            log_probs.append(log_prob)
    latents = torch.stack(latents, 1)
    return dict(
        timesteps=timesteps,
        latents=latents[:, :-1],
        next_latents=latents[:, 1:],
        log_probs=torch.stack(log_probs, 1),
        rewards=after.sum(1),
    )


def main(_):
    config = FLAGS.config
    n_train = config.sample.sde_window_size or config.sample.num_steps - 1
    accelerator = Accelerator(gradient_accumulation_steps=config.train.gradient_accumulation_steps * n_train, cpu=True)
    policy, optimizer = accelerator.prepare(config.policy, config.optimizer)
    scheduler = SimpleNamespace(step=1 / config.sample.num_steps)
    for _ in range(config.n_epochs):
        n_batches = config.train.gradient_accumulation_steps
        samples = [pipeline_with_logprob(policy, scheduler, config, n_train) for _ in range(n_batches)]
        for sample in samples:
            advantages = sample["rewards"] - sample["rewards"].mean()
            for j in range(n_train):
                with accelerator.accumulate(policy):
                    _, log_prob, mean, std = compute_log_prob(policy, scheduler, sample, j, config)
                    loss = -(advantages * torch.exp(log_prob - sample["log_probs"][:, j])).mean()
                    if config.train.beta > 0:
                        with torch.no_grad():
                            _, _, reference, _ = compute_log_prob(config.reference, scheduler, sample, j, config)
                        loss = loss + config.train.beta * ((mean - reference) ** 2 / (2 * std**2)).mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()


def make_config(window=0, beta=0.0, num_steps=10, n_samples=2, n_epochs=1, **others):
    """Ten steps, nine of them trained; batches of two; the optimizer changes nothing but keeps its gradients in `.seen`."""
    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.cat([p.grad.flatten().clone() for p in policy.parameters()])))
    reference = Policy()
    with torch.no_grad():
        reference.layers[2].bias += 1
    values = dict(
        sample=SimpleNamespace(num_steps=num_steps, sde_window_size=window, noise_level=0.7),
        train=SimpleNamespace(gradient_accumulation_steps=n_samples, beta=beta, timestep_fraction=0.99),
        use_lora=False,
        batch_size=2,
        n_epochs=n_epochs,
        policy=policy,
        reference=reference,
        optimizer=optimizer,
        seen=seen,
    )
    return SimpleNamespace(**(values | others))
