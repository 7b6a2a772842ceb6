"""Loops inside `main`: Flow-GRPO's shape and DanceGRPO's Stable Diffusion one, with real accelerate in one process."""

import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import accelerate
import observe
import pytest
import torch
from torch.testing import assert_close

from jagg_patch import JaggConfig, JaggError, __version__, group_backward, install, plan_groups
from jagg_patch.trainers import TRAINERS, wrap

FLOW = observe.Loop(
    step="compute_log_prob",
    solver="sde_step_with_logprob",
    index=lambda arguments: arguments["j"],
    timesteps=lambda arguments: arguments["sample"]["timesteps"][:, arguments["j"]],
)


@pytest.fixture(params=["train_sd3_fast", "train_grpo_sd"])
def load_either(request, load_loop):
    return partial(load_loop, request.param)


@pytest.fixture
def load_flow(load_loop):
    return partial(load_loop, "train_sd3_fast")


@pytest.fixture
def load_sd(load_loop):
    return partial(load_loop, "train_grpo_sd")


def run(module, seed=1, **changes):
    """The whole `main`. Returns its config, the gradient at each optimizer step and the RNG state after."""
    module.FLAGS.config = config = module.make_config(**changes)
    torch.manual_seed(seed)
    module.main(None)
    return config, torch.stack(config.seen), torch.get_rng_state()


def stops(module, match, **changes):
    with pytest.raises(JaggError, match=match) as error:
        run(module, **changes)
    assert len(str(error.value).splitlines()) == 2


# -- both shapes


@pytest.mark.parametrize("settings", [{"enabled": False}, {"frac": 0.0}])
def test_off_and_nothing_routed_are_bit_identical(load_either, settings, capsys):
    _, gradients, rng = run(load_either(), n_epochs=2)
    module = load_either()
    install(vars(module), config=JaggConfig(**settings))
    _, patched_gradients, patched_rng = run(module, n_epochs=2)
    assert torch.equal(patched_gradients, gradients) and torch.equal(patched_rng, rng)
    assert "first optimizer step" not in capsys.readouterr().out


def test_group_size_two_is_exact_and_draws_the_same_random_numbers(load_either):
    _, expected, rng = run(load_either(), n_epochs=2)
    module = load_either()
    handle = install(vars(module), config=JaggConfig(group_size=2, frac=1))
    _, found, patched_rng = run(module, n_epochs=2)
    assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(patched_rng, rng)
    assert (
        handle.stats.groups == 2 * 2 * 4 and handle.stats.backward_passes == handle.stats.backward_passes_unpatched == 2 * 2 * 9
    )


def test_uninstall_restores_every_name(load_either):
    module = load_either()
    before = dict(vars(module))
    for settings in ({}, {"enabled": False}):
        handle = install(vars(module), config=JaggConfig(**settings))
        run(module)
        assert module.Accelerator is not before["Accelerator"] and issubclass(module.Accelerator, before["Accelerator"])
        handle.uninstall()
        assert dict(vars(module)) == before


def test_jagg_starts_when_main_is_called(load_either, monkeypatch, capsys):
    """Not before: absl parses the settings in between, and the plan depends on them."""
    module = load_either()
    handle = install(vars(module))
    monkeypatch.setenv("JAGG_GROUP_SIZE", "3")
    assert handle.config is None and capsys.readouterr().out == ""
    run(module)
    assert handle.config.group_size == 3
    printed = capsys.readouterr().out
    assert printed.startswith(f"JAGG {__version__} on {module.__name__}: group_size 3, frac 0.6, ")
    assert "9 of 9 steps visited, in trajectory order: 5 in 2 groups (3+2), 4 exact" in printed
    assert printed.count("JAGG: first optimizer step after 16 backward passes through the model instead of 18") == 1


def test_as_a_script_an_error_ends_with_the_message_alone_and_leaves_nothing(load_either, monkeypatch):
    module = load_either()
    before = dict(vars(module))
    monkeypatch.setenv("JAGG_FRACTION", "1")
    install(vars(module))
    stops(module, "unknown setting in the environment: JAGG_FRACTION")
    assert dict(vars(module)) == before
    module.__name__ = "__main__"
    install(vars(module))
    with pytest.raises(SystemExit, match="jagg_patch: unknown setting in the environment: JAGG_FRACTION"):
        run(module)


