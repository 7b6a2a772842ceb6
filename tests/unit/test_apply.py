"""apply.sh on small stand-ins for a DanceGRPO checkout: real files, real git, and after each call a look at the whole tree."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches" / "dancegrpo"
SERIES = [line for line in (PATCHES / "series").read_text().splitlines() if not line.startswith("#")]
TRAINERS = [name.removesuffix(".patch") for name in SERIES]
FILES = [f"fastvideo/{trainer}.py" for trainer in TRAINERS]
MODULE = "fastvideo/jagg_patch"
PARSE = "    args = parser.parse_args()\n"
HOOK = "".join(re.findall(r"^\+(?!\+)(.*\n)", (PATCHES / SERIES[0]).read_text(), re.M))
SOURCE = f'''\
"""Stand-in for a trainer: prints its arguments."""
import argparse


def main(args):
    print(vars(args))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)


{PARSE}    main(args)
'''
# In place of jagg_patch where a hooked trainer is run: no torch needed.
STAND_IN_MODULE = """\
__version__ = "stand-in"


def install(namespace, parser):
    assert namespace["__name__"] == "__main__" and callable(namespace["main"])
    parser.add_argument("--added_by_hook", default=__file__)
"""
GITCONFIG = "[user]\n\tname = Tester\n\temail = tester@example.org\n"
HOSTILE_GITCONFIG = "[apply]\n\twhitespace = error\n[core]\n\twhitespace = indent-with-non-tab,tabwidth=4\n\tautocrlf = true\n"


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """A home with a git identity and nothing else, so that the tester's own configuration plays no part."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    (home / ".gitconfig").write_text(GITCONFIG)
    return home


def git(directory, *args):
    return subprocess.run(["git", "-C", directory, *args], check=True, capture_output=True, text=True, timeout=60).stdout


def write_upstream(directory):
    """The trainers, the last one without a newline at its end."""
    (directory / "fastvideo").mkdir(parents=True)
    (directory / "README.md").write_text("stand-in\n")
    for file in FILES:
        (directory / file).write_text(SOURCE)
    (directory / FILES[-1]).write_text(SOURCE.removesuffix("\n"))
    return directory


def commit_all(directory, message="upstream"):
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", message)


def make_checkout(directory):
    git(write_upstream(directory), "init", "-q")
    commit_all(directory)
    return directory


@pytest.fixture
def tarball(tmp_path):
    return write_upstream(tmp_path / "DanceGRPO-main")


@pytest.fixture
def checkout(tmp_path):
    return make_checkout(tmp_path / "DanceGRPO")


