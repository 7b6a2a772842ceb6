"""apply.sh on stand-ins for checkouts of both upstreams: real files, real git, and after each call a look at the whole tree.

The core is tested on all trainers of each upstream, the rest on a checkout with three of DanceGRPO's.
"""

import ast
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"dancegrpo": "DanceGRPO", "flow_grpo": "flow_grpo"}  # upstream: its default place in upstream/
SERIES = {
    upstream: [line for line in (ROOT / "patches" / upstream / "series").read_text().splitlines() if not line.startswith("#")]
    for upstream in FOLDERS
}
ALL_TRAINERS = {upstream: [patch.removesuffix(".patch") for patch in series] for upstream, series in SERIES.items()}
ALL_FILES = {
    "dancegrpo": [f"fastvideo/{trainer}.py" for trainer in ALL_TRAINERS["dancegrpo"]],
    "flow_grpo": [f"scripts/{trainer}.py" for trainer in ALL_TRAINERS["flow_grpo"]],
}
TRAINERS = ["train_grpo_flux", "train_grpo_flux_lora", "train_grpo_sd"]
FILES = [f"fastvideo/{trainer}.py" for trainer in TRAINERS]
FLOW_FILES = ["scripts/train_sd3.py", "scripts/train_sd3_GRPO_Guard.py", "scripts/train_qwenimage_edit.py"]
MODULE = "fastvideo/jagg_patch"
# The line before which a hook goes, and the hook.
PARSE, RUN = "    args = parser.parse_args()\n", "    app.run(main)\n"
HOOKS = {
    context: "".join(re.findall(r"^\+(?!\+)(.*\n)", (ROOT / "patches" / patch).read_text(), re.M))
    for context, patch in ((PARSE, "dancegrpo/train_grpo_flux.patch"), (RUN, "flow_grpo/train_sd3.patch"))
}
GUARD = 'if __name__ == "__main__":\n'
# What the contracts ask for; nothing of it runs.
PARSING_LOOP = """
def flux_step(model_output, latents, prev_sample):
    return model_output


def run_sample_step():
    return [{}]


def sample_reference_model(args):
    return run_sample_step()


def grpo_one_step(latents, pre_latents, transformer, timesteps, i, sigma_schedule):
    return flux_step(transformer(latents), latents, pre_latents)


def train_one_step(args):
    samples = sample_reference_model(args)
    perms = torch.stack([torch.randperm(9) for _ in samples])
    samples = in_order(samples, perms)
    for n, x in enumerate(samples):
        for j in range(9):
            loss = grpo_one_step(x["latents"][:, j], x["next"][:, j], args.model, x["timesteps"][:, j], perms[n][j], x["sigmas"])
            loss.backward()
        optimizer.step()
"""
RUN_LOOP = """
def sde_step_with_logprob(model_output, sample, prev_sample):
    return model_output


def pipeline_with_logprob(self):
    return [{}]


def wan_pipeline_with_logprob():
    return [{}]


def init_distributed():
    return 0


def compute_log_prob(transformer, sample, j):
    return sde_step_with_logprob(transformer(sample), sample, sample)
"""
LOOP_IN_MAIN = """\
    if not argv:
        samples = wan_pipeline_with_logprob() + pipeline_with_logprob(None)
        perms = torch.stack([torch.randperm(9) for _ in samples])
        samples = in_order(samples, perms)
        for sample in samples:
            for j in range(9):
                loss = compute_log_prob(model, sample, perms[0][j]) + unet(sample["latents"][:, j], sample["timesteps"][:, j])
                accelerator.backward(loss)
                optimizer.step()
"""
PARSING_SOURCE = f'''\
"""Stand-in for a trainer with a parser: prints its arguments."""
import argparse

{PARSING_LOOP}

def main(args):
    if args is None:
        train_one_step(args)
    print({{f"--{{name}}": value for name, value in vars(args).items()}})


{GUARD}    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", default=3)


{PARSE}    main(args)
'''
RUN_SOURCE = f'''\
"""Stand-in for a trainer that absl starts: prints its arguments."""
import sys


class app:
    """Stand-in for absl's."""

    def run(main, default=3):
        main(sys.argv)

{RUN_LOOP}

def main(argv):
    print(dict(zip(argv[1::2], argv[2::2])))
{LOOP_IN_MAIN}

{GUARD}{RUN}'''
# In place of jagg_patch where a hooked trainer is run: no torch needed.
STAND_IN_MODULE = """\
__version__ = "stand-in"


def install(namespace, parser=None):
    main = namespace["main"]
    assert namespace["__name__"] == "__main__" and callable(main)
    if parser is None:
        namespace["main"] = lambda argv: main([*argv, "--added_by_hook", __file__])
    else:
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
    monkeypatch.setenv("PYTHON", sys.executable)  # faster than a wrapper that finds one
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    (home / ".gitconfig").write_text(GITCONFIG)
    return home


def git(directory, *args):
    return subprocess.run(["git", "-C", directory, *args], check=True, capture_output=True, text=True, timeout=60).stdout


def source_of(file):
    """One that ends in `main(args)` may lack the newline at its end."""
    if file.startswith("scripts/") or file == "fastvideo/train_grpo_sd.py":
        return RUN_SOURCE
    return PARSING_SOURCE.removesuffix("\n" if file == "fastvideo/train_grpo_flux_lora.py" else "")


def write_upstream(directory, files=FILES):
    (directory / files[0]).parent.mkdir(parents=True)
    (directory / "README.md").write_text("stand-in\n")
    for file in files:
        (directory / file).write_text(source_of(file))
    return directory


def commit_all(directory, message="upstream"):
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", message)


def make_checkout(directory, files=FILES):
    git(write_upstream(directory, files), "init", "-q")
    commit_all(directory)
    return directory


@pytest.fixture
def tarball(tmp_path):
    return write_upstream(tmp_path / "DanceGRPO-main")


@pytest.fixture
def checkout(tmp_path):
    return make_checkout(tmp_path / "DanceGRPO")


@pytest.fixture(params=FOLDERS)
def upstream(request):
    return request.param


@pytest.fixture
def full_checkout(tmp_path, upstream):
    return make_checkout(tmp_path / FOLDERS[upstream], ALL_FILES[upstream])


def copy_patch_set(directory):
    """What apply.sh needs, to change at will. Not the checkouts in upstream/."""
    (directory / "upstream").mkdir(parents=True)
    shutil.copy(ROOT / "apply.sh", directory)
    for name in ("patches", "jagg_patch"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


@pytest.fixture
def patch_set(tmp_path):
    return copy_patch_set(tmp_path / "patch-set")


def run_apply(*args, status=0, cwd=None, env=(), patch_set=ROOT, preexec_fn=None):
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
        preexec_fn=preexec_fn,
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
    context = PARSE if PARSE in source else RUN
    hook, line = HOOKS[context], context.removesuffix("\n")  # which the file's end may lack
    assert source.count(line) == 1
    return source.replace(line, hook + line)


def trainers_in(entries):
    return [file for files in ALL_FILES.values() for file in files if file in entries]


def module_files(module):
    return {
        name: content
        for name, (_, content) in snapshot(module).items()
        if "__pycache__" not in Path(name).parts and content is not None
    }


def others(entries, trainers, module):
    """Those that applying leaves alone."""
    return {
        name: entry
        for name, entry in entries.items()
        if name not in [*trainers, ".git/info/exclude"] and not Path(name).is_relative_to(module)
    }


def assert_applied(directory, before):
    """Compared with snapshot `before`: each trainer has the hook, the module is beside it, and nothing else is different."""
    after, trainers = snapshot(directory), trainers_in(before)
    module = Path(trainers[0]).with_name("jagg_patch")
    for file in trainers:
        mode, content = before[file]
        assert after[file] == (mode, hooked(content.decode()).encode())
    assert module_files(directory / module) == module_files(ROOT / "jagg_patch")
    assert others(after, trainers, module) == others(before, trainers, module)


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


def test_checkout_round_trip(full_checkout, upstream):
    checkout, files = full_checkout, ALL_FILES[upstream]
    before = snapshot(checkout)
    for action, says in (("--check", "ready +holds +changed since .*"), ("--status", "not applied")):
        assert re.findall(rf"(\S+) +{says}$", run_apply(action, checkout), re.M) == files
        assert snapshot(checkout) == before

    assert re.findall(r"(\S+) +applied$", run_apply(checkout), re.M) == files
    assert_applied(checkout, before)
    assert git(checkout, "status", "--porcelain").split() == [word for file in sorted(files) for word in ("M", file)]
    applied = snapshot(checkout)
    for action in ([], ["--check"], ["--status"]):
        assert re.findall(r"(\S+) +applied(?: +holds .*)?$", run_apply(*action, checkout), re.M) == files
        assert snapshot(checkout) == applied

    assert f"taken out of {len(files)} trainer(s)" in run_apply("--reverse", checkout)
    assert snapshot(checkout) == before
    assert git(checkout, "status", "--porcelain", "--ignored") == ""


def test_what_a_checkout_lacks_is_told(checkout):
    """Older checkouts and forks have some of the trainers: those are patched."""
    lacking = [file for file in ALL_FILES["dancegrpo"] if file not in FILES]
    for action in (["--check"], ["--status"], []):
        printed = run_apply(*action, checkout)
        assert re.findall(r"(\S+) +not in this checkout$", printed, re.M) == lacking
        assert "scripts/" not in printed


def test_check_names_what_is_not_supported(tmp_path):
    checkout = write_upstream(tmp_path / "flow_grpo", FLOW_FILES)
    for name in ("train_bagel", "train_sd3_sft"):
        (checkout / f"scripts/{name}.py").write_text(RUN_SOURCE)
    last = run_apply("--check", checkout).splitlines()[-2:]
    for line, file, reason in zip(
        last, ("scripts/train_bagel.py", "scripts/train_sd3_sft.py"), ("method of the model", "not GRPO")
    ):
        assert re.match(rf" +{file} +not supported: .*{reason}", line)
    before = snapshot(checkout)
    run_apply(checkout)
    assert_applied(checkout, before)


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


@pytest.mark.parametrize("files", [FILES, FLOW_FILES], ids=FOLDERS)
@pytest.mark.parametrize("commit", [(), ("--commit",)], ids=["plain", "commit"])
def test_a_last_line_without_a_newline_stays_without(tmp_path, files, commit):
    """Where it is the one that the hook goes before."""
    checkout = write_upstream(tmp_path / "checkout", files)
    (checkout / files[-1]).write_text(source_of(files[-1]).removesuffix("\n"))
    git(checkout, "init", "-q")
    commit_all(checkout)
    before = snapshot(checkout)
    assert re.search(rf"{files[-1]} +ready +holds", run_apply("--check", checkout))
    run_apply(*commit, checkout)
    assert_applied(checkout, before)
    run_apply(*commit, checkout)
    run_apply("--reverse", *commit, checkout)
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
    git(inner, "check-ignore", "-q", MODULE)
    changed = snapshot(tmp_path / outer / ".git", all_of_git=True)
    assert [name for name in changed if changed[name] != outer_git[name]] == ["info/exclude"]
    run_apply("--reverse", argument, cwd=tmp_path)
    assert snapshot(inner) == before
    assert snapshot(tmp_path / outer / ".git", all_of_git=True) == outer_git


@pytest.mark.parametrize("name", ["DanceGRPO", "a b/[x]*? c", "!back\\slash "])
def test_inside_another_repository_git_ignores_the_module_and_nothing_else(tmp_path, name):
    outer = tmp_path / "outer"
    inner, other = write_upstream(outer / name), write_upstream(outer / "other")
    (outer / "a b/x c/fastvideo/jagg_patch").mkdir(parents=True)
    git(outer, "init", "-q")
    commit_all(outer)
    run_apply(inner)
    run_apply(other)
    git(inner, "check-ignore", "-q", MODULE)
    (outer / "a b/x c/fastvideo/jagg_patch/mine.py").touch()  # what the name as a pattern fits
    untracked = git(outer, "ls-files", "--others", "--exclude-standard")
    assert untracked == "a b/x c/fastvideo/jagg_patch/mine.py\n"
    run_apply("--reverse", inner)
    git(other, "check-ignore", "-q", MODULE)
    run_apply("--reverse", other)
    assert "jagg" not in (outer / ".git/info/exclude").read_text()
    assert git(outer, "ls-files", "--others", "--modified", "--exclude-standard") == untracked


def test_reverse_in_a_worktree_of_another_repository_leaves_the_module_of_the_other_ignored(tmp_path):
    write_upstream(tmp_path / "outer/inner")
    git(tmp_path / "outer", "init", "-q")
    commit_all(tmp_path / "outer")
    git(tmp_path / "outer", "worktree", "add", "-q", tmp_path / "tree")
    for outer in ("outer", "tree"):
        run_apply(tmp_path / outer / "inner")
    run_apply("--reverse", tmp_path / "tree/inner")
    git(tmp_path / "outer/inner", "check-ignore", "-q", MODULE)


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
    "removed": (lambda module: (module / "loop/session.py").unlink(), "stale"),
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


@pytest.mark.parametrize("arguments", [[], ["--commit"]], ids=["plain", "commit"])
def test_a_file_of_the_user_s_beside_a_trainer_stays(checkout, arguments):
    mine = checkout / f"{FILES[0]}.new"
    mine.write_text("mine\n")
    before = snapshot(checkout)
    run_apply(checkout)
    run_apply(*arguments, checkout)  # with --commit, the hooks are taken out and committed
    run_apply("--reverse", *arguments, checkout)
    assert mine.read_text() == "mine\n"
    assert arguments or snapshot(checkout) == before


@pytest.mark.parametrize("applied", [False, True])
def test_leavings_of_a_killed_run_are_no_part_of_the_module(checkout, applied):
    before = snapshot(checkout)
    if applied:
        run_apply(checkout)
        (checkout / MODULE / "loop/session.py").unlink()
    for suffix in (".new", ".old"):
        (checkout / f"{MODULE}{suffix}").mkdir()
        (checkout / f"{MODULE}{suffix}/half.py").touch()
    run_apply(checkout)
    assert_applied(checkout, before)


@pytest.mark.parametrize("odd", ["true", "echo"])
def test_a_python_that_is_none_is_passed_over(checkout, odd):
    run_apply("--status", checkout, env={"PYTHON": shutil.which(odd)})


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


def test_the_checkout_one_stands_in_has_to_be_named(checkout):
    before = snapshot(checkout)
    for action in ([], ["--check"], ["--reverse"]):
        assert f"to mean it, name it ({ROOT}/apply.sh … .)" in run_apply(*action, cwd=checkout, status=2)
    assert snapshot(checkout) == before


@pytest.mark.parametrize("link", ["bin/jagg", "../apply", "apply link"])
def test_through_a_link_to_it(checkout, tmp_path, link):
    (tmp_path / "here/bin").mkdir(parents=True)
    (tmp_path / "here" / link).symlink_to(os.path.relpath(ROOT / "apply.sh", (tmp_path / "here" / link).parent))
    (tmp_path / "here/second").symlink_to(link)
    for name in (link, "second"):
        command = ["sh", "-c", '"$0" --status "$1"', f"./{name}", checkout]
        done = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True, timeout=60)
        assert done.stdout.count("not applied") == len(FILES), done.stderr


def ends_silently(checkout, **options):
    done = subprocess.run([ROOT / "apply.sh", "--status", checkout], stderr=subprocess.PIPE, timeout=60, **options)
    assert done.stderr == b""
    return -done.returncode


def test_it_ends_as_any_other_command_when_nobody_reads_on(checkout):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ends_silently(checkout, stdout=writer) == signal.SIGPIPE
    finally:
        os.close(writer)


def test_it_ends_as_any_other_command_when_it_is_interrupted(checkout, tmp_path):
    stand_in = f'case "$*" in *--show-prefix) kill -INT $PPID ;; esac\nexec {shutil.which("git")} "$@"\n'
    env = os.environ | path_with(tmp_path, "git", stand_in)
    assert ends_silently(checkout, env=env, stdout=subprocess.DEVNULL) == signal.SIGINT


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
    patch_set = copy_patch_set(folder / "patch-set")
    checkout = make_checkout(folder / "DanceGRPO")
    defaults = [make_checkout(patch_set / "upstream/DanceGRPO"), make_checkout(patch_set / "upstream/flow_grpo", FLOW_FILES)]
    before = [snapshot(directory) for directory in (checkout, *defaults)]
    run_apply(checkout, patch_set=patch_set)
    run_apply(patch_set=patch_set)
    for directory, entries in zip((checkout, *defaults), before):
        assert_applied(directory, entries)


def test_hooked_trainers_call_the_module_beside_them(full_checkout, upstream, patch_set, tmp_path):
    (patch_set / "jagg_patch/__init__.py").write_text(STAND_IN_MODULE)
    run_apply(full_checkout, patch_set=patch_set)
    for file in ALL_FILES[upstream]:
        trainer = full_checkout / file
        command = [sys.executable, trainer, "--steps", "7"]
        printed = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60).stdout
        module = trainer.parent / "jagg_patch/__init__.py"
        assert ast.literal_eval(printed) == {"--steps": "7", "--added_by_hook": str(module)}


def test_mini_trainer_runs_hooked(tmp_path, patch_set):
    """As far as --help: its own parser, with torch and all else that it imports replaced."""
    mini = tmp_path / "mini"
    shutil.copytree(ROOT / "upstream/mini", mini, ignore=shutil.ignore_patterns("data", "__pycache__"))
    trainer = mini / "fastvideo/train_grpo_flux.py"
    before = snapshot(mini)
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
    run_apply("--reverse", "--only", TRAINERS[1], "--only", TRAINERS[2], checkout)
    assert snapshot(checkout) == before


def test_only_for_a_trainer_that_is_missing_is_refused(checkout):
    (checkout / FILES[-1]).unlink()
    args = ("--only", TRAINERS[0], "--only", TRAINERS[-1])
    assert_refused(checkout, *args, says=[FILES[-1], "the file is missing"])
    assert_refused(checkout, "--check", *args, says=[FILES[-1], "the file is missing"])


@pytest.mark.parametrize("action", [(), ("--check",), ("--status",), ("--reverse",)])
@pytest.mark.parametrize("only", [["train_sd3"], ["train_grpo_flux", "train_sd3"]], ids=["alone", "beside one that is there"])
def test_only_for_a_trainer_of_the_other_upstream_is_refused(checkout, action, only):
    args = [word for trainer in only for word in ("--only", trainer)]
    printed = assert_refused(checkout, *action, *args, says=["has no train_sd3\n", *ALL_TRAINERS["dancegrpo"]])
    assert "train_qwenimage" not in printed


def test_only_takes_every_trainer():
    run_apply(*[word for trainers in ALL_TRAINERS.values() for name in trainers for word in ("--only", name)], "--help")


# --commit


def subjects(directory, revisions="HEAD"):
    return git(directory, "log", "--reverse", "--format=%s", revisions).splitlines()


def assert_committed(directory, before):
    assert_applied(directory, before)
    assert git(directory, "status", "--porcelain") == ""
    added = subjects(directory)[1:]
    assert [subject.partition(":")[0] for subject in added] == [Path(file).stem for file in trainers_in(before)]


def test_commit_and_reverse(full_checkout, upstream):
    checkout = full_checkout
    before = snapshot(checkout)
    run_apply("--commit", checkout)
    assert_committed(checkout, before)
    head = git(checkout, "rev-parse", "HEAD")
    run_apply("--commit", checkout)
    assert git(checkout, "rev-parse", "HEAD") == head

    run_apply("--reverse", "--commit", checkout)
    assert snapshot(checkout) == before
    assert git(checkout, "status", "--porcelain", "--ignored") == ""
    assert len(subjects(checkout)) == len(ALL_FILES[upstream]) + 2


LATER = {
    "far above": lambda source: "import os\n" + source,
    "before the guard": lambda source: source.replace(GUARD, "print()\n" + GUARD),
    "after": lambda source: source.removesuffix("\n") + "\n    print()\n",
}


@pytest.mark.parametrize("change", LATER.values(), ids=LATER)
def test_rebase_carries_the_commits(checkout, change):
    git(checkout, "branch", "upstream")
    run_apply("--commit", checkout)
    git(checkout, "checkout", "-q", "upstream")
    for file in FILES:
        (checkout / file).write_text(change(source_of(file)))
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
    (checkout / MODULE / "loop/session.py").unlink()
    run_apply("--commit", checkout)
    assert snapshot(checkout) == fresh
    assert git(checkout, "rev-parse", "HEAD") == head


@pytest.mark.parametrize("applied", [False, True], ids=["fresh", "applied"])
def test_commit_undoes_all_if_a_git_hook_refuses(checkout, applied):
    if applied:
        run_apply(checkout)
        (checkout / MODULE / "loop/session.py").unlink()  # so the module is replaced as well
    refuse = checkout / ".git/hooks/pre-applypatch"
    refuse.parent.mkdir(exist_ok=True)
    refuse.write_text("#!/bin/sh\nmkdir .git/second_time\n")
    refuse.chmod(0o755)
    head = git(checkout, "rev-parse", "HEAD")
    assert_refused(checkout, "--commit", says="git am refused")
    assert git(checkout, "rev-parse", "HEAD") == head


def test_a_second_run_at_the_same_time_is_refused(checkout, tmp_path):
    """The first waits in git until the second has ended."""
    os.mkfifo(tmp_path / "go")
    env = path_with(
        tmp_path, "git", f'case "$*" in *am\\ *) read -r _ <"{tmp_path}/go" ;; esac\nexec {shutil.which("git")} "$@"\n'
    )
    first = subprocess.Popen([ROOT / "apply.sh", "--commit", checkout], env=os.environ | env, start_new_session=True)
    try:
        while not (checkout / MODULE).is_dir():
            assert first.poll() is None
        for action in ([], ["--reverse"]):
            done = subprocess.run([ROOT / "apply.sh", *action, checkout], capture_output=True, text=True)
            assert done.returncode == 1 and "another apply.sh is at work there" in done.stderr
        (tmp_path / "go").write_text("\n")
        assert first.wait(timeout=60) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
    assert len(subjects(checkout)) == len(FILES) + 1
    run_apply("--reverse", "--commit", checkout)


@pytest.mark.parametrize("applied", [False, True], ids=["fresh", "applied"])
def test_an_interrupted_commit_is_undone(checkout, applied):
    """Ctrl-C in the middle of git am, which reaches all of the process group."""
    if applied:
        run_apply(checkout)
    interrupt = checkout / ".git/hooks/pre-applypatch"
    interrupt.parent.mkdir(exist_ok=True)
    interrupt.write_text("#!/bin/sh\nmkdir .git/second_time || kill -INT 0\n")
    interrupt.chmod(0o755)
    before, head = snapshot(checkout), git(checkout, "rev-parse", "HEAD")
    process = subprocess.Popen([ROOT / "apply.sh", "--commit", checkout], start_new_session=True)
    assert process.wait(timeout=60) == -signal.SIGINT
    assert (checkout / ".git/second_time").is_dir()
    assert snapshot(checkout) == before and git(checkout, "rev-parse", "HEAD") == head
    assert not (checkout / ".git/rebase-apply").exists()
    interrupt.unlink()
    run_apply("--commit", checkout)
    assert len(subjects(checkout)) == len(FILES) + 1


@pytest.mark.parametrize("only", [(), ("--only", TRAINERS[0])], ids=["all", "only"])
@pytest.mark.parametrize("when", ["written", "half written"])
def test_a_reverse_that_was_killed_before_its_commit_is_finished(checkout, tmp_path, only, when):
    """SIGKILL, which can't be undone: HEAD has the hooks, the files have none."""
    before = snapshot(checkout)
    run_apply("--commit", checkout)
    head = git(checkout, "rev-parse", "HEAD").strip()
    stand_in = f'case "$*" in *"commit --quiet"*) kill -9 $PPID; exit 1 ;; esac\nexec {shutil.which("git")} "$@"\n'
    run_apply("--reverse", "--commit", *only, checkout, status=-signal.SIGKILL, env=path_with(tmp_path, "git", stand_in))
    assert git(checkout, "rev-parse", "HEAD").strip() == head and (checkout / FILES[0]).read_text() == PARSING_SOURCE
    if when == "half written":
        git(checkout, "checkout", "-q", FILES[0])
    n_taken = 1 if only else len(FILES)
    assert f"taken out of {n_taken} trainer(s)" in run_apply("--reverse", "--commit", *only, checkout)
    assert git(checkout, "status", "--porcelain") == ""
    assert git(checkout, "diff", "--name-only", head).split() == sorted(FILES)[:n_taken]
    run_apply("--reverse", "--commit", checkout)
    assert snapshot(checkout) == before


