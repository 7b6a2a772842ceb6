"""Patch files: mails with a message that stays, and a diff that is made anew."""

import difflib
import io
import os
import re
import tempfile
import textwrap
from pathlib import Path

from . import git
from .errors import Refused


def lines_of(text):
    """With their ends, which are those that git knows: a form feed is none."""
    return list(io.StringIO(text))


def ended_as(patch, text):
    """The patch (bytes) for a file whose text ends in no newline: where the last line is the hunk's, git has to be told."""
    last = text.rpartition(b"\n")[2]
    return re.sub(rb"(?m)^( %b\n)(?=-- $)" % re.escape(last), rb"\1\\ No newline at end of file\n", patch) if last else patch


def patched(text, patch, file):
    """`text` with `patch` applied; None if it doesn't fit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, file)
        path.parent.mkdir(parents=True)
        path.write_bytes(os.fsencode(text))
        git.run(folder, "init", "--quiet")
        done = git.run(folder, *git.PLAIN, "apply", "-", input=ended_as(patch.encode(), os.fsencode(text)))
        return None if done.returncode else os.fsdecode(path.read_bytes())


def added_block(patch, file):
    """The lines that a patch of one hunk adds, without their common indentation."""
    if patch.count("\n@@ ") != 1:
        raise Refused(
            f"{file}: its patch has several hunks, which can't be anchored anew",
            "place them in a checkout by hand, and export that",
        )
    return lines_of(textwrap.dedent("".join(line[1:] for line in re.findall(r"^\+(?!\+\+ ).*\n", patch, flags=re.MULTILINE))))


def with_change(patch, file, old, new):
    """The mail `patch` with its message, about the change from `old` to `new`."""
    hunks = _hunks(file, lines_of(old), lines_of(new))
    counts = [(sum(line[0] == sign for line in hunks), what, sign) for what, sign in (("insertion", "+"), ("deletion", "-"))]
    stat = "".join(f", {n} {what}{'s' * (n > 1)}({sign})" for n, what, sign in counts if n)
    bar = "".join(sign * n for n, _, sign in counts)
    summary = f" {file} | {len(bar)} {bar}\n 1 file changed{stat}\n\n"
    message, signature = patch.split("\n---\n")[0], patch.rsplit("\n-- \n")[-1]
    diff = f"diff --git a/{file} b/{file}\n--- a/{file}\n+++ b/{file}\n{''.join(hunks)}"
    return f"{message}\n---\n{summary}{diff}-- \n{signature}"


def _hunks(file, before, after):
    """The lines of the hunks. One line of context, the one below, is all that ties a hunk to upstream."""
    found = []
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        below = [line.removesuffix("\n") + "\n" for line in before[i2 : i2 + 1]]  # `ended_as` tells git of a last one
        if not all(line.endswith("\n") and not line.endswith("\r\n") for line in (*before[i1:i2], *below)):
            raise Refused(f"{file}: a line at the hook ends in CRLF", "convert it (dos2unix) and commit that")
        found.append(f"@@ -{i1 + 1},{i2 - i1 + len(below)} +{j1 + 1},{j2 - j1 + len(below)} @@\n")
        marked = (("-", before[i1:i2]), ("+", after[j1:j2]), (" ", below))
        found += [mark + line for mark, lines in marked for line in lines]
    return found
