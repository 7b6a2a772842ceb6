"""For `apply.sh --refresh` and `--export`: patch files, pin and lock anew, from a checkout. No torch, as the doctor."""

import ast
import difflib
import io
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from ..contract import CONTRACTS, HOOK, Source, differences, fingerprints, modules
from .doctor import ROOT, lock_file, read_lock


class Refused(Exception):
    """With the reason, in one line or two; nothing has been written."""


def git(folder, *arguments, text=""):
    """What git prints, or None if it fails. Nothing is decoded to other line ends."""
    command = ["git", "-C", str(folder), "-c", "core.autocrlf=false", *arguments]
    done = subprocess.run(command, input=text.encode(), capture_output=True)
    return None if done.returncode else done.stdout.decode()


class Checkout:
    """The committed state of a checkout."""

    def __init__(self, directory):
        self._directory = Path(directory)
        self.commit = (git(directory, "rev-parse", "HEAD") or "").strip()
        if not self.commit:
            raise Refused("there is no commit to compare with\nit has to be a git clone")
        if git(directory, "rev-parse", "--show-prefix").strip():
            raise Refused("it is a folder in another repository, whose commit isn't upstream's\nuse a git clone of upstream")

    def read(self, file):
        return git(self._directory, "show", f"HEAD:./{file}")

    def trainer(self, file):
        """The text of a trainer, or None if it isn't there."""
        text = self.read(file)
        if text is not None and HOOK in text:
            raise Refused(f"{file}: the commit has JAGG's hook already\ncheck out the commit of upstream's own that it is on")
        return text


def patched(text, patch, file):
    """`text` with `patch` applied; None if it doesn't fit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, file)
        path.parent.mkdir(parents=True)
        path.write_bytes(text.encode())
        git(folder, "init", "--quiet")
        if git(folder, "apply", "--whitespace=nowarn", "-", text=patch) is None:
            return None
        return path.read_bytes().decode()


def with_change(patch, file, old, new):
    """The mail `patch` with its message, about the change from `old` to `new`.

    A hunk's one line of context, the one below, is all that ties it to upstream.
    """
    before, after = lines_of(old), lines_of(new)
    hunks, n_added, n_removed = [], 0, 0
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            below = before[i2 : i2 + 1]
            if not all(line.endswith("\n") and not line.endswith("\r\n") for line in (*before[i1:i2], *below)):
                raise Refused(
                    f"{file}: a line at the hook ends in CRLF, or the last one in nothing\nconvert it (dos2unix) and commit that"
                )
            hunks.append(f"@@ -{i1 + 1},{i2 - i1 + len(below)} +{j1 + 1},{j2 - j1 + len(below)} @@\n")
            marked = (("-", before[i1:i2]), ("+", after[j1:j2]), (" ", below))
            hunks += [mark + line for mark, lines in marked for line in lines]
            n_added, n_removed = n_added + j2 - j1, n_removed + i2 - i1
    counts = [(n_added, "insertion", "+"), (n_removed, "deletion", "-")]
    stat = "".join(f", {n} {what}{'s' * (n > 1)}({sign})" for n, what, sign in counts if n)
    summary = f" {file} | {n_added + n_removed} {'+' * n_added}{'-' * n_removed}\n 1 file changed{stat}\n\n"
    message, signature = patch.split("\n---\n")[0], patch.rsplit("\n-- \n")[-1]
    diff = f"diff --git a/{file} b/{file}\n--- a/{file}\n+++ b/{file}\n{''.join(hunks)}"
    return f"{message}\n---\n{summary}{diff}-- \n{signature}"


def lines_of(text):
    """With their ends, which are those that git knows: a form feed is none."""
    return list(io.StringIO(text))


def added_block(patch, file):
    """The lines that a patch of one hunk adds, without their common indentation."""
    if patch.count("\n@@ ") != 1:
        raise Refused(
            f"{file}: its patch has several hunks, which can't be anchored anew\n"
            "place them in a checkout by hand, and export that"
        )
    return lines_of(textwrap.dedent("".join(line[1:] for line in re.findall(r"^\+(?!\+\+ ).*\n", patch, flags=re.MULTILINE))))


def is_python(text):
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def hook_place(file, text):
    """How many lines are above the statement that the hook belongs to."""
    statements = Source(text).hooks(CONTRACTS[Path(file).stem])
    if len(statements) != 1:
        raise Refused(f"{file}: {len(statements)} statements could be what the hook belongs to\n./apply.sh --check says more")
    return statements[0].lineno - 1


def anchored(patch, file, text):
    """`text` with the patch's lines before the statement that the hook belongs to."""
    place, lines = hook_place(file, text), lines_of(text)
    indent = re.match(r"\s*", lines[place])[0]
    return "".join(
        [*lines[:place], *(indent + line if line.strip() else line for line in added_block(patch, file)), *lines[place:]]
    )