def test_a_copy_s_reverse_that_was_killed_before_its_commit_is_finished(checkout):
    run_apply("--commit", checkout)
    copy = checkout / "fastvideo/my_flux.py"
    shutil.copy(checkout / FILES[0], copy)
    commit_all(checkout, "mine")
    copy.write_text(PARSING_SOURCE)  # as such a run leaves it
    run_apply("--reverse", "--commit", checkout)
    assert git(checkout, "status", "--porcelain") == "" and copy.read_text() == PARSING_SOURCE


def test_a_plain_reverse_can_be_committed_afterwards(checkout):
    before = snapshot(checkout)
    run_apply("--commit", checkout)
    run_apply("--reverse", checkout)
    assert "git commit" in run_apply("--reverse", checkout)
    run_apply("--reverse", "--commit", checkout)
    assert snapshot(checkout) == before and git(checkout, "status", "--porcelain") == ""


def test_edits_beside_a_hook_that_is_out_are_not_committed_with_it(checkout):
    run_apply("--commit", checkout)
    run_apply("--reverse", checkout)
    edit(checkout / FILES[0], "default=3", "default=5")
    head = git(checkout, "rev-parse", "HEAD")
    assert_refused(checkout, "--reverse", "--commit", says=[FILES[0], "changes of yours"])
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
def test_of_no_upstream(tmp_path, action):
    directory = tmp_path / "other"
    directory.mkdir()
    (directory / "train.py").write_text(PARSING_SOURCE)
    assert_refused(directory, *action, says=["neither", str(directory), *ALL_FILES["dancegrpo"], *ALL_FILES["flow_grpo"]])


