"""The hook in a trainer's file: where its lines stand, and whether the patch is applied, ready, or why it can't be."""

import io
import re

from . import git
from .checkout import is_read_only

HOOK = b"jagg_patch.install(globals()"  # the contract's, which takes longer to load
APPLIED, READY, LINKED = "applied", "ready", "linked"
EDITED = (
    "the hook is there but was edited, or is another version's: take its lines out by hand, or with the version that put"
    " them there (to keep an edit: patches/README.md, 3)"
)


def lines_of(text):
    """With their ends, which are those that git knows: a form feed is none."""
    return io.BytesIO(text).readlines()


def added(patch):
    """The lines that the patch adds, without indentation, and without empty ones."""
    hunks = lines_of(patch[patch.index(b"\n@@") : patch.rindex(b"\n-- \n")])
    return [line for line in (_bare(line[1:]) for line in hunks if line.startswith(b"+")) if line]


def context(patch):
    """The lines before which it adds them."""
    return [line[1:].rstrip(b"\n") for line in lines_of(patch[patch.index(b"\n@@") :]) if line.startswith(b" ")]


def _bare(line):
    return line.removesuffix(b"\n").removesuffix(b"\r").lstrip(b" \t")


def place(patch, text):
    """Where the patch's lines stand in a trainer's text: the first, and the one after the last; None unless whole, and once.

    However indented, with empty lines between (a formatter's), and before whatever line of the same indentation.
    """
    hook, lines = added(patch), lines_of(text)
    found, matched, start, end, margin_of_first = [], 0, 0, 0, b""
    for number, line in enumerate(lines):
        bare = _bare(line)
        is_complete = matched == len(hook)
        if not bare or (is_complete and bare.startswith(b"#")):
            continue
        margin = line[: len(line) - len(line.lstrip(b" \t"))]
        if is_complete:
            matched = 0
            if margin == margin_of_first:
                found.append((start, end))
        if bare != hook[matched]:
            matched = 0
        if bare == hook[matched]:
            if matched == 0:
                start, margin_of_first = number, margin
            matched, end = matched + 1, number + 1
    n_hooks = sum(HOOK in line for line in lines)
    return found[0] if len(found) == n_hooks == 1 else None


def take_out(patch, text):
    """The text without the patch's lines, which are there."""
    (start, end), lines = place(patch, text), lines_of(text)
    return b"".join(lines[:start] + lines[end:])


def patch_in(checkout, name, text):
    """The patch whose lines are in the text: a trainer's own, in a copy of one any; None if there is none, whole and once."""
    trainers = [name] if name in checkout.upstream.trainers else checkout.upstream.trainers
    return next((patch for patch in map(checkout.patch, trainers) if place(patch, text)), None)


def has_hook(checkout, trainer):
    """Whether there is any, of whatever version."""
    path = checkout.path(trainer)
    return path.is_file() and HOOK in path.read_bytes()


def copies(checkout):
    """For each other file beside the trainers that has the hook: `APPLIED`, `LINKED`, or why it can't be taken out.

    `LINKED` leads to a file beside the trainers, whose hook it is.
    """
    return {name: _copied(checkout, name) for name in checkout.others() if has_hook(checkout, name)}


def _copied(checkout, name):
    path, target = checkout.path(name), checkout.path(name).resolve()
    if path.is_symlink():
        is_there = target.parent == checkout.module.parent.resolve() and target.suffix == ".py"
        return LINKED if is_there else f"a link to {target}, in another folder: take the hook out there, or the link away"
    return APPLIED if patch_in(checkout, name, path.read_bytes()) else EDITED


def states(checkout):
    """For each trainer that is meant: `APPLIED`, `READY`, or the reason why it can't be applied."""
    found = {trainer: _obstacle(checkout, trainer) for trainer in checkout.trainers}
    fitting = _fitting(checkout, [trainer for trainer in found if found[trainer] is None])
    for trainer, said in found.items():
        if said is None:
            found[trainer] = _ready(checkout, trainer) if trainer in fitting else _misfit(checkout, trainer)
    return found


def _fitting(checkout, trainers):
    """Those whose patches git can apply."""
    if len(trainers) > 1 and _fit(checkout, trainers):
        return trainers
    return [trainer for trainer in trainers if _fit(checkout, [trainer])]


def _fit(checkout, trainers):
    command = checkout.apply_command("apply")
    return git.run(checkout.directory, *command, "--check", input=checkout.patch(*trainers)).returncode == 0


def _obstacle(checkout, trainer):
    """What can be said without git; None if nothing."""
    path = checkout.path(trainer)
    if not path.is_file():
        return "the file is missing"
    if path.is_symlink() or path.parent.is_symlink():
        return "a symbolic link, which git does not patch; put the file itself there, or name the folder that it is in"
    text = path.read_bytes()
    if re.search(rb"^(<<<<<<<|>>>>>>>) ", text, re.MULTILINE):
        return "git has left a conflict in it; resolve that first (git status)"
    if HOOK not in text:
        return None
    return APPLIED if patch_in(checkout, trainer, text) else EDITED


def _ready(checkout, trainer):
    return "the file is read-only; make it writable (chmod u+w)" if is_read_only(checkout.path(trainer)) else READY


def _misfit(checkout, trainer):
    """Why git can't apply the patch."""
    below, text = context(checkout.patch(trainer)), checkout.path(trainer).read_bytes()
    lines = text.split(b"\n")
    if any(line + b"\r" in lines for line in below):
        return "its lines end in CRLF; convert it (dos2unix), then apply again"
    wanted = " ".join(b" ".join(below).decode().split())
    return (
        f"the line before which the hook goes ('{wanted}') was changed or isn't there; where the contract holds,"
        " ./apply.sh --refresh finds its place (patches/README.md)"
    )