def copy_patch_set(directory):
    """What apply.sh needs, to change at will. Not the checkout in upstream/."""
    (directory / "upstream").mkdir(parents=True)
    for name in ("apply.sh", "upstream/pins.ini"):
        shutil.copy(ROOT / name, directory / name)
    for name in ("patches", "jagg_patch"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


@pytest.fixture
def patch_set(tmp_path):
    return copy_patch_set(tmp_path / "patch-set")


def run_apply(*args, status=0, cwd=None, env=(), patch_set=ROOT):
    """What apply.sh prints, on both streams."""
    done = subprocess.run(
        [patch_set / "apply.sh", *args],
        cwd=cwd,
        env=os.environ | dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, f"exit status {done.returncode}, not {status}:\n{done.stdout}"
    return done.stdout


def snapshot(top, all_of_git=False):
    """Every path below `top` with its mode and content. Of a .git folder only info/exclude, unless `all_of_git`."""
    entries = {}
    for folder, folders, files in os.walk(top):
        if not all_of_git and ".git" in folders:
            folders.remove(".git")
            files += [".git/info/exclude"] if Path(folder, ".git/info/exclude").exists() else []
        for name in folders + files:
            path = Path(folder, name)
            content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            entries[str(path.relative_to(top))] = path.lstat().st_mode, content
    return entries


def hooked(source):
    assert source.count(PARSE) == 1
    return source.replace(PARSE, HOOK + PARSE)


def module_files(module):
    return {
        name: content
        for name, (_, content) in snapshot(module).items()
        if "__pycache__" not in Path(name).parts and content is not None
    }


def others(entries):
    """Those that applying leaves alone."""
    return {
        name: entry
        for name, entry in entries.items()
        if name not in [*FILES, ".git/info/exclude"] and not Path(name).is_relative_to(MODULE)
    }


def assert_applied(directory, before):
    """Compared with snapshot `before`: each trainer has the hook, the module is there, and nothing else is different."""
    after = snapshot(directory)
    for file in FILES:
        mode, content = before[file]
        assert after[file] == (mode, hooked(content.decode()).encode())
    assert module_files(directory / MODULE) == module_files(ROOT / "jagg_patch")
    assert others(after) == others(before)


def assert_refused(directory, *args, says, status=1, **options):
    """Exit status, every part of the message, and an untouched tree. Returns what was printed."""
    before = snapshot(directory)
    printed = run_apply(*args, directory, status=status, **options)
    for part in [says] if isinstance(says, str) else says:
        assert part in printed
    assert snapshot(directory) == before
    return printed


@contextmanager
def read_only(path):
    mode = path.stat().st_mode
    path.chmod(mode & ~0o222)
    try:
        yield
    finally:
        path.chmod(mode)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# Apply, look, take out


def test_checkout_round_trip(checkout):
    before = snapshot(checkout)
    printed = run_apply(checkout)
    for file in FILES:
        assert re.search(rf"{file} +applied", printed)
    assert_applied(checkout, before)
    assert git(checkout, "status", "--porcelain").split() == [word for file in sorted(FILES) for word in ("M", file)]

    assert f"taken out of {len(FILES)} trainer(s)" in run_apply("--reverse", checkout)
    assert snapshot(checkout) == before
    assert git(checkout, "status", "--porcelain", "--ignored") == ""


@pytest.mark.parametrize("action", [(), ("--check",), ("--status",)])
def test_nothing_changes_once_applied(checkout, action):
    run_apply(checkout)
    applied = snapshot(checkout)
    printed = run_apply(*action, checkout)
    assert printed.count(" applied") == len(FILES)
    assert snapshot(checkout) == applied


@pytest.mark.parametrize(("action", "says"), [("--check", "ready to apply"), ("--status", "not applied")])
def test_looking_changes_nothing(checkout, action, says):
    before = snapshot(checkout)
    assert run_apply(action, checkout).count(says) == len(FILES)
    assert snapshot(checkout) == before


def test_reverse_of_nothing_changes_nothing(checkout):
    before = snapshot(checkout)
    assert "taken out of 0 trainer(s)" in run_apply("--reverse", checkout)
    assert snapshot(checkout) == before


def test_users_edits_survive_the_round_trip(checkout):
    edit(checkout / FILES[0], "default=3", "default=5")
    before = snapshot(checkout)
    run_apply(checkout)
    assert_applied(checkout, before)
    run_apply("--reverse", checkout)
    assert snapshot(checkout) == before


def test_modes_survive(checkout):
    """Checkouts shared by a group are writable for it."""
    for file in FILES:
        (checkout / file).chmod(0o664)
    (checkout / FILES[-1]).chmod(0o600)
    before = snapshot(checkout)
    run_apply(checkout)
    assert_applied(checkout, before)
    run_apply("--reverse", checkout)
    assert snapshot(checkout) == before


def test_tarball_round_trip(tarball):
    before = snapshot(tarball)
    run_apply(tarball)
    assert_applied(tarball, before)
    run_apply("--reverse", tarball)
    assert snapshot(tarball) == before


@pytest.mark.parametrize(
    ("outer", "argument"),
    [("outer", "outer/DanceGRPO"), ("with:colon", "with:colon/DanceGRPO"), ("outer", "link")],
    ids=["plain", "colon", "link"],
)
def test_tarball_inside_another_repository(tmp_path, outer, argument):
    """There a plain `git apply` skips every file and exits 0."""
    inner = write_upstream(tmp_path / outer / "DanceGRPO")
    git(tmp_path / outer, "init", "-q")
    (tmp_path / "link").symlink_to(inner)
    before, outer_git = snapshot(inner), snapshot(tmp_path / outer / ".git", all_of_git=True)
    run_apply(argument, cwd=tmp_path)
    assert_applied(inner, before)
    run_apply("--reverse", argument, cwd=tmp_path)
    assert snapshot(inner) == before
    assert snapshot(tmp_path / outer / ".git", all_of_git=True) == outer_git


def test_worktree_round_trip(checkout, tmp_path):
    worktree = tmp_path / "worktree"
    git(checkout, "worktree", "add", "-q", worktree)
    exclude = checkout / ".git/info/exclude"
    before, exclude_before = snapshot(worktree), exclude.read_bytes()
    run_apply(worktree)
    assert_applied(worktree, before)
    assert MODULE not in git(worktree, "status", "--porcelain")
    run_apply("--reverse", worktree)
    assert snapshot(worktree) == before
    assert exclude.read_bytes() == exclude_before


def test_reverse_in_a_worktree_leaves_the_module_of_another_ignored(checkout, tmp_path):
    """They share one exclude file."""
    worktree = tmp_path / "worktree"
    git(checkout, "worktree", "add", "-q", worktree)
    run_apply(checkout)
    run_apply(worktree)
    run_apply("--reverse", worktree)
    assert MODULE not in git(checkout, "status", "--porcelain")


@pytest.mark.parametrize("content", [None, "*.bak\n", "*.bak"], ids=["absent", "newline at end", "no newline at end"])
def test_exclude_file_of_any_shape(checkout, content):
    exclude = checkout / ".git/info/exclude"
    shutil.rmtree(exclude.parent)
    if content:
        exclude.parent.mkdir()
        exclude.write_text(content)
    (checkout / "old.bak").touch()
    status = git(checkout, "status", "--porcelain")
    run_apply(checkout)
    assert git(checkout, "status", "--porcelain") == "".join(f" M {file}\n" for file in sorted(FILES)) + status
    run_apply("--reverse", checkout)
    assert git(checkout, "status", "--porcelain") == status
    assert (exclude.read_text() if exclude.exists() else "").split() == (content or "").split()


# The module's copy


def test_module_is_ignored_and_has_no_caches(checkout, patch_set):
    cache = patch_set / "jagg_patch/trainers/__pycache__"
    cache.mkdir()
    (cache / "x.cpython-310.pyc").touch()
    run_apply(checkout, patch_set=patch_set)
    assert not list((checkout / MODULE).rglob("__pycache__"))
    git(checkout, "check-ignore", "-q", f"{MODULE}/install.py")


MODULE_CHANGES = {
    "edited": (lambda module: edit(module / "__init__.py", '__version__ = "', '__version__ = "0.0.0-'), "stale"),
    "added": (lambda module: (module / "left_over.py").touch(), "stale"),
    "removed": (lambda module: (module / "session.py").unlink(), "stale"),
    "gone": (shutil.rmtree, "absent"),
}


@pytest.mark.parametrize(("change", "says"), MODULE_CHANGES.values(), ids=MODULE_CHANGES)
def test_module_of_another_version_is_told_and_refreshed(checkout, change, says):
    run_apply(checkout)
    fresh = snapshot(checkout)
    assert says not in run_apply("--status", checkout)
    change(checkout / MODULE)
    assert says in run_apply("--status", checkout)
    run_apply(checkout)
    assert snapshot(checkout) == fresh


@pytest.mark.parametrize("applied", [False, True])
def test_leavings_of_a_killed_run_are_no_part_of_the_module(checkout, applied):
    before = snapshot(checkout)
    if applied:
        run_apply(checkout)
        (checkout / MODULE / "session.py").unlink()
    for suffix in (".new", ".old"):
        (checkout / f"{MODULE}{suffix}").mkdir()
        (checkout / f"{MODULE}{suffix}/half.py").touch()
    run_apply(checkout)
    assert_applied(checkout, before)


def test_caches_do_not_make_the_module_stale(checkout):
    run_apply(checkout)
    (checkout / MODULE / "__pycache__").mkdir()
    assert "stale" not in run_apply("--status", checkout)


# Wherever it is called from


@pytest.mark.parametrize(
    "argument", ["with space/DanceGRPO", "./with space/DanceGRPO/", "link", "with space/DanceGRPO/fastvideo/.."]
)
def test_relative_directory_with_spaces_or_through_a_link(tmp_path, argument):
    directory = make_checkout(tmp_path / "with space" / "DanceGRPO")
    (tmp_path / "link").symlink_to(directory)
    before = snapshot(tmp_path)
    tree = snapshot(directory)
    run_apply(argument, cwd=tmp_path)
    assert_applied(directory, tree)
    assert "absent" not in run_apply("--status", argument, cwd=tmp_path)
    run_apply("--reverse", argument, cwd=tmp_path)
    assert snapshot(tmp_path) == before


def test_dot_is_the_checkout_one_stands_in(checkout):
    before = snapshot(checkout)
    run_apply(".", cwd=checkout / "fastvideo", status=1)
    run_apply(".", cwd=checkout)
    assert_applied(checkout, before)


@pytest.mark.parametrize("variable", ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "CDPATH"])
def test_environment_names_another_place(tmp_path, variable):
    """As in a git hook or an interactive shell."""
    checkout, other = make_checkout(tmp_path / "here/DanceGRPO"), make_checkout(tmp_path / "there/DanceGRPO")
    place = {"GIT_DIR": other / ".git", "GIT_WORK_TREE": other, "GIT_INDEX_FILE": other / ".git/index", "CDPATH": other.parent}
    env = {variable: str(place[variable])}
    before, other_before = snapshot(checkout), snapshot(other, all_of_git=True)
    for commit in [[], ["--commit"]]:
        run_apply(*commit, "DanceGRPO", cwd=checkout.parent, env=env)
        assert_applied(checkout, before)
        git(checkout, "check-ignore", "-q", MODULE)
        assert snapshot(other, all_of_git=True) == other_before
        run_apply("--reverse", *commit, "DanceGRPO", cwd=checkout.parent, env=env)
        assert snapshot(checkout) == before
        assert snapshot(other, all_of_git=True) == other_before


@pytest.mark.parametrize("commit", [(), ("--commit",)], ids=["plain", "commit"])
def test_hostile_git_config(checkout, home, commit):
    with (home / ".gitconfig").open("a") as config:
        config.write(HOSTILE_GITCONFIG)
    before = snapshot(checkout)
    run_apply(*commit, checkout)
    assert_applied(checkout, before)
    run_apply("--reverse", *commit, checkout)
    assert snapshot(checkout) == before


def test_git_that_distrusts_the_owner(checkout):
    """A container's root on a user's files: git refuses to read the repository."""
    assert_refused(checkout, says=[str(checkout), "safe.directory"], env={"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"})


def test_patch_set_and_checkout_in_oddly_named_folders(tmp_path):
    folder = tmp_path / "R&D a|b 'c' \\1 $HOME *"
    checkout = make_checkout(folder / "DanceGRPO")
    before = snapshot(checkout)
    run_apply(checkout, patch_set=copy_patch_set(folder / "patch-set"))
    assert_applied(checkout, before)


@pytest.mark.parametrize("trainer", FILES)
def test_hooked_trainer_calls_the_module_beside_it(checkout, patch_set, tmp_path, trainer):
    (patch_set / "jagg_patch/__init__.py").write_text(STAND_IN_MODULE)
    run_apply(checkout, patch_set=patch_set)
    command = [sys.executable, checkout / trainer, "--steps", "7"]
    printed = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60).stdout
    assert ast.literal_eval(printed) == {"steps": 7, "added_by_hook": str(checkout / MODULE / "__init__.py")}


