"""Which variables of a piece of source decide the value of others. Nothing is run; the standard library alone.

An approximation: assignments, `if` and the methods that change an object count; what a called function does to its arguments,
a second name of the same object, and the other ways of control don't. A variable is a name, or a part of one that is always the
same: `state.mean`, `info["loss"]`.
"""

import ast
from collections import Counter
from typing import NamedTuple

from .conditions import consequences, follows, negated, parsed
from .tree import COMPREHENSIONS, LOOPS, TRIES

CHANGING = ("append", "appendleft", "extend", "insert", "add", "update", "pop", "popleft", "setdefault")  # and add_()
INDEXING = ("select", "narrow", "index_select", "gather", "take", "take_along_dim", "__getitem__")
BUILDING = (ast.BinOp, ast.UnaryOp, ast.Tuple, ast.List, ast.Slice)
SIZES = ("device", "dtype", "shape", "size", "ndim")
BLOCKS = ("body", "orelse", "finalbody")
JUMPS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class Assignment(NamedTuple):
    """The variables that a node sets or changes, what decides their values, and whether those build on the ones before."""

    names: set
    sources: list
    builds: bool = False


class True_(NamedTuple):
    """A condition that is true from here on."""

    test: str


class Meaning(NamedTuple):
    """A variable that is true where the condition `test` is."""

    name: str
    test: str


class SetWhere(NamedTuple):
    """A variable that has been set if all of the conditions `tests` are true."""

    name: str
    tests: frozenset


def is_variable(node):
    if isinstance(node, ast.Attribute) and node.attr != "data":  # which is the tensor itself
        return is_variable(node.value)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return is_variable(node.value)
    return isinstance(node, ast.Name)


def variables(node):
    """The variables that `node` is, or is a part of, innermost first: of `state.means[i]` those are state.means and state."""
    found = []
    while isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Starred, ast.Call)):
        if is_variable(node):
            found.append(ast.unparse(node))
        node = getattr(node, "func", None) or getattr(node, "value", None)
    return found


def targets(node):
    """The variables that are set, or changed in part, where `node` is the target of an assignment."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return {name for element in node.elts for name in targets(element)}
    return set(variables(node)[:1])


def uses(node, names, indexed=frozenset(), sizes=True):
    """Whether the value of `node` depends on one of `names`.

    Not counted is the choice of one element of a variable in `indexed`, and unless `sizes` what all elements have in common.
    """
    if not sizes and (isinstance(node, ast.Attribute) and node.attr in SIZES or variables(node) == ["len"]):
        return False
    if is_variable(node):
        parts = variables(node)
        if names.intersection(parts) or any(name.startswith(f"{parts[0]}[") for name in names):
            return True
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, COMPREHENSIONS):
        own = {name for generator in node.generators for name in targets(generator.target)}
        if not any(uses(generator.iter, names, indexed, sizes) for generator in node.generators):
            names = names - own
    elif isinstance(node, ast.Subscript):
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if indexed.intersection(variables(node)):
            index = [part for part in index if not _is_one(part)]
        parts = ([] if is_variable(node) else [node.value]) + index
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in INDEXING:
        if any(indexed.intersection(variables(part)) for part in (node.func, *node.args[:1])):
            parts = [node.func]
    return any(uses(part, names, indexed, sizes) for part in parts)


def _is_one(index):
    """`x`, `[x]`, `int(x)`, or `x:x + 1`."""
    if isinstance(index, ast.Slice):
        lower = ast.unparse(index.lower) if isinstance(index.lower, ast.Name) else None
        return index.upper is not None and ast.unparse(index.upper) in (f"{lower} + 1", f"1 + {lower}")
    inner = getattr(index, "elts", None) or (getattr(index, "args", None) if variables(index) == ["int"] else None) or [index]
    return len(inner) == 1 and isinstance(inner[0], ast.Name)


def counters(target, iterable, indexed):
    """The variables of the loop `for target in iterable` that don't come out of the elements of a variable in `indexed`."""
    function = ast.unparse(iterable.func) if isinstance(iterable, ast.Call) else None
    if isinstance(target, (ast.Tuple, ast.List)) and target.elts and function is not None and iterable.args:
        if function == "zip":
            return {name for pair in zip(target.elts, iterable.args) for name in counters(*pair, indexed)}
        if function == "enumerate":
            return targets(target.elts[0]) | counters(target.elts[-1], iterable.args[0], indexed)
        return counters(target, iterable.args[0], indexed)  # tqdm, list
    return set() if uses(iterable, indexed, sizes=False) else targets(target)


