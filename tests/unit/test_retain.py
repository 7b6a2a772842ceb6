"""Retained graphs on a loop of DanceGRPO's shape: the update's gradient against the unpatched loop's, and against groups without them."""

import pytest
import torch
from test_skip import keep_gradients, make_model
from torch.testing import assert_close

from jagg_patch import JaggConfig, install

FLUX = "train_grpo_flux"
ONE_BY_ONE = (
    "        latents, log_probs = run_sample_step(args, torch.randn(args.n_samples, 2), sigmas, model)\n",
    "        batches = [run_sample_step(args, torch.randn(1, 2), sigmas, model) for _ in range(args.n_samples)]\n"
    "        latents, log_probs = (torch.cat(parts) for parts in zip(*batches))\n",
)
IN_ORDER = "    rewards, latents, log_probs = rewards[shuffled], latents[shuffled], log_probs[shuffled]\n", ""


def run(module, settings=None, lr=0.0, n_epochs=4, **changes):
    """Gradients `[optimizer steps, weights]`, forwards in each update, the handle, and the steps that were visited."""
    handle = None if settings is None else install(vars(module), config=JaggConfig(**settings))
    args, model = module.make_args(n_samples=4, gradient_accumulation_steps=2, **changes), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    seen, forwards, visited = keep_gradients(optimizer), [], []
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    counted = 0

    def count(*_):
        nonlocal counted
        counted += 1

    model.register_forward_hook(count)
    torch.manual_seed(1)
    for _ in range(n_epochs):
        before = counted
        visited.append(module.train_one_step(args, model, optimizer))
        forwards.append(counted - before - 4 * module.TOTAL)
    return torch.stack(seen), forwards, handle, visited


PLANS = {
    "exact": dict(frac=0),
    "W=4": dict(frac=1),
    "W=4, frac 0.6": dict(frac=0.6),
    "W=5, frac 0.95": dict(group_size=5, frac=0.95),  # one step is left over
    "4 knots": dict(knots=4),
    "named knots": dict(knots_at="0,6,7,14"),
    "skipped": dict(frac=1, skip_forwards=True),
}


@pytest.mark.parametrize("schedule", ["sequential", "joint", "auto"])
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_are_those_of_own_forwards_and_retained_samples_run_none(load_loop, plan, schedule):
    pieces, settings = ONE_BY_ONE + IN_ORDER, PLANS[plan] | dict(schedule=schedule, self_check=False)
    own, n_own, _, _ = run(load_loop(FLUX, *pieces), settings if plan != "exact" else None, lr=0.1)
    retained, n_retained, handle, _ = run(load_loop(FLUX, *pieces), settings | dict(retain=True), lr=0.1)
    assert_close(retained, own, rtol=1e-5, atol=1e-6)
    # Two of four samples come before the first optimizer step.
    assert n_retained[:1] == n_own[:1] and n_retained[2:] == [n // 2 for n in n_own[2:]]
    assert handle.stats.retained_forwards == 3 * 2 * 15
