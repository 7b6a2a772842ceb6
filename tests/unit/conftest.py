"""Loading the loops of loop/, whole or with lines changed."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jagg_patch.evidence.self_check import SelfCheck
from jagg_patch.install import Handle


@pytest.fixture
def load_loop(tmp_path):
    """Load a loop as a module, with pieces of its text replaced: name, old, new, old, new, ..."""

    def load_changed(name, *pieces):
        path = Path(__file__).parent / f"loop/{name}.py"
        text = path.read_text()
        for old, new in zip(pieces[::2], pieces[1::2], strict=True):
            assert text.count(old) == 1, f"{old!r} is not in the loop once"
            text = text.replace(old, new)
        path = tmp_path / path.name
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load_changed


@pytest.fixture
def without_contract(monkeypatch):
    """The trainer's text isn't checked, so that what stands behind that check is: the one while it runs."""
    monkeypatch.setattr(sys.modules[Handle.__module__], "require_contract", lambda *args: None)


@pytest.fixture
def without_self_check(monkeypatch):
    """For tests that count forwards and backward passes, of which the self-check has its own."""

    def switched_off(config, say):
        return SelfCheck(replace(config, self_check=False), say)

    monkeypatch.setattr(sys.modules[Handle.__module__], "SelfCheck", switched_off)
