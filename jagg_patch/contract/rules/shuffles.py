"""Steps that come in another order than the trajectory's, where no permutation says so: they are shuffled before their loop."""

import ast
from typing import NamedTuple

from ..dataflow import affected, assignments, is_variable, targets, uses, variables
from ..difference import Difference
from ..tree import COMPREHENSIONS, FUNCTIONS

DRAWS = ("randperm", "permutation", "permuted", "argsort", "multinomial", "random.sample", "random.choices", "choice")
SORTS = ("sort", "topk", "msort", "sorted")  # what they return comes sorted, but for where each element was
PICKS = ("gather", "index_select", "take", "take_along_dim", "take_along_axis", "index_copy", "scatter")
TURNS = ("flip", "fliplr", "roll", "permuted", "permutation", "shuffle")
TRANSPOSES = ("transpose", "swapaxes", "permute", "movedim", "T", "mT")
KEEPS = ("torch", "np", "numpy", "list", "tuple", "iter", "reversed")  # functions of which an order comes out again
SIZES = ("shape", "size", "numel", "ndim", "device", "dtype")
TIMELESS = ("embed", "prompt", "mask", "token")  # in the name of what has no steps in dimension 1


def check_shuffles(source, contract, steps, forwards):
    function = source.defined[contract.loop]
    helpers = {
        name: node
        for name, node in source.defined.items()
        if name not in (contract.rollout, contract.forward, contract.loop)
    }
    shuffles = [*_shuffles(source, function), *_calls_that_shuffle(source, function, helpers)]
    everything = assignments(node for node in ast.walk(function) if not _is_in_helper(source, node, function))
    for node in shuffles:
        names = {
            name
            for one in everything
            if any(node is part for value in one.sources for part in ast.walk(value))
            for name in one.names
        }
        names |= {name for value in getattr(node, "args", [])[:1] if _is_statement(source, node) for name in variables(value)}
        reached = affected(everything, names, sizes=False)
        is_given = any(node is part for call in forwards for part in ast.walk(call))
        if is_given or any(uses(value, reached, sizes=False) for call in forwards for value in _arguments(call)):
            yield Difference(
                f"line {node.lineno}: {_short(node)} puts the steps of a sample in another order",
                "JAGG takes a step's place for the step, so its groups would be of steps that don't follow one another",
            )
            return  # the others are of the same order


def _calls_that_shuffle(source, function, helpers):
    orders = shuffled_orders(source, function)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in helpers:
            here = orders.within(source, node)
            called = helpers[node.func.id]
            arguments = called.args
            parameters = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
            given = {name for name, value in zip(parameters, node.args) if is_order(value, here)}
            given |= {keyword.arg for keyword in node.keywords if is_order(keyword.value, here)}
            if any(_shuffles(source, called, given)):
                yield node


def _is_in_helper(source, node, function):
    around = source.around(node, FUNCTIONS)
    return bool(around) and around[0] is not function


def _is_statement(source, node):
    return isinstance(source.parents.get(node), ast.Expr)


def _arguments(call):
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _short(node):
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Orders(NamedTuple):
    """The variables of a function that are places in an order other than the trajectory's, and those that are several such."""

    names: frozenset
    stacked: frozenset

    def within(self, source, node):
        """With those of the loops and comprehensions around `node`."""
        names = set()
        for one in source.around(node, (ast.For, ast.AsyncFor, *COMPREHENSIONS)):
            names |= _of_elements(one, self)
        return self._replace(names=self.names | names)


def shuffled_orders(source, function, given=frozenset()):
    """The `Orders` of `function`, with those that it is `given`."""
    found, before = Orders(frozenset(given), frozenset(given)), None
    while found != before:
        before = found
        for node in ast.walk(function):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                here = found.within(source, node)
                for target in getattr(node, "targets", None) or [node.target]:
                    names = _ordered_targets(target, node.value, here)
                    found = Orders(found.names | names, found.stacked | (names if _is_stacked(node.value, here) else set()))
            elif isinstance(node, ast.Call) and _name(node) == "shuffle" and node.args and not _has_dimension(node):
                found = found._replace(names=found.names.union(variables(node.args[0])[:1]))
    return found


def _is_stacked(node, orders):
    """Whether `node`, an order, may be one for each sample."""
    return any(
        isinstance(part, COMPREHENSIONS)
        or _name(part) in ("argsort", *SORTS)
        or orders.stacked.intersection(variables(part)[:1])
        for part in ast.walk(node)
    )


def _of_elements(loop, orders):
    """The variables of a loop or comprehension that are elements of an order, or one order of several."""
    if isinstance(loop, COMPREHENSIONS):
        return {name for one in loop.generators for name in _ordered_elements(one.target, one.iter, orders)}
    # An element of one order alone is a place. In a comprehension the places make an order again.
    names = _ordered_elements(loop.target, loop.iter, orders)
    return names if _is_stacked(loop.iter, orders) else set()


def _ordered_targets(target, value, orders):
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Call) and _name(value) in SORTS:
        return targets(target.elts[1]) if len(target.elts) == 2 else set()
    if isinstance(target, ast.Subscript):  # an order within something else
        return set()
    return targets(target) if is_order(value, orders) else set()


