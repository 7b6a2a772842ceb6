"""Whether one run of a function may pass through several places in it, or by all of them."""

import ast
from itertools import combinations

from .tree import COMPREHENSIONS, FUNCTIONS, LOOPS, TRIES

MAY_NOT_RUN = (ast.If, ast.IfExp, ast.BoolOp, ast.Match, *TRIES, *COMPREHENSIONS)


def may_both_run(source, nodes):
    return any(not _are_alternatives(source, *pair) for pair in combinations(nodes, 2))


def _are_alternatives(source, one, other):
    """Whether they stand in different branches, or one in a branch that leaves the function before the other."""
    first, second = sorted((one, other), key=lambda node: (node.lineno, node.col_offset))
    of_first, of_second = ([node, *source.around(node, ast.AST)] for node in (first, second))
    below = [node for node in of_first if node not in of_second]
    if not below or first in of_second or second in of_first:
        return False
    for node in below:
        parent = source.parents[node]
        body = getattr(parent, "body", None)
        if isinstance(parent, (ast.If, ast.match_case)) and parent in below and isinstance(body, list):
            branch = body if node in body else getattr(parent, "orelse", [])
            if node in branch and isinstance(branch[-1], (ast.Return, ast.Raise)):
                return True
    fork = source.parents[below[-1]]
    sides = below[-1], next(node for node in of_second if source.parents.get(node) is fork)
    if isinstance(fork, ast.Match):
        return fork.subject not in sides
    if isinstance(fork, ast.IfExp):
        return fork.test not in sides
    return isinstance(fork, ast.If) and sides[0] in fork.body and sides[1] in fork.orelse


def may_end_without(nodes, function):
    """Whether a run of `function` may end, but by an exception, without any of `nodes`, calls in it."""
    return bool(_ways_without(nodes, function.body))


def _ways_without(nodes, block):
    """How a run of the statements `block` without any of `nodes` may go on: to what comes after it, out of the function."""
    ways = set()
    for statement in block:
        inner = _ways_past(nodes, statement)
        ways |= inner - {"on"}
        if "on" not in inner:
            return ways
    return ways | {"on"}


def _ways_past(nodes, statement):
    if isinstance(statement, ast.Raise):
        return set()
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return set() if _surely_runs(nodes, statement.items) else _ways_without(nodes, statement.body)
    if isinstance(statement, ast.If):
        return set() if _surely_runs(nodes, [statement.test]) else _union(nodes, [statement.body, statement.orelse])
    if isinstance(statement, ast.Match):  # which is taken to have a case for everything
        return _union(nodes, [case.body for case in statement.cases])
    if isinstance(statement, TRIES):
        return _union(nodes, [[*statement.body, *statement.orelse], *(handler.body for handler in statement.handlers)])
    if isinstance(statement, LOOPS):  # which are taken to run
        return _ways_without(nodes, statement.body)
    if _surely_runs(nodes, [statement]):
        return set()
    return {"out"} if isinstance(statement, ast.Return) else {"on"}


def _union(nodes, blocks):
    return set().union(*(_ways_without(nodes, block) for block in blocks))


def _surely_runs(nodes, parts):
    """Whether one of `nodes` runs whenever all the expressions in `parts` are evaluated."""
    for part in parts:
        if part in nodes:
            return True
        if isinstance(part, ast.IfExp):
            sure = _surely_runs(nodes, [part.test]) or all(_surely_runs(nodes, [side]) for side in (part.body, part.orelse))
        elif isinstance(part, ast.BoolOp):
            sure = _surely_runs(nodes, part.values[:1])
        else:
            sure = not isinstance(part, FUNCTIONS) and _surely_runs(nodes, list(ast.iter_child_nodes(part)))
        if sure:
            return True
    return False


def may_pass_by(nodes, branch):
    """Whether a pass through `branch` may run none of `nodes`."""
    if isinstance(branch, TRIES):
        return not all(isinstance(handler.body[-1], ast.Raise) for handler in branch.handlers)
    if isinstance(branch, ast.If):
        return not all(any(node in ast.walk(one) for one in block for node in nodes) for block in (branch.body, branch.orelse))
    return True
