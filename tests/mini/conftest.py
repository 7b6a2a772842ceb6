"""Settings for the tests of the mini trainer."""

import shutil
import subprocess

import pytest
from launch import ROOT


@pytest.fixture
def patched(tmp_path):
    """A copy of the mini trainer with apply.sh's hook."""
    copy = tmp_path / "mini"
    shutil.copytree(ROOT / "upstream/mini", copy, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([ROOT / "apply.sh", "--only", "train_grpo_flux", copy], check=True, capture_output=True)
    return copy