NOT_OURS = """\
import argparse


def main(args):
    print(args)


if __name__ == "__main__":
    main(argparse.ArgumentParser().parse_args())
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("action", [(), ("--check",)], ids=["apply", "--check"])
def test_of_another_repository_with_a_trainer_s_file_name(tmp_path, action, end):
    """What the contract misses is told, and that it may be no such trainer at all."""
    directory = tmp_path / "other/scripts"
    directory.mkdir(parents=True)
    (directory / "train_sd3.py").write_bytes(NOT_OURS.replace("\n", end).encode())
    printed = assert_refused(directory.parent, *action, says=["scripts/train_sd3.py ", "no function compute_log_prob"])
    assert "it may be no such trainer at all" in printed and "app.run" in printed


@pytest.mark.parametrize("action", [(), ("--check",)], ids=["apply", "--check"])
def test_an_edited_hook_is_a_trainer_s(checkout, action):
    change_hook(0)(checkout, FILES)
    edit(checkout / FILES[0], "            loss.backward()\n", "")
    printed = assert_refused(checkout, *action, says=["the hook is there but was edited", "no backward()"])
    assert "no such trainer" not in printed


@pytest.mark.parametrize("action", [(), ("--check",), ("--status",), ("--reverse",), ("--only", "train_sd3")])
def test_of_both_upstreams(checkout, action):
    (checkout / "scripts").mkdir()
    (checkout / "scripts/train_sd3.py").write_text(RUN_SOURCE)
    assert_refused(checkout, *action, says=["several upstreams", "dancegrpo flow_grpo"])


@pytest.mark.parametrize("action", [(), ("--check",), ("--status",), ("--reverse",)])
def test_no_such_directory(tmp_path, action):
    assert "nowhere: no such directory" in run_apply(*action, tmp_path / "nowhere", status=1)
    assert not list(tmp_path.iterdir())


def change_line(index):
    def change(top, files):
        file = top / files[index]
        edit(file, *(("parse_args()", "parse_args(None)") if PARSE in file.read_text() else ("run(main)", "run(main, 3)")))

    return change


def change_hook(index):
    def change(top, files):
        run_apply(top)
        edit(top / files[index], "import jagg_patch  #", "import jagg_patch #")

    return change


def put_something_at_module(top, files):
    module = (top / files[0]).with_name("jagg_patch")
    module.mkdir()
    (module / "mine.py").write_text("mine = 1\n")


def link_module(top, files):
    (top / files[0]).with_name("jagg_patch").symlink_to(ROOT / "jagg_patch")


def link_trainer(top, files):
    (top / files[0]).rename(top / "elsewhere.py")
    (top / files[0]).symlink_to("../elsewhere.py")


def convert_long_file(top, files):
    """Longer than a pipe holds."""
    file = top / files[0]
    file.write_text((file.read_text() + "# more\n" * 50_000).replace("\n", "\r\n"))


CONTEXT = {
    FILES[0]: "('args = parser.parse_args()')",
    FILES[-1]: "('app.run(main)')",
    **dict.fromkeys(FLOW_FILES, "('app.run(main)')"),
}
REFUSALS = {  # what is done to a checkout; which of its files is refused, if it is one of them; what is said
    "line changed in the first": (change_line(0), 0, "before which the hook goes"),
    "line changed in the last": (change_line(-1), -1, "before which the hook goes"),
    "hook changed in the first": (change_hook(0), 0, "the hook is there but was edited"),
    "hook changed in the last": (change_hook(-1), -1, "the hook is there but was edited"),
    "something else at the module": (put_something_at_module, None, "jagg_patch: something else"),
    "link at the module": (link_module, None, "jagg_patch: something else"),
    "link in place of a trainer": (link_trainer, 0, "symbolic link"),
    "CRLF": (convert_long_file, 0, "CRLF"),
}


@pytest.mark.parametrize("files", [FILES, FLOW_FILES], ids=FOLDERS)
@pytest.mark.parametrize(("prepare", "index", "says"), REFUSALS.values(), ids=REFUSALS)
def test_refused(tmp_path, files, prepare, index, says):
    """All or nothing: the trainers that could be patched aren't either. --check foretells it."""
    checkout = make_checkout(tmp_path / "checkout", files)
    prepare(checkout, files)
    says = [says] if index is None else [f"{files[index]} ", says]
    if "before which" in says[-1]:
        says += [CONTEXT[files[index]]]
    printed = assert_refused(checkout, says=says)
    assert printed.count("apply.sh: ") == 1  # the reasons, then one line that says what became of it
    assert_refused(checkout, "--check", says=says)