def test_mini_trainer_runs_hooked(tmp_path, patch_set):
    """As far as --help: its own parser, with torch and all else that it imports replaced."""
    mini = tmp_path / "mini"
    shutil.copytree(ROOT / "upstream/mini", mini, ignore=shutil.ignore_patterns("data", "__pycache__"))
    trainer = mini / "fastvideo/train_grpo_flux.py"
    before = snapshot(mini)
    assert_refused(mini, says=["fastvideo/train_grpo_flux_lora.py", "missing", "--only"])
    (patch_set / "jagg_patch/__init__.py").write_text(STAND_IN_MODULE)
    source = trainer.read_text()
    run_apply("--only", "train_grpo_flux", mini, patch_set=patch_set)
    assert trainer.read_text() == hooked(source)

    nodes = list(ast.walk(ast.parse(source)))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    replaced = sorted(name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names)
    runner = (
        "import runpy, sys, unittest.mock\n"
        f"sys.modules.update({{name: unittest.mock.MagicMock() for name in {replaced}}})\n"
        f"sys.path[0], sys.argv = {str(trainer.parent)!r}, [{str(trainer)!r}, '--help']\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    printed = subprocess.run([sys.executable, "-c", runner], check=True, capture_output=True, text=True, timeout=60).stdout
    assert "--sampling_steps" in printed
    assert "--added_by_hook" in printed

    run_apply("--reverse", mini)
    assert snapshot(mini) == before


# --only


def test_only_leaves_the_other_trainers_alone(checkout):
    before = snapshot(checkout)
    run_apply("--only", TRAINERS[0], checkout)
    assert (checkout / FILES[0]).read_text() == hooked(before[FILES[0]][1].decode())
    for file in FILES[1:]:
        assert snapshot(checkout)[file] == before[file]
    run_apply("--reverse", checkout)
    assert snapshot(checkout) == before


def test_module_stays_while_another_trainer_needs_it(checkout):
    before = snapshot(checkout)
    run_apply(checkout)
    run_apply("--reverse", "--only", TRAINERS[0], checkout)
    assert (checkout / MODULE / "install.py").exists()
    assert (checkout / FILES[0]).read_bytes() == before[FILES[0]][1]
    run_apply("--reverse", "--only", TRAINERS[-1], checkout)
    assert snapshot(checkout) == before


def test_only_serves_where_a_trainer_is_missing(checkout):
    (checkout / FILES[-1]).unlink()
    assert_refused(checkout, says=[FILES[-1], "missing", "--only"])
    run_apply("--only", TRAINERS[0], checkout)
    assert HOOK in (checkout / FILES[0]).read_text()


# --commit


def subjects(directory, revisions="HEAD"):
    return git(directory, "log", "--reverse", "--format=%s", revisions).splitlines()


def assert_committed(directory, before):
    assert_applied(directory, before)
    assert git(directory, "status", "--porcelain") == ""
    added = subjects(directory)[1:]
    assert [subject.partition(":")[0] for subject in added] == TRAINERS


def test_commit_and_reverse(checkout):
    before = snapshot(checkout)
    run_apply("--commit", checkout)
    assert_committed(checkout, before)
    head = git(checkout, "rev-parse", "HEAD")
    run_apply("--commit", checkout)
    assert git(checkout, "rev-parse", "HEAD") == head

    run_apply("--reverse", "--commit", checkout)
    assert snapshot(checkout) == before
    assert git(checkout, "status", "--porcelain", "--ignored") == ""
    assert len(subjects(checkout)) == len(FILES) + 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import argparse\n", "import argparse\nimport os\n"),
        ("default=3)\n", 'default=3)\n    parser.add_argument("--more", default=1)\n'),
        ("    main(args)", "    print(args)\n    main(args)"),
    ],
    ids=["far above", "above the blank lines", "after"],
)
def test_rebase_carries_the_commits(checkout, old, new):
    git(checkout, "branch", "upstream")
    run_apply("--commit", checkout)
    git(checkout, "checkout", "-q", "upstream")
    for file in FILES:
        edit(checkout / file, old, new)
    commit_all(checkout, "later upstream")
    later = snapshot(checkout)
    git(checkout, "checkout", "-q", "-")
    git(checkout, "rebase", "-q", "upstream")
    assert_applied(checkout, later)
    assert len(subjects(checkout, "upstream..HEAD")) == len(FILES)
    assert run_apply("--check", checkout).count(" applied") == len(FILES)


