"""What a rule says where a source isn't as the contract has it."""

from typing import NamedTuple


class Difference(NamedTuple):
    """`what` differs from the contract, and what that `means`.

    `needed_by`: the settings that are all it matters to, by their names in `JaggConfig`. Not `is_readable`: to this Python, and
    nothing is known of the contract.
    """

    what: str
    means: str
    needed_by: tuple = ()
    is_readable: bool = True

    @property
    def is_fatal(self):
        return not self.needed_by

    def __str__(self):
        return f"{self.what}: {self.means}"
