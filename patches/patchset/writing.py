"""New texts for files of the patch set."""

import difflib
import sys

from .upstreams import ROOT


def write(new):
    """Show how the files in `{path: text}` change, then change them, each whole."""
    for path, text in new.items():
        old = path.read_text() if path.is_file() else ""
        name = path.relative_to(ROOT)
        diff = difflib.unified_diff(old.splitlines(True), text.splitlines(True), f"a/{name}", f"b/{name}")
        sys.stdout.writelines(diff)
    for path, text in new.items():
        path.with_suffix(".new").write_text(text)
    for path in new:
        path.with_suffix(".new").replace(path)
