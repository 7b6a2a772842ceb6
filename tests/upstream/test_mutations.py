"""The real trainers, changed in their syntax trees as upstream could: the verdicts, and a run of what is let through."""

import ast
import shutil

import pytest
import torch
from checkouts import DANCEGRPO, FLOW_GRPO, HERE, paths, require_dancegrpo
from launch import ROOT, torchrun

from jagg_patch.contract import CONTRACTS, LOOPS, differences

require_dancegrpo()

FOLDERS = {"train_grpo": DANCEGRPO / "fastvideo", "train": FLOW_GRPO / "scripts"}
FILES = [FOLDERS["train_grpo" if name.startswith("train_grpo") else "train"] / f"{name}.py" for name in CONTRACTS]
FILES = [file for file in FILES if file.is_file()]


class Trainer:
    """The tree of a trainer, and the places that changes are made in."""

    def __init__(self, file):
        self.contract = CONTRACTS[file.stem]
        self.tree = ast.parse(file.read_text())
        self.modules = {}  # that it is split into, by name

    def function(self, name):
        return next(node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == name)

    def calls(self, name):
        return [n for n in ast.walk(self.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == name]

    def holders(self, test):
        """`(list of statements, index)` of the statements that `test` is true of, outermost first."""
        return [
            (body, index)
            for node in ast.walk(self.function(self.contract.loop))
            for body in (getattr(node, field, None) for field in ("body", "orelse"))
            if isinstance(body, list)
            for index, statement in enumerate(body)
            if test(statement)
        ]

    def steps(self):
        """The loop over steps, and where it stands."""

        def has_backward(node):
            return isinstance(node, LOOPS) and any(isinstance(n, ast.Attribute) and n.attr == "backward" for n in ast.walk(node))

        body, index = self.holders(has_backward)[-1]
        return body[index], body, index

    def backward(self):
        def is_backward(node):
            return (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Call)
                and ast.unparse(node.value.func).endswith(".backward")
            )

        ((body, index),) = self.holders(is_backward)
        return body, index

    def text(self):
        return ast.unparse(ast.fix_missing_locations(self.tree))

    def verdict(self):
        return [str(one) for one in differences(self.text(), self.contract, self.modules.get) if one.is_fatal]


def parse(text):
    return ast.parse(text).body


def rename_parameter(trainer, function, old, new):
    definition = trainer.function(function)
    for node in ast.walk(definition):
        if isinstance(node, ast.arg) and node.arg == old:
            node.arg = new
        elif isinstance(node, ast.Name) and node.id == old:
            node.id = new
    for call in trainer.calls(function):
        for keyword in call.keywords:
            keyword.arg = new if keyword.arg == old else keyword.arg


def add_parameter(trainer):
    definition = trainer.function(trainer.contract.forward)
    definition.args.args.append(ast.arg("scale"))
    definition.args.defaults.append(ast.Constant(1.0))


def reorder_parameters(trainer):
    """Of the training forward, in the definition and in its calls."""
    arguments = trainer.function(trainer.contract.forward).args
    arguments.args[:2] = arguments.args[1::-1]
    for call in trainer.calls(trainer.contract.forward):
        call.args[:2] = call.args[1::-1]


