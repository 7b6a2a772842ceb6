"""The real upstream checkouts, which tests skip without, and unpatched copies of them."""

import os
import shutil
import subprocess
from pathlib import Path

import diffusers
import pytest
from launch import ROOT

HERE = Path(__file__).parent
DANCEGRPO = Path(os.environ.get("DANCEGRPO_DIR") or ROOT / "upstream/DanceGRPO").resolve()
FLOW_GRPO = Path(os.environ.get("FLOW_GRPO_DIR") or ROOT / "upstream/flow_grpo").resolve()


def require_dancegrpo():
    """Skip the module that asks unless there is a checkout."""
    if not (DANCEGRPO / "fastvideo/train_grpo_flux.py").is_file():
        reason = "needs a DanceGRPO checkout: run ./apply.sh (it clones one), or set DANCEGRPO_DIR"
        pytest.skip(reason, allow_module_level=True)


def require_flow_grpo():
    """Skip the module that asks unless there is a checkout."""
    if not (FLOW_GRPO / "scripts/train_sd3.py").is_file():
        reason = "needs a Flow-GRPO checkout: run ./apply.sh upstream/flow_grpo (it clones one), or set FLOW_GRPO_DIR"
        pytest.skip(reason, allow_module_level=True)


def require_trainer(folder, name, diffusers_class):
    """Skip the test that asks where a checkout is without that trainer, or diffusers without a class that it imports."""
    if not (folder / f"{name}.py").is_file():
        pytest.skip(f"this checkout has no {name}.py")
    if not hasattr(diffusers, diffusers_class):
        pytest.skip(f"diffusers {diffusers.__version__} has no {diffusers_class}, which {name} needs")


def unpatched_copy(checkout, parts, destination):
    """Copy those folders of a checkout, as an unpacked tarball without a git directory, and take JAGG out of the copy."""
    for part in parts:
        shutil.copytree(checkout / part, destination / part, ignore=shutil.ignore_patterns("__pycache__", "jagg_patch"))
    subprocess.run([ROOT / "apply.sh", "--reverse", destination], check=True, capture_output=True)
    return destination


def paths(*folders):
    """The environment in which Python finds modules there."""
    return {"PYTHONPATH": os.pathsep.join(map(str, folders))}
