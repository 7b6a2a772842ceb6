"""The contract on changed trainers: the verdict on their text, and what a run does whose text is let through."""

import ast
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_install import make_model, run

from jagg_patch import JaggConfig, JaggError, install
from jagg_patch.contract import CONTRACTS, DANCEGRPO, differences, fingerprints
from jagg_patch.trainers import TRAINERS

FLUX = "train_grpo_flux"
TEXT = (Path(__file__).parent / f"loop/{FLUX}.py").read_text()
DEF = "def grpo_one_step(args, latents, pre_latents, transformer, timesteps, i, sigma_schedule):"
CALL = "            new_log_probs = grpo_one_step(\n"
ARGUMENTS = TEXT.partition(CALL)[2].partition("            )\n")[0]
BACKWARD = "            loss.backward()\n"
LOOPS = "    for i in range(args.n_samples):\n        for j in range(train_timesteps):\n"
ROLLOUT = "    rewards, latents, log_probs, sigmas = sample_reference_model(args, model)\n"
SOLVE = "    return flux_step(velocity, latents,"
SOLVED = next(line for line in TEXT.splitlines(True) if line.startswith(SOLVE))
STEP = "        if (i + 1) % args.gradient_accumulation_steps == 0:\n            optimizer.step()\n"

# The gradient stays what it was.
HARMLESS = {
    "comments and formatting": [DEF, DEF.replace("(args,", "(  # of one sample\n    args,"), BACKWARD, f"\n{BACKWARD}"],
    "a parameter renamed that nothing reads": [
        "def run_sample_step(args, z, sigmas, model):",
        "def run_sample_step(args, z, sigmas, model, unused=None):",
    ],
    "a parameter added, with a default": [DEF, DEF.replace("schedule)", "schedule, scale=1.0)")],
    "a parameter added, and given": [DEF, DEF.replace("(args,", "(scale, args,"), CALL, f"{CALL}                1.0,\n"],
    "parameters reordered": [
        DEF,
        DEF.replace("latents, pre_latents, transformer, timesteps", "timesteps, transformer, latents, pre_latents"),
        ARGUMENTS,
        """                args,
                timesteps[step : step + 1],
                model,
                latents[i : i + 1, step],
                latents[i : i + 1, step + 1],
                step,
                sigmas,
""",
    ],
    "given by name": [
        ARGUMENTS,
        """                args,
                transformer=model,
                timesteps=timesteps[step : step + 1],
                latents=latents[i : i + 1, step],
                pre_latents=latents[i : i + 1, step + 1],
                sigma_schedule=sigmas,
                i=step,
""",
    ],
    "unpacked arguments": [ARGUMENTS, ARGUMENTS.replace("                args,\n", "                *[args],\n")],
    "a reference forward without gradients": [
        CALL,
        f"            with torch.no_grad(): grpo_one_step(\n{ARGUMENTS}            )\n{CALL}",
    ],
    "one branch or the other": [
        f"{CALL}{ARGUMENTS}            )\n",
        "            if step % 2:\n"
        f"    {CALL}{ARGUMENTS}                )\n            else:\n    {CALL}{ARGUMENTS}                )\n",
    ],
    "backward with arguments": [BACKWARD, BACKWARD.replace("()", "(retain_graph=False)")],
    "samples enumerated": [LOOPS, LOOPS.replace("for i in range(args.n_samples)", "for i, _ in enumerate(latents)")],
    "the solver step in another module": [],
    "the solver step in another module, by a star": [],
    "the solver step assigned": [
        "def grpo_one_step(",
        "flux_step = (lambda function: function)(flux_step)\n\n\ndef grpo_one_step(",
    ],
    "an early return": [SOLVE, f"    if args.eta < 0:\n{SOLVED.replace('    ret', '        ret')}{SOLVE}"],
    "one expression or the other": [SOLVED, f"{SOLVED[:-1]} if args.eta < 0 else {SOLVED[11:]}"],
    "one case or the other": [
        SOLVED,
        "    match args.eta < 0:\n        case True:\n"
        f"            {SOLVED.strip()}\n        case False:\n            {SOLVED.strip()}\n",
    ],
    "an annotated permutation": ["    perms = ", "    perms: torch.Tensor = "],
    "a reference forward with gradients switched off": [
        CALL,
        f"            with torch.set_grad_enabled(False): grpo_one_step(\n{ARGUMENTS}            )\n{CALL}",
    ],
    "the place and a total, for the log": [
        LOOPS,
        f"    total = 0\n{LOOPS}",
        BACKWARD,
        f"{BACKWARD}            total += loss.item()\n            if j % 10 == 9: print(j, total)\n",
    ],
    "a reference under a condition that stands there twice": [
        BACKWARD,
        "            if args.eta > 0:\n                reference = new_log_probs.detach()\n"
        "            if args.eta > 0:\n                loss = loss + 0 * (new_log_probs - reference).mean()\n"
        f"{BACKWARD}",
    ],
    "a reference, and a log of it under more conditions": [
        BACKWARD,
        "            if args.eta > 0:\n                reference = new_log_probs.detach()\n"
        f"                loss = loss + 0 * (new_log_probs - reference).mean()\n{BACKWARD}"
        "            if args.eta > 0 and j == 99:\n                print(reference)\n"
        "            seen = reference.mean().item() if args.eta > 0 else 0.0\n"
        "            visited[-1] += 0 * int(seen)\n",
    ],
    "one backward or the other": [
        BACKWARD,
        "            if args.eta > 0:\n                loss.backward()\n"
        "            else:\n                (1 * loss).backward()\n",
    ],
    "a backward that is tried": [
        BACKWARD,
        "            try:\n                loss.backward()\n            except RuntimeError:\n                raise\n"
        "            finally:\n                del loss\n",
    ],
    "the loss and the log in one dictionary": [
        LOOPS,
        f"    info = {{'seen': []}}\n{LOOPS}",
        BACKWARD,
        "            info['loss'] = loss\n            info['seen'].append(loss.item())\n"
        f"            loss = info['loss']\n{BACKWARD}",
    ],
    "what all steps share, at the first": [
        "            loss = -(advantages[i]",
        "            if j == 0:\n                advantage = advantages[i]\n            loss = -(advantage",
    ],
    "clamped in place": [
        "            loss = -(advantages[i]",
        "            advantages = advantages.clamp(-9, 9)\n            loss = -(advantages[i]",
    ],
    "the step selected": ["            step = perms[i][j]\n", "            step = perms[i].select(0, int(j))\n"],
    "terms added up": [
        BACKWARD,
        f"            for term in (loss, loss):\n                loss = loss + 0 * term\n{BACKWARD}",
    ],
    "a second use of the variable": [
        BACKWARD,
        f"            loss, _ = torch.stack([loss, loss]).max(dim=0)\n            [i for i in range(2)]\n{BACKWARD}",
    ],
    "blocks that the pass doesn't go on from": [
        BACKWARD,
        "            if args.eta > 99:\n                try:\n                    loss = loss.detach()\n"
        "                except ValueError:\n                    raise\n    "
        "            else:\n                    raise ValueError\n"
        "                finally:\n                    raise ValueError\n"
        "            if args.eta > 99:\n                raise ValueError\n            else:\n                scale = 1.0\n"
        f"            loss = loss * scale\n{BACKWARD}",
    ],
    "a condition of several branches": [
        BACKWARD,
        "            try: scale = 1.0\n            except ValueError: scale = 2.0\n"
        f"            with torch.enable_grad(): loss = loss * scale\n{BACKWARD}",
    ],
    "the rollout in another function": [
        ROLLOUT,
        ROLLOUT.replace("sample_reference_model(args, model)", "sample_reference_model(model=model, args=args)"),
    ],
}
# The words that stop the run before it trains.
BROKEN = {
    "a parameter renamed": [
        [DEF, DEF.replace("timesteps", "t").replace("):", "):\n    timesteps = t")],
        "grpo_one_step() has no parameter timesteps",
    ],
    "the forward renamed": [
        [DEF, DEF.replace("grpo_one", "policy"), CALL, CALL.replace("grpo_one", "policy")],
        "there is no function grpo_one_step()",
    ],
    "the forward in another module": [[], "grpo_one_step() comes from trainer_parts now"],
    "the solver step twice": [
        [SOLVE, f"    flux_step(velocity, latents, args.eta, sigma_schedule, i, pre_latents, True, True)\n{SOLVE}"],
        "calls flux_step() in 2 places",
    ],
    "the solver step in a condition, and under it": [
        [SOLVED, f"    if {SOLVED.strip()[7:]} is not None:\n    {SOLVED}    raise ValueError\n"],
        "calls flux_step() in 2 places",
    ],
    "another solver step": [
        [
            "def flux_step(",
            "def solve(*args, **kwargs):\n    return flux_step(*args, **kwargs)\n\n\ndef flux_step(",
            SOLVE,
            SOLVE.replace("flux_step", "solve"),
        ],
        "calls flux_step() in 0 places",
    ],
    "the loops swapped": [
        [LOOPS, "    for j in range(train_timesteps):\n        for i in range(args.n_samples):\n"],
        "doesn't run over the steps of a sample",
    ],
    "the backward after the loop": [
        ["            loss.backward()\n", "        loss.backward()\n"],
        "there is no backward() in the loop over steps",
    ],
    "the losses added up": [
        [
            LOOPS,
            LOOPS.replace(":\n        for j", ":\n        total = 0\n        for j"),
            BACKWARD,
            "            total = total + loss\n        total.backward()\n",
        ],
        "there is no backward() in the loop over steps",
    ],
    "the losses of two steps added up": [
        [BACKWARD, "            total = loss if j % 2 == 0 else total + loss\n            if j % 2: total.backward()\n"],
        "backward() is conditional",
    ],
    "the backward in a function": [
        [BACKWARD, "            def run_backward(): loss.backward()\n            run_backward()\n"],
        "there is no backward() in the loop over steps",
    ],
    "the backward of the step before": [
        [BACKWARD, "", CALL, f"            if j:\n                loss.backward()\n{CALL}"],
        "backward() comes before the forward",
    ],
    "two backward passes": [
        [BACKWARD, BACKWARD.replace("()", "(retain_graph=True)") + BACKWARD],
        "there are 2 calls of backward()",
    ],
    "a second loss outside": [
        [STEP, f"        torch.nn.functional.mse_loss(model(torch.ones(1, 3)), torch.ones(1, 2)).backward()\n{STEP}"],
        "backward() outside the loop over steps",
    ],
    "steps left out": [[CALL, f"            if j == 3: continue\n{CALL}"], "may leave steps out"],
    "the optimizer in the loop": [
        [BACKWARD, f"{BACKWARD}            optimizer.step()\n"],
        "optimizer.step in the loop over steps",
    ],
    "gradients clipped in the loop": [
        [BACKWARD, f"{BACKWARD}            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"],
        "torch.nn.utils.clip_grad_norm_ in the loop over steps",
    ],
    "gradients dropped in the loop": [
        [BACKWARD, f"            optimizer.zero_grad()\n{BACKWARD}"],
        "optimizer.zero_grad in the loop",
    ],
    "gradients looked at in the loop": [
        [BACKWARD, f"{BACKWARD}            if next(model.parameters()).grad.abs().max() > 1: print('large')\n"],
        "next(model.parameters()).grad in the loop",
    ],
    "a loss that grows with the place": [
        [BACKWARD, f"            loss = loss * (1 + j)\n{BACKWARD}"],
        "depends on j, the step's place",
    ],
    "a loss weighted by the place": [
        [
            LOOPS,
            f"    weights = torch.linspace(0, 1, len(perms[0]))\n{LOOPS}",
            BACKWARD,
            f"            loss = loss * weights[j]\n{BACKWARD}",
        ],
        "depends on j, the step's place",
    ],
    "another loss at the first place": [
        [BACKWARD, f"            if j == 0:\n                loss = 2 * loss\n{BACKWARD}"],
        "depends on j, the step's place",
    ],
    "the step drawn before": [
        [BACKWARD, f"            loss = loss * perms[i][j - 1]\n{BACKWARD}"],
        "depends on j, the step's place",
    ],
    "a running mean": [
        [
            LOOPS,
            f"    mean = 1.0\n{LOOPS}",
            BACKWARD,
            f"            mean = 0.9 * mean + loss.item()\n            loss = loss / mean\n{BACKWARD}",
        ],
        "depends on mean, what the steps before left",
    ],
    "a count": [
        [LOOPS, f"    count = 0\n{LOOPS}", BACKWARD, "            count += 1\n            (loss * count).backward()\n"],
        "depends on count, what the steps before left",
    ],
    "a list of the losses before": [
        [
            LOOPS,
            f"    before = []\n{LOOPS}",
            BACKWARD,
            f"            before.append(loss.item())\n            loss = loss / before[0]\n{BACKWARD}",
        ],
        "depends on before, what the steps before left",
    ],
    "a constant from some place on": [
        [
            LOOPS,
            LOOPS.replace(":\n        for j", ":\n        scale = 1.0\n        for j"),
            BACKWARD,
            f"            if j >= 5:\n                scale = 0.5\n            loss = loss * scale\n{BACKWARD}",
        ],
        "depends on j, the step's place",
    ],
    "a stop from some step on": [
        [
            LOOPS,
            LOOPS.replace(":\n        for j", ":\n        stop = False\n        for j"),
            BACKWARD,
            "            if ratio.mean() > 2:\n                stop = True\n"
            f"            if stop:\n                loss = loss * 0\n{BACKWARD}",
        ],
        "depends on stop, what the steps before left",
    ],
    "a sign that turns": [
        [LOOPS, f"    sign = 1\n{LOOPS}", BACKWARD, f"            sign = -sign\n            loss = loss * sign\n{BACKWARD}"],
        "depends on sign, what the steps before left",
    ],
    "a mean kept in a tensor's data": [
        [
            LOOPS,
            f"    mean = torch.ones(())\n{LOOPS}",
            BACKWARD,
            f"            mean.data = 0.9 * mean.data + 0.1 * loss.detach()\n            loss = loss / mean\n{BACKWARD}",
        ],
        "depends on mean, what the steps before left",
    ],
    "the place as a size": [
        [BACKWARD, f"            loss = loss * perms[i][:j].shape[0]\n{BACKWARD}"],
        "depends on j, the step's place",
    ],
    "one branch without a backward": [
        [BACKWARD, f"            if j == 3:\n                pass\n            else:\n    {BACKWARD}"],
        "backward() is conditional",
    ],
    "a mean kept in a tensor": [
        [
            LOOPS,
            f"    mean = torch.ones(())\n{LOOPS}",
            BACKWARD,
            f"            mean.lerp_(loss.detach(), 0.1)\n            loss = loss / mean\n{BACKWARD}",
        ],
        "depends on mean, what the steps before left",
    ],
    "the next of a list": [
        [LOOPS, f"    weights = iter(range(99))\n{LOOPS}", BACKWARD, f"            loss = loss * next(weights)\n{BACKWARD}"],
        "depends on weights, what the steps before left",
    ],
    "the place from a list": [
        [
            LOOPS,
            LOOPS.replace("j in range(train_timesteps)", "_, j in enumerate(list(range(train_timesteps)))"),
            BACKWARD,
            f"            loss = loss * 0.9**j\n{BACKWARD}",
        ],
        "depends on j, the step's place",
    ],
    "a gradient of the place": [
        [BACKWARD, BACKWARD.replace("()", "(gradient=torch.tensor(1.0 + j))")],
        "depends on j, the step's place",
    ],
    "gradients clipped in a function": [
        [
            "def train_one_step(",
            "def clip(model):\n    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n\n\ndef train_one_step(",
            BACKWARD,
            f"{BACKWARD}            clip(model)\n",
        ],
        "torch.nn.utils.clip_grad_norm_ in the loop",
    ],
    "a hook on the loss": [
        [BACKWARD, f"            loss.register_hook(lambda grad: grad * (1 + j))\n{BACKWARD}"],
        "register_hook in the loop",
    ],
    "what a condition left": [
        [
            BACKWARD,
            f"            if step == 3:\n                scale = loss.item()\n            loss = loss / scale\n{BACKWARD}",
        ],
        "depends on scale, what the steps before left",
    ],
    "another sample at each step": [
        [CALL, f"            i = (i + 1) % args.n_samples\n{CALL}"],
        "i changes in the loop over steps",
    ],
    "the backward after an and": [
        [BACKWARD, "            len(loss.shape) == 0 and loss.backward()\n"],
        "backward() is conditional",
    ],
    "the backward in a case": [
        [BACKWARD, f"            match 0:\n                case 0:\n        {BACKWARD}"],
        "backward() is conditional",
    ],
    "two definitions": [
        [DEF, f"if False:\n    def grpo_one_step(): pass\n\n\n{DEF}"],
        "grpo_one_step is defined or assigned in 2 places",
    ],
    "a definition replaced": [
        [
            "def train_one_step(",
            "def train_one_step(*args):\n    return one_step(*args)\n\n\ntrain_one_step = train_one_step\n\n\ndef one_step(",
        ],
        "train_one_step is defined or assigned in 2 places",
    ],
    "a second pass over the samples": [
        [LOOPS, "    for _ in range(2):\n      for i in range(args.n_samples):\n        for j in range(train_timesteps):\n"],
        "3 loops run between perms and the forward, not 2",
    ],
    "a second loop of its own": [
        [
            STEP,
            f"{STEP}{LOOPS}            step = perms[i][j]\n"
            f"            grpo_one_step(\n{ARGUMENTS}            ).mean().backward()\n",
        ],
        "calls grpo_one_step() in 2 places",
    ],
    "a while loop": [
        [LOOPS, LOOPS.replace("for j in range(train_timesteps):", "j = -1\n        while (j := j + 1) < train_timesteps:")],
        "isn't called in a for loop",
    ],
    "arguments in another order than the parameters": [
        [DEF, DEF.replace("transformer, timesteps", "timesteps, transformer")],
        "doesn't run over the steps of a sample",
    ],
    "the permutation gone": [
        ["            torch.randperm(n)\n", "            torch.arange(n)\n"],
        "has 0 calls of randperm() in statements `perms = …`",
    ],
    "the rollout twice": [[ROLLOUT, ROLLOUT * 2], "calls sample_reference_model() in 2 places"],
    "a generator": [["    return visited", "    yield visited"], "train_one_step() has become a generator"],
}
# What the text doesn't show: the words that stop the run while it trains, before an optimizer step.
STOPPED = {
    "the steps in another order": [
        ["    train_timesteps = int(", "    perms = perms.flip(1)\n    train_timesteps = int("],
        "the plan expected",
    ],
    "fewer steps": [["range(train_timesteps):", "range(train_timesteps - 2):"], "the plan expected|steps planned"],
}


