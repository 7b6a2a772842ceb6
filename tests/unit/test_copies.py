"""apply.sh and what it has put beside the trainers: hooks in copies of them, and who can read the module."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from test_apply import (  # noqa: F401, fixtures among them
    FILES,
    FLOW_FILES,
    HOOKS,
    MODULE,
    PARSE,
    RUN,
    TRAINERS,
    assert_refused,
    checkout,
    commit_all,
    copy_patch_set,
    edit,
    git,
    home,
    make_checkout,
    patch_set,
    run_apply,
    snapshot,
    subjects,
)

COPY = "fastvideo/my_flux.py"


@pytest.fixture
def copied(checkout):  # noqa: F811
    """A checkout with hooks, and a copy of a trainer that has one."""
    run_apply(checkout)
    shutil.copy(checkout / FILES[0], checkout / COPY)
    return checkout


def line_of(printed, file):
    (line,) = [line for line in printed.splitlines() if line.startswith(f"  {file} ")]
    return line


# Copies and links


@pytest.mark.parametrize(
    ("files", "index", "name"),
    [(FILES, 0, "my_flux"), (FILES, -1, "my.sd"), (FLOW_FILES, 0, "train_bagel"), (FLOW_FILES, 0, "train grpo")],
)
def test_a_copy_is_told_and_taken_along(tmp_path, files, index, name):
    there = make_checkout(tmp_path / "checkout", files)
    copy = (there / files[index]).with_name(f"{name}.py")
    shutil.copy(there / files[index], copy)
    before = snapshot(there)
    run_apply(there)
    shutil.copy(there / files[index], copy)
    copy.chmod(0o750)
    file = str(copy.relative_to(there))
    line = line_of(run_apply("--status", there), file)
    assert "a copy of a trainer" in line and "JAGG_ENABLED=0" in line and "--reverse" in line
    printed = run_apply("--reverse", there)
    assert f"taken out of {len(files)} trainer(s)" in printed and f"and of {file}, a copy" in printed
    assert stat.S_IMODE(copy.stat().st_mode) == 0o750
    copy.chmod(stat.S_IMODE(before[file][0]))
    assert snapshot(there) == before


@pytest.mark.parametrize("only", [(), ("--only", TRAINERS[0])], ids=["all", "only"])
def test_a_link_is_told_and_is_what_it_leads_to(checkout, only):  # noqa: F811
    (checkout / COPY).symlink_to("train_grpo_flux.py")
    before = snapshot(checkout)
    run_apply(*only, checkout)
    assert "a link to train_grpo_flux.py" in line_of(run_apply("--status", checkout), COPY)
    run_apply("--reverse", *only, checkout)
    assert snapshot(checkout) == before


def test_a_copy_that_is_left_keeps_the_module(copied):
    args = [word for trainer in TRAINERS for word in ("--only", trainer)]
    before = snapshot(copied)
    printed = run_apply("--reverse", *args, copied)
    assert f"the module stays: {COPY} has the hook" in printed
    after = snapshot(copied)
    assert [file for file in before if after.get(file) != before[file]] == FILES
    assert "absent" not in run_apply("--status", copied)
    assert f"and of {COPY}, a copy" in run_apply("--reverse", copied)
    assert not (copied / MODULE).exists() and HOOKS[PARSE] not in (copied / COPY).read_text()


def test_a_copy_runs_with_jagg_off_and_says_why_it_stops_with_jagg_on(copied):
    def run_copy(enabled):
        command, env = [sys.executable, copied / COPY, "--steps", "7"], os.environ | {"JAGG_ENABLED": enabled}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    off, on = run_copy("0"), run_copy("1")
    assert off.returncode == 0 and "'--steps': '7'" in off.stdout, off.stderr
    assert on.returncode == 1 and "no adapter for the trainer 'my_flux'" in on.stderr and "JAGG_ENABLED=0" in on.stderr
    assert len(on.stderr.splitlines()) == 2


def edit_hook(copied):
    edit(copied / COPY, "import jagg_patch  #", "import jagg_patch #")


def make_read_only(copied):
    (copied / COPY).chmod(0o444)


def lead_elsewhere(copied):
    (copied / COPY).rename(copied / "elsewhere.py")
    (copied / COPY).symlink_to("../elsewhere.py")


@pytest.mark.parametrize(
    ("prepare", "says"), [(edit_hook, "was edited"), (make_read_only, "read-only"), (lead_elsewhere, "a link to")]
)
@pytest.mark.parametrize("commit", [(), ("--commit",)], ids=["plain", "commit"])
def test_a_copy_whose_hook_cannot_be_taken_out_is_refused(copied, prepare, says, commit):
    """Else it would be left with a hook that finds no module."""
    prepare(copied)
    assert_refused(copied, "--reverse", *commit, says=[COPY, says, "--only"][: 2 if says == "read-only" else 3])
    if says != "read-only":
        assert says in line_of(run_apply("--status", copied), COPY)


def test_a_copy_in_a_commit_is_taken_out_of_it(checkout):  # noqa: F811
    run_apply("--commit", checkout)
    shutil.copy(checkout / FILES[0], checkout / COPY)
    commit_all(checkout, "mine")
    run_apply("--reverse", "--commit", checkout)
    assert git(checkout, "status", "--porcelain", "--ignored") == ""
    assert git(checkout, "grep", "-l", "jagg", "HEAD^") and "jagg" not in (checkout / COPY).read_text()
    assert subjects(checkout)[-1] == "Take JAGG's hook out"


def test_a_copy_is_put_back_when_git_refuses(checkout):  # noqa: F811
    run_apply("--commit", checkout)
    shutil.copy(checkout / FILES[0], checkout / COPY)
    refuse = checkout / ".git/hooks/pre-commit"
    refuse.parent.mkdir(exist_ok=True)
    refuse.write_text("#!/bin/sh\nexit 1\n")
    refuse.chmod(0o755)
    assert_refused(checkout, "--reverse", "--commit", says="git commit refused")


def test_files_without_the_hook_are_nobody_s_business(checkout):  # noqa: F811
    (checkout / "fastvideo/other.py").write_bytes(b"\xff\xfe not text\n")
    (checkout / "fastvideo/folder.py").mkdir()
    (checkout / "fastvideo/dangling.py").symlink_to("nowhere.py")
    before = snapshot(checkout)
    run_apply(checkout)
    printed = run_apply("--status", checkout)
    assert not any(f"fastvideo/{name}.py" in printed for name in ("other", "folder", "dangling"))
    run_apply("--reverse", checkout)
    assert snapshot(checkout) == before


# Who can read the module


def modes(checkout):  # noqa: F811
    """Those of the module's folders and of its files."""
    found = ({checkout / MODULE}, set())
    for path in (checkout / MODULE).rglob("*"):
        found[path.is_file()].add(path)
    return [{stat.S_IMODE(path.stat().st_mode) for path in paths} for paths in found]