def test_commit_after_a_plain_apply(checkout):
    before = snapshot(checkout)
    run_apply(checkout)
    run_apply("--commit", checkout)
    assert_committed(checkout, before)


def test_commit_completes_an_earlier_one(checkout):
    before = snapshot(checkout)
    run_apply("--commit", "--only", TRAINERS[0], checkout)
    run_apply("--commit", checkout)
    assert_committed(checkout, before)


def test_commit_leaves_edits_in_other_files(checkout):
    (checkout / "README.md").write_text("mine\n")
    run_apply("--commit", checkout)
    assert git(checkout, "status", "--porcelain") == " M README.md\n"
    assert len(subjects(checkout)) == len(FILES) + 1


@pytest.mark.parametrize("applied", [False, True], ids=["fresh", "applied"])
@pytest.mark.parametrize("action", [(), ("--reverse",)], ids=["apply", "reverse"])
@pytest.mark.parametrize("staged", [False, True], ids=["edited", "staged"])
def test_commit_refuses_with_edits_of_the_user(checkout, action, applied, staged):
    """Else they would end up in our commit."""
    if applied:
        run_apply(checkout)
    if action:
        run_apply("--commit", checkout)
    edit(checkout / FILES[0], "default=3", "default=5")
    if staged:
        git(checkout, "add", FILES[0])
    head = git(checkout, "rev-parse", "HEAD")
    assert_refused(checkout, *action, "--commit", says=["staged changes"] if staged else [FILES[0], "changes of yours"])
    assert git(checkout, "rev-parse", "HEAD") == head
    assert (git(checkout, "diff", "--cached", "--name-only") != "") == staged


