"""The rules of the contract: generator functions of a source and a contract, which yield the `Difference`s that they find."""

from ..difference import Difference
from .functions import check_functions
from .hook import check_hook
from .loop import check_loop
from .solver import check_solver


def all_differences(source, contract):
    found = [*check_functions(source, contract, contract.parameters), *check_hook(source, contract)]
    found += [
        Difference(one.what, f"{one.means} where forwards are skipped (JAGG_SKIP_FORWARDS)", is_fatal=False)
        for one in check_functions(source, contract, contract.skipping)
        if one.what not in {other.what for other in found}
    ]
    return [*found, *check_loop(source, contract), *check_solver(source, contract)]
