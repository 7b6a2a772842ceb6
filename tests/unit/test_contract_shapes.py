"""The verdict on loops of all three shapes that shuffle steps, leave samples out or call other solvers; and how some run."""

import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_install import run as run_one_step
from test_main_loops import run
from torch.testing import assert_close

from jagg_patch import JaggConfig, JaggError, install
from jagg_patch.contract import CONTRACTS, differences
from jagg_patch.trainers import find_trainer

HERE = Path(__file__).parent
DANCE, FLOW, SD = "train_grpo_flux", "train_sd3_fast", "train_grpo_sd"
TEXTS = {name: (HERE / f"loop/{name}.py").read_text() for name in (DANCE, FLOW, SD)}


def changed(name, *pieces):
    """The text of a loop with pieces of it replaced: old, new, old, new, ..."""
    text = TEXTS[name]
    for old, new in zip(pieces[::2], pieces[1::2], strict=True):
        assert text.count(old) == 1, f"{old!r} is not in the loop once"
        text = text.replace(old, new)
    return text


def found(name, *pieces, **others):
    return differences(changed(name, *pieces), replace(CONTRACTS[name], hook=(), **others))


def verdict(name, *pieces, **others):
    return [str(one) for one in found(name, *pieces, **others) if one.is_fatal]


def line_of(text, words):
    return next(number for number, line in enumerate(text.splitlines(), 1) if words in line)


def test_the_loops_hold_as_they_are():
    assert [verdict(name) for name in TEXTS] == [[], [], []]


# -- steps that are shuffled in time

SAMPLES = "        for sample in samples:\n"
KEYS = '("timesteps", "latents", "next_latents", "log_probs")'
EACH = f"            for key in {KEYS}:\n                sample[key] = "
B = "config.batch_size"
ROWS = f"            perms = torch.stack([torch.randperm(n_train) for _ in range({B})])\n"
ORDER = "            order = torch.randperm(n_train)\n"
# Of each sample's steps, before the loop over them; `ORDER` is of n_train steps, `ROWS` of each sample in the batch.
SHUFFLED = {
    "as one of upstream's first versions had it in a comment": f"{ROWS}{EACH}sample[key][torch.arange({B})[:, None], perms]\n",
    "one order for all samples": f"{ORDER}{EACH}sample[key][:, order]\n",
    "in a comprehension": f"{ORDER}            sample = {{k: v[:, order] if v.ndim > 1 else v for k, v in sample.items()}}\n",
    "drawn in the index": f"            torch.manual_seed(0)\n{EACH}sample[key][:, torch.randperm(n_train)]\n",
    "moved to a device": f"{ORDER}            there = order.to('cpu').long()\n{EACH}sample[key][:, there]\n",
    "a part of the steps": f"            n = n_train\n            order = torch.randperm(n)[:n]\n{EACH}sample[key][:, order]\n",
    "gathered": f"{ROWS}{EACH}gathered(sample[key], perms)\n",
    "gathered by the method": f"{ROWS}            index = perms\n            timesteps = sample['timesteps'].gather(1, index)\n"
    "            sample['timesteps'] = timesteps\n",
    "taken along the dimension": f"{ROWS}            t = sample['timesteps']\n"
    "            sample['timesteps'] = torch.take_along_dim(t, perms, dim=1)\n",
    "index_select": f"{ORDER}{EACH}sample[key].index_select(1, order)\n",
    "index_select by name": f"{ORDER}{EACH}torch.index_select(sample[key], dim=1, index=order)\n",
    "the order of random numbers": f"            order = torch.rand(n_train).argsort()\n{EACH}sample[key][:, order]\n",
    "the second of a sort": f"            _, order = torch.rand(n_train).sort()\n{EACH}sample[key][:, order]\n",
    "the indices of a sort": f"            order = torch.sort(torch.rand(n_train)).indices\n{EACH}sample[key][:, order]\n",
    "a list": f"            order = list(range(n_train))\n            random.shuffle(order)\n{EACH}sample[key][:, order]\n",
    "drawn from a range": f"            order = random.sample(range(n_train), n_train)\n{EACH}sample[key][:, order]\n",
    "numpy's": f"            order = np.random.permutation(n_train)\n{EACH}sample[key][:, order]\n",
    "row by row": f"{ROWS}{EACH}torch.stack([sample[key][b, perms[b]] for b in range({B})])\n",
    "a row of a row": f"{ROWS}{EACH}torch.stack([sample[key][b][perms[b]] for b in range({B})])\n",
    "rows beside their orders": f"{ROWS}{EACH}torch.stack([row[perm] for row, perm in zip(sample[key], perms)])\n",
    "in place, row by row": f"{ROWS}            for b, perm in enumerate(perms):\n"
    "                sample['timesteps'][b] = sample['timesteps'][b, perm]\n",
    "column by column": f"{ORDER}{EACH}torch.stack([sample[key][:, k] for k in order], 1)\n",
    "transposed": f"{ORDER}{EACH}sample[key].transpose(0, 1)[order].transpose(0, 1)\n",
    "turned round": f"            n = n_train\n{EACH}sample[key].flip(1)\n",
    "turned round by name": f"            n = n_train\n{EACH}torch.flip(sample[key], dims=[1])\n",
    "rolled": f"            n = n_train\n{EACH}torch.roll(sample[key], 1, dims=1)\n",
    "in a function of the file": "            sample = shuffled(sample, n_train)\n",
}
HELPERS = f"""def gathered(x, perms):
    return torch.gather(x, 1, perms.view(*perms.shape, *[1] * (x.ndim - 2)).expand_as(x))


def shuffled(sample, n):
    order = torch.randperm(n)
    return sample | {{key: sample[key][:, order] for key in {KEYS}}}


def main(_):
"""


