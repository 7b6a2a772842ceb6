"""apply.sh --check, --refresh and --export when upstream has moved: stand-ins for checkouts, a patch set to change at will."""

import os
import re
import sys

import pytest
from test_apply import (  # noqa: F401, fixtures among them
    FILES,
    HOOKS,
    PARSE,
    ROOT,
    RUN,
    assert_applied,
    assert_refused,
    checkout,
    commit_all,
    edit,
    full_checkout,
    git,
    home,
    patch_set,
    run_apply,
    snapshot,
    tarball,
    upstream,
    write_upstream,
)

FLUX = FILES[0]
STEP = "def grpo_one_step(latents, pre_latents, transformer, timesteps, i, sigma_schedule):"


URLS = {"dancegrpo": "https://github.com/XueZeyue/DanceGRPO", "flow_grpo": "https://github.com/yifan123/flow_grpo"}


def publish(directory, url=URLS["dancegrpo"], remote="origin"):
    """As if the last commit had been fetched from there."""
    git(directory, "config", f"remote.{remote}.url", url)
    git(directory, "update-ref", f"refs/remotes/{remote}/main", "HEAD")


@pytest.fixture
def moved(checkout, patch_set):  # noqa: F811
    """`moved(old, new)` changes the Flux trainer upstream, after the patch set was refreshed; returns the checkout's commit."""
    run_apply("--refresh", checkout, patch_set=patch_set)

    def change(old, new):
        edit(checkout / FLUX, old, new)
        commit_all(checkout)
        return git(checkout, "rev-parse", "HEAD").strip()

    return change


def row(printed, file=FLUX):
    """Patch, contract and what differs, of the table's rows of a trainer."""
    lines = printed.split(f"  {file} ")[1].split("  fastvideo/")[0].splitlines()
    patch, contract, *says = re.split(r" +", lines[0].strip(), maxsplit=2)
    return patch, contract, [*says, *(line.strip() for line in lines[1:] if line.startswith(" " * 40))]


def message(patch):
    return patch.read_text().partition("\ndiff --git ")[0]


def test_a_refresh_pins_the_commit_and_keeps_the_messages(full_checkout, upstream, patch_set):  # noqa: F811
    patches = patch_set / "patches" / upstream
    before = {patch.name: message(patch) for patch in patches.glob("*.patch")}
    untouched = snapshot(full_checkout)
    publish(full_checkout, URLS[upstream])
    printed = run_apply("--refresh", full_checkout, patch_set=patch_set)
    commit = git(full_checkout, "rev-parse", "HEAD").strip()
    assert f"patches/{upstream}/pin.ini: {upstream} is at {commit}" in printed
    assert f"+++ b/patches/{upstream}/lock.json" in printed and f".patch\n+++ b/patches/{upstream}/" in printed
    assert git(patch_set, "config", "--file", f"patches/{upstream}/pin.ini", "upstream.commit").strip() == commit
    assert {patch.name: message(patch) for patch in patches.glob("*.patch")} == before
    assert snapshot(full_checkout) == untouched
    checked = run_apply("--check", full_checkout, patch_set=patch_set)
    assert checked.count(" ready    holds\n") == len(before) and "changed" not in checked
    printed = run_apply("--refresh", full_checkout, patch_set=patch_set)  # again: nothing left to do
    assert printed.count("nothing that is relied on changed") == len(before) and "@@" not in printed
    run_apply(full_checkout, patch_set=patch_set)
    assert_applied(full_checkout, untouched)


def test_comments_and_formatting_are_no_change_and_code_is(moved, checkout, patch_set):  # noqa: F811
    moved("    samples = sample_reference_model(args)", "    # all of them\n    samples = (sample_reference_model( args ))")
    assert row(run_apply("--check", checkout, patch_set=patch_set)) == ("ready", "holds", [])
    locked = git(checkout, "rev-parse", "HEAD~1")[:12]
    moved(
        "    return flux_step(transformer(latents), latents, pre_latents)",
        "    return 2 * flux_step(transformer(latents), latents, pre_latents)",
    )
    assert row(run_apply("--check", checkout, patch_set=patch_set)) == (
        "ready",
        "holds",
        [f"changed since {locked}: grpo_one_step"],
    )


