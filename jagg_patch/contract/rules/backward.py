"""Gradients in the loop over steps: every pass has one backward after its forward, and nothing reads what is yet to come."""

import ast

from ..branches import MAY_NOT_RUN, may_both_run, may_pass_by
from ..calls import backwards
from ..difference import Difference
from ..tree import FUNCTIONS, LOOPS

USES_GRADIENTS = ("grad", "clip_grad_norm_", "clip_grad_value_", "unscale_", "zero_grad", "register_hook")


def check_backward(source, contract, steps, forwards):
    found = backwards(source.defined[contract.loop])
    mine = [node for node in found if source.around(node, (*LOOPS, *FUNCTIONS))[0] is steps]
    loop = f"the loop over steps (line {steps.lineno})"
    if not mine:
        yield Difference(
            f"there is no backward() in {loop}",
            "the losses of several steps share one, or none; JAGG needs one after each forward",
        )
    elif may_both_run(source, mine):
        yield Difference(f"there are {len(mine)} calls of backward() in {loop}", "JAGG takes one gradient a step")
    elif mine[0].lineno < max(call.lineno for call in forwards):
        yield Difference(f"backward() comes before the forward in {loop}", "a step's loss would meet another step's graph")
    elif any(
        steps in source.around(one, LOOPS) and may_pass_by(mine, one)
        for node in mine
        for one in source.around(node, MAY_NOT_RUN)
    ):
        yield Difference(f"backward() is conditional in {loop}", "a step without it would leave a group open")
    for node in found:
        if node not in mine and not _is_over_before(source, contract, node, steps):
            yield Difference(
                f"line {node.lineno}: backward() outside {loop}", "JAGG can't tell which steps' losses that one is about"
            )
    for node in ast.walk(steps):
        if isinstance(node, (ast.Continue, ast.Break)) and source.around(node, LOOPS)[0] is steps:
            yield Difference(f"line {node.lineno}: {loop} may leave steps out", "the plan counts all of them")
    yield from _gradients(source, contract, steps, loop)


def _is_over_before(source, contract, node, steps):
    """Whether it is in the rollout, of a reward's own gradient, say: no group is open before the loop over samples."""
    samples = next(iter(source.around(steps, LOOPS)), steps)
    return source.around(node, FUNCTIONS)[0] is source.defined[contract.loop] and node.end_lineno < samples.lineno


def _gradients(source, contract, steps, loop):
    """What the loop over steps does to gradients, itself or in a function of this file that it calls."""
    for node in ast.walk(steps):
        name = getattr(node, "id", None)
        function = source.defined.get(name) if name != contract.loop else None
        # Where accelerate counts, it knows when a sample isn't over, and so does the optimizer.
        is_at_sync = contract.steps_optimizer and any(
            steps in source.around(branch, LOOPS) and _is_at_sync(source, contract, node, branch)
            for branch in source.around(node, ast.If)
        )
        for part in [node] if function is None else ast.walk(function):
            name = part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", None)
            if name not in USES_GRADIENTS and ast.unparse(part) != "optimizer.step":
                continue
            if not (is_at_sync or (contract.steps_optimizer and name in ("step", "zero_grad"))):
                yield Difference(
                    f"line {part.lineno}: {ast.unparse(part)} in {loop}", "a group's gradients aren't there before its end"
                )


def _is_at_sync(source, contract, node, branch):
    """Whether the `if` runs `node` where accelerate reduces gradients, or where the same lines step the optimizer.

    As far as its text tells: the run compares gradients as well.
    """
    is_else = any(node in ast.walk(one) for one in branch.orelse)
    denies = [part for part in ast.walk(branch.test) if isinstance(part, (ast.Not, ast.Or))]
    is_synced = _asks_for_sync(source, contract, branch.test) and len(denies) == is_else
    mine = branch.orelse if is_else else branch.body
    calls = [part.func for one in mine for part in ast.walk(one) if isinstance(part, ast.Call)]
    return is_synced or any(getattr(function, "attr", None) == "step" for function in calls)


def _asks_for_sync(source, contract, test):
    """Whether `sync_gradients` is in it, or in what a name in it was given."""
    names = {part.id for part in ast.walk(test) if isinstance(part, ast.Name)}
    given = [
        one.value
        for one in ast.walk(source.defined[contract.loop])
        if isinstance(one, ast.Assign) and {getattr(target, "id", None) for target in one.targets} & names
    ]
    return any(getattr(part, "attr", None) == "sync_gradients" for one in [test, *given] for part in ast.walk(one))
