"""--check: what applying would do to each trainer. Nothing is changed."""

from . import module
from .errors import Refused
from .hooks import has_hook, states
from .report import absent, all_can_be, row
from .verdicts import Verdict, verdicts


def run(checkout, options):
    """Print the table, and refuse what applying would refuse."""
    found, on_contracts = states(checkout), verdicts(checkout)
    row("trainer", f"{'patch':8} {'contract':9} what differs, and what it means")
    for trainer, state in found.items():
        _rows(checkout.file(trainer), state, on_contracts.get(trainer, Verdict("unknown", [])), has_hook(checkout, trainer))
    absent(checkout)
    row(checkout.upstream.pin("module"), module.state(checkout))
    for line in checkout.upstream.pins("unsupported"):
        file, _, reason = line.partition(" ")
        if not checkout.only and (checkout.directory / file).is_file():
            row(file, f"not supported: {reason}")
    if not all_can_be(found) or any(verdict.contract != "holds" for verdict in on_contracts.values()):
        raise Refused(
            f"{checkout.directory}: a trainer can't be patched, or would train wrong",
            "to leave it out, name the others with --only",
        )
    module.require_room(checkout)
    module.require_no_other(checkout)


def _rows(file, state, verdict, is_hooked):
    says = verdict.says
    if not all_can_be({file: state}):
        says, state = [state, *verdict.besides(is_hooked)], "refused"
    for number, line in enumerate(says or [""]):
        row(*([file, f"{state:8} {verdict.contract:9} {line}"] if number == 0 else ["", f"{'':18} {line}"]))
