"""Every version of every trainer in the upstreams' public history: applies, contract, and for Flux the real training step."""

import subprocess

import pytest
import torch
from checkouts import DANCEGRPO, FLOW_GRPO, HERE, paths, require_dancegrpo
from launch import ROOT, torchrun
from patchset.mail import patched

from jagg_patch.contract import CONTRACTS, differences, modules
from jagg_patch.trainers import TRAINERS

require_dancegrpo()

CHECKOUTS = {"dancegrpo": (DANCEGRPO, "fastvideo"), "flow_grpo": (FLOW_GRPO, "scripts")}
# What no version but these breaks, and how.
BROKEN = {
    # grpo_one_step came with be8cf11; until then the forward stood in the loop
    ("train_grpo_hunyuan", "93ec253"): [
        "there is no function grpo_one_step()",
        "train_one_step() calls grpo_one_step() in 0 places",
    ],
}


def git(checkout, *arguments):
    done = subprocess.run(["git", "-C", checkout, *arguments], capture_output=True)
    return done.stdout.decode() if done.returncode == 0 else None


def versions(upstream):
    """`(trainer, commit)` of each distinct text that a trainer has had, oldest first."""
    checkout, folder = CHECKOUTS[upstream]
    for path in sorted((ROOT / "patches" / upstream).glob("*.patch")):
        seen, file = set(), f"{folder}/{path.stem}.py"
        for commit in (git(checkout, "log", "--reverse", "--format=%h", "--abbrev=7", "--", file) or "").split():
            blob = git(checkout, "rev-parse", "--quiet", "--verify", f"{commit}:{file}")
            if blob and blob not in seen:
                seen.add(blob)
                yield path.stem, commit


VERSIONS = [(upstream, *version) for upstream in CHECKOUTS for version in versions(upstream)]


def test_the_history_is_there():
    """Of DanceGRPO from the first release on: 26 files. A checkout without its history would test nothing."""
    found = [trainer for upstream, trainer, _ in VERSIONS if upstream == "dancegrpo"]
    if len(found) < 9:
        pytest.skip("the checkout is an archive or a shallow clone: git fetch --unshallow")
    page = (ROOT / "patches/README.md").read_text()
    for trainer in set(found):
        commits = [commit for _, other, commit in VERSIONS if other == trainer]
        assert f"| {trainer} | {len(commits)}, {commits[0]}" in page
    assert len(found) >= 26


@pytest.mark.parametrize(("upstream", "trainer", "commit"), VERSIONS, ids=lambda value: value)
def test_each_version_has_the_right_verdict(upstream, trainer, commit):
    checkout, folder = CHECKOUTS[upstream]
    file = f"{folder}/{trainer}.py"

    def read(path):
        return git(checkout, "show", f"{commit}:{path}")

    text = read(file)
    assert patched(text, (ROOT / "patches" / upstream / f"{trainer}.patch").read_text(), file) is not None
    found = [one.what for one in differences(text, CONTRACTS[trainer], modules(read, folder)) if one.is_fatal]
    assert found == BROKEN.get((trainer, commit), [])


FAST = [commit for _, trainer, commit in VERSIONS if trainer == "train_sd3_fast"]


@pytest.mark.parametrize("commit", FAST)
def test_each_version_of_the_fast_trainer_is_planned_by_its_own_window(commit):
    text = git(FLOW_GRPO, "show", f"{commit}:scripts/train_sd3_fast.py")
    window = "sde_window_size" if "sde_window_size" in text else "train_num_steps"
    assert TRAINERS["train_sd3_fast"].as_written(text).window == window


FLUX = [commit for upstream, trainer, commit in VERSIONS if trainer == "train_grpo_flux"]


@pytest.fixture(scope="module", params=FLUX)
def flux(request, tmp_path_factory):
    """The cells of the Flux trainer as it was at a commit, with everything around it as it was then."""
    out = tmp_path_factory.mktemp("cells")
    (out / "images").mkdir()
    checkout = tmp_path_factory.mktemp("upstream")
    archive = subprocess.run(["git", "-C", DANCEGRPO, "archive", request.param, "fastvideo"], check=True, capture_output=True)
    subprocess.run(["tar", "x", "-C", checkout], input=archive.stdout, check=True)
    arguments = checkout, "train_grpo_flux", out, "unpatched", "off", "W=2", "W=4"
    torchrun(1, HERE / "cells.py", *arguments, cwd=out, env=paths(checkout, ROOT, ROOT / "tests", HERE), timeout=1800)
    return torch.load(out / "rank0.pt")


def test_each_version_of_flux_trains_right(flux):
    for what in ("weights", "gradient", "rng"):
        assert torch.equal(flux["off"][what], flux["unpatched"][what])
    assert flux["W=2"]["exact_error"] <= 1e-6
    assert max(flux[cell]["oracle_error"] for cell in ("W=2", "W=4")) <= 1e-6
    assert flux["unpatched"]["passes"] > flux["W=4"]["passes"] > 0