def test_a_broken_contract_is_refused_by_everything_that_writes(moved, checkout, patch_set):  # noqa: F811
    moved(STEP, STEP.replace("timesteps", "t"))
    reason = "grpo_one_step() has no parameter timesteps any more: JAGG goes by that name"
    printed = assert_refused(checkout, "--check", says=["would train wrong", "--only"], patch_set=patch_set)
    patch, contract, says = row(printed)
    assert (patch, contract, says[0]) == ("ready", "broken", reason)
    assert row(printed, FILES[1]) == ("ready", "holds", [])
    assert_refused(checkout, says=[f"refused: the contract is broken: {reason}", "nothing was changed"], patch_set=patch_set)
    before = snapshot(patch_set)
    assert_refused(checkout, "--refresh", says=["nothing was written", f"{FLUX}: {reason}"], patch_set=patch_set)
    assert snapshot(patch_set) == before
    assert run_apply("--only", "train_grpo_sd", checkout, patch_set=patch_set).count(" applied") == 1
    git(checkout, "checkout", "-q", ".")
    run_apply("--refresh", "--only", "train_grpo_sd", checkout, patch_set=patch_set)


@pytest.mark.parametrize("action", ["--check", None])
def test_an_applied_trainer_whose_loop_was_edited_is_found(checkout, action):  # noqa: F811
    run_apply(checkout)
    edit(checkout / FLUX, "            loss.backward()\n", "        loss.backward()\n")
    says = ["there is no backward() in the loop over steps"]
    assert_refused(checkout, *([action] if action else []), says=says)
    assert "taken out of 3 trainer(s)" in run_apply("--reverse", checkout)


@pytest.mark.parametrize(
    ("new", "hook"),
    [
        ("    args, rest = parser.parse_known_args()\n", None),
        ("    args = parser.parse_args(\n        None,\n    )\n", None),
        ("    if True:\n        args = parser.parse_args()\n", None),
        ("    main(parser.parse_args())\n    args = None\n", None),
    ],
)
def test_the_hook_is_anchored_anew(moved, checkout, patch_set, new, hook):  # noqa: F811
    moved(PARSE, new)
    assert row(run_apply("--check", checkout, patch_set=patch_set, status=1))[:2] == ("refused", "holds")
    text = (checkout / FLUX).read_text()
    assert "the hook is anchored anew; changed: hook" in run_apply("--refresh", checkout, patch_set=patch_set)
    assert row(run_apply("--check", checkout, patch_set=patch_set)) == ("ready", "holds", [])
    run_apply(checkout, patch_set=patch_set)
    assert (checkout / FLUX).read_text() == text.replace(new, HOOKS[PARSE] + new)
    run_apply("--reverse", checkout, patch_set=patch_set)
    assert (checkout / FLUX).read_text() == text


@pytest.mark.parametrize("commit", [[], ["--commit"]], ids=["plain", "commit"])
@pytest.mark.parametrize(
    "new", ["    args, rest = parser.parse_known_args()\n", "    if True:\n        args = parser.parse_args()\n"]
)
def test_a_hook_that_was_anchored_elsewhere_is_still_ours(moved, checkout, tmp_path, patch_set, new, commit):  # noqa: F811
    """The patch set has moved on, and a checkout hasn't."""
    before = (checkout / FLUX).read_text()
    other = tmp_path / "other"
    git(tmp_path, "clone", "-q", checkout, other)
    run_apply(*commit, other, patch_set=patch_set)
    hooked = (other / FLUX).read_text()
    moved(PARSE, new)
    run_apply("--refresh", checkout, patch_set=patch_set)
    assert row(run_apply("--check", other, patch_set=patch_set))[:2] == ("applied", "holds")
    run_apply(*commit, other, patch_set=patch_set)
    assert (other / FLUX).read_text() == hooked
    run_apply("--reverse", *commit, other, patch_set=patch_set)
    assert (other / FLUX).read_text() == before and git(other, "status", "--porcelain") == ""


