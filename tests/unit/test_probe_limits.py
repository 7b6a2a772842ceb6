"""The probe on a loop of upstream's shape, where it can't say anything or must not go on. tests/engines has the numbers."""

import json

import models
import pytest
import torch
from test_weights import CONDITIONED, SWITCHED_BY_LOOP

from jagg_patch import JaggConfig, JaggError, install
from jagg_patch.method.folding import weighted_sum


@pytest.fixture
def probed(load_loop, tmp_path):
    """`probed(pieces of the loop, old and new in turn, settings)`: one training step; cosines by group size, and the weights."""

    def run(*pieces, in_backward=False, **settings):
        module = load_loop("train_grpo_flux", *pieces)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        if in_backward:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: torch.optim.SGD([p], lr=0.0).step())
        log = tmp_path / "run.jsonl"
        install(vars(module), config=JaggConfig(log=str(log), **settings))
        module.train_one_step(module.make_args(), model, torch.optim.SGD(model.parameters(), lr=0.1))
        (record,) = map(json.loads, log.read_text().splitlines())
        log.unlink()
        cosines = {probe["group_size"]: [group["cosine"] for group in probe["groups"]] for probe in record["probe"] or ()}
        return cosines, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    return run


def test_a_group_whose_endpoints_share_a_timestep_has_no_cosine_and_trains_on(probed):
    """Timesteps 4, 3, 3, 3, 3, 2, …: nothing is grouped, so that training doesn't mind."""
    few = ("torch.linspace(1, 0, args.sampling_steps + 1)", "torch.linspace(0.004, 0, args.sampling_steps + 1)")
    cosines, weights = probed(*few, frac=0, group_size=3, probe_every=1)
    _, unprobed = probed(*few, frac=0, group_size=3)
    assert torch.equal(weights, unprobed)
    assert [cosine is None for cosine in cosines[3]] == [False, False, True, True, False]


@pytest.mark.usefixtures("without_contract")
def test_a_forward_that_cannot_be_run_again_has_no_cosine(probed):
    """The loop changes the sample in place once it has trained on it."""
    changed = ("            loss.backward()", "            loss.backward()\n            latents[i, step] = 0")
    cosines, weights = probed(*changed, probe_every=1)
    assert cosines[4] == [None] * 4
    assert torch.equal(weights, probed(*changed)[1])
    assert None not in probed(probe_every=1)[0][4]


@pytest.mark.parametrize("settings", [{}, {"frac": "auto"}])
def test_a_single_visited_step_is_not_probed(probed, settings):
    assert probed("timestep_fraction=1.0", "timestep_fraction=0.07", probe_every=1, **settings)[0] == {}


def test_a_probe_that_no_optimizer_step_comes_to_says_so(probed, capsys):
    assert probed("gradient_accumulation_steps=2", "gradient_accumulation_steps=4", probe_every=1)[0] == {}
    assert "no probe at training step 1: the optimizer didn't step in it" in capsys.readouterr().out


def test_an_optimizer_that_steps_in_gradient_hooks_is_refused(probed):
    with pytest.raises(JaggError, match="the probe can't run: hooks run at each gradient"):
        probed(frac=0, probe_every=1, in_backward=True)


@pytest.mark.parametrize("settings", [{"frac": 0}, {"frac": 1}])
def test_another_network_that_another_optimizer_steps_is_refused(load_loop, settings):
    module, model = load_loop("train_grpo_flux", *CONDITIONED), models.WithConditioner()
    install(vars(module), config=JaggConfig(probe_every=1, self_check=False, **settings))
    with pytest.raises(JaggError, match="the probe can't run: the training forward trains weights that are neither the model's"):
        module.train_one_step(module.make_args(), model, torch.optim.SGD(model.parameters(), lr=0.0))
    both = torch.optim.SGD([*model.parameters(), *model.conditioner[0].parameters()], lr=0.0)
    module.train_one_step(module.make_args(), model, both)


ROLLOUT = (
    "    with torch.no_grad():\n        latents, log_probs",
    "    model.prepare()\n    model.eval()\n    with torch.no_grad():\n        latents, log_probs",
    "    advantages = (rewards",
    "    model.train()\n    advantages = (rewards",
)


