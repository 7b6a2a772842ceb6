"""What ends the program before it is done."""

import sys
from contextlib import contextmanager


class Refused(Exception):
    """It can't be done, and nothing was changed. The arguments are lines for the user: what and where, then what to do."""

    status = 1

    def show(self):
        """Print the lines where errors go."""
        first, *others = self.args
        print(f"apply.sh: {first}", *(f"  {line}" for line in others), sep="\n", file=sys.stderr)


class BadUsage(Refused):
    """The command line means nothing."""

    status = 2

    def __init__(self, what):
        super().__init__(what, "./apply.sh --help shows the usage")


@contextmanager
def about(place):
    """What is refused within is refused because of `place`."""
    try:
        yield
    except Refused as reason:
        raise Refused(f"{place}: {reason.args[0]}", *reason.args[1:]) from None
