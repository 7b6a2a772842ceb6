"""Whether one run of a function may pass through several places in it, or by all of them."""

import ast
from itertools import combinations

from .tree import COMPREHENSIONS, TRIES

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


def may_pass_by(nodes, branch):
    """Whether a pass through `branch` may run none of `nodes`."""
    if isinstance(branch, TRIES):
        return not all(isinstance(handler.body[-1], ast.Raise) for handler in branch.handlers)
    if isinstance(branch, ast.If):
        return not all(any(node in ast.walk(one) for one in block for node in nodes) for block in (branch.body, branch.orelse))
    return True