class Delayed(models.Plain):
    """Scales by a running statistic, made at its first training forward, as it was before a rollout."""

    scale = 1.0

    def prepare(self):
        self.scale = float(getattr(self, "amax", 1.0))

    def forward(self, x):
        hidden = self.net[1](self.net[0](x))
        if self.training:
            with torch.no_grad():
                if not hasattr(self, "amax"):
                    self.amax = hidden.abs().mean().clone()
                else:
                    self.amax.lerp_(hidden.abs().mean(), 0.3)
        return self.net[2](hidden / self.scale)


class Decaying(models.Plain):
    """Each training forward makes a trained weight smaller."""

    def prepare(self):
        """Nothing."""

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.net[0].weight.mul_(0.999)
        return self.net(x)


@pytest.mark.parametrize("model", [Delayed, Decaying])
@pytest.mark.parametrize("settings", [{"frac": 0, "probe_every": 1}, {"frac": 1, "group_size": 2, "schedule": "sequential"}])
def test_what_a_training_forward_changes_is_put_back(load_loop, model, settings):
    """By the probe, and by the self-check."""

    def run(**changes):
        module, network = load_loop("train_grpo_flux", *ROLLOUT), model()
        install(vars(module), config=JaggConfig(**settings | changes))
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
        for _ in range(3):
            module.train_one_step(module.make_args(sampling_steps=5), network, optimizer)
        return torch.cat([weight.detach().flatten() for weight in network.parameters()])

    assert torch.equal(run(), run(self_check=False, probe_every=0))


@pytest.mark.usefixtures("without_contract")
def test_a_second_solver_step_is_refused_where_nothing_is_grouped_too(probed):
    twice = (
        "velocity = run_model(transformer, latents, timesteps)",
        "velocity = run_model(transformer, latents, timesteps)\n"
        "    flux_step(velocity, latents, args.eta, sigma_schedule, i, pre_latents, True, True)",
    )
    with pytest.raises(JaggError, match="the solver step ran 2 times"):
        probed(*twice, frac=0, probe_every=1)


@pytest.mark.usefixtures("without_contract")
def test_where_nothing_is_grouped_a_failed_forward_may_be_passed_over(probed):
    """As unpatched: frac 0 changes nothing of a trainer."""
    passed_over = (
        "def run_model(model, latents, timesteps):\n",
        "def run_model(model, latents, timesteps):\n"
        "    if torch.is_grad_enabled() and timesteps == 500:\n        raise MemoryError\n",
        "            new_log_probs = grpo_one_step(",
        "            try: new_log_probs = grpo_one_step(",
        "                sigmas,\n            )\n",
        "                sigmas,\n            )\n            except MemoryError: continue\n",
    )
    probed(*passed_over, frac=0)
    with pytest.raises(JaggError, match="had failed"):
        probed(*passed_over)


def test_a_weighted_sum_is_wider_than_half_precision_with_one_weight_a_step():
    grads = [torch.full([1, 4], 1.0, dtype=torch.float16)] * 3
    weights = torch.tensor([1 / 3, 1 / 3, 1 / 3])  # in fp16 they add up to 0.99976
    assert torch.equal(weighted_sum(grads, weights), grads[0])


@pytest.mark.parametrize("pieces", [(), SWITCHED_BY_LOOP])
@pytest.mark.parametrize("settings", [{"frac": 0}, {"frac": 1, "cuts": (5, 7), "group_size": 2}])
def test_weights_that_are_trained_at_some_steps_only_are_left_as_they_were(load_loop, pieces, settings):
    """The gradients of two training steps, and which weights are trained after each."""

    def run(probe_every):
        module = load_loop("train_grpo_flux", *pieces)
        model = models.Plain() if pieces else models.SwitchedInside()
        install(vars(module), config=JaggConfig(probe_every=probe_every, schedule="sequential", **settings))
        torch.manual_seed(1)
        optimizer, seen = torch.optim.Adam(model.parameters(), lr=0.1), []
        for _ in range(2):
            module.train_one_step(module.make_args(), model, optimizer)
            seen += [weight.grad.clone() for weight in model.parameters()]
            seen += [torch.tensor([weight.requires_grad for weight in model.parameters()])]
            optimizer.zero_grad()
        return seen + list(model.parameters())

    assert all(torch.equal(*pair) for pair in zip(run(0), run(1), strict=True))