@pytest.mark.parametrize("engine", ["MEGATRON_LM", "XLA"])
def test_an_engine_that_was_not_shown_to_be_right_is_refused(load_either, engine):
    class OtherEngine(accelerate.Accelerator):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.value = accelerate.utils.DistributedType(engine)

        distributed_type = property(lambda self: vars(self).get("value", accelerate.utils.DistributedType.NO))

    module = load_either()
    module.Accelerator = OtherEngine
    install(vars(module), config=JaggConfig())
    stops(module, f"accelerate runs {engine}")


def test_a_gradient_sync_inside_a_sample_is_refused_at_start(load_either, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    module = load_either()
    install(vars(module), config=JaggConfig())
    stops(module, "syncs gradients every 2 steps, not a multiple of the 9")


@pytest.mark.parametrize(
    ("new", "match"),
    [
        ("accelerator.backward(loss)\nINDENTif j == 1: optimizer.optimizer.step()", "optimizer was about to step while"),
        ("if j != 1: accelerator.backward(loss)", "no gradient arrived for step 1"),
        ("if j != 4: accelerator.backward(loss)", "visited step 5 .* while the group .* still open"),
        ("accelerator.backward(loss)\nINDENTif j == 7: break", "the plan expected"),
    ],
)
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
@pytest.mark.usefixtures("without_contract")
def test_a_loop_that_would_lose_a_gradient_is_stopped(load_either, new, match, schedule):
    indent = {"train_sd3_fast": 20, "train_grpo_sd": 24}[load_either.args[0]]
    module = load_either("accelerator.backward(loss)", new.replace("INDENT", " " * indent))
    install(vars(module), config=JaggConfig(schedule=schedule))
    stops(module, match)


@pytest.mark.parametrize(
    ("engine", "n_micro_steps", "frac", "refused"),
    [
        ("NO", 9, 0.6, None),
        ("MULTI_GPU", 18, 0.6, None),
        ("MULTI_GPU", 12, 0.6, "every 12 steps"),
        ("XLA", 9, 0.6, "accelerate runs XLA"),
        ("DEEPSPEED", 4, 0.0, None),  # nothing is grouped, so nothing is touched
    ],
)
def test_what_fits(engine, n_micro_steps, frac, refused):
    made = SimpleNamespace(distributed_type=accelerate.utils.DistributedType[engine], gradient_accumulation_steps=n_micro_steps)
    with pytest.raises(JaggError, match=refused) if refused else nullcontext():
        wrap.require_fit(made, 9, JaggConfig(frac=frac))


def test_a_kept_main_is_the_unpatched_one_after_uninstall(load_either):
    module = load_either()
    handle = install(vars(module), config=JaggConfig())
    kept = module.main
    handle.uninstall()
    before = dict(vars(module))
    module.FLAGS.config = module.make_config()
    kept(None)
    assert handle.config is None and dict(vars(module)) == before


def test_losses_that_the_trainer_keeps_hold_no_gradients_of_proxies(load_either):
    """Flow-GRPO keeps every loss, with its graph, until it logs their mean."""
    module = load_either("accelerator.backward(loss)", "accelerator.backward(loss); FLAGS.losses.append(loss)")
    module.FLAGS.losses = []
    install(vars(module), config=JaggConfig(frac=1))
    config, _, _ = run(module)
    parameters = {id(p) for group in config.optimizer.param_groups for p in group["params"]}
    proxies, nodes = [], [loss.grad_fn for loss in module.FLAGS.losses]
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable") and id(node.variable) not in parameters:
            proxies.append(node.variable)
        nodes += [next_node for next_node, _ in node.next_functions if next_node is not None]
    # Of groups of five and four in the sequential schedule; the last two steps' proxies lead to the knots' graphs.
    assert len(proxies) >= 2 * (3 + 2) and all(proxy.grad is None for proxy in proxies)


# -- Flow-GRPO's


@pytest.mark.parametrize(("window", "group_size"), [(0, 3), (0, 4), (2, 4), (3, 4), (4, 4), (5, 2)])
@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_flow_gradient_is_group_backward_s(load_flow, window, group_size, beta, schedule):
    """With beta, the loss reaches the model through the mean too, and a reference forward runs beside each step."""
    config = JaggConfig(group_size=group_size, frac=1, schedule=schedule)
    module = load_flow()
    with observe.recorded_steps(module, FLOW) as steps:
        run(module, window=window, beta=beta)
    n_visited = window or 9
    expected = observe.oracle_gradient(module, steps[0]["arguments"]["transformer"], steps, n_visited, config, FLOW)
    module = load_flow()
    handle = install(vars(module), config=config)
    _, found, _ = run(module, window=window, beta=beta)
    assert observe.relative_error(found[0], expected) <= 1e-6
    groups = plan_groups(n_visited, config)
    assert handle.stats.backward_passes == 2 * sum(min(len(group), 2) for group in groups)


@pytest.mark.parametrize(("window", "variable", "frac"), [(3, None, 1.0), (0, None, 0.6), (3, "0.7", 0.7), (0, "1", 1.0)])
def test_a_window_is_routed_whole_by_default(load_flow, monkeypatch, window, variable, frac):
    if variable:
        monkeypatch.setenv("JAGG_FRAC", variable)
    module = load_flow()
    handle = install(vars(module))
    run(module, window=window)
    assert handle.config.frac == frac


@pytest.mark.parametrize(
    ("changes", "update", "whole"),
    [
        (dict(window=3), "9 -> 7 (1.29x)", "19 -> 17 (1.12x)"),  # 3 x (1 + 2); 3 + 2 x 2
        (dict(window=3, beta=0.1), "12 -> 10 (1.20x)", "22 -> 20 (1.10x)"),
        (dict(window=4, use_lora=True), "8 -> 6 (1.33x)", "18 -> 16 (1.12x)"),
    ],
)
def test_flow_banner_counts_the_reference_and_lora(load_flow, capsys, changes, update, whole):
    module = load_flow()
    install(vars(module))
    run(module, **changes)
    assert f"update {update}, with sampling {whole}\n" in capsys.readouterr().out


def test_the_banner_says_so_where_there_is_nothing_to_save(load_flow, capsys):
    for window, says in ((2, 1), (3, 0)):
        module = load_flow()
        install(vars(module))
        run(module, window=window)
        assert capsys.readouterr().out.count("groups of two are exact and save no backward pass") == says


def test_what_depends_on_no_weight_may_be_returned_beside_the_log_probability(load_flow):
    """The previous sample and the noise level have no graph at the group's first step, whose forward recorded everything."""
    module = load_flow()
    install(vars(module), config=JaggConfig(frac=1))
    run(module)


@pytest.mark.usefixtures("without_contract")
def test_a_model_output_returned_beside_the_log_probability_is_stopped(load_flow):
    pieces = "    return sde_step_with_logprob(", "    return output.sum(), *sde_step_with_logprob("
    module = load_flow(*pieces, "_, log_prob, mean, std = compute", "_, _, log_prob, mean, std = compute")
    install(vars(module), config=JaggConfig(frac=1))
    stops(module, "visited step 0 .* depends on weights by another way than the model's output")


@pytest.mark.usefixtures("without_contract")
def test_a_returned_tensor_that_has_a_graph_at_later_steps_only_is_stopped(load_flow):
    pieces = (
        "    return sde_step_with_logprob(",
        "    return output.square().mean() if j else torch.zeros(()), *sde_step_with_logprob(",
    )
    module = load_flow(*pieces, "_, log_prob, mean, std = compute", "_, _, log_prob, mean, std = compute")
    install(vars(module), config=JaggConfig(frac=1))
    stops(module, "visited step 4 .* returned a tensor with a graph")


@pytest.mark.usefixtures("without_contract")
def test_a_run_that_ends_inside_a_sample_is_stopped(load_flow):
    module = load_flow("accelerator.backward(loss)", "accelerator.backward(loss)\n                    if j == 7: break")
    install(vars(module), config=JaggConfig())
    stops(module, "the training step ended after 8 of the 9 steps", n_samples=1)


@pytest.mark.parametrize(
    ("name", "window", "fraction", "steps"),
    [
        ("train_sd3", 3, 0.6, (10, 6, 6)),
        ("train_sd3_fast", 3, 0.6, (10, 3, 3)),
        ("train_sd3_fast", 0, 0.6, (10, 9, 9)),
        ("train_sd3_fast", -1, 0.6, (10, 9, 9)),
    ],
)
def test_flow_steps(name, window, fraction, steps):
    sample, train = SimpleNamespace(num_steps=10, sde_window_size=window), SimpleNamespace(timestep_fraction=fraction)
    assert TRAINERS[name].steps(SimpleNamespace(sample=sample, train=train)) == steps


@pytest.mark.usefixtures("without_contract")
def test_a_trainer_without_accelerate_compares_ranks_once_its_process_group_is_there(load_flow, monkeypatch):
    start = (
        "def init_distributed():\n    FLAGS.started = True\n\n\ndef main(_):\n    init_distributed()\n    init_distributed()\n"
    )
    module = load_flow("def main(_):\n", start)
    module.__file__ = "train_qwenimage.py"
    seen = []
    monkeypatch.setattr(
        sys.modules["jagg_patch.install"], "require_same_on_all_ranks", lambda config: seen.append(module.FLAGS.started)
    )
    install(vars(module), config=JaggConfig())
    run(module)
    assert seen == [True]
    del module.init_distributed
    module = load_flow()
    module.__file__ = "train_qwenimage.py"
    install(vars(module), config=JaggConfig())
    stops(module, "there is no function init_distributed")


def test_flow_names_that_changed_are_refused(load_flow):
    module = load_flow("def sde_step_with_logprob(scheduler, model_output,", "def sde_step_with_logprob(scheduler, output,")
    install(vars(module), config=JaggConfig())
    stops(module, "sde_step_with_logprob.. has no parameter model_output")


# -- Stable Diffusion's


@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_sd_trains_the_same_steps_in_trajectory_order_in_every_pass(load_sd, fraction):
    """The loop permutes what the pass before has permuted: the orders compose."""
    plain, _, rng = run(load_sd(), fraction=fraction, n_inner=3, n_epochs=2)
    module = load_sd()
    install(vars(module), config=JaggConfig())
    patched, _, patched_rng = run(module, fraction=fraction, n_inner=3, n_epochs=2)
    assert torch.equal(patched_rng, rng)
    k = int(9 * fraction)
    assert len(plain.visited) == len(patched.visited) == 2 * 3 * 2 * k
    for start in range(0, len(plain.visited), k):
        unpatched, ordered = (list(zip(*config.visited[start : start + k], strict=True)) for config in (plain, patched))
        assert ordered == [tuple(sorted(timesteps, reverse=True)) for timesteps in unpatched]


class Recorder:
    """The UNet's calls of the unpatched run, by sample and timestep: input rows, and s = dL/d(output) rows, per guidance half."""

    def __init__(self, unet):
        self.calls = []
        unet.register_forward_hook(self._keep)

    def _keep(self, unet, inputs, output):
        if output.sample.requires_grad:
            call = [torch.stack([half for half in tensor.detach().chunk(2)]) for tensor in inputs]
            self.calls.append(call)
            output.sample.register_hook(lambda grad: call.append(torch.stack(grad.chunk(2))))

    def in_trajectory_order(self, k):
        """For each batch, k calls: (sample, timestep, embeds, s), every sample's rows sorted by timestep, downwards."""
        for start in range(0, len(self.calls), k):
            tensors = [torch.stack(tensor) for tensor in zip(*self.calls[start : start + k], strict=True)]  # [k, 2, B, ...]
            order = tensors[1][:, 0].argsort(0, descending=True)  # [k, B]
            sample = torch.arange(order.shape[1])
            yield [[tensor[order[j], :, sample].transpose(0, 1).flatten(0, 1) for tensor in tensors] for j in range(k)]


@pytest.mark.parametrize("fraction", [1.0, 0.6])
@pytest.mark.parametrize("group_size", [3, 4])
@pytest.mark.parametrize("schedule", ["joint", "sequential"])
def test_sd_gradient_is_group_backward_s(load_sd, fraction, group_size, schedule):
    config = JaggConfig(group_size=group_size, frac=1, schedule=schedule)
    module, k = load_sd(), int(9 * fraction)
    module.FLAGS.config = plain = module.make_config(fraction)
    recorder = Recorder(plain.unet)
    torch.manual_seed(1)
    module.main(None)
    unet = module.UNet()
    for calls in recorder.in_trajectory_order(k):
        for group in plan_groups(k, config):
            members = [calls[position] for position in group]
            group_backward(
                lambda j, members=members: unet(*members[j][:3]).sample,
                lambda j, v_hat, members=members: (members[j][3] * v_hat).sum(),
                torch.stack([member[1] for member in members]),
                config,
            )
    expected = torch.cat([p.grad.flatten() for p in unet.parameters()])
    module = load_sd()
    handle = install(vars(module), config=config)
    _, found, _ = run(module, fraction=fraction)
    assert observe.relative_error(found[0], expected) <= 1e-6
    assert handle.stats.backward_passes == 2 * 2 * len(plan_groups(k, config))


SKIP_AN_EPOCH = "if config.n_epochs == 3:\n            config.n_epochs = 0\n            continue\n        "
WITHOUT_GUIDANCE = "return unet(sample, timestep, torch.zeros(len(sample), 1)).sample\n    "


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pipeline, 2) for _ in range(config.n_samples // 2)", "pipeline, n) for n in (4,)"),
        ("rewards = torch.cat(", SKIP_AN_EPOCH + "rewards = torch.cat("),
        ("embeds = torch.tensor(", WITHOUT_GUIDANCE + "embeds = torch.tensor("),
        ("unet, optimizer = accel", "accelerator.prepare(torch.utils.data.DataLoader([1]))\n    unet, optimizer = accel"),
    ],
    ids=["rollouts of other sizes", "a skipped epoch", "without guidance", "a loader prepared apart"],
)
def test_sd_loop_may_differ(load_sd, old, new):
    pieces = [old, new] if "return" not in new else [old, new, "cfg=True", "cfg=False"]
    _, expected, rng = run(load_sd(*pieces), fraction=0.6, n_inner=2, n_epochs=3)
    module = load_sd(*pieces)
    handle = install(vars(module), config=JaggConfig(group_size=2, frac=1))
    _, found, patched_rng = run(module, fraction=0.6, n_inner=2, n_epochs=3)
    assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(patched_rng, rng) and handle.stats.groups


