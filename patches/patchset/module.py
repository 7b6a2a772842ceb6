"""The copy of jagg_patch beside the trainers, which git is told to ignore."""

import os
import re
import shutil

from . import git
from .checkout import is_read_only
from .errors import Refused
from .upstreams import ROOT

SOURCE = ROOT / "jagg_patch"


def version(module=SOURCE):
    """What its __init__ says."""
    init = module / "__init__.py"
    found = re.search(r'^__version__ = "(.*)"', init.read_text() if init.is_file() else "", re.MULTILINE)
    return found[1] if found else ""


def is_ours(checkout):
    """Whether the module beside the trainers is one, of whatever version."""
    return not checkout.module.is_symlink() and (checkout.module / "install.py").is_file()


def is_other(checkout):
    """Whether something else is in its place."""
    return os.path.lexists(checkout.module) and not is_ours(checkout)


def is_current(checkout):
    """Whether it is the same as this patch set's, but for caches."""
    return _contents(SOURCE) == _contents(checkout.module)


def _contents(module):
    found = {}
    for path in module.rglob("*"):
        name = path.relative_to(module)
        if "__pycache__" not in name.parts:
            found[name] = path.is_file() and path.read_bytes()
    return found


def state(checkout):
    """What the tables say of it."""
    if is_other(checkout):
        return "something else"
    if not is_ours(checkout):
        return "absent; ./apply.sh puts it there"
    its = f"version {version(checkout.module)}"
    return its if is_current(checkout) else f"{its}, stale: differs from this {version()}; ./apply.sh updates it"


def beside(checkout, age):
    """Where it is while it is put there (`new`), and while what it replaces may have to be put back (`old`)."""
    return checkout.module.with_name(f"{checkout.module.name}.{age}")


def require_room(checkout):
    """Refuse if it can't be put there or taken away."""
    for path in (checkout.module.parent, checkout.exclude):
        if path is not None and path.exists() and is_read_only(path):
            raise Refused(f"{path}: it is read-only, and has to change", "make it writable (chmod u+w)")
    for path in (beside(checkout, "new"), beside(checkout, "old")):
        if path.is_symlink() or path.is_file():
            raise Refused(f"{path}: it has the name of a folder that is needed for a moment", "move it away, then try again")


def require_no_other(checkout):
    """Refuse if something else is in its place."""
    if is_other(checkout):
        raise Refused(f"{checkout.module}: something else is already there", "move it away, then apply again")


def put(checkout):
    """Put it there as it is in this patch set. Within a `Change`, which takes care of what it replaces."""
    if not is_current(checkout):
        _copy(beside(checkout, "new"))
        if is_ours(checkout):
            checkout.module.rename(beside(checkout, "old"))
        beside(checkout, "new").rename(checkout.module)
    ignored = _ignored(checkout)
    if ignored is not None and _line(checkout) not in ignored:
        checkout.exclude.parent.mkdir(parents=True, exist_ok=True)
        missing = b"\n" if ignored[-1] else b""  # at the end of the last line
        with checkout.exclude.open("ab") as file:
            file.write(missing + _line(checkout) + b"\n")


def _copy(target):
    try:
        shutil.copytree(SOURCE, target, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copy)
    except shutil.Error as errors:
        (_, path, reason), *_ = errors.args[0]
        raise Refused(f"{path}: the module can't be copied", reason) from None


def remove(checkout):
    """Take it away. Within a `Change`."""
    if is_ours(checkout):
        checkout.module.rename(beside(checkout, "old"))
    ignored, line = _ignored(checkout), _line(checkout)
    if ignored is None or line not in ignored:
        return
    worktrees = git.output(checkout.directory, "worktree", "list", "--porcelain") or ""  # which share the file
    for tree in re.findall("^worktree (.*)", worktrees, re.MULTILINE):
        if os.path.isdir(os.path.join(tree, checkout.prefix, checkout.upstream.pin("module"))):
            return
    checkout.exclude.write_bytes(b"\n".join(other for other in ignored if other != line))


def _line(checkout):
    """A pattern, from the repository's top on, for its path alone."""
    prefix = re.sub(r"[\\*?[]", r"\\\g<0>", checkout.prefix)
    return os.fsencode(f"/{prefix}{checkout.upstream.pin('module')}/")


def _ignored(checkout):
    """The lines of the exclude file, without their ends; None if the checkout is in no repository."""
    if checkout.exclude is None:
        return None
    return checkout.exclude.read_bytes().split(b"\n") if checkout.exclude.is_file() else [b""]
