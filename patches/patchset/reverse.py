"""--reverse: the hooks out of the trainers and their copies, and the module away where nobody needs it any more."""

import os
from typing import NamedTuple

from . import git, module
from .change import Change, replace
from .checkout import is_read_only
from .committing import require_committable, require_unedited
from .errors import Refused
from .hooks import APPLIED, HOOK, LINKED, copies, has_hook, patch_in, states, take_out


class Plan(NamedTuple):
    """The files that have the hook, and those that have it in the last commit; by the names of trainers and copies."""

    applied: list
    committed: list


def plan(checkout, options):
    """What is to be done; refused if there is a file for which it can't be."""
    found = states(checkout) | ({} if checkout.only else copies(checkout))
    for name, state in found.items():
        if has_hook(checkout, name) and state not in (APPLIED, LINKED):
            raise Refused(
                f"{checkout.path(name)}: {state}", "nothing was changed; to leave it out, name the others with --only"
            )
    applied = [name for name in found if found[name] == APPLIED]
    for path in map(checkout.path, applied):
        if is_read_only(path):
            raise Refused(f"{path}: the file is read-only", "make it writable (chmod u+w)")
    names = [*checkout.trainers, *([] if checkout.only else checkout.others())]
    committed = [name for name in checkout.committed(names, HOOK) if checkout.path(name).is_file()]
    module.require_room(checkout)
    if options.commit:
        require_committable(checkout, committed)
        require_unedited(checkout, [name for name in committed if name in applied])
        for name in committed:
            if name not in applied:
                _require_taken_out(checkout, name)
    return Plan(applied, committed)


def _require_taken_out(checkout, name):
    """Refuse unless the hook is all that the file lacks of the last commit: a run was killed before it could commit that."""
    text = os.fsencode(git.output(checkout.directory, "show", f"HEAD:./{checkout.file(name)}"))
    patch = patch_in(checkout, name, text)
    if patch is None or take_out(patch, text) != checkout.path(name).read_bytes():
        raise Refused(f"{checkout.path(name)}: has changes of yours", "commit or stash them, then try again")


def run(checkout, options):
    """Do it, and say so."""
    applied, committed = plan(checkout, options)
    taken = list(dict.fromkeys([*applied, *(committed if options.commit else [])]))
    with Change(checkout, taken, options.commit):
        for path, name in ((checkout.path(name), name) for name in applied):
            text = path.read_bytes()
            replace(path, take_out(patch_in(checkout, name, text), text))
        if options.commit and committed:
            _commit(checkout, committed)
        left = [name for name in [*checkout.upstream.trainers, *checkout.others()] if has_hook(checkout, name)]
        if not left:
            module.remove(checkout)
    trainers = [name for name in taken if name in checkout.upstream.trainers]
    print(f"taken out of {len(trainers)} trainer(s) in {checkout.directory}")
    for name in taken:
        if name not in trainers:
            print(f"  and of {checkout.file(name)}, a copy")
    if left:
        others = f", and {len(left) - 1} more" if left[1:] else ""
        print(f"  the module stays: {checkout.file(left[0])} has the hook{others}")
    for name in () if options.commit else committed:
        print(f"  the hook was committed: commit this change too (git commit {checkout.file(name)})")


def _commit(checkout, names):
    files = map(checkout.file, names)
    if not git.passes_on(
        checkout.directory, *git.PLAIN, "commit", "--quiet", "--only", "-m", "Take JAGG's hook out", "--", *files
    ):
        raise Refused(f"{checkout.directory}: git commit refused (its reason stands above)", "reverse without --commit")
