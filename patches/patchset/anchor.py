"""Where the hook belongs in a trainer's text: before the statement that its contract names."""

import re

from .contracts import Source
from .errors import Refused
from .mail import added_block, lines_of


def hook_place(file, text, contract):
    """How many lines are above the statement."""
    statements = Source(text).hooks(contract)
    if len(statements) != 1:
        raise Refused(f"{file}: {len(statements)} statements could be what the hook belongs to", "./apply.sh --check says more")
    return statements[0].lineno - 1


def anchored(patch, file, text, contract):
    """`text` with the patch's lines before the statement, indented as it is."""
    place, lines = hook_place(file, text, contract), lines_of(text)
    indent = re.match(r"\s*", lines[place])[0]
    hook = [indent + line if line.strip() else line for line in added_block(patch, file)]
    return "".join([*lines[:place], *hook, *lines[place:]])
