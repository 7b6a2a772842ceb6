"""The rules of the contract: generator functions of a source and a contract, which yield the `Difference`s that they find."""

from .functions import check_functions
from .hook import check_hook
from .loop import check_loop, check_rollout
from .solver import check_solver


# Of a trainer whose plan needs no rollout: what is known of one where it begins and ends.
RECORDS = ("skip_forwards", "retain")
ROLLOUT = (*RECORDS, "probe_every", "log", "frac", "knots")
WHERE = {
    RECORDS: "where forwards are left out (JAGG_SKIP_FORWARDS, JAGG_RETAIN)",
    ROLLOUT: "where training steps are told apart (JAGG_SKIP_FORWARDS, JAGG_RETAIN, JAGG_PROBE_EVERY, JAGG_LOG, JAGG_FRAC=auto, "
    "JAGG_KNOTS)",
}


def all_differences(source, contract):
    found = [*check_functions(source, contract, contract.parameters), *check_hook(source, contract)]
    for name, parameters in contract.recording.items():
        settings = ROLLOUT if name == contract.rollout else RECORDS
        found += [
            _for(settings, one)
            for one in check_functions(source, contract, {name: parameters})
            if one.what not in {other.what for other in found}
        ]
    rollout = check_rollout(source, contract)
    found += [_for(ROLLOUT, one) for one in rollout] if contract.plans_at_start else rollout
    return [*found, *check_loop(source, contract), *check_solver(source, contract)]


def _for(settings, difference):
    return difference._replace(means=f"{difference.means} {WHERE[settings]}", needed_by=settings)