@pytest.mark.parametrize("spelling", SHUFFLED)
def test_steps_shuffled_in_time_break_a_contract_without_a_permutation(spelling):
    pieces = "def main(_):\n", HELPERS, SAMPLES, SAMPLES + SHUFFLED[spelling]
    (only,) = verdict(FLOW, *pieces)
    assert "the steps of a sample in another order" in only and "JAGG takes a step's place for the step" in only
    text = changed(FLOW, *pieces)
    first = line_of(text, "for sample in samples") + 1
    assert first <= int(only.partition("line ")[2].partition(":")[0]) < first + SHUFFLED[spelling].count("\n")


# Of samples alone, of something else, of steps that come sorted: trained right as they are.
NOT_SHUFFLED = {
    "samples": [SAMPLES, f"        perm = torch.randperm({B})\n"
                f"        samples = [{{k: v[perm] for k, v in s.items()}} for s in samples]\n{SAMPLES}"],
    "samples, key by key": [SAMPLES, f"{SAMPLES}            perm = torch.randperm({B})\n            for key in sample:\n"
                            "                sample[key] = sample[key][perm]\n"],
    "samples, every column": [SAMPLES, f"{SAMPLES}            perm = torch.randperm({B})\n"
                              "            sample = {k: v[perm, ...] for k, v in sample.items()}\n"],
    "samples by index_select": [SAMPLES, f"{SAMPLES}            perm = torch.randperm({B})\n"
                                "            sample = {k: v.index_select(0, perm) for k, v in sample.items()}\n"],
    "the batches": [SAMPLES, f"        random.shuffle(samples)\n{SAMPLES}", "import torch\n", "import random\nimport torch\n"],
    "the identity, as upstream's": [SAMPLES, f"{SAMPLES}            rows = [torch.arange(n_train) for _ in range({B})]\n"
                                    f"            perms = torch.stack(rows)\n"
                                    f"{EACH}sample[key][torch.arange({B})[:, None], perms]\n"],
    "a part of the steps, sorted": [SAMPLES, f"{SAMPLES}            order = torch.randperm(n_train)[:n_train].sort().values\n"
                                    f"{EACH}sample[key][:, order]\n"],
    "places of one variable, and another of its name": [
        SAMPLES, f"        shown = random.sample(range({B}), 1)\n        for i in shown:\n"
        f"            seen = samples[0]['latents'][i]\n{SAMPLES}",
        "for j in range(n_train):",
        "for i in range(n_train):\n                j = i\n                sample['at'] = sample['timesteps'][:, i]",
        "import torch\n", "import random\nimport torch\n"],
    "steps that are left out of a weight": [
        SAMPLES, f"{SAMPLES}            chosen = torch.randperm(n_train)[:2]\n"
        f"            sample['weights'] = torch.ones({B}, n_train)\n"
        f"            sample['weights'][:, chosen] = 0.5\n"],
    "what isn't trained on": [SAMPLES, f"{SAMPLES}            shown = sample['latents'][:, torch.randperm(n_train)]\n"
                              "            seen = shown.mean()\n"],
}  # fmt: skip