def in_another_module(text, name, imported):
    """The text of the loop, and of a module that has the function `name` of it, of which `imported` is imported."""
    tree = ast.parse(text)
    (definition,) = (node for node in tree.body if getattr(node, "name", None) == name)
    lines = text.splitlines(True)
    moved = lines[definition.lineno - 1 : definition.end_lineno]
    rest = lines[: definition.lineno - 1] + lines[definition.end_lineno :]
    return "".join(rest).replace(
        "import torch\n", f"import torch\nfrom trainer_parts import {imported}\n"
    ), "import torch\n\n\n" + "".join(moved)


@pytest.fixture
def load(load_loop, tmp_path, monkeypatch):
    """`load(name of the change, its pieces)` is the changed trainer as a module."""

    def load_changed(change, pieces):
        if "in another module" not in change:
            return load_loop(FLUX, *pieces)
        name = "flux_step" if "solver" in change else "grpo_one_step"
        text, parts = in_another_module(TEXT, name, "*" if "star" in change else name)
        (tmp_path / "trainer_parts.py").write_text(parts)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "trainer_parts", raising=False)
        return load_loop(FLUX, TEXT, text)

    return load_changed


def verdict(module, contract=replace(DANCEGRPO, hook=())):
    return [str(one) for one in differences(Path(module.__file__).read_text(), contract) if one.is_fatal]


