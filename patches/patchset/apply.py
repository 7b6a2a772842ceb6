"""Applying: the hooks into the trainers, and the module beside them."""

import sys
from typing import NamedTuple

from . import git, module
from .change import Change, replace
from .committing import require_committable, require_unedited
from .errors import Refused
from .hooks import APPLIED, HOOK, READY, has_hook, states, take_out
from .report import all_can_be, report
from .verdicts import verdicts


class Plan(NamedTuple):
    """The trainers that are to be patched, and those of them that are already, but not in a commit."""

    todo: list
    loose: list


def plan(checkout, options):
    """What is to be done; refused if there is a trainer for which it can't be."""
    found = states(checkout)
    for trainer, verdict in verdicts(checkout).items():
        if found[trainer] in (APPLIED, READY) and verdict.contract != "holds":
            found[trainer] = f"the contract is {verdict.contract}: {'; '.join(verdict.says)}"
        elif verdict.contract == "broken":
            found[trainer] = "; ".join([found[trainer], *verdict.besides(has_hook(checkout, trainer))])
    if not all_can_be(found):
        report(checkout, found, "not applied", file=sys.stderr)
        raise Refused(
            f"{checkout.directory}: refused; nothing was changed", "to leave a trainer out, name the others with --only"
        )
    module.require_room(checkout)
    module.require_no_other(checkout)
    todo, applied = ([trainer for trainer in found if found[trainer] == state] for state in (READY, APPLIED))
    if not options.commit:
        return Plan(todo, [])
    committed = checkout.committed(applied, HOOK)
    loose = [trainer for trainer in applied if trainer not in committed]
    require_committable(checkout, todo + loose)
    require_unedited(checkout, todo)
    return Plan(todo + loose, loose)


def run(checkout, options):
    """Do it, and say so."""
    todo, loose = plan(checkout, options)
    with Change(checkout, checkout.trainers, options.commit) as change:
        module.put(checkout)
        if options.commit:
            _commit(checkout, todo, loose)
        elif todo:
            _patch(checkout, todo)
        for trainer in todo:  # git's word isn't enough
            if not has_hook(checkout, trainer):
                raise Refused(
                    f"{checkout.path(trainer)}: git reported success, but the hook is not there",
                    "please report this, with git --version",
                )
        change.keep_modes(todo)
    print(f"JAGG {module.version()} in {checkout.directory}:")
    if not report(checkout, states(checkout), ""):
        sys.exit(1)
    if options.commit:
        print("the module isn't in the commits: run ./apply.sh on every clone")
    print("train as before; JAGG_ENABLED=0 turns it off, ./apply.sh --reverse takes it out")


def _patch(checkout, trainers):
    command = checkout.apply_command("apply")
    if not git.passes_on(checkout.directory, *command, input=checkout.patch(*trainers)):
        raise Refused(f"{checkout.directory}: git apply refused the patches (its reason stands above)", "nothing was changed")


def _commit(checkout, trainers, loose):
    for trainer in loose:  # git am wants the file as it was
        path = checkout.path(trainer)
        replace(path, take_out(checkout.patch(trainer), path.read_bytes()))
    require_unedited(checkout, loose)
    command = checkout.apply_command("am", "--quiet")
    if trainers and not git.passes_on(checkout.directory, *command, input=checkout.patch(*trainers)):
        raise Refused(f"{checkout.directory}: git am refused the patches (its reason stands above)", "apply without --commit")