@pytest.mark.parametrize("spelling", NOT_SHUFFLED)
def test_what_else_is_shuffled_holds_and_trains_right(load_loop, spelling):
    assert verdict(FLOW, *NOT_SHUFFLED[spelling]) == []
    expected = run(load_loop(FLOW, *NOT_SHUFFLED[spelling]))[1]
    module = load_loop(FLOW, *NOT_SHUFFLED[spelling])
    install(vars(module), config=JaggConfig(group_size=2, frac=1))
    assert_close(run(module)[1], expected, rtol=1e-5, atol=1e-7)


# -- samples that are left out

@pytest.mark.parametrize(
    "pieces",
    [
        [SAMPLES, f"{SAMPLES}            if sample['rewards'].sum() == 0:\n                continue\n"],
        [SAMPLES, f"{SAMPLES}            if sample['rewards'].sum() == 0:\n                break\n"],
        [SAMPLES, SAMPLES.replace("samples:", "[one for one in samples if one['rewards'].sum() != 0]:")],
    ],
)
def test_flow_grpo_s_samples_may_be_left_out(pieces):
    """Its steps need no order."""
    assert verdict(FLOW, *pieces) == []


BATCHES = "            for start in range(0, config.n_samples, config.train.batch_size):\n"
ADVANTAGES = "                for j in range(n_train):\n"
INSIDE = TEXTS[SD].partition(ADVANTAGES)[2].partition("\n\n\n")[0]
LEAVES_OUT = {
    "continue": [ADVANTAGES, f"                if advantages.abs().max() == 0:\n                    continue\n{ADVANTAGES}"],
    "break": [ADVANTAGES, f"                if advantages.abs().max() == 0:\n                    break\n{ADVANTAGES}"],
    "a condition": [
        ADVANTAGES + INSIDE,
        "                if advantages.abs().max() > 0:\n" + textwrap.indent(ADVANTAGES + INSIDE, "    "),
    ],
    "a filter": [BATCHES, BATCHES.replace("range(", "[n for n in range(").replace("):", ") if rewards[n] != 0]:")],
    "a filter before": [
        BATCHES,
        "            starts = [n for n in range(0, config.n_samples, config.train.batch_size) if rewards[n] != 0]\n"
        "            for start in starts:\n",
    ],
}


@pytest.mark.parametrize("way", LEAVES_OUT)
def test_stable_diffusion_s_samples_may_not_be_left_out(way):
    (only,) = verdict(SD, *LEAVES_OUT[way])
    assert "may leave samples out" in only and "which sample an order is of" in only


def test_keys_that_are_left_out_are_no_samples():
    over = "            for start in range(0, len(kept['latents']), config.train.batch_size):\n"
    kept = "            kept = {k: torch.where(v > 0, v, v) for k, v in samples.items() if k}\n"
    assert verdict(SD, BATCHES, kept + over) == []
    chosen = "            chosen = torch.nonzero(rewards).flatten()\n"  # before an order is drawn
    drawn = "            # fmt: off\n"
    assert verdict(SD, drawn, chosen + drawn, BATCHES, BATCHES.replace("0, ", "0 * len(chosen), ")) == []
    assert verdict(SD, BATCHES, chosen + BATCHES.replace("0, ", "0 * len(chosen), ")) != []


