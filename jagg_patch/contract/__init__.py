"""What the interception relies on in a trainer's source text, and where a text differs from it. Nothing is imported or run.

The standard library alone, and nothing of the rest of JAGG, so that apply.sh can ask any Python 3.
"""

import platform

from .behind import settings_behind_steps
from .calls import calls_in_assignments
from .contracts import CONTRACTS, DANCEGRPO, DANCEGRPO_SD, Contract
from .difference import Difference
from .fingerprint import fingerprints
from .rules import all_differences
from .rules.hook import HOOK
from .rules.order import not_one
from .tree import LOOPS, UNREADABLE, Source, modules

__all__ = [
    "CONTRACTS",
    "Contract",
    "DANCEGRPO",
    "DANCEGRPO_SD",
    "Difference",
    "HOOK",
    "LOOPS",
    "Source",
    "calls_in_assignments",
    "differences",
    "fingerprints",
    "modules",
    "not_one",
    "settings_behind_steps",
]


def differences(text, contract, find=lambda module: None):
    """Where a trainer's source differs from `contract`: a list of `Difference`.

    Args:
        text: the source, or its bytes.
        find: gives the text of a module by its dotted name, or None; for functions that the trainer imports.
    """
    try:
        return all_differences(Source(text, find), contract)
    except UNREADABLE as error:
        means = f"Python {platform.python_version()} can't read it; is it whole, and does it train with a newer one?"
        return [Difference(str(error), means, is_readable=False)]