@pytest.mark.parametrize(
    ("trainers", "folders", "files"),
    [
        ((0o644, 0o644, 0o644), 0o755, 0o644),
        ((0o664, 0o664, 0o600), 0o775, 0o664),
        ((0o640, 0o600, 0o640), 0o750, 0o640),
        ((0o755, 0o644, 0o644), 0o755, 0o644),
        ((0o600, 0o600, 0o600), 0o700, 0o600),
    ],
)
def test_the_module_gets_the_trainers_modes(checkout, tmp_path, trainers, folders, files):  # noqa: F811
    """And not those of this patch set, which somebody may have cloned for himself."""
    patches = copy_patch_set(tmp_path / "mine")
    for path in (patches / "jagg_patch").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    for file, mode in zip(FILES, trainers):
        (checkout / file).chmod(mode)
    run_apply(checkout, patch_set=patches, preexec_fn=lambda: os.umask(0o077))
    assert modes(checkout) == [{folders}, {files}]


@pytest.mark.parametrize("commit", [(), ("--commit",)], ids=["plain", "commit"])
def test_what_root_applies_belongs_to_the_trainers_owner(checkout, commit):  # noqa: F811
    git(checkout, "config", "--global", "safe.directory", "*")
    owner = 1234 if os.geteuid() == 0 else os.geteuid()
    for file in FILES:
        os.chown(checkout / file, owner, -1)
        (checkout / file).chmod(0o600)
    run_apply(*commit, checkout)
    there = [checkout / file for file in FILES] + [checkout / MODULE, *(checkout / MODULE).rglob("*")]
    assert {path.stat().st_uid for path in there} == {owner}
    assert stat.S_IMODE((checkout / FILES[0]).stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["", "__init__.py", "loop", "loop/session.py"])