LOOPS = "    for i in range(args.n_samples):\n        for j in range(train_timesteps):\n"
STEP = "            step = perms[i][j]\n"
ZERO = LOOPS.replace("        for j", "        if advantages[i] == 0:\n            continue\n        for j")
FILTERED = LOOPS.replace("range(args.n_samples)", "[n for n in range(args.n_samples) if advantages[n] != 0]")
MASKED = "    chosen = torch.nonzero(advantages).flatten().tolist()\n" + LOOPS.replace("range(args.n_samples)", "chosen")


@pytest.mark.parametrize("loops", [ZERO, FILTERED, MASKED])
@pytest.mark.parametrize(
    ("step", "holds"),
    [
        (STEP, True),
        (STEP.replace("perms[i][j]", "perms[i, j]"), True),
        ("            row = perms[i]\n            step = row[j]\n", True),
        (STEP.replace("perms[i][j]", "int(perms[i][j])"), False),
        (STEP.replace("perms[i][j]", "perms[i][j].item()"), False),
        (STEP.replace("perms[i][j]", "perms.tolist()[i][j]"), False),
        (STEP.replace("perms[i][j]", "perms[i][j] + 0"), False),
    ],
)
def test_samples_may_be_left_out_where_the_permutation_says_whose_order_it_is(loops, step, holds):
    said = verdict(DANCE, LOOPS, loops, STEP, step)
    assert verdict(DANCE, STEP, step) == []
    assert said == [] if holds else ["which sample an order is of" in one for one in said] == [True]


def test_a_permutation_that_is_made_anew_does_not_say_whose_order_it_is():
    drawn = "    train_timesteps = int("
    (only,) = verdict(DANCE, drawn, f"    perms = perms[advantages != 0]\n{drawn}", LOOPS, ZERO)
    assert "which sample an order is of" in only
    assert verdict(DANCE, drawn, f"    perms = perms.to('cpu')\n{drawn}", LOOPS, ZERO) == []


def test_an_end_before_the_last_sample_leaves_no_order_in_doubt():
    assert verdict(DANCE, STEP, STEP.replace("perms[i][j]", "int(perms[i][j])"), LOOPS, ZERO.replace("continue", "break")) == []
    stepped = "            optimizer.step()\n"
    assert verdict(DANCE, stepped, f"{stepped}        if i < 1:\n            continue\n        print(i)\n") == []


# -- where the loop over steps begins

STEPS = "            for j in range(n_train):\n"


@pytest.mark.parametrize(
    "over",
    [
        "range(1, n_train)",
        "range(n_train // 2, n_train)",
        "tqdm(range(1, n_train), desc='steps')",
        "[j for j in range(2, n_train)]",
        "range(n_train - 1, -1, -1)",
        "range(0, n_train, 2)",
        "reversed(range(n_train))",
        "list(range(n_train))[1:]",
        "list(range(n_train))[::-1]",
        "sorted(range(n_train), reverse=True)",
        "torch.randperm(n_train)",
    ],
)
def test_a_loop_that_does_not_begin_at_the_first_step_is_named(over):
    for new in (STEPS.replace("range(n_train)", over), f"            steps = {over}\n            for j in steps:\n"):
        pieces = STEPS, new
        (only,) = verdict(FLOW, *pieces)
        assert "doesn't run from the first step on" in only and "the plan begins there" in only
    two = LOOPS.replace("range(train_timesteps)", over.replace("n_train", "train_timesteps"))
    if "randperm" not in over:
        assert any("doesn't run from the first step on" in one for one in verdict(DANCE, LOOPS, two))