@pytest.mark.parametrize("staged", [False, True], ids=["edited", "staged"])
def test_commit_again_only_refreshes_the_module(checkout, staged):
    """Work on a hooked trainer is no obstacle where nothing is left to commit."""
    run_apply("--commit", checkout)
    edit(checkout / FILES[0], "default=3", "default=5")
    if staged:
        git(checkout, "add", FILES[0])
    fresh, head = snapshot(checkout), git(checkout, "rev-parse", "HEAD")
    (checkout / MODULE / "session.py").unlink()
    run_apply("--commit", checkout)
    assert snapshot(checkout) == fresh
    assert git(checkout, "rev-parse", "HEAD") == head


@pytest.mark.parametrize("applied", [False, True], ids=["fresh", "applied"])
def test_commit_undoes_all_if_a_git_hook_refuses(checkout, applied):
    if applied:
        run_apply(checkout)
        (checkout / MODULE / "session.py").unlink()  # so the module is replaced as well
    refuse = checkout / ".git/hooks/pre-applypatch"
    refuse.parent.mkdir(exist_ok=True)
    refuse.write_text("#!/bin/sh\nmkdir .git/second_time\n")
    refuse.chmod(0o755)
    head = git(checkout, "rev-parse", "HEAD")
    assert_refused(checkout, "--commit", says="git am refused")
    assert git(checkout, "rev-parse", "HEAD") == head