def gradients(module, schedule, **settings):
    install(vars(module), config=JaggConfig(frac=1, schedule=schedule, **settings))
    return run(module)[1]


@pytest.fixture(scope="module", params=["joint", "sequential"])
def schedule(request):
    return request.param


@pytest.fixture
def expected(load_loop, schedule):
    return gradients(load_loop(FLUX), schedule)


@pytest.mark.parametrize("change", HARMLESS)
def test_a_harmless_change_is_let_through_and_trains_the_same(load, expected, schedule, change):
    module = load(change, HARMLESS[change])
    assert verdict(module) == []
    assert torch.equal(gradients(module, schedule), expected)


@pytest.mark.parametrize("change", BROKEN)
def test_a_change_that_breaks_the_contract_stops_the_run_before_it_trains(load, change):
    pieces, words = BROKEN[change]
    module = load(change, pieces)
    found = verdict(module)
    assert any(words in one for one in found)
    with pytest.raises(JaggError) as error:
        install(vars(module), config=JaggConfig())
    first, second = str(error.value).splitlines()
    assert first == f"{module.__file__}: {found[0]}" and "JAGG_ENABLED=0" in second


@pytest.mark.parametrize("change", STOPPED)
def test_what_the_text_does_not_show_stops_the_run_before_a_wrong_gradient_is_used(load, schedule, change):
    pieces, words = STOPPED[change]
    module = load(change, pieces)
    assert verdict(module) == []
    with pytest.raises(JaggError, match=words):
        gradients(module, schedule)