def test_where_it_begins_may_be_computed():
    start = "            first = 0\n"
    ranges = "0, n_train", "first, n_train", "config.first, n_train", "0, n_train, 1"
    others = "list(range(n_train))[:9]", "tqdm(range(n_train), disable=reversed([]))"
    for over in (*(f"range({one})" for one in ranges), *others):
        assert verdict(FLOW, STEPS, start + STEPS.replace("range(n_train)", over)) == []


def test_a_loop_over_the_permutation_itself_runs_over_all_it_has():
    over = LOOPS.replace("j in range(train_timesteps)", "step in perms[i][:train_timesteps]")
    assert verdict(DANCE, LOOPS, over, STEP, "") == []
    late = LOOPS.replace("j in range(train_timesteps)", "step in perms[i][1:train_timesteps]")
    assert any("doesn't run from the first step on" in one for one in verdict(DANCE, LOOPS, late, STEP, ""))


# -- solvers

CALL = "    return flux_step(velocity, latents, args.eta, sigma_schedule, i, pre_latents, grpo=True, sde_solver=True)[2]\n"
OTHER_STEP = """plain_step = flux_step


def other_step(model_output, *others, **named):
    return plain_step(model_output, *others, **named)


def grpo_one_step("""
TWO = "    if args.eta > {}:\n    " + CALL + CALL.replace("flux_step", "other_step")
PARAMETERS = CONTRACTS[DANCE].parameters | {"other_step": ("model_output",)}


def test_a_solver_in_one_branch_of_two_is_named_with_what_is_called_instead():
    assert verdict(DANCE, CALL, TWO.format(1), "def grpo_one_step(", OTHER_STEP) == [
        "grpo_one_step() may end without a call of flux_step(), and hands the model's output to other_step(): "
        "that call is where JAGG stands in for the model's output, once a step"
    ]
    for pieces in (
        [CALL, f"    if args.eta > 1:\n        return velocity.sum(1).detach()\n{CALL}"],
        [CALL, CALL.replace("return ", "return None if args.eta > 1 else ")],
        [CALL, f"    try:\n    {CALL}    except ValueError:\n        pass\n"],
        [CALL, f"    with torch.enable_grad():\n        if args.eta:\n        {CALL}"],
    ):
        assert "may end without a call of flux_step()" in "".join(verdict(DANCE, *pieces)), pieces
    for pieces in (
        [CALL, f"    if args.eta > 9:\n        raise ValueError\n{CALL}"],
        [CALL, f"    with torch.enable_grad():\n    {CALL}"],
        [CALL, f"    try:\n    {CALL}    except ValueError:\n        raise\n"],
    ):
        assert verdict(DANCE, *pieces) == []


@pytest.mark.parametrize("picked", [0, 1])
def test_several_solvers_are_a_change_of_the_contract_alone(load_loop, monkeypatch, picked):
    plain = load_loop(DANCE)
    install(vars(plain), config=JaggConfig(frac=1))
    expected = run_one_step(plain)[1]
    two = replace(CONTRACTS[DANCE], solvers=("flux_step", "other_step"), parameters=PARAMETERS)
    monkeypatch.setitem(CONTRACTS, DANCE, two)
    module = load_loop(DANCE, CALL, TWO.format(picked), "def grpo_one_step(", OTHER_STEP)
    install(vars(module), config=JaggConfig(frac=1))
    assert torch.equal(run_one_step(module)[1], expected)


FLOW_CALL = "    return sde_step_with_logprob(\n"
FLOW_ARGUMENTS = TEXTS[FLOW].partition(FLOW_CALL)[2].partition("    )\n")[0]


