"""The lines that are printed of a checkout's trainers and of the module."""

from .hooks import APPLIED, READY


def row(what, says, file=None):
    """One line of a table."""
    print(f"  {what:40} {says}".rstrip(" "), file=file)


def report(checkout, states, if_ready, file=None):
    """A line a trainer, with `if_ready` for those that aren't patched yet; returns whether all can be."""
    for trainer, said in states.items():
        row(checkout.file(trainer), {APPLIED: said, READY: if_ready}.get(said, f"refused: {said}"), file=file)
    absent(checkout, file)
    return all_can_be(states)


def all_can_be(states):
    """Whether nothing stands in the way of any trainer."""
    return set(states.values()) <= {APPLIED, READY}


def absent(checkout, file=None):
    """A line for each trainer that the checkout doesn't have."""
    for trainer in checkout.absent():
        row(checkout.file(trainer), "not in this checkout", file=file)
