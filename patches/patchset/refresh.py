"""--refresh: patches, lock and pin made anew from what a checkout has committed."""

import ast
import json
from typing import NamedTuple

from . import git
from .anchor import anchored
from .contracts import differences, fingerprints
from .errors import Refused, about
from .head import Head, contract_of
from .mail import patched, with_change
from .upstreams import ROOT
from .verdicts import changed_symbols
from .writing import write


class Moved(NamedTuple):
    """A trainer at a later commit."""

    patch: str
    symbols: dict
    how: str


def run(checkout, options):
    """Do it, and show what changes; nothing is written if one of the contracts is broken."""
    with about(checkout.directory):
        head, upstream = Head(checkout), checkout.upstream
        lock = upstream.lock()
        moved = _moved(checkout, head, lock)
        for trainer, one in moved.items():
            lock[trainer] = {"commit": head.commit, "symbols": one.symbols}
    here = [trainer for trainer in upstream.trainers if head.read(upstream.file(trainer)) is not None]
    behind = sorted(trainer for trainer in here if lock.get(trainer, {}).get("commit") != head.commit)
    if behind:
        print(f"the pin stays where it is, for these aren't refreshed: {', '.join(behind)}")
    patches = {upstream.patch_file(trainer): one.patch for trainer, one in moved.items()}
    write({**patches, upstream.lock_file: json.dumps(lock, indent=1) + "\n"})
    if not behind:
        _pin(upstream, head.commit)
    if not head.is_published():
        print("its commit is on no remote branch there: has upstream published it?")


def _moved(checkout, head, lock):
    """`{trainer: Moved}` of those that the commit has, with a line printed for each; refused if one's contract is broken."""
    found, broken = {}, []
    for trainer in checkout.trainers:
        file, patch = checkout.file(trainer), checkout.upstream.patch_file(trainer).read_text()
        contract, text = contract_of(trainer, file), head.trainer(trainer)
        if text is None:
            print(f"  {file:40} not in this checkout: its patch and lock stay")
            continue
        fatal = [one for one in differences(text, contract, head.find) if one.is_fatal]
        if fatal:
            broken += [f"{file}: {one}" for one in fatal]
            continue
        found[trainer] = _move(patch, file, text, contract, head.find)
        print(f"  {file:40} {found[trainer].how}; {_what_changed(found[trainer].symbols, lock.get(trainer))}")
    if broken:
        raise Refused("the contract is broken, so nothing was written", *broken, "name the others with --only")
    if not found:
        raise Refused("it has none of the trainers committed")
    return found


def _move(patch, file, text, contract, find):
    hooked, how = patched(text, patch, file), "the patch still applies"
    if hooked is None:
        hooked, how = anchored(patch, file, text, contract), "the hook is anchored anew"
    new = with_change(patch, file, text, hooked)
    if patched(text, new, file) != hooked or not _is_python(hooked):
        raise Refused(f"{file}: the new patch doesn't do what it should", "please report this, with git --version")
    return Moved(new, fingerprints(text, contract, find), how)


def _is_python(text):
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _what_changed(symbols, locked):
    if not (locked and locked["symbols"]):
        return "locked for the first time"
    changed = changed_symbols(symbols, locked["symbols"])
    return f"changed: {', '.join(changed)}" if changed else "nothing that is relied on changed"


def _pin(upstream, commit):
    name = upstream.pin_file.relative_to(ROOT)
    if not git.succeeds(ROOT, "config", "--file", str(name), "upstream.commit", commit):
        raise Refused(f"{name} can't be written: the pin of {upstream.name} has to be {commit}")
    print(f"{name}: {upstream.name} is at {commit}")