def test_a_module_that_others_cannot_read_is_told_and_mended(checkout, name):  # noqa: F811
    """Python would say that it has no install(), or not even that."""
    run_apply(checkout)
    fresh = snapshot(checkout)
    path = checkout / MODULE / name
    path.chmod(0o700 if path.is_dir() else 0o600)
    for action in ("--status", "--check"):
        line = line_of(run_apply(action, checkout), MODULE)
        assert f"{path} can't be read by all who can read the trainers" in line and "./apply.sh" in line
    run_apply(checkout)
    assert snapshot(checkout) == fresh


def test_a_module_without_its_init_is_told_and_mended(checkout):  # noqa: F811
    run_apply(checkout)
    fresh = snapshot(checkout)
    (checkout / MODULE / "__init__.py").unlink()
    assert "version unknown, stale" in line_of(run_apply("--status", checkout), MODULE)
    run_apply(checkout)
    assert snapshot(checkout) == fresh


@pytest.fixture
def open_folder():
    """One that every user gets into, which pytest's aren't."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.parametrize("name", [".", "__init__.py", "loop"])
def test_a_module_that_the_user_cannot_read_is_a_sentence(open_folder, name):
    checkout, patches = make_checkout(open_folder / "DanceGRPO"), copy_patch_set(open_folder / "patch-set")  # noqa: F811
    run_apply(checkout)
    (checkout / MODULE / name).chmod(0)
    before = snapshot(checkout)
    options = {"patch_set": patches, "env": {"PYTHON": "", "HOME": str(open_folder)}}
    if os.geteuid() == 0:  # who can read everything: play another
        subprocess.run(["chown", "-R", "1234", checkout], check=True)
        options["preexec_fn"] = partial(os.setuid, 1234)
    for action, status in (((), 1), (("--check",), 1), (("--status",), 0), (("--reverse",), 1)):
        printed = run_apply(*action, checkout, status=status, **options)
        assert f"{checkout / MODULE / name}" in printed and "chmod -R u+rwX" in printed and "Errno" not in printed
        assert snapshot(checkout) == before


@pytest.mark.parametrize("suffix", [".new", ".old"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_in_the_way_is_a_sentence(checkout, suffix, kind):  # noqa: F811
    path = checkout / f"{MODULE}{suffix}"
    path.touch() if kind == "file" else path.symlink_to("..")
    for action in ((), ("--check",), ("--reverse",)):
        printed = assert_refused(checkout, *action, says=[f"{path}: ", "move it away"])
        assert "Errno" not in printed


def test_what_the_system_refuses_is_a_sentence(checkout, tmp_path):  # noqa: F811
    """Of whatever file: here the exclude file's folder is none."""
    shutil.rmtree(checkout / ".git/info")
    (checkout / ".git/info").touch()
    printed = assert_refused(checkout, says=[f"{checkout}/.git/info", "try again"])
    assert "Errno" not in printed