def test_a_conflict_is_named(checkout):  # noqa: F811
    run_apply(checkout)
    edit(checkout / FLUX, HOOKS[PARSE], f"<<<<<<< upstream\n=======\n{HOOKS[PARSE]}>>>>>>> ours\n")
    printed = assert_refused(checkout, "--check", says="git has left a conflict in it")
    assert row(printed)[:2] == ("refused", "unknown") and "can't read it" in row(printed)[2][1]
    assert_refused(checkout, "--reverse", says=[FLUX, "git has left a conflict in it", "--only"])
    assert "taken out of 1 trainer(s)" in run_apply("--reverse", "--only", "train_grpo_sd", checkout)


def test_what_this_python_cannot_read_is_unknown_and_not_patched(checkout):  # noqa: F811
    edit(checkout / FLUX, PARSE, f"    a syntax of the future\n{PARSE}")
    patch, contract, says = row(assert_refused(checkout, "--check", says="a trainer can't be patched"))
    assert (patch, contract) == ("ready", "unknown") and "does it train with a newer one?" in says[0]
    assert_refused(checkout, says=[f"{FLUX} ", "refused: the contract is unknown: invalid syntax", "can't read it"])


@pytest.mark.parametrize("place", ["after", "a string", "a comment", "main"])
def test_a_hook_that_would_never_start_anything_is_found(checkout, place):  # noqa: F811
    hook = HOOKS[PARSE]
    run_apply(checkout)
    edit(
        checkout / FLUX,
        f"{hook}{PARSE}",
        {
            "after": f"{PARSE}{hook}",
            "a string": f'    """\n{hook}    """\n{PARSE}',
            "a comment": f"    pass  # {hook.strip().splitlines()[-1].strip()}\n{PARSE}",
            "main": f"    def start():\n{hook.replace('    ', '        ')}{PARSE}",
        }[place],
    )
    says = (
        "was edited"
        if place == "a comment"
        else "the hook isn't among the statements before parser.parse_args(): JAGG would never"
    )
    assert_refused(checkout, "--check", says=says)


@pytest.mark.parametrize("between", ["\n", "\n\n"])
@pytest.mark.parametrize("below", ["", "\n", "# theirs\n", "    # theirs\n\n"])
def test_a_hook_that_a_formatter_has_spaced_is_still_ours(checkout, between, below):  # noqa: F811
    run_apply(checkout)
    first, second = HOOKS[PARSE].splitlines()
    edit(checkout / FLUX, HOOKS[PARSE], f"{first}\n{between}{second}\n{below}")
    without = (checkout / FLUX).read_text().replace(f"{first}\n{between}{second}\n", "")
    assert row(run_apply("--check", checkout))[:2] == ("applied", "holds")
    run_apply("--reverse", checkout)
    assert (checkout / FLUX).read_text() == without


def test_a_hook_that_a_branch_would_be_empty_without_stays(checkout):  # noqa: F811
    run_apply(checkout)
    edit(checkout / FLUX, HOOKS[PARSE], "    if True:\n" + HOOKS[PARSE].replace("    ", "        "))
    assert_refused(checkout, "--reverse", says=[FLUX, "was edited"])


def test_the_hook_takes_the_trainer_s_indentation(checkout, patch_set):  # noqa: F811
    text = (checkout / FLUX).read_text().replace("    ", "\t")
    (checkout / FLUX).write_text(text)
    commit_all(checkout)
    assert row(run_apply("--check", checkout, patch_set=patch_set, status=1))[:2] == ("refused", "holds")
    run_apply("--refresh", checkout, patch_set=patch_set)
    run_apply(checkout, patch_set=patch_set)
    hook = HOOKS[PARSE].replace("    ", "\t")
    assert (checkout / FLUX).read_text() == text.replace("\targs = parser", f"{hook}\targs = parser")


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ("    parse(parser)\n", "0 statements under `if __name__ …` call parser.parse_args or parser.parse_known_args()"),
        (f"{PARSE}    parser.parse_args()\n", "2 statements under"),
        (
            "    with open(__file__):\n        parser = argparse.ArgumentParser()\n        args = parser.parse_args()\n",
            "0 statements under",
        ),
    ],
)
def test_a_hook_without_its_one_place_breaks_the_contract(moved, checkout, patch_set, new, reason):  # noqa: F811
    moved(PARSE, new)
    before = snapshot(patch_set)
    assert_refused(checkout, "--refresh", says=["nothing was written", reason], patch_set=patch_set)
    assert snapshot(patch_set) == before


