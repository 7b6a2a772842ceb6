"""What a loop runs over, behind the variables that stand for it; the standard library alone."""

import ast

from .calls import training_calls
from .tree import COMPREHENSIONS, FUNCTIONS, LOOPS, UNREADABLE, Source


def values_of(function, name, after=0):
    """The expressions that the variable `name` alone is set to in `function`, below line `after`."""
    return [
        node.value
        for node in ast.walk(function)
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None and node.lineno > after
        for target in getattr(node, "targets", None) or [node.target]
        if isinstance(target, ast.Name) and target.id == name
    ]


def behind(function, node, opens=lambda node: True, after=0):
    """`node`, what it is made of, and what the variables in it are set to in `function`, below line `after`.

    Nothing of one that `opens` denies, and no arguments by name, which are a progress bar's.
    """
    found, names, queue = [], set(), [node]
    while queue:
        one = queue.pop()
        found.append(one)
        if not opens(one):
            continue
        if isinstance(one, ast.Name) and one.id not in names:
            names.add(one.id)
            queue += values_of(function, one.id, after)
        queue += [part for part in ast.iter_child_nodes(one) if not isinstance(part, ast.keyword)]
    return found


def loop_over_steps(source, contract):
    """The innermost loop around the training forward, or None where there is none, or several."""
    if contract.loop not in source.defined:
        return None
    forwards = training_calls(source, source.defined[contract.loop], contract.forward)
    inner = {source.around(call, (*LOOPS, *FUNCTIONS))[0] for call in forwards}
    return inner.pop() if len(inner) == 1 else None


def settings_behind_steps(text, contract):
    """The names of the settings that decide how many steps the loop in a trainer's source trains."""
    try:
        source = Source(text)
        steps = loop_over_steps(source, contract)
    except UNREADABLE:
        return set()  # which the rules say
    if not isinstance(steps, (ast.For, ast.AsyncFor)):
        return set()
    return {node.attr for node in behind(source.defined[contract.loop], steps.iter) if isinstance(node, ast.Attribute)}


def is_filtered(node):
    """Whether `node` picks some of several samples by a condition."""
    if isinstance(node, COMPREHENSIONS):
        return not isinstance(node, ast.DictComp) and any(generator.ifs for generator in node.generators)  # of keys
    name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    if name == "where":
        return len(node.args) == 1
    return name in ("filter", "compress", "nonzero", "flatnonzero", "argwhere", "masked_select")
