"""What trainers do to samples, steps and losses before the update: left out, in another order, NaN, the last batch."""

from functools import partial

import models
import pytest
import torch
from torch.testing import assert_close

from jagg_patch import JaggConfig, JaggError, install
from jagg_patch.loop.recording import Recording
from jagg_patch.loop.skipping import Skipping

FEW_TIMESTEPS = "torch.linspace(1, 0, args.sampling_steps + 1)", "torch.linspace(0.004, 0, args.sampling_steps + 1)"
STEPS = "        for j in range(train_timesteps):"
LEFT_OUT = STEPS, f"        if i in args.left_out: continue\n{STEPS}"


@pytest.fixture
def trains(load_loop):
    """`trains(pieces of the loop, model, arguments, settings)`: visited steps and the gradient; without settings unpatched."""

    def run(pieces=(), model=models.Plain, args={}, **settings):
        module, model = load_loop("train_grpo_flux", *pieces), model()
        if settings:
            install(vars(module), config=JaggConfig(**{"frac": 1} | settings))
        torch.manual_seed(1)
        visited = module.train_one_step(module.make_args(**args), model, torch.optim.SGD(model.parameters(), lr=0.0))
        return visited, torch.cat([weight.grad.flatten() for weight in model.parameters()])

    return run


@pytest.fixture
def runs_flow(load_loop):
    """`runs_flow(pieces, changes to the configuration, settings)`: the gradient at each optimizer step of Flow-GRPO's loop."""

    def run(pieces=(), changes={}, **settings):
        module = load_loop("train_sd3_fast", *pieces)
        if settings:
            install(vars(module), config=JaggConfig(**{"frac": 1} | settings))
        module.FLAGS.config = config = module.make_config(**changes)
        torch.manual_seed(1)
        module.main(None)
        return torch.stack(config.seen)

    return run


# -- samples that the loop visits again


@pytest.mark.parametrize("samples", [[0, 1, 0], [0, 0, 1, 1], [0, 1] * 3], ids=str)
@pytest.mark.parametrize("fraction", [0.6, 1.0])
def test_samples_may_come_again(trains, samples, fraction):
    """In several epochs over a rollout, or the hard ones twice."""
    again = "    for i in range(args.n_samples):", f"    for i in {samples}:"
    args = dict(timestep_fraction=fraction)
    steps, expected = trains(again, args=args)
    visited, found = trains(again, args=args, group_size=2)
    n = len(steps) // len(samples)
    assert visited == [step for start in range(0, len(steps), n) for step in sorted(steps[start : start + n])]
    assert_close(found, expected, rtol=1e-5, atol=1e-7)


# -- samples that the loop leaves out


@pytest.mark.parametrize("left_out", [(), (0,), (1,), (3,), (0, 2), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("fraction", [0.6, 1.0])
def test_samples_may_be_left_out(trains, left_out, fraction):
    """Each sample has steps of its own at a fraction of 0.6. Groups of two are exact."""
    args = dict(timestep_fraction=fraction, n_samples=4, gradient_accumulation_steps=4, left_out=left_out)
    if 3 in left_out:
        args["gradient_accumulation_steps"] = 1  # whose optimizer step would be left out too
    steps, expected = trains(LEFT_OUT, args=args)
    visited, found = trains(LEFT_OUT, args=args, group_size=2, schedule="sequential")
    n_steps = int(15 * fraction)
    samples = [steps[start : start + n_steps] for start in range(0, len(steps), n_steps)]
    assert visited == [step for sample in samples for step in sorted(sample)] and len(samples) == 4 - len(left_out)
    assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("without_contract")
def test_samples_that_are_left_out_where_the_trainer_hands_on_plain_numbers_stop(trains):
    args = dict(timestep_fraction=0.6, n_samples=4, left_out=(0,))
    with pytest.raises(JaggError, match="the plan expected trajectory step"):
        trains((*LEFT_OUT, "step = perms[i][j]", "step = int(perms[i][j])"), args=args, group_size=2)


# -- steps in another order


@pytest.mark.usefixtures("without_contract")
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.parametrize("order", ["torch.randperm(n_train)", "torch.arange(n_train).roll(1)", "torch.arange(n_train) * 5 % 9"])
def test_steps_that_the_loop_shuffles_in_time_stop(runs_flow, order, schedule):
    """The timesteps go with them, so that each step by itself is as the schedule says."""
    shuffled = f"        for sample in samples:\n            order = {order}\n"
    shuffled += "            for key in ('timesteps', 'latents', 'next_latents', 'log_probs'):\n"
    shuffled += "                sample[key] = sample[key][:, order]\n"
    with pytest.raises(JaggError, match="aren't (all between those of its endpoints|in the order of a trajectory)") as error:
        runs_flow(("        for sample in samples:\n", shuffled), schedule=schedule)
    assert len(str(error.value).splitlines()) == 2


def test_groups_of_two_need_no_order_and_no_two_timesteps(trains):
    """Each of their steps has a backward of its own."""
    _, expected = trains(FEW_TIMESTEPS)
    assert_close(trains(FEW_TIMESTEPS, group_size=2)[1], expected, rtol=1e-5, atol=1e-8)
    with pytest.raises(JaggError, match="share a timestep"):
        trains(FEW_TIMESTEPS, group_size=3)


# -- a loss that isn't a number


class Mended(models.Plain):
    """Hooks on the gradients of its weights put 0 for NaN."""

    def __init__(self):
        super().__init__()
        for weight in self.parameters():
            weight.register_hook(partial(torch.nan_to_num, nan=0.0))


@pytest.mark.parametrize("schedule", ["sequential", "auto"])
def test_a_nan_loss_takes_its_own_step_alone_from_groups_of_two(trains, schedule):
    broken = "loss.backward()", "(loss * (float('nan') if int(step) == 4 else 1)).backward()"
    _, expected = trains(broken, model=Mended)
    _, found = trains(broken, model=Mended, schedule=schedule, group_size=2)
    assert expected.isfinite().all() and not torch.equal(expected, trains(model=Mended)[1])
    assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("step", [1, 2])
def test_a_nan_loss_between_two_knots_stays_out_where_only_those_count(trains, step):
    broken = "loss.backward()", f"(loss * (float('nan') if int(step) == {step} else 1)).backward()"
    _, found = trains(broken, aggregation="endpoints", self_check=False)
    assert torch.equal(found, trains(aggregation="endpoints", self_check=False)[1])


@pytest.mark.parametrize(("output", "said"), [(float("nan"), "a model output isn't finite"), (2.0, "differ by 50%")])
def test_a_model_output_that_is_no_number_is_called_that(output, said):
    lines = []
    skipping = Skipping(JaggConfig(skip_forwards=True), Recording(), lines.append)
    skipping.compare(torch.ones(1, 2), torch.full([1, 2], output))
    assert not skipping.is_agreed("cpu")
    (line,) = lines
    assert said in line


# -- accelerate's last batch of a loader


LOADER = (
    "    for _ in range(config.n_epochs):",
    "    for _ in accelerator.prepare(torch.utils.data.DataLoader(range(config.n_epochs))):",
)


def test_in_the_last_batch_of_a_loader_nothing_is_grouped(runs_flow, capsys):
    """There accelerate syncs gradients after every step, and the optimizer steps."""
    expected = runs_flow(LOADER, dict(n_epochs=3))
    found = runs_flow(LOADER, dict(n_epochs=3), group_size=2)
    assert len(expected) == 1 + 1 + 2 * 9  # two samples of nine steps
    assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert capsys.readouterr().out.count("nothing is grouped in this update: accelerate syncs every step of the last batch") == 1