PLACES = [FILES[0], FILES[-1], "fastvideo", ".git/info/exclude"]


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


@pytest.mark.parametrize("index", [0, -1])
def test_reverse_of_an_edited_hook_is_refused(checkout, index):
    change_hook(index)(checkout, FILES)
    assert_refused(checkout, "--reverse", says=[FILES[index], "the hook is there but was edited"])


@pytest.mark.parametrize("prepare", [put_something_at_module, link_module])
def test_reverse_leaves_what_it_did_not_put_there(checkout, prepare):
    prepare(checkout, FILES)
    before = snapshot(checkout)
    run_apply("--reverse", checkout)
    assert snapshot(checkout) == before


def path_with(directory, command, script):
    """An environment in which `script` is run in place of `command`."""
    (directory / "bin").mkdir()
    (directory / "bin" / command).write_text(f"#!/bin/sh\n{script}")
    (directory / "bin" / command).chmod(0o755)
    return {"PATH": f"{directory / 'bin'}:{os.environ['PATH']}"}


def limit_file_sizes():
    """The next best to a full disk: files of the module are longer."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))


@pytest.mark.parametrize("applied", [False, True], ids=["fresh", "stale"])
@pytest.mark.parametrize("fate", ["no space", "killed", "hung up"])
def test_failure_half_way_is_undone(checkout, tmp_path, fate, applied):
    """A hook without the whole module would stop the trainer."""
    if applied:
        run_apply("--only", TRAINERS[0], checkout)
        (checkout / MODULE / "loop/session.py").unlink()
    if fate == "no space":
        assert_refused(checkout, says=[f"{MODULE}.new/", "File too large"], preexec_fn=limit_file_sizes)
        return
    number = {"killed": signal.SIGTERM, "hung up": signal.SIGHUP}[fate]
    stand_in = f"""\