def assignments(nodes):
    """The `Assignment`s that are among `nodes`."""
    return [found for found in map(_assignment, nodes) if found is not None]


def _assignment(node):
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
        if node.value is None:
            return None
        found = getattr(node, "targets", None) or [node.target]
        names = {name for target in found for name in targets(target)}
        builds = isinstance(node, ast.AugAssign) or any(
            isinstance(part, BUILDING) and uses(part, names) for part in ast.walk(node.value)
        )
        indices = [part.slice for target in found for part in ast.walk(target) if isinstance(part, ast.Subscript)]
        return Assignment(names, [node.value, *indices], builds)
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return Assignment(targets(node.target), [node.iter])
    if isinstance(node, ast.withitem) and node.optional_vars is not None:
        return Assignment(targets(node.optional_vars), [node.context_expr])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        in_place = node.func.attr.endswith("_") and not node.func.attr.startswith("_") and "grad" not in node.func.attr
        if node.func.attr in CHANGING or in_place:
            return Assignment(targets(node.func.value), node.args, builds=True)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "next" and node.args:
        return Assignment(targets(node.args[0]), [], builds=True)
    return None


def affected(found, names, indexed=frozenset(), sizes=True):
    """`names`, and the variables whose values depend on them by the assignments `found`; the rest is as in `uses`."""
    names, before = set(names), None
    while names != before:
        before = set(names)
        for one in found:
            if not one.names <= names and any(uses(source, names, indexed, sizes) for source in one.sources):
                names |= one.names
    return names


class Pass:
    """One pass of `loop`: its assignments, and those of its variables that another order of the passes could change."""

    def __init__(self, loop, function):
        nodes = [node for statement in loop.body for node in ast.walk(statement)]
        self._assignments = assignments(nodes)
        self._varying = affected(self._assignments, targets(loop.target))
        # What a condition decides: not whether something is computed that would be the same in every pass.
        everywhere = Counter(name for one in assignments(ast.walk(function)) for name in one.names)
        for node in nodes:
            if isinstance(node, ast.If):
                for one in assignments(ast.walk(node)):
                    if self._varies(one) or any(everywhere[name] > 1 for name in one.names):
                        self._assignments.append(Assignment(one.names, [node.test]))
        read = set()
        _read(loop.body, targets(loop.target), read)
        self.carried = {name for one in self._assignments if self._varies(one) for name in one.names & read}

    def _varies(self, one):
        return one.builds or any(uses(source, self._varying) for source in one.sources)

    def decides(self, name, nodes, indexed):
        """Whether the values of `nodes` depend on the variable `name`, but as in `uses`."""
        names = affected(self._assignments, {name}, indexed)
        return any(uses(node, names, indexed) for node in nodes)


