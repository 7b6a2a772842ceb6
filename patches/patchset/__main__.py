"""`python patches/patchset`, as apply.sh runs it."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of this folder: the package is imported by its name
    from patchset.cli import main

    main(sys.argv[1:])