@pytest.mark.parametrize("skips", [False, True])
def test_flow_grpo_s_several_solvers(load_loop, monkeypatch, skips):
    """The rollout's are all recorded."""
    definition = "plain_step = sde_step_with_logprob\n\n\ndef other_step(scheduler, model_output, timestep, sample, {0}):\n"
    definition += "    return plain_step(scheduler, model_output, timestep, sample, prev_sample, noise_level)\n\n\n"
    pieces = [
        "def compute_log_prob(",
        definition.format("prev_sample=None, noise_level=0.7") + "def compute_log_prob(",
        FLOW_CALL,
        f"    if j < 5:\n        return other_step(\n{FLOW_ARGUMENTS}        )\n{FLOW_CALL}",
    ]
    rollout = "after, log_prob, _, _ = sde_step_with_logprob("
    pieces += [rollout, "after, log_prob, _, _ = (other_step if j < 5 else sde_step_with_logprob)("]
    plain, config = load_loop(FLOW), JaggConfig(frac=1, skip_forwards=skips)
    handle = install(vars(plain), config=config)
    expected, skipped = run(plain, n_epochs=3)[1], handle.stats.skipped_forwards
    needs = CONTRACTS[FLOW].recording["sde_step_with_logprob"]
    contract = CONTRACTS[FLOW]
    two = replace(
        contract,
        solvers=(*contract.solvers, "other_step"),
        parameters=contract.parameters | {"other_step": ("model_output",)},
        recording=contract.recording | {"other_step": needs},
    )
    monkeypatch.setitem(CONTRACTS, FLOW, two)
    module = load_loop(FLOW, *pieces)
    handle = install(vars(module), config=config)
    assert torch.equal(run(module, n_epochs=3)[1], expected)
    assert handle.stats.skipped_forwards == skipped and bool(skipped) == skips


@pytest.mark.parametrize(
    "returned",
    [
        "return LOG_PROB, velocity",
        "return LOG_PROB, velocity.float().mean()",
        "log_prob = LOG_PROB\n    squared = velocity.square()\n    return dict(log_prob=log_prob, squared=squared)",
        "log_prob = LOG_PROB\n    result = [log_prob]\n    result.append(velocity)\n    return result",
        "return LOG_PROB + 0 * velocity.sum(1)",
    ],
)
def test_a_model_output_returned_beside_the_log_probability_is_named(returned):
    text = "    " + returned.replace("LOG_PROB", CALL.strip().removeprefix("return ")) + "\n"
    (only,) = verdict(DANCE, CALL, text)
    assert "grpo_one_step() returns the model's output beside" in only and "would lose that gradient" in only


@pytest.mark.parametrize(
    "beside",
    ["velocity.detach()", "velocity.shape", "len(velocity)", "velocity.dtype", "velocity.norm().item()",
     "float(velocity[0, 0])", "latents", "args.eta"],
)  # fmt: skip
def test_what_has_no_gradient_may_be_returned_beside_the_log_probability(beside):
    assert verdict(DANCE, CALL, CALL.replace("[2]", f"[2], {beside}")) == []


def test_a_reference_s_output_may_be_too():
    without = "    with torch.no_grad(), transformer.disable_adapter():\n"
    reference = "        before = run_model(transformer, latents, timesteps)\n"
    assert verdict(DANCE, CALL, without + reference + CALL.replace("[2]", "[2], before")) == []


# -- the rest

def trained(load_loop, *pieces):
    """The gradients of Flow-GRPO's loop, all steps in groups."""
    module = load_loop(FLOW, *pieces)
    install(vars(module), config=JaggConfig(frac=1))
    return run(module)[1]


ALIAS = ["def pipeline_with_logprob(", "def roll_out(", "[pipeline_with_logprob(", "[roll_out("]


