"""Say of each trainer in a checkout whether its patch applies and its contract holds, and what differs since the pin.

The same as `./apply.sh --check DIR`, which needs no torch. The contracts are checked in the source text: nothing of the checkout
is imported. Exit status 1 if something differs that would train wrong.
"""

import json
import os
import sys
from pathlib import Path

from ..contract import CONTRACTS, Difference, differences, fingerprints, modules
from ..errors import JaggError

ROOT = Path(__file__).resolve().parents[2]  # of the patch set


def add_arguments(parser):
    parser.add_argument("directory", nargs="?", metavar="DIR", help="a checkout, otherwise those in upstream/")
    parser.add_argument("--only", action="append", default=[], metavar="TRAINER", help="one trainer; may be repeated")


def run(args):
    script = ROOT / "apply.sh"
    if not script.is_file():
        raise JaggError(
            f"{ROOT} has no apply.sh, which looks at the patches\nrun the doctor from the patch set, not from a checkout"
        )
    sys.stdout.flush()
    only = [word for name in args.only for word in ("--only", name)]
    os.execv(script, [str(script), "--check", *only, *([args.directory] if args.directory else [])])


def lock_file(upstream):
    return ROOT / "upstream" / f"{upstream}.lock"


def read_lock(upstream):
    """`{trainer: {"commit": …, "symbols": {symbol: fingerprint}}}`."""
    path = lock_file(upstream)
    return json.loads(path.read_text()) if path.is_file() else {}


def examine(directory, file, locked):
    """`(differences, changed)` of a trainer's file: from its contract, and the symbols that aren't as `locked`."""

    def read(file):
        path = Path(directory, file)
        return path.read_bytes() if path.is_file() else None  # bytes: the first lines may name the encoding

    name, find, text = Path(file).stem, modules(read, Path(file).parent), read(file)
    if name not in CONTRACTS:
        return [Difference(f"{name} is not in CONTRACTS", "jagg_patch/contract.py has to say what is relied on")], []
    contract = CONTRACTS[name]
    found = differences(text, contract, find)
    if not all(one.is_readable for one in found):
        return found, []
    now = fingerprints(text, contract, find)
    return found, [name for name in now if now[name] != locked.get(name)]


def main(directory, upstream, *files):
    """For apply.sh: lines of a trainer's name, `holds`, `broken` or `unknown`, and what there is to say, with tabs between."""
    lock = read_lock(upstream)
    for file in files:
        name = Path(file).stem
        locked = lock.get(name, {"commit": "the first", "symbols": {}})
        found, changed = examine(directory, file, locked["symbols"])
        fatal = [one for one in found if one.is_fatal]
        for one in fatal:
            print(name, "broken" if one.is_readable else "unknown", one, sep="\t")
        if not fatal:
            said = [f"changed since {locked['commit'][:12]}: {', '.join(changed)}"] if changed else []
            print(name, "holds", "; ".join([*said, *map(str, found)]), sep="\t")
