"""The mini trainer's model in one process: rollouts by the trainer's functions, exact gradients, and those of groups."""

import sys
from types import SimpleNamespace
from typing import NamedTuple

import torch

from jagg_patch.errors import JaggError
from jagg_patch.method.folding import endpoint_weights, weighted_sum
from jagg_patch.method.plan import alphas

AGGREGATIONS = ("interpolate", "endpoints")
ADV_CLIP_MAX = 5.0  # the trainer's default


class Rollout(NamedTuple):
    """A prompt group's samples, `[B, ...]`; the last of the T steps is never trained."""

    latents: torch.Tensor  # [B, T + 1, 16, 4]
    log_probs: torch.Tensor  # [B, T]
    advantages: torch.Tensor  # [B]
    sequence: torch.Tensor  # [B, 1, 16]
    pooled: torch.Tensor  # [B, 16]

    def samples(self, chosen):
        return Rollout(*(tensor[chosen] for tensor in self))


class Probe:
    """The model, and the mini trainer's modules, which need what the demo needs."""

    def __init__(self, mini, n_steps):
        if not (mini / "fastvideo/train_grpo_flux.py").is_file():
            raise JaggError(
                f"no mini trainer in {mini}\n"
                "this command runs in JAGG's own checkout (or --mini DIR); a run of your own is probed with JAGG_PROBE_EVERY"
            )
        sys.path.insert(0, str(mini / "fastvideo"))
        try:
            import digits
            import train_grpo_flux
            from diffusers import FluxTransformer2DModel
        except ImportError as error:
            raise needs(error) from error
        finally:
            sys.path.remove(str(mini / "fastvideo"))
        self.digits, self.trainer = digits, train_grpo_flux
        self.transformer = FluxTransformer2DModel.from_pretrained(mini / "data/flux", subfolder="transformer")
        self.parameters = list(self.transformer.parameters())
        self.n_steps = n_steps

    def sigmas(self, shift):
        return self.trainer.sd3_time_shift(shift, torch.linspace(1, 0, self.n_steps + 1))

    @torch.no_grad()
    def roll_out(self, digit, n_samples, eta, shift):
        """`n_samples` rollouts of one prompt by the trainer's sampler, with its advantages within the prompt group."""
        sequence, pooled = self.digits.prompt_embeds(torch.full([n_samples], digit))
        images, latents, log_probs = self.trainer.run_sample_step(
            SimpleNamespace(eta=eta),
            torch.randn(n_samples, 16, 4),
            range(self.n_steps),
            self.sigmas(shift),
            self.transformer,
            sequence,
            pooled,
        )
        rewards = self.digits.class_probabilities(self.digits.unpack_pixels(images))[:, digit]
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-8)).clamp(-ADV_CLIP_MAX, ADV_CLIP_MAX)
        return Rollout(latents, log_probs, advantages, sequence, pooled)

    def forward(self, rollout, steps, timesteps):
        """The model output for each sample at its own step, with the graph. `steps` and `timesteps` are `[B]`."""
        latents = rollout.latents[torch.arange(len(steps)), steps]
        return self.trainer.predict_velocity(self.transformer, latents, timesteps, rollout.sequence, rollout.pooled)

    def loss(self, v_hat, rollout, steps, eta, sigmas):
        """The policy loss before the first optimizer step, where nothing is clipped: mean over samples of -A * ratio."""
        total = 0.0
        for step in steps.unique().tolist():  # the trainer's step function takes one index
            chosen = steps == step
            now, then = (rollout.latents[chosen, place] for place in (step, step + 1))
            _, _, log_probs = self.trainer.flux_step(v_hat[chosen], now, eta, sigmas, step, then, grpo=True, sde_solver=True)
            ratio = torch.exp(log_probs - rollout.log_probs[chosen, step])
            total = total - (rollout.advantages[chosen] * ratio).sum()
        return total / len(steps)

    def steps(self, rollout, steps, eta, shift):
        """Timesteps, model outputs with their graphs and upstream gradients of the visited `steps` `[k, B]`: k of each."""
        sigmas = self.sigmas(shift)
        timesteps = torch.tensor([int(sigma * 1000) for sigma in sigmas[:-1]])[steps]
        outputs = [self.forward(rollout, *where) for where in zip(steps, timesteps, strict=True)]
        upstream_grads = []
        for output, step in zip(outputs, steps, strict=True):
            v_hat = output.detach().requires_grad_()
            upstream_grads += torch.autograd.grad(self.loss(v_hat, rollout, step, eta, sigmas), v_hat)
        return timesteps, outputs, upstream_grads

    def vjp(self, outputs, grads):
        """The gradient `[P]` of the weights, of `outputs` whose graphs are kept."""
        found = torch.autograd.grad(outputs, self.parameters, grads, retain_graph=True, materialize_grads=True)
        return torch.cat([grad.flatten() for grad in found])

    def gradients(self, rollout, steps, eta, shift, groups):
        """The gradient of each position of the trajectory, and of each group as JAGG has it.

        Args:
            rollout: B samples.
            steps: `[k, B]`, the steps that each sample visits, in trajectory order.
            groups: `range`s over the k positions.

        Returns:
            The exact gradients `[k, P]`, and `{(group, aggregation): gradient [P]}`.
        """
        timesteps, outputs, upstream_grads = self.steps(rollout, steps, eta, shift)

        def vjp(positions, grads):
            return self.vjp([outputs[position] for position in positions], grads)

        exact = torch.stack([vjp([position], [grad]) for position, grad in enumerate(upstream_grads)])
        grouped = {}
        for group in groups:
            inside = slice(group.start, group.stop)
            if len(group) == 1:  # an exact step
                grouped |= {(group, aggregation): exact[group.start] for aggregation in AGGREGATIONS}
                continue
            ends = (group[0], group[-1])
            weights = endpoint_weights(alphas(timesteps[inside]))
            folded = [weighted_sum(upstream_grads[inside], weight) for weight in weights]
            grouped[group, "interpolate"] = vjp(ends, folded)
            grouped[group, "endpoints"] = exact[list(ends)].sum(0)
        return exact, grouped


def needs(error):
    return JaggError(f"the probe needs {error.name}\ninstall what the demo has: tests/venv.sh demo (or setup.cfg, [demo])")