def test_reverse_commit_undoes_all_if_a_git_hook_refuses(checkout):
    run_apply("--commit", checkout)
    refuse = checkout / ".git/hooks/pre-commit"
    refuse.parent.mkdir(exist_ok=True)
    refuse.write_text("#!/bin/sh\nexit 1\n")
    refuse.chmod(0o755)
    assert_refused(checkout, "--reverse", "--commit", says=["apply.sh:", "commit"])


def test_commit_leaves_a_git_am_of_the_user_in_progress(checkout, tmp_path):
    git(checkout, "checkout", "-q", "-b", "other")
    (checkout / "README.md").write_text("other\n")
    commit_all(checkout, "other")
    (tmp_path / "mail").write_text(git(checkout, "format-patch", "--stdout", "-1"))
    git(checkout, "checkout", "-q", "-")
    (checkout / "README.md").write_text("mine\n")
    commit_all(checkout, "mine")
    with pytest.raises(subprocess.CalledProcessError):
        git(checkout, "am", tmp_path / "mail")
    assert_refused(checkout, "--commit", says=["git am"])
    assert (checkout / ".git/rebase-apply").is_dir()


def test_reverse_of_a_commit_says_to_commit(checkout):
    run_apply("--commit", checkout)
    printed = run_apply("--reverse", checkout)
    for file in FILES:
        assert f"git commit {file}" in printed
    assert git(checkout, "status", "--porcelain") == "".join(f" M {file}\n" for file in sorted(FILES))


def test_reverse_commit_of_a_plain_apply_needs_no_commit(checkout):
    before = snapshot(checkout)
    run_apply(checkout)
    run_apply("--reverse", "--commit", checkout)
    assert snapshot(checkout) == before
    assert subjects(checkout) == ["upstream"]


@pytest.mark.parametrize("name", ["third_party", "third party"])
def test_commit_in_a_monorepo(tmp_path, name):
    outer = tmp_path / "outer"
    inner = write_upstream(outer / name / "DanceGRPO")
    git(outer, "init", "-q")
    commit_all(outer)
    before = snapshot(inner)
    run_apply("--commit", inner)
    assert_applied(inner, before)
    assert git(outer, "diff", "--name-only", "-z", f"HEAD~{len(FILES)}").split("\0")[:-1] == [
        f"{name}/DanceGRPO/{file}" for file in sorted(FILES)
    ]
    assert git(outer, "diff", "HEAD") == ""
    assert "to commit" not in run_apply("--reverse", "--commit", inner)
    assert snapshot(inner) == before
    assert git(outer, "status", "--porcelain") == ""


@pytest.mark.parametrize("action", [(), ("--reverse",)], ids=["apply", "reverse"])
def test_commit_without_git_is_refused(tarball, action):
    if action:
        run_apply(tarball)
    assert_refused(tarball, "--commit", *action, says="--commit needs a git checkout")


def test_commit_of_untracked_trainers_is_refused(tmp_path):
    (tmp_path / "outer").mkdir()
    git(tmp_path / "outer", "init", "-q")
    inner = write_upstream(tmp_path / "outer/inner")
    assert_refused(inner, "--commit", says=[FILES[0], "not tracked"])


# Refusals


@pytest.mark.parametrize("action", [(), ("--check",), ("--status",), ("--reverse",)])
def test_not_dancegrpo(tmp_path, action):
    directory = tmp_path / "other"
    directory.mkdir()
    (directory / "train.py").write_text(SOURCE)
    assert_refused(directory, *action, says=["not a DanceGRPO checkout", str(directory), *FILES])


@pytest.mark.parametrize("action", [(), ("--check",), ("--status",), ("--reverse",)])
def test_no_such_directory(tmp_path, action):
    assert "nowhere: no such directory" in run_apply(*action, tmp_path / "nowhere", status=1)
    assert not list(tmp_path.iterdir())


def change_line(file):
    return lambda top: edit(top / file, PARSE, "    args = parser.parse_args(None)\n")


def change_hook(file):
    def change(top):
        run_apply(top)
        edit(top / file, "globals(), parser)", "globals(), parser, config)")

    return change


def put_something_at_module(top):
    (top / MODULE).mkdir()
    (top / MODULE / "mine.py").write_text("mine = 1\n")


def link_trainer(top):
    (top / FILES[0]).rename(top / "elsewhere.py")
    (top / FILES[0]).symlink_to("../elsewhere.py")


def link_module(top):
    (top / MODULE).symlink_to(ROOT / "jagg_patch")