def test_what_cannot_be_pinned_is_refused(checkout, tarball, patch_set):  # noqa: F811
    before = snapshot(patch_set)
    assert_refused(tarball, "--refresh", says="it has to be a git clone", patch_set=patch_set)
    (checkout / FLUX).write_bytes((checkout / FLUX).read_text().replace("\n", "\r\n").encode())
    commit_all(checkout)
    assert_refused(checkout, "--refresh", says=[FLUX, "CRLF", "dos2unix"], patch_set=patch_set)
    git(checkout, "reset", "-q", "--hard", "HEAD~1")
    run_apply("--commit", checkout, patch_set=patch_set)
    assert_refused(checkout, "--refresh", says=[FLUX, "the commit has JAGG's hook already"], patch_set=patch_set)
    assert snapshot(patch_set) == before


def test_uncommitted_changes_are_not_pinned(moved, checkout, patch_set):  # noqa: F811
    edit(checkout / FLUX, STEP, STEP.replace("timesteps", "t"))
    assert "nothing that is relied on changed" in run_apply("--refresh", checkout, patch_set=patch_set)


def test_a_patch_changed_by_hand_is_exported_and_applied(checkout, patch_set):  # noqa: F811
    patch = patch_set / "patches/dancegrpo/train_grpo_flux.patch"
    before = message(patch)
    run_apply("--refresh", checkout, patch_set=patch_set)
    run_apply(checkout, patch_set=patch_set)
    unchanged = snapshot(patch_set)
    run_apply("--export", checkout, patch_set=patch_set)
    assert snapshot(patch_set) == unchanged
    edit(checkout / FLUX, "    jagg_patch.install(", "    print('JAGG is put in')\n    jagg_patch.install(")
    edited = (checkout / FLUX).read_text()
    printed = run_apply("--export", "--only", "train_grpo_flux", checkout, patch_set=patch_set)
    assert "++    print('JAGG is put in')" in printed
    assert message(patch) == before.replace("| 2 ++", "| 3 +++").replace("2 insertions", "3 insertions")
    run_apply("--reverse", checkout, patch_set=patch_set)
    assert (checkout / FLUX).read_text() == edited.replace("    print('JAGG is put in')\n", "").replace(HOOKS[PARSE], "")
    run_apply("--commit", checkout, patch_set=patch_set)
    assert (checkout / FLUX).read_text() == edited


@pytest.mark.parametrize("hook", ["\n{}", "{}\n"])
def test_a_hook_with_an_empty_line_at_an_end_is_not_exported(checkout, patch_set, hook):  # noqa: F811
    run_apply(checkout)
    edit(checkout / FLUX, HOOKS[PARSE], hook.format(HOOKS[PARSE]))
    before = snapshot(patch_set)
    says = [FLUX, "begins or ends with an empty line"]
    assert_refused(checkout, "--export", "--only", "train_grpo_flux", says=says, patch_set=patch_set)
    assert snapshot(patch_set) == before


