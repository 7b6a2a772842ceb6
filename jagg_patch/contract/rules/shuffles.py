"""Steps that come in another order than the trajectory's, where no permutation says so: they are shuffled before their loop."""

import ast

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
    shuffles = [*_shuffles(function), *_calls_that_shuffle(function, helpers)]
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


def _calls_that_shuffle(function, helpers):
    orders = shuffled_orders(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in helpers:
            called = helpers[node.func.id]
            arguments = called.args
            parameters = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
            given = {name for name, value in zip(parameters, node.args) if is_order(value, orders)}
            given |= {keyword.arg for keyword in node.keywords if is_order(keyword.value, orders)}
            if any(_shuffles(called, given)):
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


def shuffled_orders(function, given=frozenset()):
    """The variables of `function` whose values are places in an order that is none of the trajectory's; those `given` are."""
    names, before = set(given), None
    nodes = list(ast.walk(function))
    while names != before:
        before = set(names)
        for node in nodes:
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                for target in getattr(node, "targets", None) or [node.target]:
                    names |= _ordered_targets(target, node.value, names)
            elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
                names |= _ordered_elements(node.target, node.iter, names)
            elif isinstance(node, ast.Call) and _name(node) == "shuffle" and node.args and not _has_dimension(node):
                names |= set(variables(node.args[0])[:1])
    return names


def _ordered_targets(target, value, names):
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Call) and _name(value) in SORTS:
        return targets(target.elts[1]) if len(target.elts) == 2 else set()
    if isinstance(target, ast.Subscript):  # an order within something else
        return set()
    return targets(target) if is_order(value, names) else set()


def _ordered_elements(target, iterable, names):
    function = _name(iterable)
    if isinstance(target, ast.Tuple) and function == "enumerate" and iterable.args:
        return _ordered_elements(target.elts[-1], iterable.args[0], names)
    if isinstance(target, ast.Tuple) and function == "zip":
        return {name for pair in zip(target.elts, iterable.args) for name in _ordered_elements(*pair, names)}
    return targets(target) if is_order(iterable, names) else set()


def _name(node):
    """Of the function that `node` calls, without what it is a part of; of `….indices` that."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)


def is_order(node, names):
    """Whether the value of `node` is such an order, or several, given the variables `names` that are."""
    if is_variable(node) and names.intersection(variables(node)):
        return not (isinstance(node, ast.Attribute) and node.attr in SIZES)
    if isinstance(node, ast.Call):
        return _is_order_called(node, names)
    if isinstance(node, ast.Attribute):
        if node.attr == "indices" and _name(node.value) in SORTS:
            return True
        return node.attr not in SIZES and is_order(node.value, names)
    if isinstance(node, ast.Subscript):
        if isinstance(node.value, ast.Call) and _name(node.value) in SORTS:
            return ast.unparse(node.slice) in ("1", "-1")
        return is_order(node.value, names)
    if isinstance(node, COMPREHENSIONS) and not isinstance(node, ast.DictComp):
        own = {name for one in node.generators for name in _ordered_elements(one.target, one.iter, names)}
        return is_order(node.elt, names | own)
    if isinstance(node, ast.IfExp):
        return is_order(node.body, names) or is_order(node.orelse, names)
    if isinstance(node, (ast.BinOp, ast.List, ast.Tuple, ast.Starred, ast.NamedExpr)):
        return any(is_order(part, names) for part in ast.iter_child_nodes(node))
    return False


def _is_order_called(node, names):
    whole = ast.unparse(node.func)
    if _name(node) == "argsort":  # of the timesteps: the trajectory's own
        return not any(word in ast.unparse(node).lower() for word in ("timestep", "sigma"))
    if any(whole == name or whole.endswith(f".{name}") for name in DRAWS):
        return not _has_dimension(node)
    if _name(node) in (*SORTS, *PICKS, *SIZES, "len"):
        return False
    if isinstance(node.func, ast.Attribute) and is_order(node.func.value, names):
        return True
    return whole.partition(".")[0] in KEEPS and any(is_order(value, names) for value in node.args)


def _has_dimension(node):
    """Whether `node` is told to work along dimension 1 of what it gets."""
    return any(keyword.arg in ("axis", "dim", "dims") and _is_one(keyword.value) for keyword in node.keywords)


def _is_one(node):
    return ast.unparse(node) in ("1", "[1]", "(1,)")


def _shuffles(function, given=frozenset()):
    """Where `function` reorders dimension 1 of something, which is time in what a rollout gives."""
    orders = shuffled_orders(function, given)
    rows = _rows(function, orders)
    for node in ast.walk(function):
        if isinstance(node, (ast.Subscript, ast.Call)) and any(word in ast.unparse(node) for word in TIMELESS):
            continue
        if isinstance(node, ast.Subscript) and _is_shuffle(node, orders, rows):
            yield node
        elif isinstance(node, ast.Call):
            given = _arguments(node)
            if _name(node) in PICKS and any(map(_is_one, given)) and any(is_order(value, orders) for value in given):
                yield node
            elif _name(node) in TURNS and (_has_dimension(node) or _turns_by_position(node)):
                yield node


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


def _rows(function, orders):
    """Variables that count the samples of a batch, or are one of them beside its order."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            name = _name(node.iter)
            if name == "range":
                found |= targets(node.target)
            elif name == "enumerate" and isinstance(node.target, ast.Tuple):
                found |= targets(node.target.elts[0])
            elif name == "zip" and any(is_order(value, orders) for value in node.iter.args):
                pairs = zip(getattr(node.target, "elts", []), node.iter.args)
                found |= {name for one, value in pairs if isinstance(value, ast.Subscript) for name in targets(one)}
    return found - orders
