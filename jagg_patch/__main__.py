"""`python -m jagg_patch COMMAND`."""

import argparse
import importlib
import sys

from .errors import JaggError

COMMANDS = {
    "doctor": "whether the patches and contracts of a checkout hold",
    "report": "what a run's log says of its gradients, and which frac and W to choose",
}


def main():
    parser = argparse.ArgumentParser(prog="python -m jagg_patch", description="tools around the patch set")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help in COMMANDS.items():
        module = importlib.import_module(f".commands.{name}", __package__)
        command = subparsers.add_parser(name, help=help, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args()
    try:
        args.run(args)
    except JaggError as error:
        sys.exit(f"jagg_patch: {error}")


if __name__ == "__main__":
    main()
