"""--export: the patches made anew from the hooks as they stand in a checkout's files."""

from .anchor import hook_place
from .errors import Refused, about
from .head import Head, contract_of
from .hooks import HOOK
from .mail import lines_of, with_change
from .writing import write


def run(checkout, options):
    """Do it, and show what changes."""
    with about(checkout.directory):
        head, new = Head(checkout), {}
        for trainer in checkout.trainers:
            file, path = checkout.file(trainer), checkout.upstream.patch_file(trainer)
            old = path.read_text()
            new[path] = _exported(checkout.path(trainer), file, old, head.trainer(trainer), contract_of(trainer, file))
            print(f"  {file:40} {'exported' if new[path] != old else 'as in its patch'}")
    write(new)


def _exported(path, file, patch, text, contract):
    """The patch, for the file at `path` instead of the committed `text`."""
    edited = path.read_bytes() if path.is_file() and text is not None else b""
    if HOOK not in edited:
        raise Refused(f"{file}: it has no hook to export", "run ./apply.sh on it, edit, then export")
    place, before, after = hook_place(file, text, contract), lines_of(text), lines_of(edited.decode())
    end = place + len(after) - len(before)
    if before != after[:place] + after[end:]:
        raise Refused(
            f"{file}: it has other changes than lines before the statement that the hook belongs to",
            "commit or stash what isn't JAGG's, then export",
        )
    hook = after[place:end]
    if not (hook[0].strip() and hook[-1].strip()):
        raise Refused(f"{file}: the hook begins or ends with an empty line", "take that out, then export")
    return with_change(patch, file, text, edited.decode())