PLACES = [FILES[0], FILES[-1], "fastvideo", ".git/info/exclude"]
REFUSALS = {
    "missing trainer": (lambda top: (top / FILES[-1]).unlink(), [FILES[-1], "missing", "--only"]),
    "line changed in the first": (change_line(FILES[0]), [FILES[0], "args = parser.parse_args()"]),
    "line changed in the last": (change_line(FILES[-1]), [FILES[-1], "args = parser.parse_args()"]),
    "hook changed in the first": (change_hook(FILES[0]), [FILES[0], "the hook is there but was edited"]),
    "hook changed in the last": (change_hook(FILES[-1]), [FILES[-1], "the hook is there but was edited"]),
    "something else at the module": (put_something_at_module, [MODULE, "something else"]),
    "link at the module": (link_module, [MODULE, "something else"]),
    "link in place of a trainer": (link_trainer, [FILES[0], "symbolic link"]),
    "CRLF": (lambda top: edit(top / FILES[0], "\n", "\r\n"), [FILES[0], "CRLF"]),
}


@pytest.mark.parametrize(("prepare", "says"), REFUSALS.values(), ids=REFUSALS)
def test_refused(checkout, prepare, says):
    """All or nothing: the trainers that could be patched aren't either. --check foretells it."""
    prepare(checkout)
    printed = assert_refused(checkout, says=says)
    assert printed.count("apply.sh: ") == 1  # the reasons, then one line that says what became of it
    assert_refused(checkout, "--check", says=says)


@pytest.mark.parametrize("name", PLACES)
def test_read_only_is_refused(checkout, name):
    """For root too: it could write, but someone meant something by it. --check foretells it."""
    with read_only(checkout / name):
        assert_refused(checkout, says=[name, "read-only"])
        assert_refused(checkout, "--check", says=[name, "read-only"])


@pytest.mark.parametrize("name", PLACES)
def test_reverse_of_read_only_is_refused(checkout, name):
    run_apply(checkout)
    with read_only(checkout / name):
        assert_refused(checkout, "--reverse", says=[name, "read-only"])


@pytest.mark.parametrize("file", [FILES[0], FILES[-1]])
def test_reverse_of_an_edited_hook_is_refused(checkout, file):
    change_hook(file)(checkout)
    assert_refused(checkout, "--reverse", says=[file, "the hook is there but was edited"])


@pytest.mark.parametrize("prepare", [put_something_at_module, link_module])
def test_reverse_leaves_what_it_did_not_put_there(checkout, prepare):
    prepare(checkout)
    before = snapshot(checkout)
    run_apply("--reverse", checkout)
    assert snapshot(checkout) == before


@pytest.mark.parametrize("applied", [False, True], ids=["fresh", "stale"])
@pytest.mark.parametrize(("fate", "status"), [("exit 1", 1), ("kill -TERM $PPID", -signal.SIGTERM)], ids=["no space", "killed"])
def test_failure_half_way_is_undone(checkout, tmp_path, fate, status, applied):
    """A hook without the whole module would stop the trainer."""
    if applied:
        run_apply(checkout)
        (checkout / MODULE / "session.py").unlink()
    failing = tmp_path / "bin/cp"
    failing.parent.mkdir()
    failing.write_text(
        "#!/bin/sh\n"
        "for target; do :; done\n"
        f'case $target in *jagg_patch*) ;; *) exec {shutil.which("cp")} "$@" ;; esac\n'
        f'mkdir "$target"; touch "$target/half.py"; echo "cp: no space left" >&2; {fate}\n'
    )
    failing.chmod(0o755)
    assert_refused(checkout, says="no space left", status=status, env={"PATH": f"{failing.parent}:{os.environ['PATH']}"})


# Bad usage


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--bogus DIR", "unknown option --bogus"),
        ("DIR DIR", "one directory at most"),
        ("--check --reverse DIR", "exclude each other"),
        ("--only train_nothing DIR", "train_nothing"),
        (f"--only ../dancegrpo/{TRAINERS[0]} DIR", "no patch of that name"),
        ("DIR --only", "--only needs a trainer"),
        ("--commit --status DIR", "--commit goes with"),
        ("DIR --check --commit", "--commit goes with"),
    ],
)
def test_bad_usage(checkout, args, says):
    before = snapshot(checkout)
    printed = run_apply(*[checkout if arg == "DIR" else arg for arg in args.split()], status=2)
    assert says in printed
    assert "--help" in printed
    assert snapshot(checkout) == before


@pytest.mark.parametrize("action", [(), ("--reverse",)], ids=["apply", "reverse"])
def test_empty_directory_name_is_not_the_default(patch_set, action):
    """A script's "$UNSET" must not reach upstream/DanceGRPO."""
    make_checkout(patch_set / "upstream/DanceGRPO")
    before = snapshot(patch_set)
    run_apply(*action, "", patch_set=patch_set, status=2)
    assert snapshot(patch_set) == before


