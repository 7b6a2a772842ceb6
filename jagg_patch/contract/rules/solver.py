"""The solver step in the training forward: it runs once, and nothing but what it returns depends on the model's output."""

import ast
import copy

from ..branches import may_both_run, may_end_without
from ..calls import WITHOUT_GRADIENT, argument_of, training_calls
from ..dataflow import affected, assignments, uses
from ..difference import Difference
from ..tree import FUNCTIONS

MODEL = "transformer"  # what every contract calls the parameter of `forward` that is the model
METHODS, BUILTINS = ("detach", "item", "tolist"), ("float", "int", "bool")  # that give what has no gradient


def check_solver(source, contract):
    if not contract.solvers or contract.forward not in source.defined:
        return
    function = source.defined[contract.forward]
    calls = training_calls(source, function, *contract.solvers)
    names = " or ".join(f"{name}()" for name in contract.solvers)
    means = "that call is where JAGG stands in for the model's output, once a step"
    if not calls or may_both_run(source, calls):
        yield Difference(f"{contract.forward}() calls {names} in {len(calls)} places", means)
        return
    if may_end_without(calls, function):
        others = solvers_instead(source, contract)
        instead = f", and hands the model's output to {', '.join(others)}" if others else ""
        yield Difference(f"{contract.forward}() may end without a call of {names}{instead}", means)
        return
    for node in _returned_beside(source, function, calls):
        yield Difference(
            f"line {node.lineno}: {contract.forward}() returns the model's output beside what {names} makes of it",
            "the steps between would lose that gradient, for their forwards record no graph",
        )


def solvers_instead(source, contract):
    """The functions, but the contract's, that are given the model's output in the training forward, as `name()`."""
    function = source.defined.get(contract.forward)
    if function is None:
        return []
    outputs = _outputs(function)
    return sorted(
        {
            f"{node.func.id}()"
            for node in ast.walk(function)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and source.bindings[node.func.id]
            and node.func.id not in contract.solvers
            and any(uses(value, outputs, sizes=False) for value in (*node.args, *(one.value for one in node.keywords)))
        }
    )


def _outputs(function):
    """The variables of `function` that depend on what the model returns."""
    return affected(assignments(ast.walk(function)), _set_by(function, _is_model_call), sizes=False)


def _set_by(function, test):
    """The variables that are set to something with a part that `test` is true of."""
    return {
        name
        for one in assignments(ast.walk(function))
        if any(test(part) for value in one.sources for part in ast.walk(value))
        for name in one.names
    }


def _is_model_call(node):
    given = (node.func, *node.args, *(one.value for one in node.keywords)) if isinstance(node, ast.Call) else ()
    return any(isinstance(one, ast.Name) and one.id == MODEL for one in given)


def _returned_beside(source, function, calls):
    """The `return`s of `function` with something that depends on the model's output by another way than `calls`."""
    rest = _WithoutGradient(calls).visit(copy.deepcopy(function))
    outputs = _set_by(rest, _is_model_call)  # not a reference's
    for call in calls:
        name = call.func.id
        value = argument_of(call, "model_output", source.definition(name) if name in source.bindings else None)
        named = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)} if value is not None else set()
        outputs |= named & affected(assignments(ast.walk(function)), {MODEL}, sizes=False)  # the model by another name
    # One that the solver sets anew may be the output before, and what is made of it after.
    outputs = outputs - _set_by(function, lambda node: node in calls) - {MODEL}
    outputs = affected(assignments(ast.walk(rest)), outputs, sizes=False)
    own = {node for inner in ast.walk(rest) if isinstance(inner, FUNCTIONS) and inner is not rest for node in ast.walk(inner)}
    return [
        node
        for node in ast.walk(rest)
        if isinstance(node, ast.Return) and node not in own and node.value is not None
        if uses(node.value, outputs, sizes=False)
    ]


class _WithoutGradient(ast.NodeTransformer):
    """Takes out of a copy of a function those of its `calls`, and what has no gradient to the model."""

    def __init__(self, calls):
        self._places = {(call.lineno, call.col_offset, call.end_col_offset) for call in calls}

    def visit_With(self, node):
        self.generic_visit(node)
        without = any(word in ast.unparse(item.context_expr) for item in node.items for word in WITHOUT_GRADIENT)
        return ast.Pass(lineno=node.lineno, col_offset=node.col_offset) if without else node

    def visit_Call(self, node):
        is_number = getattr(node.func, "attr", None) in METHODS or getattr(node.func, "id", None) in BUILTINS
        if is_number or (node.lineno, node.col_offset, node.end_col_offset) in self._places:
            return ast.Constant(None, lineno=node.lineno, col_offset=node.col_offset)
        return self.generic_visit(node)