case "$*" in *"apply --directory=") test -e {checkout / MODULE}/loop/session.py && kill -{int(number)} $PPID ;; esac
exec {shutil.which("git")} "$@"
"""
    assert_refused(checkout, says="", status=-number, env=path_with(tmp_path, "git", stand_in))


@pytest.mark.parametrize(("status", "says"), [(1, "no space left"), (0, "git reported success")])
def test_a_trainer_that_git_loses_is_put_back(checkout, tmp_path, status, says):
    """It removes the file before it writes the new one."""
    stand_in = f"""\
case "$*" in *"apply --directory=") rm {checkout / FILES[0]}; echo "error: no space left" >&2; exit {status} ;; esac
exec {shutil.which("git")} "$@"
"""
    assert_refused(checkout, says=says, env=path_with(tmp_path, "git", stand_in))


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


@pytest.mark.parametrize("action", [(), ("--only", "train_sd3"), ("--help",)], ids=["apply", "--only", "--help"])
def test_without_git(checkout, tmp_path, action):
    (tmp_path / "bin").mkdir()
    for name in ("sh", "dirname", "readlink"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    before, is_help = snapshot(checkout), action == ("--help",)
    printed = run_apply(*action, checkout, status=0 if is_help else 1, env={"PATH": str(tmp_path / "bin")})
    assert ("usage" if is_help else "git is not installed") in printed
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
    for trainer in [*ALL_TRAINERS["dancegrpo"], *ALL_TRAINERS["flow_grpo"]]:
        assert trainer in printed


def test_help_names_every_option():
    printed = run_apply("--help")
    for option in ("--check", "--status", "--reverse", "--commit", "--only", "--demo", "exit status"):
        assert option in printed


def test_demo_runs_in_an_environment_of_its_own(patch_set):
    (patch_set / "tests").mkdir()
    venv = patch_set / "tests/venv.sh"
    venv.write_text(f'#!/bin/sh\n[ "$*" = demo ] && echo {sys.executable}\n')
    venv.chmod(0o755)
    (patch_set / "upstream/demo.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(7)\n")
    assert run_apply("--demo", patch_set=patch_set, status=7) == f"['--out', '{patch_set}/demo-output']\n"
    assert run_apply("--demo", "a b", patch_set=patch_set, status=7) == "['--out', 'a b']\n"
    assert "--only doesn't go with --demo" in run_apply("--demo", "--only", TRAINERS[0], patch_set=patch_set, status=2)
    venv.write_text("#!/bin/sh\nexit 3\n")
    assert run_apply("--demo", patch_set=patch_set, status=3) == ""


# Without DIR: the default checkouts


@pytest.fixture
def both(patch_set):
    """The default checkouts of a patch set."""
    top = patch_set / "upstream"
    return make_checkout(top / "DanceGRPO"), make_checkout(top / "flow_grpo", FLOW_FILES)


def test_both_default_checkouts(patch_set, both):
    before = [snapshot(checkout) for checkout in both]
    for action, says in (("--check", "ready    holds"), ("--status", "not applied")):
        printed = run_apply(action, patch_set=patch_set)
        assert [line for line in printed.splitlines() if not line.startswith(" ")] == [f"{checkout}:" for checkout in both]
        assert printed.count(says) == 6
    run_apply(patch_set=patch_set)
    for checkout, entries in zip(both, before):
        assert_applied(checkout, entries)
    run_apply("--reverse", patch_set=patch_set)
    assert [snapshot(checkout) for checkout in both] == before


def test_only_leaves_the_other_default_checkout_alone(patch_set, both):
    before = snapshot(both[0], all_of_git=True)
    printed = run_apply("--only", "train_sd3", patch_set=patch_set) + run_apply(
        "--check", "--only", "train_sd3", patch_set=patch_set
    )
    assert "DanceGRPO" not in printed
    assert snapshot(both[0], all_of_git=True) == before
    assert (both[1] / FLOW_FILES[0]).read_text() == hooked(RUN_SOURCE)
    assert (both[1] / FLOW_FILES[1]).read_text() == RUN_SOURCE


def test_only_names_trainers_of_both_default_checkouts(patch_set, both):
    run_apply("--only", TRAINERS[0], "--only", "train_sd3", patch_set=patch_set)
    for checkout, files in zip(both, (FILES, FLOW_FILES)):
        assert [file for file in files if "jagg" in (checkout / file).read_text()] == files[:1]


@pytest.mark.parametrize("args", [(), ("--commit",), ("--reverse",)], ids=["apply", "commit", "reverse"])
@pytest.mark.parametrize("index", [0, 1], ids=FOLDERS)
def test_a_refusal_in_one_leaves_the_other(patch_set, both, args, index):
    if args == ("--reverse",):
        run_apply(patch_set=patch_set)
        change_hook(0)(both[index], (FILES, FLOW_FILES)[index])
    elif args == ("--commit",):
        edit(both[index] / (FILES, FLOW_FILES)[index][0], "default=3", "default=5")
    else:
        change_line(0)(both[index], (FILES, FLOW_FILES)[index])
    before = [snapshot(checkout, all_of_git=True) for checkout in both]
    printed = run_apply(*args, patch_set=patch_set, status=1)
    assert printed.count("apply.sh: ") == 1
    assert str(both[index]) in printed
    assert [snapshot(checkout, all_of_git=True) for checkout in both] == before


def test_looking_goes_on_after_a_refusal(patch_set, both):
    change_line(0)(both[0], FILES)
    assert run_apply("--check", patch_set=patch_set, status=1).count("ready    holds") == 5
    assert run_apply("--status", patch_set=patch_set).count("not applied") == 5
    shutil.rmtree(both[0] / "fastvideo")
    assert run_apply("--status", patch_set=patch_set, status=1).count("not applied") == 3


# The clone at the pin


def pin_to(patch_set, url, commit, upstream="dancegrpo"):
    for name, value in (("url", url), ("commit", commit)):
        git(patch_set, "config", "--file", f"patches/{upstream}/pin.ini", f"upstream.{name}", value)


def clones(patch_set):
    return sorted(path.name for path in (patch_set / "upstream").iterdir() if path.is_dir())


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
    assert clones(patch_set) == ["DanceGRPO"]

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
@pytest.mark.parametrize("args", [(), ("upstream/flow_grpo",), ("--only", "train_sd3")], ids=["default", "DIR", "--only"])
def test_only_applying_clones(patch_set, action, args):
    before = snapshot(patch_set)
    assert "no such directory" in run_apply(action, *args, patch_set=patch_set, cwd=patch_set, status=1)
    assert snapshot(patch_set) == before


@pytest.fixture
def flow_upstream(tmp_path, patch_set):
    """What flow_grpo is pinned to."""
    checkout = make_checkout(tmp_path / "flow_grpo", FLOW_FILES)
    pin_to(patch_set, checkout, git(checkout, "rev-parse", "HEAD").strip(), "flow_grpo")
    return checkout


@pytest.mark.parametrize("argument", ["upstream/flow_grpo", "./upstream/../upstream/flow_grpo/"])
def test_dir_that_is_a_default_place_is_cloned(patch_set, flow_upstream, argument):
    run_apply(argument, patch_set=patch_set, cwd=patch_set)
    assert clones(patch_set) == ["flow_grpo"]
    assert_applied(patch_set / "upstream/flow_grpo", snapshot(flow_upstream))


def test_named_trainer_s_upstream_is_cloned(patch_set, flow_upstream):
    """Beside a default checkout of the other, which stays as it is unless it is named too."""
    dance = make_checkout(patch_set / "upstream/DanceGRPO")
    before = snapshot(dance)
    flow = patch_set / "upstream/flow_grpo"
    run_apply("--only", "train_sd3", patch_set=patch_set)
    assert (flow / "scripts/train_sd3.py").read_text() == hooked(RUN_SOURCE)
    assert snapshot(dance) == before
    shutil.rmtree(flow)
    run_apply("--only", "train_sd3", "--only", TRAINERS[0], patch_set=patch_set)
    assert (flow / "scripts/train_sd3.py").read_text() == hooked(RUN_SOURCE)
    assert (dance / FILES[0]).read_text() == hooked(PARSING_SOURCE)


def test_clone_that_fails_leaves_the_other_checkout(patch_set, tmp_path):
    make_checkout(patch_set / "upstream/DanceGRPO")
    pin_to(patch_set, tmp_path / "nowhere", "0" * 40, "flow_grpo")
    before = snapshot(patch_set)
    assert "could not clone" in run_apply("--only", TRAINERS[0], "--only", "train_sd3", patch_set=patch_set, status=1)
    assert snapshot(patch_set) == before


@pytest.mark.parametrize("only", [["train_grpo_flux"], ["train_grpo_flux", "train_sd3"]], ids=["alone", "beside one of it"])
def test_only_of_the_other_upstream_clones_nothing(patch_set, flow_upstream, only):
    args = [word for trainer in only for word in ("--only", trainer)]
    assert "has no train_grpo_flux\n" in run_apply(*args, "upstream/flow_grpo", patch_set=patch_set, cwd=patch_set, status=1)
    assert clones(patch_set) == []


def test_pin_on_no_branch(patch_set, flow_upstream):
    """As GitHub keeps what a force push left behind, or a pull request: a clone doesn't bring it."""
    before, pinned = snapshot(flow_upstream), git(flow_upstream, "rev-parse", "HEAD").strip()
    git(flow_upstream, "update-ref", "refs/pull/1/head", "HEAD")
    edit(flow_upstream / FLOW_FILES[0], "default=3", "default=5")
    git(flow_upstream, "commit", "-qa", "--amend", "-m", "forced")
    git(flow_upstream, "config", "uploadpack.allowAnySHA1InWant", "true")
    pin_to(patch_set, f"file://{flow_upstream}", pinned, "flow_grpo")  # by a plain path git copies every object
    run_apply("--only", "train_sd3", patch_set=patch_set)
    run_apply(patch_set=patch_set)
    assert git(patch_set / "upstream/flow_grpo", "rev-parse", "HEAD").strip() == pinned
    assert_applied(patch_set / "upstream/flow_grpo", before)