def test_flow_grpo_s_rollout_may_have_another_name(load_loop):
    assert verdict(FLOW, *ALIAS) == []
    said = [str(one) for one in found(FLOW, *ALIAS)]
    settings = "JAGG_SKIP_FORWARDS, JAGG_RETAIN, JAGG_PROBE_EVERY, JAGG_LOG, JAGG_FRAC=auto"
    assert len(said) == 2 and all(settings in one for one in said)
    assert torch.equal(trained(load_loop, *ALIAS), trained(load_loop))


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        (dict(skip_forwards=True), "JAGG_SKIP_FORWARDS=0"),
        (dict(retain=True), "JAGG_RETAIN=0"),
        (dict(probe_every=1), "JAGG_PROBE_EVERY=0"),
        (dict(log="log.jsonl"), "JAGG_LOG unset"),
        (dict(frac="auto"), "a number as JAGG_FRAC"),
    ],
)
def test_what_needs_flow_grpo_s_rollout_stops_where_it_has_another_name(load_loop, settings, advice):
    module = load_loop(FLOW, *ALIAS)
    install(vars(module), config=JaggConfig(**settings))
    with pytest.raises(JaggError, match="there is no function pipeline_with_logprob") as error:
        run(module)
    assert f"run with {advice}, or move" in str(error.value)


REWARDS = """        for sample in samples:
            guide = torch.ones(2, requires_grad=True)
            (guide * sample["latents"][:, -1]).sum().backward()
            sample["rewards"] = sample["rewards"] + 0 * guide.grad.sum()
"""


def test_a_reward_s_gradient_in_the_rollout_holds_and_trains_the_same(load_loop):
    pieces = SAMPLES, f"{REWARDS}{SAMPLES}"
    assert verdict(FLOW, *pieces) == []
    assert torch.equal(trained(load_loop, *pieces), trained(load_loop))


def test_a_backward_that_the_loop_over_samples_could_reach_does_not_hold():
    inside = REWARDS.replace("        for sample in samples:\n", "")
    for pieces in (
        [SAMPLES, SAMPLES + inside],
        [SAMPLES, f"        def pull(loss):\n            loss.backward()\n\n{SAMPLES}"],
        [STEPS, f"{inside}{STEPS}"],
    ):
        assert any("backward() outside the loop" in one for one in verdict(FLOW, *pieces)), pieces


BACKWARD = "            loss.backward()\n"
SEVERAL = "            {need} = {test}\n            if {need}:\n                x = loss.detach()\n            if {then}:\n"
USED = "                loss = loss + 0 * x\n" + BACKWARD


@pytest.mark.parametrize(
    ("test", "then", "holds"),
    [
        ("args.eta > 0 or args.beta", "args.eta > 0", True),
        ("args.eta > 0 or args.beta", "args.beta", True),
        ("args.eta > 0 or args.beta or args.gamma", "args.beta and step != 3", True),
        ("args.eta > 0", "args.eta > 0", True),
        ("args.eta > 0", "not (args.beta or not need)", True),
        ("args.eta > 0 and args.beta", "args.eta > 0 and args.beta", True),
        ("not args.eta > 0", "not args.eta > 0", True),
        ("not (args.eta and args.beta)", "not args.eta", True),
        ("args.eta > 0 and args.beta", "args.eta > 0", False),
        ("args.eta > 0", "args.eta > 0 or args.beta", False),
        ("args.eta or args.beta", "not args.eta", False),
        ("args.eta or args.beta", "args.gamma", False),
    ],
)
def test_a_condition_that_follows_from_another_leaves_nothing_from_the_step_before(test, then, holds):
    text = SEVERAL.format(need="need", test=test, then=then) + USED
    said = verdict(DANCE, BACKWARD, text)
    assert said == [] if holds else any("depends on x, what the steps before left" in one for one in said)
    inline = text.replace(f"            need = {test}\n", "").replace("if need:", f"if {test}:")
    inline = inline.replace("not need", f"not ({test})")
    assert bool(verdict(DANCE, BACKWARD, inline)) == (not holds)


def test_a_condition_that_has_changed_since_does_not_hold_any_more():
    text = SEVERAL.format(need="need", test="wanted or args.beta", then="wanted") + USED
    wanted = "            wanted = bool(args.eta > 0)\n"
    assert verdict(DANCE, BACKWARD, wanted + text) == []
    later = text.replace("            if wanted:", "            wanted = bool(args.eta)\n            if wanted:")
    assert any("depends on x" in one for one in verdict(DANCE, BACKWARD, wanted + later))
    later = text.replace("            if need:", "            wanted = bool(args.eta)\n            if need:")
    assert any("depends on x" in one for one in verdict(DANCE, BACKWARD, wanted + later))