def test_sd_pass_that_draws_and_does_not_train_is_stopped(load_sd):
    module = load_sd(
        "samples = {key: values[torch",
        "if not config.visited: config.visited.append(0); continue\n            samples = {key: values[torch",
    )
    install(vars(module), config=JaggConfig())
    stops(module, "orders more samples than the 4 of its rollout", n_inner=2)


@pytest.mark.usefixtures("without_contract")
def test_sd_last_sample_cut_short_is_stopped_at_the_next_rollout(load_sd):
    module = load_sd(
        "accelerator.backward(loss)", "accelerator.backward(loss)\n                        if start and j == 7: break"
    )
    install(vars(module), config=JaggConfig())
    stops(module, "a new rollout ended after 8 of the 9 steps", n_epochs=2)


@pytest.mark.usefixtures("without_contract")
def test_sd_forward_that_is_no_visited_step_is_stopped(load_sd):
    call = "config.visited.append("
    module = load_sd(call, "unet(torch.ones(1, 2), torch.ones(1), torch.ones(1, 1))\n" + " " * 24 + call)
    install(vars(module), config=JaggConfig())
    stops(module, "the plan expected trajectory step")


def test_sd_steps_that_were_not_ordered_are_stopped(load_sd):
    module = load_sd("for _ in range(config.n_samples)\n", "for _ in range(config.n_samples // 2) for _ in range(2)\n")
    install(vars(module), config=JaggConfig())
    run(module)  # the same number of draws
    module = load_sd("torch.arange(config.n_samples)[:, None], perms]", "torch.arange(config.n_samples)[:, None], perms.flip(0)]")
    install(vars(module), config=JaggConfig())
    stops(module, "the plan expected trajectory step", fraction=0.6)


def test_sd_with_a_second_model_is_refused(load_sd):
    prepare = "unet, optimizer = accelerator.prepare(config.unet, "
    module = load_sd(prepare, "unet, _, optimizer = accelerator.prepare(config.unet, torch.nn.Linear(1, 1), ")
    install(vars(module), config=JaggConfig())
    stops(module, "is given 2 models")