def _read(node, done, found):
    """Add to `found` the variables that are read before `node` has surely set them, given those `done`; returns what is then.

    Among `done` is what is known of conditions as well: `True_`, `Meaning` and `SetWhere`.
    """
    if isinstance(node, list):
        for one in node:
            done = _read(one, done, found)
        return done
    if isinstance(node, ast.AugAssign):
        found |= targets(node.target) - done
    if is_variable(node):
        if not isinstance(node, ast.Name) and not done.intersection(variables(node)):
            _read(node.value, done, found)
        if isinstance(node.ctx, ast.Store):
            return {one for one in done if not _is_about(one, targets(node))} | targets(node)
        if not done.intersection(variables(node)):
            found |= targets(node)
        return done
    if isinstance(node, (*COMPREHENSIONS, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)):
        own = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}
        own |= {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
        for inner in ast.iter_child_nodes(node):
            _read(inner, done | own, found)
        return done | {node.name} if hasattr(node, "name") else done
    tests = _tests(node)
    ends = {}  # by the fields that are blocks; None for one that the pass doesn't go on from
    # Not in the order of the fields: what is assigned is read before it is set, and that before the blocks.
    last = ("target", "targets", "optional_vars", *BLOCKS)
    for name, value in sorted(ast.iter_fields(node), key=lambda item: last.index(item[0]) if item[0] in last else -1):
        if name in BLOCKS:
            ends[name] = _end(value, _given(done, tests.get(name)), found)
        elif name in ("handlers", "cases"):
            ends[name] = [_end(branch.body, done, found) for branch in value]
        elif isinstance(value, (ast.AST, list)):
            nodes = value if isinstance(value, list) else [value]
            done = _read([one for one in nodes if isinstance(one, ast.AST)], done, found)
    if isinstance(node, (ast.With, ast.AsyncWith, *LOOPS)):
        return ends["body"] or done  # a loop within the pass is taken to run
    if isinstance(node, (ast.If, ast.IfExp)):
        known = {one for name in tests for one in _set_where(tests[name], getattr(node, name), done, ends[name])}
        return _meet([ends["body"], ends["orelse"]], done) | known
    if isinstance(node, TRIES):
        whole = None if None in (ends["body"], ends["orelse"]) else ends["body"] | ends["orelse"]
        return _meet([whole, *ends["handlers"]], done) | (ends["finalbody"] or set())
    if isinstance(node, ast.Assign):
        names = {name for target in node.targets if isinstance(target, ast.Name) for name in targets(target)}
        done = done | {Meaning(name, ast.unparse(node.value)) for name in names if not _mentions(node.value, names)}
    return done


def _tests(node):
    """What is true in the branches of an `if`, by their names."""
    return {"body": node.test, "orelse": negated(node.test)} if isinstance(node, (ast.If, ast.IfExp)) else {}


def _mentions(node, names):
    return any(is_variable(part) and names.intersection(variables(part)) for part in ast.walk(node))


def _is_about(known, names):
    """Whether what is known of a condition is of an earlier value of one of the variables `names`."""
    if isinstance(known, str):
        return False
    tests = known.tests if isinstance(known, SetWhere) else [known.test]
    return isinstance(known, Meaning) and known.name in names or any(_mentions(parsed(test), names) for test in tests)


def _given(done, test):
    """`done`, and what follows where `test` is true, or None."""
    if test is None:
        return done
    meanings = {one.name: one.test for one in done if isinstance(one, Meaning)}
    true = consequences(test, meanings).union(
        *(consequences(parsed(one.test), meanings) for one in done if isinstance(one, True_))
    )
    names = {
        one.name
        for one in done
        if isinstance(one, SetWhere) and all(follows(parsed(condition), true, meanings) for condition in one.tests)
    }
    return done | names | set(map(True_, true))


def _set_where(test, block, done, end):
    """What is known after a branch, that ends with `end`, of the variables that it has set: under which conditions it has."""
    block = block if isinstance(block, list) else [block]
    stores = {name for inner in block for one in assignments(ast.walk(inner)) for name in one.names}
    if end is None or _mentions(test, stores):
        return set()
    tests = frozenset([ast.unparse(test)])
    return {
        SetWhere(one, tests) if isinstance(one, str) else one._replace(tests=one.tests | tests)
        for one in end - done
        if isinstance(one, (str, SetWhere))
    }


def _end(block, done, found):
    end = _read(block, done, found)
    return None if isinstance(block, list) and block and isinstance(block[-1], JUMPS) else end


def _meet(ends, done):
    ends = [end for end in ends if end is not None]
    return set.intersection(*ends) if ends else done