OLD_FAST = [
    "config.sample.sde_window_size or config.sample.num_steps - 1",
    "config.sample.train_num_steps",
    "sde_window_size=window",
    "train_num_steps=window",
]


@pytest.mark.parametrize("pieces", [OLD_FAST, [*OLD_FAST[:3], "sde_window_size=2, train_num_steps=window"]])
def test_a_loop_over_train_num_steps_is_planned_so(load_loop, pieces):
    """As Flow-GRPO's of August and September 2025, and a fork of it with the newer settings beside."""
    module = load_loop(FLOW, *pieces)
    handle = install(vars(module))
    run(module, window=4)
    assert handle.config.frac == 1 and handle.stats.grouped_steps == 2 * 4
    direct = [STEPS, STEPS.replace("n_train", "config.sample.train_num_steps")]
    assert find_trainer(vars(load_loop(FLOW, *pieces, *direct))).window == "train_num_steps"


def test_a_setting_that_the_loop_does_not_read_is_not_planned_by(load_loop):
    module = load_loop(FLOW, "sde_window_size=window", "sde_window_size=window, train_num_steps=2")
    handle = install(vars(module))
    run(module, window=4)
    assert handle.stats.grouped_steps == 2 * 4


def test_a_window_in_trajectory_order_and_three_solvers_are_named_as_such():
    """MixGRPO's shape: no permutation of steps, another solver for each setting."""
    solvers = "".join(f"    if args.solver == '{n}':\n    {CALL.replace('flux_step', n)}" for n in ("flow_step", "dance_step"))
    text = changed(
        DANCE,
        CALL, f"{solvers}{CALL.replace('flux_step', 'dpm_step')}",
        "import torch\n", "import torch\nfrom sampling import dance_step, dpm_step, flow_step\n",
        "            torch.randperm(n)\n", "            torch.arange(n)\n",
    ).replace("flux_step", "dpm_step").replace("def dpm_step(", "def sample_step(")  # fmt: skip
    said = [str(one) for one in differences(text, replace(CONTRACTS[DANCE], hook=()))]
    assert said[0] == (
        "there is no function flux_step(): grpo_one_step() hands the model's output to dance_step(), dpm_step(), flow_step()"
    )
    assert any("perms" in one and "in trajectory order" in one for one in said)


CLIPS = [
    ("if accelerator.sync_gradients:", True),
    ("if accelerator.sync_gradients and config.train.clips:", True),
    ("if not accelerator.sync_gradients:\n    pass\nelse:", True),
    ("now = accelerator.sync_gradients\nif now:", True),
    ("if bool(accelerator.sync_gradients):", True),
    ("if accelerator.sync_gradients:\n    pass\nelse:", False),
    ("if not accelerator.sync_gradients:", False),
    ("if accelerator.sync_gradients or j == 3:", False),
    ("if config.train.max_grad_norm > 0:", False),
    ("if (j + 1) % 2 == 0:", False),
    ("if torch.isfinite(loss):", False),
    ("if True:", False),
]


@pytest.mark.parametrize(("branch", "holds"), CLIPS)
@pytest.mark.parametrize("call", ["accelerator.clip_grad_norm_(policy.parameters(), 1.0)", "print(policy.weight.grad)"])
def test_gradients_are_clipped_where_accelerate_syncs_them_and_nowhere_else(call, branch, holds):
    backward = "                    accelerator.backward(loss)\n"
    lines = [*branch.splitlines(), f"    {call}"]
    found = verdict(FLOW, backward, backward + "".join(f"{' ' * 20}{line}\n" for line in lines))
    assert (found == []) == holds
    assert all("in the loop over steps" in str(difference) for difference in found)
