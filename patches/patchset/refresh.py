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
    patches = {upstream.patch_file(trainer): one.patch for trainer, one in moved.items()}
    write({**patches, upstream.lock_file: json.dumps(lock, indent=1) + "\n"})
    obstacle = _pin_obstacle(checkout, head, lock)
    if obstacle:
        what, remedy = obstacle
        print(f"{_pin_name(upstream)}: stays at {upstream.pin('commit')[:12]}: {what}\n  {remedy}")
    else:
        _pin(upstream, head.commit)


def _pin_obstacle(checkout, head, lock):
    """Why upstream's pin can't be the commit, and what would help; None if it can."""
    upstream, again = checkout.upstream, f"./apply.sh --refresh {checkout.directory}"
    if checkout.only:
        return "--only never moves it", f"when the others are ready too: {again}"
    here = [trainer for trainer in upstream.trainers if head.read(upstream.file(trainer)) is not None]
    behind = sorted(trainer for trainer in here if lock.get(trainer, {}).get("commit") != head.commit)
    if behind:
        return f"the commit has {', '.join(behind)}, and the folder hasn't", f"put that back (git restore), then {again}"
    if not head.is_of(upstream.pin("url")):
        return (
            f"no branch that was fetched from {upstream.pin('url')} has {head.commit[:12]}",
            "a fork's commit is never upstream's; if it is upstream's: git remote add, git fetch, then refresh again",
        )
    return None


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
        advice = "name the others with --only" if found else "it may be no such checkout at all"
        raise Refused("the contract is broken, so nothing was written", *broken, advice)
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


def _pin_name(upstream):
    return str(upstream.pin_file.relative_to(ROOT))


def _pin(upstream, commit):
    name = _pin_name(upstream)
    if not git.succeeds(ROOT, "config", "--file", name, "upstream.commit", commit):
        raise Refused(f"{name} can't be written: the pin of {upstream.name} has to be {commit}")
    print(f"{name}: {upstream.name} is at {commit}")
