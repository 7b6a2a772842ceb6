"""The copy of jagg_patch beside the trainers, which git is told to ignore."""

import os
import re
import shutil
from pathlib import Path

from . import git
from .checkout import give, is_read_only
from .errors import Refused
from .upstreams import ROOT

SOURCE = ROOT / "jagg_patch"
READABLE = "let its owner make it readable (chmod -R u+rwX,go+rX), then apply again"


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


def _paths(checkout):
    """Of its folders and files, but for caches: a folder before what is in it. None of them if it isn't a folder."""
    if checkout.module.is_dir() and not checkout.module.is_symlink():
        yield checkout.module
        for folder, folders, files in os.walk(checkout.module):
            folders[:] = [name for name in folders if name != "__pycache__"]
            yield from (Path(folder, name) for name in folders + files)


def _shut(checkout):
    """The first path in it that can't be read here and now; None if all can."""
    return next((path for path in _paths(checkout) if not os.access(path, os.R_OK | os.X_OK * path.is_dir())), None)


def _withheld(checkout):
    """The first path in it that some who can read the trainers can't; None if there is none."""
    mode = _mode(checkout)
    return next((path for path in _paths(checkout) if _of_kind(mode, path) & 0o555 & ~path.stat().st_mode), None)


def _mode(checkout):
    """Of a file in it: whoever may read or write a trainer may do so with it."""
    mode = 0o600
    for path in map(checkout.path, checkout.upstream.trainers):
        mode |= path.stat().st_mode & 0o666 if path.is_file() else 0
    return mode


def _of_kind(mode, path):
    """Who may read a folder has to get into it."""
    return mode | (mode & 0o444) >> 2 if path.is_dir() else mode


def state(checkout):
    """What the tables say of it."""
    shut = _shut(checkout)
    if shut:
        return f"{shut} can't be read; {READABLE}"
    if is_other(checkout):
        return "something else"
    if not is_ours(checkout):
        return "absent; ./apply.sh puts it there"
    withheld = _withheld(checkout)
    if withheld:
        return f"{withheld} can't be read by all who can read the trainers; ./apply.sh mends that"
    its = f"version {version(checkout.module) or 'unknown'}"
    return its if is_current(checkout) else f"{its}, stale: differs from this {version()}; ./apply.sh updates it"


def beside(checkout, age):
    """Where it is while it is put there (`new`), and while what it replaces may have to be put back (`old`)."""
    return checkout.module.with_name(f"{checkout.module.name}.{age}")


def require_room(checkout):
    """Refuse if it can't be put there or taken away."""
    shut = _shut(checkout)
    if shut:
        raise Refused(f"{shut}: it can't be read, and training couldn't either", READABLE)
    for path in (checkout.module.parent, checkout.exclude, *filter(Path.is_dir, _paths(checkout))):
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
    if not is_current(checkout) or _withheld(checkout):
        _copy(beside(checkout, "new"), checkout)
        if is_ours(checkout):
            checkout.module.rename(beside(checkout, "old"))
        beside(checkout, "new").rename(checkout.module)
    ignored = _ignored(checkout)
    if ignored is not None and _line(checkout) not in ignored:
        checkout.exclude.parent.mkdir(parents=True, exist_ok=True)
        missing = b"\n" if ignored[-1] else b""  # at the end of the last line
        with checkout.exclude.open("ab") as file:
            file.write(missing + _line(checkout) + b"\n")


def _copy(target, checkout):
    try:
        shutil.copytree(SOURCE, target, ignore=shutil.ignore_patterns("__pycache__"), copy_function=shutil.copy)
    except shutil.Error as errors:
        (_, path, reason), *_ = errors.args[0]
        raise Refused(f"{path}: the module can't be copied", reason) from None
    owner, mode = checkout.path(checkout.trainers[0]).stat(), _mode(checkout)
    for path in [target, *target.rglob("*")]:
        give(path, owner, _of_kind(mode, path))


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