def test_unknown_trainer_lists_all_that_are_known():
    printed = run_apply("--only", TRAINERS[0], "--only", "train_nothing", status=2)
    for trainer in TRAINERS:
        assert trainer in printed


def test_help_names_every_option():
    printed = run_apply("--help")
    for option in ("--check", "--status", "--reverse", "--commit", "--only", "--demo", "exit status"):
        assert option in printed


# Without DIR: the clone at the pin


def pin_to(patch_set, url, commit):
    pins = patch_set / "upstream/pins.ini"
    for name, value in (("url", url), ("commit", commit)):
        git(patch_set, "config", "--file", pins, f"dancegrpo.{name}", value)


def test_clones_the_pin_once(patch_set, checkout):
    pinned = git(checkout, "rev-parse", "HEAD").strip()
    before = snapshot(checkout)
    edit(checkout / FILES[0], "default=3", "default=5")
    commit_all(checkout, "tip")
    pin_to(patch_set, checkout, pinned)
    clone = patch_set / "upstream/DanceGRPO"
    printed = run_apply(patch_set=patch_set)
    assert str(checkout) in printed
    assert pinned[:12] in printed
    assert_applied(clone, before)
    assert git(clone, "rev-parse", "HEAD").strip() == pinned
    assert sorted(path.name for path in (patch_set / "upstream").iterdir()) == ["DanceGRPO", "pins.ini"]

    pin_to(patch_set, checkout.parent / "nowhere", pinned)
    applied = snapshot(clone)
    assert "cloning" not in run_apply(patch_set=patch_set)
    assert snapshot(clone) == applied
    run_apply("--reverse", patch_set=patch_set)
    assert snapshot(clone) == before


@pytest.mark.parametrize("missing", ["url", "commit"])
def test_clone_that_fails_leaves_nothing(patch_set, checkout, missing):
    commit = "0" * 40 if missing == "commit" else git(checkout, "rev-parse", "HEAD").strip()
    url = checkout.parent / "nowhere" if missing == "url" else checkout
    pin_to(patch_set, url, commit)
    before = snapshot(patch_set)
    printed = run_apply(patch_set=patch_set, status=1)
    assert f"git clone {url}" in printed
    assert f"checkout {commit}" in printed
    assert "./apply.sh DIR" in printed
    assert snapshot(patch_set) == before


@pytest.mark.parametrize("action", ["--check", "--status", "--reverse"])
def test_only_applying_clones(patch_set, action):
    before = snapshot(patch_set)
    assert "no such directory" in run_apply(action, patch_set=patch_set, status=1)
    assert snapshot(patch_set) == before


# The patch files


def diff_lines(patch):
    """Lines of all hunks, with their first character."""
    mail = (PATCHES / patch).read_text().removesuffix("\n").rpartition("\n-- \n")[0]
    return [line for hunk in re.split(r"^@@ .* @@.*\n", mail, flags=re.M)[1:] for line in hunk.splitlines()]


def test_series_names_every_patch():
    assert sorted(SERIES) == sorted(path.name for path in PATCHES.glob("*.patch"))


def test_pins_name_the_files_that_are_patched():
    targets = [re.findall(r"^\+\+\+ b/(.*)$", (PATCHES / patch).read_text(), re.M) for patch in SERIES]
    assert targets == [[file] for file in FILES]
    assert git(ROOT, "config", "--file", ROOT / "upstream/pins.ini", "--get-all", "dancegrpo.file").splitlines() == FILES


@pytest.mark.parametrize("patch", SERIES)
def test_patch_adds_the_hook_and_carries_no_upstream_text(patch):
    lines = diff_lines(patch)
    assert {line for line in lines if not line.startswith("+")} == {" " + PARSE.rstrip("\n")}
    added = [line[1:].strip() for line in lines if line.startswith("+")]
    assert 1 <= len(added) <= 3
    assert added[-1] == "jagg_patch.install(globals(), parser)"


@pytest.mark.parametrize("patch", SERIES)
def test_patch_is_a_mail_that_gives_a_reason(patch, checkout, tmp_path):
    with (PATCHES / patch).open() as mail:
        command = ["git", "mailinfo", tmp_path / "message", tmp_path / "diff"]
        head = subprocess.run(command, stdin=mail, check=True, capture_output=True, text=True, timeout=60).stdout
    assert re.search(rf"^Subject: {patch.removesuffix('.patch')}: ", head, re.M)
    assert re.search(r"^Email: .+@.+", head, re.M)
    assert len((tmp_path / "message").read_text().split("---")[0].strip().splitlines()) >= 2
    git(checkout, "am", "-q", PATCHES / patch)
    assert HOOK in (checkout / f"fastvideo/{patch.removesuffix('.patch')}.py").read_text()