def test_clone_with_hostile_git_config(patch_set, flow_upstream, home):
    with (home / ".gitconfig").open("a") as config:
        config.write(HOSTILE_GITCONFIG)
    run_apply("upstream/flow_grpo", patch_set=patch_set, cwd=patch_set)
    assert_applied(patch_set / "upstream/flow_grpo", snapshot(flow_upstream))


# The patch files and the pins


EVERY_PATCH = [f"{upstream}/{patch}" for upstream, series in SERIES.items() for patch in series]


def diff_lines(patch):
    """Lines of all hunks, with their first character."""
    mail = (ROOT / "patches" / patch).read_text().removesuffix("\n").rpartition("\n-- \n")[0]
    return [line for hunk in re.split(r"^@@ .* @@.*\n", mail, flags=re.M)[1:] for line in hunk.splitlines()]


def test_series_names_every_patch(upstream):
    assert sorted(SERIES[upstream]) == sorted(path.name for path in (ROOT / "patches" / upstream).glob("*.patch"))


def test_pins_name_the_files_that_are_patched(upstream):
    def pin(name):
        command = ["git", "config", "--file", ROOT / "patches" / upstream / "pin.ini", "--get-all", f"upstream.{name}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines()

    texts = [(ROOT / "patches" / upstream / patch).read_text() for patch in SERIES[upstream]]
    assert [re.findall(r"^\+\+\+ b/(.*)$", text, re.M) for text in texts] == [[file] for file in ALL_FILES[upstream]]
    assert pin("file") == ALL_FILES[upstream]
    assert pin("folder") == [FOLDERS[upstream]]
    assert pin("module") == [str(Path(ALL_FILES[upstream][0]).with_name("jagg_patch"))]
    for line in pin("unsupported"):
        assert re.match(r"\S+\.py \S+", line)
        assert line.split()[0] not in ALL_FILES[upstream]


@pytest.mark.parametrize("patch", EVERY_PATCH)
def test_patch_adds_the_hook_and_carries_no_upstream_text(patch):
    lines = diff_lines(patch)
    (context,) = {f"{line[1:]}\n" for line in lines if not line.startswith("+")}
    assert context in HOOKS
    assert "".join(f"{line[1:]}\n" for line in lines if line.startswith("+")) == HOOKS[context]


def test_hooks_are_short_and_call_install():
    for context, arguments in ((PARSE, "globals(), parser"), (RUN, "globals()")):
        lines = HOOKS[context].splitlines()
        assert 1 <= len(lines) <= 3
        assert lines[-1] == f"    jagg_patch.install({arguments})"


def test_patches_are_mails_that_give_a_reason(full_checkout, upstream, tmp_path):
    for patch, file in zip(SERIES[upstream], ALL_FILES[upstream]):
        with (ROOT / "patches" / upstream / patch).open() as mail:
            command = ["git", "mailinfo", tmp_path / "message", tmp_path / "diff"]
            head = subprocess.run(command, stdin=mail, check=True, capture_output=True, text=True, timeout=60).stdout
        assert re.search(rf"^Subject: {patch.removesuffix('.patch')}: ", head, re.M)
        assert re.search(r"^Email: .+@.+", head, re.M)
        assert len((tmp_path / "message").read_text().split("---")[0].strip().splitlines()) >= 2
        git(full_checkout, "am", "-q", ROOT / "patches" / upstream / patch)
        assert (full_checkout / file).read_text() == hooked(source_of(file))
