"""The loop over steps: one training forward in each pass, which is told the step of one sample, after the rollout."""

import ast

from ..branches import may_both_run
from ..calls import training_calls
from ..dataflow import targets
from ..difference import Difference
from ..tree import COMPREHENSIONS, FUNCTIONS, LOOPS
from .backward import check_backward
from .order import check_permutation


def check_loop(source, contract):
    """Which loop it is, and all rules about it."""
    if contract.loop not in source.defined:
        return
    forwards = training_calls(source, source.defined[contract.loop], contract.forward)
    inner = {source.around(call, (*LOOPS, *FUNCTIONS))[0] for call in forwards}
    if len(inner) != 1 or may_both_run(source, forwards):
        means = "JAGG follows one training forward a step" if forwards else "JAGG would never see a step"
        yield Difference(f"{contract.loop}() calls {contract.forward}() in {len(forwards)} places", means)
        return
    (steps,) = inner
    if not isinstance(steps, ast.For):
        yield Difference(f"{contract.forward}() isn't called in a for loop", "JAGG groups the steps of one")
        return
    yield from check_backward(source, contract, steps, forwards)
    yield from _selection(source, contract, steps, forwards)
    yield from _samples(source, steps)
    if contract.permutation:
        yield from check_permutation(source, contract, steps)
    yield from _rollout(source, contract, steps)


def _selection(source, contract, steps, forwards):
    variables = _names(steps.target)
    for statement in ast.walk(steps):
        if isinstance(statement, ast.Assign) and variables & _names(statement.value):
            variables |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    for call in forwards:
        if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
            continue  # seen when it runs
        argument = _argument(source, contract, call)
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


def _argument(source, contract, call):
    named = [keyword.value for keyword in call.keywords if keyword.arg == contract.step]
    if named:
        return named[0]
    position = contract.step
    if isinstance(position, str):
        arguments = source.defined[contract.forward].args if contract.forward in source.defined else None
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)] if arguments else []
        position = names.index(contract.step) if contract.step in names else len(call.args)
    return call.args[position] if position < len(call.args) else None


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


def _rollout(source, contract, steps):
    calls = [
        node
        for node in ast.walk(source.defined[contract.loop])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == contract.rollout
    ]
    if not calls or max(call.lineno for call in calls) > steps.lineno or may_both_run(source, calls):
        yield Difference(
            f"{contract.loop}() calls {contract.rollout}() in {len(calls)} places, or after the loop over steps",
            "JAGG plans the update when the rollout ends",
        )
