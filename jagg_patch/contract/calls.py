"""Where a source calls what: functions by name, `….backward()`, a method in an assignment."""

import ast

from .tree import FUNCTIONS

WITHOUT_GRADIENT = ("no_grad", "inference_mode", "set_grad_enabled(False)", "set_grad_enabled(mode=False)")


def training_calls(source, function, *names):
    """Calls by one of `names`, or by a name with one as an argument, in `function` itself where gradients are recorded."""
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and any(isinstance(one, ast.Name) and one.id in names for one in (node.func, *node.args))
        and source.around(node, FUNCTIONS)[0] is function
        and not any(
            word in ast.unparse(item.context_expr)
            for block in source.around(node, ast.With)
            for item in block.items
            for word in WITHOUT_GRADIENT
        )
    ]


def argument_of(call, parameter, definition):
    """What `call` gives `parameter`, a name or a position, of the function with that `definition`, or None; None if nothing."""
    named = [keyword.value for keyword in call.keywords if keyword.arg == parameter]
    if named:
        return named[0]
    position = parameter
    if isinstance(position, str):
        arguments = definition.args if definition is not None else None
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)] if arguments else []
        position = names.index(parameter) if parameter in names else len(call.args)
    return call.args[position] if position < len(call.args) else None


def backwards(tree):
    """Calls of `….backward()`."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward"
    ]


def calls_in_assignments(tree, variable, method):
    """The statement, for each call of `….method(…)` in one that assigns to `variable`."""
    return [
        statement
        for statement in ast.walk(tree)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None
        for target in getattr(statement, "targets", None) or [statement.target]
        if isinstance(target, ast.Name) and target.id == variable
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Attribute) and node.attr == method
    ]