def test_a_hook_of_several_levels_survives_a_refresh(checkout, patch_set):  # noqa: F811
    hook = "    if not args:\n        # indented\n\n        import jagg_patch\n    jagg_patch.install(globals(), parser)\n"
    run_apply(checkout, patch_set=patch_set)
    edit(checkout / FLUX, HOOKS[PARSE], hook)
    edited = (checkout / FLUX).read_text()
    run_apply("--export", "--only", "train_grpo_flux", checkout, patch_set=patch_set)
    git(checkout, "checkout", "-q", ".")
    assert "the patch still applies" in run_apply("--refresh", checkout, patch_set=patch_set)
    run_apply(checkout, patch_set=patch_set)
    assert (checkout / FLUX).read_text() == edited
    git(checkout, "checkout", "-q", ".")
    edit(checkout / FLUX, PARSE, "    if True:\n        args = parser.parse_args()\n")
    commit_all(checkout)
    run_apply("--refresh", checkout, patch_set=patch_set)
    run_apply(checkout, patch_set=patch_set)
    assert f"{hook}    if True:\n" in (checkout / FLUX).read_text()


def test_another_repository_s_commit_is_not_pinned(tmp_path, patch_set):  # noqa: F811
    outer = tmp_path / "outer"
    write_upstream(outer / "third party/DanceGRPO")
    git(outer, "init", "-q")
    commit_all(outer)
    before = snapshot(patch_set)
    assert_refused(outer / "third party/DanceGRPO", "--refresh", says="a folder in another repository", patch_set=patch_set)
    assert snapshot(patch_set) == before


def test_only_never_moves_the_pin(checkout, patch_set):  # noqa: F811
    pin = patch_set / "patches/dancegrpo/pin.ini"
    before = pin.read_text()
    publish(checkout)
    for trainers in (["train_grpo_flux"], ["train_grpo_flux_lora", "train_grpo_sd"]):
        args = [word for trainer in trainers for word in ("--only", trainer)]
        printed = run_apply("--refresh", *args, checkout, patch_set=patch_set)
        assert "patches/dancegrpo/pin.ini: stays at 15cc71d53cc2" in printed and "--only" in printed
        assert pin.read_text() == before
    run_apply("--refresh", checkout, patch_set=patch_set)
    assert git(checkout, "rev-parse", "HEAD").strip() in pin.read_text()


def test_the_pin_waits_for_a_trainer_that_is_only_committed(checkout, patch_set):  # noqa: F811
    pin = (patch_set / "patches/dancegrpo/pin.ini").read_text()
    publish(checkout)
    (checkout / FILES[1]).unlink()
    printed = run_apply("--refresh", checkout, patch_set=patch_set)
    assert "stays at 15cc71d53cc2" in printed and "train_grpo_flux_lora" in printed
    assert (patch_set / "patches/dancegrpo/pin.ini").read_text() == pin


@pytest.mark.parametrize("args", [(), ("--only", "train_grpo_flux")], ids=["all", "only"])
@pytest.mark.parametrize(
    "remotes",
    [
        {},
        {"origin": "https://github.com/somebody/DanceGRPO"},
        {"origin": "git@github.com:XueZeyue/DanceGRPO-fork.git", "mine": "/srv/DanceGRPO"},
    ],
    ids=["none", "a fork", "several"],
)
def test_a_fork_s_commit_is_never_pinned(checkout, patch_set, args, remotes):  # noqa: F811
    """Nor where upstream's own remote is there too, which is behind."""
    before = (patch_set / "patches/dancegrpo/pin.ini").read_text()
    publish(checkout, remote="upstream")
    git(checkout, "commit", "-q", "--allow-empty", "-m", "fork")
    for remote, url in remotes.items():
        publish(checkout, url, remote)
    printed = run_apply("--refresh", *args, checkout, patch_set=patch_set)
    assert "patches/dancegrpo/pin.ini: stays at 15cc71d53cc2" in printed
    assert args or URLS["dancegrpo"] in printed and "fetch" in printed
    assert (patch_set / "patches/dancegrpo/pin.ini").read_text() == before
    commit = git(checkout, "rev-parse", "HEAD").strip()
    assert commit in (patch_set / "patches/dancegrpo/lock.json").read_text()