def split_off(trainer, name):
    """`name` into a module of its own, with all that this file imports."""
    imports = [node for node in trainer.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    definition = trainer.function(name)
    trainer.modules["trainer_parts"] = ast.unparse(ast.Module([*imports, definition], []))
    trainer.tree.body[trainer.tree.body.index(definition)] = parse(f"from trainer_parts import {name}")[0]


def swap_loops(trainer):
    steps, body, index = trainer.steps()
    ((outer, place),) = trainer.holders(lambda node: isinstance(node, ast.For) and node.body is body)
    samples = outer[place]
    (samples.target, samples.iter), (steps.target, steps.iter) = (steps.target, steps.iter), (samples.target, samples.iter)


def move_backward(trainer):
    _, around, place = trainer.steps()
    body, index = trainer.backward()
    around.insert(place + 1, body[index])
    body[index] = ast.Pass()


def put_into_loop(statement):
    def change(trainer):
        trainer.steps()[0].body.extend(parse(statement))

    return change


def put_before_backward(text):
    """`text` names the loss `{loss}`, and the variable that counts the steps `{place}`."""

    def change(trainer):
        place = trainer.steps()[0].target.id
        body, index = trainer.backward()
        call = body[index].value
        loss = ast.unparse(call.args[0] if call.args else call.func.value)
        body[index:index] = parse(text.format(place=place, loss=loss))

    return change


def change_sample(trainer):
    steps, body, _ = trainer.steps()
    ((outer, place),) = trainer.holders(lambda node: isinstance(node, ast.For) and node.body is body)
    sample = ast.unparse(outer[place].target.elts[-1])
    steps.body[:0] = parse(f"{sample} = other({sample})")


def pass_twice(trainer):
    """Over the samples, in the order that was drawn."""
    _, body, _ = trainer.steps()
    ((outer, place),) = trainer.holders(lambda node: isinstance(node, ast.For) and node.body is body)
    outer[place] = ast.For(ast.Name("again", ast.Store()), parse("range(2)")[0].value, [outer[place]], [])


def visit_again(trainer):
    _, body, index = trainer.steps()
    body.insert(index, body[index])


def backward_if(trainer):
    body, index = trainer.backward()
    body[index] = ast.If(ast.Name("is_last", ast.Load()), [body[index]], [])


def backward_twice(trainer):
    body, index = trainer.backward()
    body.insert(index, body[index])


def without_hook(trainer):
    trainer.tree.body[-1] = parse("if __name__ == '__main__':\n    start()")[0]


def forward_in_a_while(trainer):
    steps, body, index = trainer.steps()
    body[index] = ast.While(ast.Constant(True), steps.body, [])


BROKEN = {
    "step renamed": (lambda t: rename_parameter(t, t.contract.forward, t.contract.step, "now"), "has no parameter"),
    "solver's parameter renamed": (
        lambda t: rename_parameter(t, t.contract.solvers[0], "model_output", "output"),
        "has no parameter model_output",
    ),
    "forward moved": (lambda t: split_off(t, t.contract.forward), "comes from trainer_parts now"),
    "loops swapped": (swap_loops, "doesn't run over the steps of a sample"),
    "backward after the loop": (move_backward, "there is no backward() in the loop over steps"),
    "backward conditional": (backward_if, "backward() is conditional"),
    "two backward passes": (backward_twice, "2 calls of backward()"),
    "a break": (put_into_loop("if done:\n    break"), "may leave steps out"),
    "optimizer in the loop": (put_into_loop("optimizer.step()"), "optimizer.step in the loop"),
    "gradients looked at": (put_into_loop("print(next(parameters).grad)"), ".grad in the loop"),
    "loss ordered by place": (put_before_backward("{loss} = {loss} * (1 + {place})"), "the step's place in the loop"),
    "loss ordered by a list": (put_before_backward("{loss} = {loss} * [3, 2, 1][{place}]"), "the step's place in the loop"),
    "loss ordered by the neighbour": (
        put_before_backward("{loss} = {loss} * sample['log_probs'][:, {place} - 1]"),
        "the step's place in the loop",
    ),
    "loss ordered by a running mean": (
        put_before_backward("mean = .9 * mean + .1 * {loss}.item()\n{loss} = {loss} / mean"),
        "what the steps before left",
    ),
    "another sample": (change_sample, "changes in the loop over steps"),
    "a second pass": (pass_twice, "3 loops run between perms and the forward"),
    "a second loop over the steps": (visit_again, " places"),
    "a while loop": (forward_in_a_while, "isn't called in a for loop"),
    "no hook": (without_hook, "0 statements under `if __name__"),
}
HARMLESS = {
    "parameter added": add_parameter,
    "parameters reordered": reorder_parameters,
    "solver in another module": lambda trainer: split_off(trainer, trainer.contract.solvers[0]),
    "a log of the place and the loss": put_before_backward("if {place} == 0:\n    seen = []\nseen.append({loss}.item())"),
}


def suits(trainer, change):
    """Whether there is something to change so: not all have a solver step of their own, or a permutation."""
    contract = trainer.contract
    if "solver" in change and not set(contract.solvers) & {getattr(n, "name", None) for n in trainer.tree.body}:
        return False
    if (
        "step" in change and "renamed" in change or change == "forward moved" or "parameter" in change
    ) and contract.forward == "unet":
        return False
    if (change == "a second pass" or "ordered by" in change) and contract.permutation is None:
        return False
    return not (change == "optimizer in the loop" and contract.steps_optimizer)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_unchanged_tree_keeps_the_contract(file):
    assert Trainer(file).verdict() == []


CASES = [(file, change) for file in FILES for change in [*BROKEN, *HARMLESS] if suits(Trainer(file), change)]


@pytest.mark.parametrize(("file", "change"), CASES, ids=lambda value: value if isinstance(value, str) else value.stem)
def test_each_change_has_the_right_verdict(file, change):
    trainer = Trainer(file)
    if change in HARMLESS:
        HARMLESS[change](trainer)
        assert trainer.verdict() == []
    else:
        apply, words = BROKEN[change]
        apply(trainer)
        assert any(words in one for one in trainer.verdict())


def test_what_is_let_through_trains_right(dancegrpo, tmp_path):
    """All harmless changes at once in the Flux trainer, whose real training step then runs."""
    checkout, out = tmp_path / "DanceGRPO", tmp_path / "cells"
    shutil.copytree(dancegrpo, checkout)
    (out / "images").mkdir(parents=True)
    file = checkout / "fastvideo/train_grpo_flux.py"
    trainer = Trainer(file)
    for change in HARMLESS.values():
        change(trainer)
    file.write_text(trainer.text())
    for name, text in trainer.modules.items():
        (checkout / f"{name}.py").write_text(text)
    arguments = checkout, file.stem, out, "unpatched", "off", "W=2", "W=4"
    torchrun(1, HERE / "cells.py", *arguments, cwd=out, env=paths(checkout, ROOT, ROOT / "tests", HERE), timeout=1800)
    records = torch.load(out / "rank0.pt")
    for what in ("weights", "gradient", "rng"):
        assert torch.equal(records["off"][what], records["unpatched"][what])
    assert records["W=2"]["exact_error"] <= 1e-6
    assert max(records[cell]["oracle_error"] for cell in ("W=2", "W=4")) <= 1e-6
