"""The order of the steps: one permutation, which JAGG sorts, so a loss may depend on a step but not on its place."""

import ast

from ..calls import backwards, calls_in_assignments
from ..dataflow import Pass, affected, assignments, counters
from ..difference import Difference
from ..tree import LOOPS
from .left_out import check_left_out


def check_permutation(source, contract, steps, forwards):
    function = source.defined[contract.loop]
    found = calls_in_assignments(function, contract.permutation, "randperm")
    if len(found) != 1:
        means = "JAGG sorts the steps that it draws"
        if not found:
            means += "; a loop that trains steps in trajectory order by itself, a window of them say, is of another shape"
        yield Difference(not_one(contract.loop, found, contract.permutation, "randperm"), means)
        return
    around = [loop for loop in (steps, *source.around(steps, LOOPS)) if loop not in source.around(found[0], LOOPS)]
    if len(around) != contract.permuted_loops:
        yield Difference(
            f"{len(around)} loops run between {contract.permutation} and the forward, not {contract.permuted_loops}",
            "the plan is for one pass over the samples, each with the steps in its order",
        )
    yield from _order(contract, function, steps, found[0])
    yield from check_left_out(source, contract, found[0], around, forwards)


def not_one(function, found, variable, method):
    return f"{function}() has {len(found)} calls of {method}() in statements `{variable} = …`, not one"


def _order(contract, function, steps, drawn):
    """JAGG visits the drawn steps in another order, so a loss may depend on the step, but not on its place."""
    later = assignments(node for node in ast.walk(function) if getattr(node, "lineno", 0) >= drawn.lineno)
    permuted = affected(later, {contract.permutation}, sizes=False)
    losses = [
        part
        for node in backwards(steps)
        for part in (node.func.value, *node.args, *(keyword.value for keyword in node.keywords))
    ]
    one_pass = Pass(steps, function)
    for names, means in (
        (counters(steps.target, steps.iter, permuted), "the step's place in the loop"),
        (one_pass.carried, "what the steps before left"),
    ):
        for name in sorted(names):
            if one_pass.decides(name, losses, permuted):
                yield Difference(
                    f"the loss depends on {name}, {means} (line {steps.lineno})", "JAGG visits the steps in another order"
                )
