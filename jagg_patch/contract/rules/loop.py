"""The loop over steps: one training forward in each pass, which is told the step of one sample, after the rollout."""

import ast

from ..behind import behind, loop_over_steps, values_of
from ..branches import may_both_run
from ..calls import argument_of, training_calls
from ..dataflow import targets
from ..difference import Difference
from ..tree import COMPREHENSIONS, LOOPS
from .backward import check_backward
from .order import check_permutation
from .shuffles import check_shuffles, is_order, shuffled_orders


def check_loop(source, contract):
    """Which loop it is, and all rules about it."""
    if contract.loop not in source.defined:
        return
    forwards = training_calls(source, source.defined[contract.loop], contract.forward)
    steps = loop_over_steps(source, contract)
    if steps is None or may_both_run(source, forwards):
        means = "JAGG follows one training forward a step" if forwards else "JAGG would never see a step"
        yield Difference(f"{contract.loop}() calls {contract.forward}() in {len(forwards)} places", means)
        return
    if not isinstance(steps, ast.For):
        yield Difference(f"{contract.forward}() isn't called in a for loop", "JAGG groups the steps of one")
        return
    yield from check_backward(source, contract, steps, forwards)
    yield from _selection(source, contract, steps, forwards)
    yield from _samples(source, steps)
    yield from _start(source, contract, steps)
    if contract.permutation:
        yield from check_permutation(source, contract, steps, forwards)
    else:
        yield from check_shuffles(source, contract, steps, forwards)


def _selection(source, contract, steps, forwards):
    variables = _names(steps.target)
    for statement in ast.walk(steps):
        if isinstance(statement, ast.Assign) and variables & _names(statement.value):
            variables |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    for call in forwards:
        if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
            continue  # seen when it runs
        argument = argument_of(call, contract.step, source.defined.get(contract.forward))
        if argument is None:
            yield Difference(f"{contract.forward}() isn't given {contract.step}", "JAGG reads the step from it")
            continue
        if not variables & _names(argument):
            yield Difference(
                f"the innermost loop (line {steps.lineno}) doesn't run over the steps of a sample",
                "consecutive forwards would be of several samples, and a group is one's",
            )


def _names(node):
    """The variables that select what `node` is: of `samples[i]["x"][:, j]` that is j."""
    if isinstance(node, ast.Name):
        return {node.id}
    parts = [node.slice] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
    return {name for part in parts for name in _names(part)}


def _start(source, contract, steps):
    function = source.defined[contract.loop]

    def opens(node):  # what counts steps doesn't say where they begin
        return not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("range", "enumerate", "len")

    orders = shuffled_orders(source, function)
    for node in behind(function, steps.iter, opens):
        if not contract.permutation and is_order(node, orders) or _begins_late(function, node):
            yield Difference(
                f"the loop over steps (line {steps.lineno}) doesn't run from the first step on: {ast.unparse(node)}",
                "the plan begins there, and goes on in the order of the trajectory",
            )
            return


def _begins_late(function, node):
    """Whether `node` has other steps than those from 0 on. A start that is a setting is seen when it runs."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name == "sorted":
            return any(keyword.arg == "reverse" for keyword in node.keywords)
        start, stride = (node.args[0], node.args[2:]) if name == "range" and len(node.args) > 1 else (None, [])
        return name == "reversed" or not _may_be(function, start, 0) or bool(stride) and not _may_be(function, *stride, 1)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        return not (_may_be(function, node.slice.lower, 0) and _may_be(function, node.slice.step, 1))
    return False


def _may_be(function, node, number):
    values = [node] if node is not None else []
    if isinstance(node, ast.Name):
        values = values_of(function, node.id)
    return not values or any(
        isinstance(value, ast.Attribute) or isinstance(value, ast.Constant) and value.value == number for value in values
    )


def _samples(source, steps):
    samples = {name for loop in source.around(steps, LOOPS) if isinstance(loop, ast.For) for name in targets(loop.target)}
    samples &= {node.id for node in ast.walk(steps) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for node in ast.walk(steps):
        if isinstance(node, ast.Name) and node.id in samples and _sets(source, node):
            yield Difference(
                f"line {node.lineno}: {node.id} changes in the loop over steps (line {steps.lineno})",
                "its steps would be of several samples, and a group is one's",
            )


def _sets(source, node):
    return isinstance(node.ctx, ast.Store) and not source.around(node, COMPREHENSIONS)


def check_rollout(source, contract):
    steps = loop_over_steps(source, contract)
    if steps is None:
        return
    calls = [
        node
        for node in ast.walk(source.defined[contract.loop])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == contract.rollout
    ]
    if not calls or max(call.lineno for call in calls) > steps.lineno or may_both_run(source, calls):
        yield Difference(
            f"{contract.loop}() calls {contract.rollout}() in {len(calls)} places, or after the loop over steps",
            "JAGG goes by it" if contract.plans_at_start else "JAGG plans the update when the rollout ends",
        )
