"""What the contracts say of a checkout's trainers, by their source text: nothing of it is imported."""

import traceback
from pathlib import Path
from typing import NamedTuple

from .errors import Refused


class Verdict(NamedTuple):
    """On a contract, which `holds`, is `broken` or `unknown`, and what there is to say, in lines."""

    contract: str
    says: list

    def besides(self, is_hooked):
        """Its lines beside the reason why the patch doesn't go in: where both fail, the name may be all that fits."""
        doubt = [] if is_hooked else ["the contract is broken as well, so it may be no such trainer at all"]
        return [*(doubt if self.contract == "broken" else []), *filter(None, self.says)]


def verdicts(checkout):
    """`{trainer: Verdict}`, of those that are there."""
    there = [trainer for trainer in checkout.trainers if checkout.path(trainer).is_file()]
    try:
        lock = checkout.upstream.lock()
        return {trainer: _verdict(checkout, trainer, lock) for trainer in there}
    except Exception:
        traceback.print_exc()
        raise Refused(f"{checkout.directory}: its contracts can't be checked (the reason stands above)") from None


def _verdict(checkout, trainer, lock):
    from .contracts import CONTRACTS, differences, fingerprints, modules  # not above: it takes a while

    def read(file):
        path = checkout.directory / file
        return path.read_bytes() if path.is_file() else None  # bytes: the first lines may name the encoding

    if trainer not in CONTRACTS:
        return Verdict("broken", [f"{trainer} is not in CONTRACTS: jagg_patch/contract has to say what is relied on"])
    file, contract = checkout.file(trainer), CONTRACTS[trainer]
    text, find = read(file), modules(read, Path(file).parent)
    found = differences(text, contract, find)
    fatal = [one for one in found if one.is_fatal]
    if fatal:
        return Verdict("broken" if all(one.is_readable for one in fatal) else "unknown", [str(one) for one in fatal])
    locked = lock.get(trainer, {"commit": "the first", "symbols": {}})
    changed = changed_symbols(fingerprints(text, contract, find), locked["symbols"])
    said = [f"changed since {locked['commit'][:12]}: {', '.join(changed)}"] if changed else []
    return Verdict("holds", ["; ".join([*said, *map(str, found)])])


def changed_symbols(now, locked):
    """The names whose fingerprints are others than the locked ones."""
    return [name for name in now if now[name] != locked.get(name)]
