"""--demo: in an environment of its own, upstream/demo.py."""

import os
import subprocess
import sys

from .upstreams import ROOT


def run(out):
    """Become it."""
    made = subprocess.run([ROOT / "tests/venv.sh", "demo"], stdout=subprocess.PIPE, text=True)
    if made.returncode:
        sys.exit(made.returncode)
    python = made.stdout.rstrip("\n")
    os.execv(python, [python, str(ROOT / "upstream/demo.py"), "--out", out or str(ROOT / "demo-output")])
