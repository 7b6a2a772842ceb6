"""Which conditions follow from others, by `and`, `or`, `not` and the variables that stand for them; the standard library alone.

A condition is its text, as `ast.unparse` has it. `meanings` gives the text that a variable stands for, by its name.
"""

import ast
from functools import lru_cache


@lru_cache(maxsize=None)
def parsed(text):
    return ast.parse(text, mode="eval").body


def negated(node):
    return node.operand if _is_not(node) else ast.UnaryOp(ast.Not(), node)


def _is_not(node):
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _parts(node, meanings):
    """`(all or any, conditions)` that `node` comes to, or None where it can't be taken apart."""
    is_negated, inner = _is_not(node), node.operand if _is_not(node) else node
    if isinstance(inner, ast.BoolOp):
        join = all if isinstance(inner.op, ast.And) != is_negated else any
        return join, [negated(value) if is_negated else value for value in inner.values]
    if ast.unparse(inner) in meanings:
        meant = parsed(meanings[ast.unparse(inner)])
        return all, [negated(meant) if is_negated else meant]
    return (all, [inner.operand]) if is_negated and _is_not(inner) else None


def consequences(node, meanings):
    """The conditions that are true where `node` is."""
    join, parts = _parts(node, meanings) or (any, [])
    return {ast.unparse(node)}.union(*(consequences(part, meanings) for part in parts if join is all))


def follows(node, known, meanings):
    """Whether `node` is true where all conditions in `known` are."""
    join, parts = _parts(node, meanings) or (any, [])
    return ast.unparse(node) in known or bool(parts) and join(follows(part, known, meanings) for part in parts)