def _ordered_elements(target, iterable, orders):
    function = _name(iterable)
    if isinstance(target, ast.Tuple) and function == "enumerate" and iterable.args:
        return _ordered_elements(target.elts[-1], iterable.args[0], orders)
    if isinstance(target, ast.Tuple) and function == "zip":
        return {name for pair in zip(target.elts, iterable.args) for name in _ordered_elements(*pair, orders)}
    return targets(target) if is_order(iterable, orders) else set()


def _name(node):
    """Of the function that `node` calls, without what it is a part of; of `….indices` that."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def is_order(node, orders):
    """Whether the value of `node` is such an order, or several."""
    if is_variable(node) and orders.names.intersection(variables(node)):
        return not (isinstance(node, ast.Attribute) and node.attr in SIZES)
    if isinstance(node, ast.Call):
        return _is_order_called(node, orders)
    if isinstance(node, ast.Attribute):
        if node.attr == "indices" and _name(node.value) in SORTS:
            return True
        return node.attr not in SIZES and is_order(node.value, orders)
    if isinstance(node, ast.Subscript):
        if isinstance(node.value, ast.Call) and _name(node.value) in SORTS:
            return ast.unparse(node.slice) in ("1", "-1")
        return is_order(node.value, orders)
    if isinstance(node, COMPREHENSIONS) and not isinstance(node, ast.DictComp):
        return is_order(node.elt, orders._replace(names=orders.names | _of_elements(node, orders)))
    if isinstance(node, ast.IfExp):
        return is_order(node.body, orders) or is_order(node.orelse, orders)
    if isinstance(node, (ast.BinOp, ast.List, ast.Tuple, ast.Starred, ast.NamedExpr)):
        return any(is_order(part, orders) for part in ast.iter_child_nodes(node))
    return False


def _is_order_called(node, orders):
    whole = ast.unparse(node.func)
    if _name(node) == "argsort":  # of the timesteps: the trajectory's own
        return not any(word in ast.unparse(node).lower() for word in ("timestep", "sigma"))
    if any(whole == name or whole.endswith(f".{name}") for name in DRAWS):
        return not _has_dimension(node)
    if _name(node) in (*SORTS, *PICKS, *SIZES, "len"):
        return False
    if isinstance(node.func, ast.Attribute) and is_order(node.func.value, orders):
        return True
    return whole.partition(".")[0] in KEEPS and any(is_order(value, orders) for value in node.args)


def _has_dimension(node):
    """Whether `node` is told to work along dimension 1 of what it gets."""
    return any(keyword.arg in ("axis", "dim", "dims") and _is_one(keyword.value) for keyword in node.keywords)


def _is_one(node):
    return ast.unparse(node) in ("1", "[1]", "(1,)")


def _shuffles(source, function, given=frozenset()):
    """Where `function` reorders dimension 1 of something, which is time in what a rollout gives."""
    orders = shuffled_orders(source, function, given)
    for node in ast.walk(function):
        if not isinstance(node, (ast.Subscript, ast.Call)) or any(word in ast.unparse(node) for word in TIMELESS):
            continue
        here = orders.within(source, node)
        if isinstance(node, ast.Subscript):
            if _is_shuffle(node, here, _rows(source, node, here)) and not _sets_a_number(source, node):
                yield node
            continue
        given = _arguments(node)
        if _name(node) in PICKS and any(map(_is_one, given)) and any(is_order(value, here) for value in given):
            yield node
        elif _name(node) in TURNS and (_has_dimension(node) or _turns_by_position(node)):
            yield node


def _sets_a_number(source, node):
    parent = source.parents[node]
    is_given = isinstance(parent, ast.Assign) and not isinstance(parent.value, ast.Constant)
    return isinstance(node.ctx, ast.Store) and not is_given


def _turns_by_position(node):
    own = 1 if ast.unparse(node.func).partition(".")[0] in KEEPS else 0  # the argument that is turned
    place = {"flip": own, "roll": own + 1}.get(_name(node))
    return _name(node) == "fliplr" or place is not None and place < len(node.args) and _is_one(node.args[place])


def _is_shuffle(node, orders, rows):
    index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if len(index) > 1:
        second = index[1]
        if isinstance(second, ast.Slice):
            return second.step is not None and ast.unparse(second.step).startswith("-")
        return not isinstance(index[0], ast.Constant) and is_order(second, orders)
    if not is_order(index[0], orders):
        return False
    value = node.value
    if _name(value) in TRANSPOSES or isinstance(value, ast.Name) and value.id in rows:
        return True
    return (
        isinstance(value, ast.Subscript)
        and isinstance(value.value, ast.Subscript)  # else it may be a list of batches, and samples that are shuffled
        and isinstance(value.slice, ast.Name)
        and value.slice.id in rows
    )


def _rows(source, node, orders):
    """Variables around `node` that count the samples of a batch, or are one of them beside its order."""
    found = set()
    for loop in source.around(node, (ast.For, ast.AsyncFor, *COMPREHENSIONS)):
        for one in getattr(loop, "generators", [loop]):
            name = _name(one.iter)
            if name == "range":
                found |= targets(one.target)
            elif name == "enumerate" and isinstance(one.target, ast.Tuple):
                found |= targets(one.target.elts[0])
            elif name == "zip" and any(is_order(value, orders) for value in one.iter.args):
                pairs = zip(getattr(one.target, "elts", []), one.iter.args)
                found |= {name for row, value in pairs if isinstance(value, ast.Subscript) for name in targets(row)}
    return found - orders.names
