"""`python -m jagg_patch report`: what a run's log says."""

import argparse
import sys

from .errors import JaggError
from .evidence import report


def main():
    parser = argparse.ArgumentParser(prog="python -m jagg_patch", description="beside a trainer that JAGG is in")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    help = "what a run's log says of its gradients, and which frac and W to choose"
    report.add_arguments(subparsers.add_parser("report", help=help, description=report.__doc__))
    args = parser.parse_args()
    try:
        report.run(args)
    except JaggError as error:
        sys.exit(f"jagg_patch: {error}")


if __name__ == "__main__":
    main()
