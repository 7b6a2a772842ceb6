"""--status: what is applied, and whether the module is this version."""

from . import module
from .hooks import states
from .report import report, row


def run(checkout, options):
    """Print it."""
    report(checkout, states(checkout), "not applied")
    row(checkout.upstream.pin("module"), module.state(checkout))
