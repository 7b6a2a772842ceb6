"""--status: what is applied, and whether the module is this version."""

from . import module
from .hooks import APPLIED, LINKED, copies, states
from .report import report, row


def run(checkout, options):
    """Print it."""
    report(checkout, states(checkout), "not applied")
    for name, state in copies(checkout).items():
        if state == LINKED:
            state = f"a link to {checkout.path(name).resolve().name}, and patched as that is"
        elif state == APPLIED:
            state = "a copy of a trainer, with its hook: it stops unless JAGG_ENABLED=0; --reverse takes it out here too"
        row(checkout.file(name), state)
    row(checkout.upstream.pin("module"), module.state(checkout))