def test_another_name_is_a_change_of_the_contract_alone(load_loop, monkeypatch, expected, schedule):
    """As patches/README.md says."""
    renamed = {name: f"policy_{name}" for name in ("train_one_step", "sample_reference_model", "grpo_one_step", "flux_step")}
    text = TEXT
    for old, new in renamed.items():
        text = text.replace(f"{old}(", f"{new}(")
    module = load_loop(FLUX, TEXT, f"{text}\n\ndef train_one_step(*args):\n    return policy_train_one_step(*args)\n")
    names = {field: renamed[getattr(DANCEGRPO, field)] for field in ("loop", "rollout", "forward")}
    names["solvers"] = tuple(renamed[name] for name in DANCEGRPO.solvers)
    parameters, recording = (
        {renamed.get(name, name): wanted for name, wanted in wanted_of.items()}
        for wanted_of in (DANCEGRPO.parameters, DANCEGRPO.recording)
    )
    monkeypatch.setitem(CONTRACTS, FLUX, replace(DANCEGRPO, **names, parameters=parameters, recording=recording))
    assert torch.equal(gradients(module, schedule), expected)


def test_what_skipped_forwards_need_is_asked_for_where_they_are_skipped(load_loop, schedule, expected):
    module = load_loop(
        FLUX, DEF, DEF.replace("pre_latents", "after"), "sigma_schedule, i, pre_latents,", "sigma_schedule, i, after,"
    )
    assert verdict(module) == []
    with pytest.raises(JaggError, match="no parameter pre_latents .* where forwards are left out .*\n.* JAGG_SKIP_FORWARDS=0"):
        gradients(module, schedule, skip_forwards=True)
    assert torch.equal(gradients(module, schedule), expected)


