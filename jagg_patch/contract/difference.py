"""What a rule says where a source isn't as the contract has it."""

from typing import NamedTuple


class Difference(NamedTuple):
    """`what` differs from the contract, and what that `means`.

    Not `is_fatal`: for skipped forwards alone. Not `is_readable`: to this Python, and nothing is known of the contract.
    """

    what: str
    means: str
    is_fatal: bool = True
    is_readable: bool = True

    def __str__(self):
        return f"{self.what}: {self.means}"