@pytest.mark.parametrize(
    "url",
    [
        "https://github.com/XueZeyue/DanceGRPO.git",
        "https://github.com/XueZeyue/DanceGRPO/",
        "https://somebody@github.com/xuezeyue/dancegrpo",
        "git@github.com:XueZeyue/DanceGRPO.git",
        "ssh://git@github.com/XueZeyue/DanceGRPO.git",
    ],
)
def test_upstream_s_remote_is_known_however_it_is_written(checkout, patch_set, url):  # noqa: F811
    publish(checkout, url, "of.up/stream")
    printed = run_apply("--refresh", checkout, patch_set=patch_set)
    assert f"dancegrpo is at {git(checkout, 'rev-parse', 'HEAD').strip()}" in printed


def test_a_patch_is_refreshed_from_a_file_without_a_last_newline(checkout, patch_set):  # noqa: F811
    """It fits files of either end."""
    trainer, start = checkout / FILES[-1], "    app.run(main, 3)"
    text = trainer.read_text().replace("    app.run(main)\n", start)
    trainer.write_text(text)
    commit_all(checkout)
    assert "the hook is anchored anew" in run_apply("--refresh", checkout, patch_set=patch_set)
    assert "No newline" not in (patch_set / "patches/dancegrpo/train_grpo_sd.patch").read_text()
    for end in ("", "\n"):
        trainer.write_text(text + end)
        before = snapshot(checkout)
        run_apply(checkout, patch_set=patch_set)
        assert trainer.read_text() == text.replace(start, f"{HOOKS[RUN]}{start}") + end
        if not end:
            assert "as in its patch" in run_apply("--export", "--only", "train_grpo_sd", checkout, patch_set=patch_set)
        run_apply("--reverse", checkout, patch_set=patch_set)
        assert snapshot(checkout) == before


def test_a_refresh_where_no_contract_holds_says_that_it_may_be_none(tmp_path, patch_set):  # noqa: F811
    other = write_upstream(tmp_path / "other", [FLUX])
    (other / FLUX).write_text("print()\n")
    git(other, "init", "-q")
    commit_all(other)
    says = ["the contract is broken, so nothing was written", "it may be no such checkout at all"]
    assert_refused(other, "--refresh", says=says, patch_set=patch_set)


def test_what_is_not_a_hook_is_not_exported(checkout, patch_set):  # noqa: F811
    before = snapshot(patch_set)
    assert_refused(checkout, "--export", says=[FLUX, "it has no hook to export"], patch_set=patch_set)
    run_apply(checkout, patch_set=patch_set)
    edit(checkout / FLUX, "default=3", "default=5")
    assert_refused(checkout, "--export", says=[FLUX, "other changes than lines before the statement"], patch_set=patch_set)
    assert snapshot(patch_set) == before


def test_the_user_s_python_settings_change_nothing(checkout, tmp_path, patch_set):  # noqa: F811
    """Nor does Python leave anything: no cache in the patch set, of whose module a copy goes beside the trainers."""
    expected, before = run_apply("--check", checkout, patch_set=patch_set), snapshot(patch_set)
    (tmp_path / "path").mkdir()
    for name in ("ast", "json", "sitecustomize", "torch"):
        (tmp_path / f"path/{name}.py").write_text("raise SystemExit('theirs')\n")
    settings = {"PYTHONPATH": str(tmp_path / "path"), "PYTHONHOME": str(tmp_path), "PYTHONOPTIMIZE": "2", "LC_ALL": "C"}
    assert run_apply("--check", checkout, patch_set=patch_set, env=settings, cwd=tmp_path / "path") == expected
    assert snapshot(patch_set) == before


def test_without_a_python_that_can_everything_is_refused(checkout, tmp_path):  # noqa: F811
    (tmp_path / "bin").mkdir()
    for name in ("python3", "python", *(f"python3.{minor}" for minor in range(10, 14))):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": ""}
    for action in ([], ["--check"], ["--refresh"]):
        assert_refused(checkout, *action, says=["apply.sh: there is no Python from 3.10 on", "PYTHON="], env=env)
    assert row(run_apply("--check", checkout, env=env | {"PYTHON": sys.executable}))[:2] == ("ready", "holds")
    (tmp_path / "bin/python3.12").unlink()
    (tmp_path / "bin/python3.12").symlink_to(sys.executable)
    assert row(run_apply("--check", checkout, env=env))[:2] == ("ready", "holds")
