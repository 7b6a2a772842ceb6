"""Parts of patches/patchset that calls of apply.sh in test_apply.py and test_refresh.py don't come across."""

import os

import pytest
from patchset import hooks, mail
from patchset.change import replace
from patchset.upstreams import UPSTREAMS

from jagg_patch.contract import HOOK

PATCH = UPSTREAMS[0].patch_file("train_grpo_flux").read_text()
FILE = "fastvideo/train_grpo_flux.py"


def test_the_hook_is_the_contracts():
    assert hooks.HOOK == HOOK.encode()


FIRST = b"    import jagg_patch  # beside this file, put there by JAGG's apply.sh\n"
SECOND = b"    jagg_patch.install(globals(), parser)\n"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (b"if x:\n" + FIRST + SECOND + b"    run()\n", (1, 3)),
        (b"if x:\n" + FIRST + b"\n" + SECOND + b"\n    # theirs\n    run()", (1, 4)),
        (b"if x:\n" + FIRST + FIRST + SECOND + b"    run()\n", (2, 4)),
        (b"if x:\n" + FIRST + SECOND + FIRST + SECOND + b"    run()\n", None),
        (b"if x:\n" + FIRST + SECOND + b"    run()\n" + SECOND, None),
        (b"if x:\n" + FIRST + b"    run()\n" + SECOND + b"    run()\n", None),
        (b"if x:\n" + FIRST + SECOND + b"run()\n", None),
        (b"if x:\n" + FIRST + SECOND, None),
        (b"if x:\n    run()\n", None),
    ],
    ids=["plain", "spaced", "begun twice", "twice", "a second call", "a line between", "ends a block", "ends the file", "none"],
)
def test_the_place_of_the_hook(text, place):
    patch = PATCH.encode()
    assert hooks.place(patch, text) == place
    assert hooks.place(patch, text.replace(b"\n", b"\r\n")) == place
    if place:
        assert hooks.take_out(patch, text) == b"".join(text.splitlines(True)[: place[0]] + text.splitlines(True)[place[1] :])


def test_every_folder_with_a_series_is_an_upstream():
    assert [upstream.name for upstream in UPSTREAMS] == ["dancegrpo", "flow_grpo"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a\nb\nc\nd\n", "a\n+\nb\nc\n+\n+\nd\n"),
        ("a\nb\nc\nd\n", "a\nc\nB\nd\n"),
        ("a\n\fb\u2028c\nd\n", "a\n-- \n\fb\u2028c\n@@\nd\n"),
    ],
    ids=["two hunks", "other lines", "ends that git knows none of"],
)
def test_a_patch_made_anew_does_what_it_should(old, new):
    patch = mail.with_change(PATCH, FILE, old, new)
    assert mail.patched(old, patch, FILE) == new
    assert patch.partition("\n---\n")[0] == PATCH.partition("\n---\n")[0]


def test_a_file_that_is_replaced_keeps_owner_and_mode_and_leaves_its_links(tmp_path):
    path, link = tmp_path / "train.py", tmp_path / "linked.py"
    path.write_text("before")
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 1234, 1234)
    link.hardlink_to(path)
    before = path.stat()
    replace(path, b"after")
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert (path.read_text(), link.read_text()) == ("after", "before")
    assert sorted(tmp_path.iterdir()) == [link, path]
