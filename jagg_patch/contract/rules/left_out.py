"""Samples that are left out between the permutation and the forward: can it still be told which one an order is of?"""

import ast

from ..behind import behind, is_filtered, values_of
from ..branches import MAY_NOT_RUN, may_pass_by
from ..calls import argument_of
from ..difference import Difference
from ..tree import LOOPS

CONVERTS = ("to", "cuda", "cpu", "long", "int", "contiguous")


def check_left_out(source, contract, drawn, around, forwards):
    """`around` are the loops between `drawn`, the statement that draws the permutation, and the forward, innermost first."""
    steps, *samples = around
    found = [node for loop in samples for node in _leaves_out(source, contract, drawn, loop, steps)]
    if not found or _says_whose(source, contract, forwards):
        return
    given = f"{contract.forward}() isn't given an element of {contract.permutation}, as in {contract.permutation}[i][j]"
    yield Difference(
        f"line {found[0].lineno}: the loop over samples (line {samples[0].lineno}) may leave samples out"
        + (f", and {given}" if contract.permuted_step else ""),
        "JAGG couldn't tell which sample an order is of",
    )


def _leaves_out(source, contract, drawn, loop, steps):
    for node in ast.walk(loop):
        # After the last of an order nothing is in doubt, where the next rollout draws anew.
        is_jump = isinstance(node, ast.Continue) and node.lineno < steps.lineno
        is_jump |= isinstance(node, ast.Break) and contract.permuted_step is None
        if is_jump and source.around(node, LOOPS)[0] is loop:
            yield node
    for node in source.around(steps, MAY_NOT_RUN):
        if loop in source.around(node, LOOPS) and may_pass_by([steps], node):
            yield node
    if isinstance(loop, ast.For):
        yield from filter(is_filtered, behind(source.defined[contract.loop], loop.iter, after=drawn.end_lineno))


def _says_whose(source, contract, forwards):
    if contract.permuted_step is None:
        return False
    function, definition = source.defined[contract.loop], source.defined.get(contract.forward)
    anew = values_of(function, contract.permutation)[1:]
    return all(_is_same(value, contract.permutation) for value in anew) and all(
        _is_element(function, argument_of(call, contract.permuted_step, definition), contract.permutation) for call in forwards
    )


def _is_same(value, permutation):
    """Whether `value` is the permutation itself, elsewhere or of another dtype."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in CONVERTS:
        value = value.func.value
    return isinstance(value, ast.Name) and value.id == permutation


def _is_element(function, node, permutation):
    """Whether `node` is a subscript of the permutation, which is a view of it: also by a variable that is set once."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if not isinstance(node, ast.Name) or node.id == permutation:
        return node is not None and isinstance(node, ast.Name)
    values = values_of(function, node.id)
    return len(values) == 1 and isinstance(values[0], ast.Subscript) and _is_element(function, values[0], permutation)
