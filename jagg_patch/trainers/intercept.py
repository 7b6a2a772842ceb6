"""Wrapping names of a module from outside: checks before, a forwarding module, and where a call came from."""

import ast
import inspect
import sys
import textwrap
import types
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import AUTO
from ..contract import calls_in_assignments, differences, not_one
from ..errors import JaggError


NO_RECORDS = "JAGG_SKIP_FORWARDS=0 JAGG_RETAIN=0"
# To run with where a setting needs what the trainer hasn't.
INSTEAD = {
    "skip_forwards": "JAGG_SKIP_FORWARDS=0",
    "retain": "JAGG_RETAIN=0",
    "probe_every": "JAGG_PROBE_EVERY=0",
    "log": "JAGG_LOG unset",
    "frac": "a number as JAGG_FRAC",
    "knots": "positions in place of a number (JAGG_KNOTS_AT)",
}


def require_contract(namespace, contract, config):
    """Raise `JaggError` unless the source of the trainer in `namespace` keeps `contract`, as far as the `config` needs it."""
    for difference in differences(text_of(namespace), replace(contract, hook=())):  # which has been run
        if difference.is_fatal:
            raise changed(namespace, str(difference))
        without = [INSTEAD[name] for name in difference.needed_by if _is_on(config, name)]
        if without:
            raise changed(namespace, str(difference), without=" and ".join(without))


def text_of(namespace):
    """The source of the trainer in `namespace`. Raises `JaggError` where it can't be read."""
    try:
        return Path(namespace["__file__"]).read_bytes()
    except (KeyError, OSError) as error:
        raise changed(namespace, f"its source can't be read ({error})") from None


def _is_on(config, name):
    value = getattr(config, name)
    return value == AUTO if name == "frac" else bool(value)


def require_parameters(namespace, function, parameters, without="JAGG_ENABLED=0"):
    """Raise `JaggError` unless `namespace[function]` is a function that names all of `parameters`.

    The message recommends to run `without` what needs them.
    """
    found = namespace.get(function)
    if not inspect.isfunction(found) or inspect.isgeneratorfunction(inspect.unwrap(found)):
        raise changed(namespace, f"there is no function {function}(), or it has become a generator", without)
    missing = [name for name in parameters if name not in inspect.signature(found).parameters]
    if missing:
        raise changed(namespace, f"{function}() has no parameter {', '.join(missing)} any more", without)


def require_module(namespace, name):
    """Raise `JaggError` unless `namespace` has the module `name` under its own name."""
    if namespace.get(name) is not sys.modules.get(name):
        raise changed(namespace, f"{name} isn't imported as {name}")


def require_class(namespace, name):
    """Raise `JaggError` unless `namespace[name]` is a class."""
    if not inspect.isclass(namespace.get(name)):
        raise changed(namespace, f"there is no class {name}")


def changed(namespace, what, without="JAGG_ENABLED=0"):
    """The `JaggError` to raise when the trainer in `namespace` isn't as JAGG knows it."""
    return JaggError(
        f"{namespace.get('__file__', namespace.get('__name__'))}: {what}\n"
        f"upstream has changed in a place that JAGG relies on: run with {without}, or move the patch set (its patches/README.md)"
    )


@dataclass(frozen=True)
class SourceLines:
    """A range of lines of one source file, ends included."""

    filename: str
    first: int
    last: int


def call_lines(function, variable, method):
    """The lines of the one statement in `function` that assigns `variable` from an expression calling `….method(…)`.

    Raises `JaggError` unless there is exactly one such call.
    """
    found = all_call_lines(function, variable, method)
    if len(found) != 1:
        raise changed(inspect.unwrap(function).__globals__, not_one(function.__name__, found, variable, method))
    return found[0]


def all_call_lines(function, variable, method):
    """Those of all such calls."""
    function = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except OSError:
        raise changed(function.__globals__, f"the source of {function.__name__}() can't be read") from None
    filename, offset = function.__code__.co_filename, function.__code__.co_firstlineno - 1
    statements = calls_in_assignments(tree, variable, method)
    return [SourceLines(filename, offset + statement.lineno, offset + statement.end_lineno) for statement in statements]


def called_from(lines):
    """Whether the caller of the function that asks stands in `lines`."""
    caller = sys._getframe(2)
    return caller.f_code.co_filename == lines.filename and lines.first <= caller.f_lineno <= lines.last


def local_of_caller(lines, name):
    """The local variable `name` of the function with `lines` that the asking function is called from, or None."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == lines.filename:  # a comprehension may have a frame of its own
        if name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back
    return None


class ForwardingModule(types.ModuleType):
    """A module as one namespace sees it: every attribute is the real module's, but for the replaced ones.

    The real module stays as it is for every other library.
    """

    def __init__(self, module, **replaced):
        super().__init__(module.__name__, module.__doc__)
        vars(self).update(__spec__=module.__spec__, __loader__=module.__loader__, __package__=module.__package__)
        vars(self).update(replaced, _forwards_to=module)

    def __getattr__(self, name):
        return getattr(vars(self)["_forwards_to"], name)

    def __setattr__(self, name, value):
        setattr(vars(self)["_forwards_to"], name, value)

    def __delattr__(self, name):
        delattr(vars(self)["_forwards_to"], name)

    def __dir__(self):
        return dir(vars(self)["_forwards_to"])