def test_line_ends_and_tabs_are_no_difference():
    expected = fingerprints(TEXT, DANCEGRPO)
    for changed in (TEXT.replace("\n", "\r\n"), re.sub("^ +", lambda spaces: "\t" * (len(spaces[0]) // 4), TEXT, flags=re.M)):
        assert differences(changed, replace(DANCEGRPO, hook=())) == []
        assert fingerprints(changed, DANCEGRPO) == expected
    (only,) = differences(TEXT.replace("def flux_step(", "def flux step("), DANCEGRPO)
    assert "line 13)" in only.what and "can't read it" in only.means and not only.is_readable
    assert differences(b"\xef\xbb\xbf" + TEXT.encode(), replace(DANCEGRPO, hook=())) == []
    for unreadable in (b"\xff" + TEXT.encode(), TEXT + "x = " + "-" * 100_000 + "1\n"):
        assert not differences(unreadable, DANCEGRPO)[0].is_readable


def test_the_page_says_how_many_changes_have_been_tried():
    page = (Path(__file__).resolve().parents[2] / "patches/README.md").read_text()
    assert f"of {len(HARMLESS)} harmless changes" in page
    assert f"{len(BROKEN)} changes that would train wrong" in page and f"{len(STOPPED)} that the text doesn't show" in page


GUARD = """if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    args = parser.parse_args()
    train_one_step(args)
"""


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", None),
        ("args = parser.parse_args()", "args, rest = parser.parse_known_args()", None),
        ("    args = parser.parse_args()\n    train_one_step(args)", "    train_one_step(parser.parse_args())", None),
        ("parser.parse_args()", "parse()", 0),
        ("    args = parser", "    parser.parse_args()\n    args = parser", 2),
        ('if __name__ == "__main__":', "if True:", 0),
    ],
)
def test_the_hook_needs_one_place(old, new, found):
    text = TEXT + "\n\n" + GUARD.replace(old, new)
    expected = [] if found is None else [f"{found} statements under `if __name__ …` call"]
    assert [str(one)[: len(expected[0])] for one in differences(text, DANCEGRPO)] == expected


def test_a_loop_that_nothing_calls_is_found():
    """As where upstream trains with a copy of it: JAGG would be off without a word."""
    (only,) = differences(f"{TEXT}\n\n{GUARD.replace('train_one_step', 'train')}", DANCEGRPO)
    assert str(only) == "nothing calls train_one_step(): JAGG would never see a step"


def test_a_fingerprint_is_of_the_code_alone():
    before = fingerprints(TEXT, DANCEGRPO)
    assert set(before) == {"train_one_step", "sample_reference_model", "grpo_one_step", "flux_step", "run_sample_step", "hook"}
    same = TEXT.replace(DEF, DEF + '\n    """Says what it does."""  # and so on').replace("visited = []", "visited = [ ]")
    assert fingerprints(same, DANCEGRPO) == before
    other = TEXT.replace("/ (2 * eta**2)", "/ (3 * eta**2)")
    assert {name for name, now in fingerprints(other, DANCEGRPO).items() if now != before[name]} == {"flux_step"}


def test_a_function_that_is_imported_is_looked_at_where_it_is(tmp_path):
    text, parts = in_another_module(TEXT, "flux_step", "flux_step")
    contract, modules = replace(DANCEGRPO, hook=()), {"trainer_parts": parts}
    assert differences(text, contract, modules.get) == []
    assert fingerprints(text, contract, modules.get)["flux_step"] == fingerprints(TEXT, contract)["flux_step"]
    modules["trainer_parts"] = parts.replace("model_output", "output")
    (only,) = (one for one in differences(text, contract, modules.get) if one.is_fatal)
    assert only.what == "flux_step() has no parameter model_output any more"
    assert differences(text, contract) == []  # not found: install looks at it


def test_every_adapter_has_its_contract():
    assert set(CONTRACTS) == set(TRAINERS)
    assert all(TRAINERS[name].contract == contract for name, contract in CONTRACTS.items())


def test_the_contract_needs_the_standard_library_alone():
    """apply.sh checks it with any Python, so nothing may be imported with it."""
    script = (
        "import sys, types; package = sys.modules['p'] = types.ModuleType('p'); package.__path__ = [sys.argv[1]]\n"
        "before = set(sys.modules); import p.contract; print(*sorted(set(sys.modules) - before))"
    )
    command = [sys.executable, "-S", "-c", script, Path(__file__).resolve().parents[2] / "jagg_patch"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} - {"p"} <= sys.stdlib_module_names


def test_the_model_of_the_tests_has_gradients_that_differ_by_step(load_loop):
    """Else an order that is wrong wouldn't show."""
    found = [run(load_loop(FLUX), make_model(), timestep_fraction=k / 15)[1] for k in (14, 15)]
    assert not torch.allclose(*found)
