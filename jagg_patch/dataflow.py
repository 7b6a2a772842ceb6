"""Which variables of a piece of source decide the value of others. Nothing is run; the standard library alone.

An approximation: assignments, conditions and the usual methods that change a container count, what a called function does to
its arguments doesn't.
"""

import ast

IN_PLACE = ("append", "appendleft", "extend", "insert", "add", "update", "pop", "popleft", "setdefault")
VALUES = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.Call)  # what gives a variable its value
METADATA = ("device", "dtype", "shape", "size", "ndim")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))  # from Python 3.11 on


def variables(node):
    """The variables that `node` is, or is a part of, innermost first: of `state.means[i]` those are state.means and state."""
    found = []
    while isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Starred, ast.Call)):
        if isinstance(node, (ast.Name, ast.Attribute)):
            found.append(ast.unparse(node))
        node = getattr(node, "func", None) or getattr(node, "value", None)
    return found


def targets(node):
    """The variables that are set, or changed in part, where `node` is the target of an assignment."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return {name for element in node.elts for name in targets(element)}
    return set(variables(node)[:1])


def uses(node, names, indexed=frozenset()):
    """Whether the value of `node` depends on one of `names`, but as the index of one element of a variable in `indexed`."""
    if isinstance(node, ast.Attribute) and node.attr in METADATA or isinstance(node, ast.Call) and variables(node) == ["len"]:
        return False
    if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in names:
        return True
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Subscript) and indexed.intersection(variables(node)):
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        parts = [node.value, *(part for part in index if not _is_one(part))]
    return any(uses(part, names, indexed) for part in parts)


def _is_one(index):
    """`x`, or `x:x + 1`."""
    if isinstance(index, ast.Slice) and index.lower is not None and index.upper is not None:
        return isinstance(index.lower, ast.Name) and ast.unparse(index.upper) == f"{index.lower.id} + 1"
    return isinstance(index, ast.Name)


def counters(target, iterable, indexed):
    """The variables of the loop `for target in iterable` that don't come out of the elements of a variable in `indexed`."""
    function = ast.unparse(iterable.func) if isinstance(iterable, ast.Call) else None
    if isinstance(target, (ast.Tuple, ast.List)) and function is not None and iterable.args:
        if function == "zip":
            return {name for pair in zip(target.elts, iterable.args) for name in counters(*pair, indexed)}
        if function == "enumerate":
            return targets(target.elts[0]) | counters(target.elts[-1], iterable.args[0], indexed)
        return counters(target, iterable.args[0], indexed)  # tqdm, list
    return set() if uses(iterable, indexed) else targets(target)


def _assigned(node):
    """The names that `node` itself sets or changes, and the nodes that decide what to."""
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
        found = getattr(node, "targets", None) or [node.target]
        sources = [node.value, *found] if node.value is not None else []
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        found, sources = [node.target], [node.iter]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        found, sources = [node.optional_vars], [node.context_expr]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in IN_PLACE:
        found, sources = [node.func.value], node.args
    elif isinstance(node, (ast.If, ast.While)):
        return {name for inner in ast.walk(node) if inner is not node for name in _assigned(inner)[0]}, [node.test]
    else:
        return set(), []
    return {name for target in found for name in targets(target)}, sources


def affected(nodes, names, indexed=frozenset()):
    """`names`, and the variables whose values depend on them by what is assigned in `nodes`. `indexed` is as in `uses`."""
    names, before = set(names), None
    assignments = [_assigned(node) for node in nodes]
    while names != before:
        before = set(names)
        for found, sources in assignments:
            if any(uses(source, names, indexed) for source in sources):
                names |= found
    return names


def carried(loop):
    """The variables that a pass of `loop` may find as the pass before has left them."""
    changed = {name for statement in loop.body for node in ast.walk(statement) for name in _assigned(node)[0]}
    found = set()
    _read(loop.body, targets(loop.target), found)
    return changed & found


def _read(node, done, found):
    """Add to `found` the variables that are read before `node` has surely set them, given those `done`; returns what is then."""
    if isinstance(node, list):
        for one in node:
            done = _read(one, done, found)
        return done
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id not in done:
            found.add(node.id)
        return done | {node.id} if isinstance(node.ctx, ast.Store) else done
    if isinstance(node, ast.AugAssign):
        found |= targets(node.target) - done
    if isinstance(node, ast.Attribute):
        _read(node.value, done, found)
        if isinstance(node.ctx, ast.Store):
            return done | targets(node)
        found |= targets(node) - done
        return done
    if isinstance(node, (*COMPREHENSIONS, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)):
        own = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}
        own |= {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
        for inner in ast.iter_child_nodes(node):
            _read(inner, done | own, found)
        return done | {node.name} if hasattr(node, "name") else done
    # What is assigned is read before it is set, whatever the order of the fields.
    ends = {}
    for name, value in sorted(ast.iter_fields(node), key=lambda item: item[0] in ("target", "targets", "optional_vars")):
        if name in ("body", "orelse", "finalbody"):
            ends[name] = _read(value, done, found)
        elif name in ("handlers", "cases"):
            ends[name] = [_read(branch, done, found) for branch in value]
        elif isinstance(value, (ast.AST, list)):
            nodes = value if isinstance(value, list) else [value]
            done = _read([one for one in nodes if isinstance(one, ast.AST)], done, found)
    if isinstance(node, (ast.With, ast.AsyncWith, ast.ExceptHandler)):
        return ends["body"]
    if isinstance(node, (ast.If, ast.IfExp)):
        return ends["body"] & ends["orelse"]
    if isinstance(node, TRIES):
        return ends["body"].intersection(*ends["handlers"]) | ends["finalbody"]
    return done
