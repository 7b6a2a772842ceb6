"""The functions that JAGG wraps: they are there, with the parameters that it goes by."""

import ast

from ..difference import Difference
from ..tree import FUNCTIONS
from .solver import solvers_instead


def check_functions(source, contract, parameters):
    """Of `parameters`, which are the contract's, or what skipped forwards need as well."""
    for name, wanted in parameters.items():
        is_read = name in (contract.loop, contract.forward)
        if not source.bindings[name]:
            if is_read or not source.bindings["*"]:
                others = solvers_instead(source, contract) if name in contract.solvers else []
                instead = f"{contract.forward}() hands the model's output to {', '.join(others)}"
                yield Difference(f"there is no function {name}()", instead if others else "JAGG has nothing to wrap")
            continue
        if is_read and source.bindings[name] > 1:
            yield Difference(
                f"{name} is defined or assigned in {source.bindings[name]} places",
                "JAGG would read one, and train with another",
            )
        if is_read and name not in source.defined:
            module, _ = source.imported.get(name, ("elsewhere", None))
            yield Difference(f"{name}() comes from {module} now", "JAGG wraps this file's names, and it uses that one's")
        definition = source.definition(name)
        if definition is None:
            continue  # looked at when training starts
        if isinstance(definition, ast.AsyncFunctionDef) or _yields(definition):
            yield Difference(f"{name}() has become a generator", "JAGG can't tell when a call of it is over")
        arguments = definition.args
        has = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        missing = [parameter for parameter in wanted if parameter not in has]
        if missing:
            yield Difference(f"{name}() has no parameter {', '.join(missing)} any more", "JAGG goes by that name")


def _yields(definition):
    inner = {
        node
        for other in ast.walk(definition)
        if isinstance(other, FUNCTIONS) and other is not definition
        for node in ast.walk(other)
    }
    return any(isinstance(node, (ast.Yield, ast.YieldFrom)) and node not in inner for node in ast.walk(definition))