def show(path, new):
    """Print how the file at `path` changes."""
    old = path.read_text() if path.is_file() else ""
    name = path.relative_to(ROOT)
    sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{name}", f"b/{name}"))


def refresh(directory, upstream, files):
    """New patches and lock for what the checkout has committed: `{path: text}`, and the commit, if all trainers are at it."""
    checkout, lock, new, broken = Checkout(directory), read_lock(upstream), {}, []
    for file in files:
        path = ROOT / "patches" / upstream / f"{Path(file).stem}.patch"
        if path.stem not in CONTRACTS:
            raise Refused(f"{file}: {path.stem} is not in CONTRACTS\njagg_patch/contract.py has to say what is relied on")
        patch, contract, find = path.read_text(), CONTRACTS[path.stem], modules(checkout.read, Path(file).parent)
        text = checkout.trainer(file)
        if text is None:
            print(f"  {file:40} not in this checkout: its patch and lock stay")
            continue
        found = [one for one in differences(text, contract, find) if one.is_fatal]
        if found:
            broken += [f"{file}: {one}" for one in found]
            continue
        hooked, moved = patched(text, patch, file), "the patch still applies"
        if hooked is None:
            hooked, moved = anchored(patch, file, text), "the hook is anchored anew"
        patch = with_change(patch, file, text, hooked)
        if patched(text, patch, file) != hooked or not is_python(hooked):
            raise Refused(f"{file}: the new patch doesn't do what it should\nplease report this, with git --version")
        now, before = fingerprints(text, contract, find), lock.get(path.stem, {}).get("symbols", {})
        changed = [name for name in now if now[name] != before.get(name)]
        said = f"changed: {', '.join(changed)}" if changed else "nothing that is relied on changed"
        said = said if before else "locked for the first time"
        print(f"  {file:40} {moved}; {said}")
        new[path] = patch
        lock[path.stem] = {"commit": checkout.commit, "symbols": now}
    if not new and not broken:
        raise Refused("it has none of the trainers committed")
    if broken:
        raise Refused("\n".join(["the contract is broken, so nothing was written", *broken, "name the others with --only"]))
    new[lock_file(upstream)] = json.dumps(lock, indent=1) + "\n"
    folder, names = Path(files[0]).parent, [path.stem for path in (ROOT / "patches" / upstream).glob("*.patch")]
    here = [name for name in names if checkout.read(f"{folder}/{name}.py")]
    behind = [name for name in here if lock.get(name, {}).get("commit") != checkout.commit]
    if behind:
        print(f"the pin stays where it is, for these aren't refreshed: {', '.join(sorted(behind))}")
    return new, None if behind else checkout.commit


def export(directory, upstream, files):
    """New patches for the hooks as they stand in the checkout's files: `{path: text}`."""
    checkout, new = Checkout(directory), {}
    for file in files:
        path = ROOT / "patches" / upstream / f"{Path(file).stem}.patch"
        edited, text = Path(directory, file), checkout.trainer(file)
        edited = edited.read_bytes().decode() if edited.is_file() and text is not None else ""
        if HOOK not in edited:
            raise Refused(f"{file}: it has no hook to export\nrun ./apply.sh on it, edit, then export")
        place, before, after = hook_place(file, text), lines_of(text), lines_of(edited)
        if before != after[:place] + after[place + len(after) - len(before) :]:
            raise Refused(
                f"{file}: it has other changes than lines before the statement that the hook belongs to\n"
                "commit or stash what isn't JAGG's, then export"
            )
        hook = after[place : place + len(after) - len(before)]
        if not (hook[0].strip() and hook[-1].strip()):
            raise Refused(f"{file}: the hook begins or ends with an empty line\ntake that out, then export")
        new[path] = with_change(path.read_text(), file, text, edited)
        print(f"  {file:40} {'exported' if new[path] != path.read_text() else 'as in its patch'}")
    return new


def main(action, directory, upstream, *files):
    """For apply.sh. Exit status 1 with the reason, and nothing written, if it can't be done."""
    try:
        new, commit = refresh(directory, upstream, files) if action == "refresh" else (export(directory, upstream, files), None)
    except Refused as reason:
        sys.exit(f"apply.sh: {directory}: " + str(reason).replace("\n", "\n  "))
    for path, text in new.items():
        show(path, text)
    sys.stdout.flush()
    for path, text in new.items():
        path.with_suffix(".new").write_text(text)
    for path in new:
        path.with_suffix(".new").replace(path)
    if commit:
        if git(ROOT, "config", "--file", "upstream/pins.ini", f"upstream.{upstream}.commit", commit) is None:
            sys.exit(f"apply.sh: upstream/pins.ini can't be written: the pin of {upstream} has to be {commit}")
        print(f"upstream/pins.ini: {upstream} is at {commit}")
    if action == "refresh" and not git(directory, "branch", "--remotes", "--contains", "HEAD"):
        print("its commit is on no remote branch there: has upstream published it?")
