"""--reverse: the hooks out of the trainers, and the module away where no other trainer needs it."""

from typing import NamedTuple

from . import git, module
from .change import Change, replace
from .checkout import is_read_only
from .committing import require_committable, require_unedited
from .errors import Refused
from .hooks import APPLIED, HOOK, has_hook, states, take_out


class Plan(NamedTuple):
    """The trainers that have the hook, and those of them that have it in the last commit."""

    applied: list
    committed: list


def plan(checkout, options):
    """What is to be done; refused if there is a trainer for which it can't be."""
    found = states(checkout)
    for trainer, state in found.items():
        if has_hook(checkout, trainer) and state != APPLIED:
            raise Refused(
                f"{checkout.path(trainer)}: {state}", "nothing was changed; to leave it out, name the others with --only"
            )
    applied = [trainer for trainer in found if found[trainer] == APPLIED]
    for path in map(checkout.path, applied):
        if is_read_only(path):
            raise Refused(f"{path}: the file is read-only", "make it writable (chmod u+w)")
    committed = checkout.committed(applied, HOOK)
    module.require_room(checkout)
    if options.commit:
        require_committable(checkout, committed)
        require_unedited(checkout, committed)
    return Plan(applied, committed)


def run(checkout, options):
    """Do it, and say so."""
    applied, committed = plan(checkout, options)
    with Change(checkout, options.commit):
        for path, patch in ((checkout.path(trainer), checkout.patch(trainer)) for trainer in applied):
            replace(path, take_out(patch, path.read_bytes()))
        if options.commit and committed:
            _commit(checkout, committed)
        if not any(has_hook(checkout, trainer) for trainer in checkout.upstream.trainers):
            module.remove(checkout)
    print(f"taken out of {len(applied)} trainer(s) in {checkout.directory}")
    for trainer in () if options.commit else committed:
        print(f"  the hook was committed: commit this change too (git commit {checkout.file(trainer)})")


def _commit(checkout, trainers):
    files = map(checkout.file, trainers)
    if not git.passes_on(
        checkout.directory, *git.PLAIN, "commit", "--quiet", "--only", "-m", "Take JAGG's hook out", "--", *files
    ):
        raise Refused(f"{checkout.directory}: git commit refused (its reason stands above)", "reverse without --commit")
