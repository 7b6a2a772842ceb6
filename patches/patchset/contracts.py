"""The contracts of jagg_patch, loaded without the package itself, which imports torch."""

import importlib
import sys
import types

from .upstreams import ROOT

_parent = types.ModuleType(f"{__package__}.jagg_patch")  # their relative imports are looked up in it
_parent.__path__ = [str(ROOT / "jagg_patch")]
sys.modules[_parent.__name__] = _parent
_contract = importlib.import_module(f"{_parent.__name__}.contract")

CONTRACTS, Difference, Source = _contract.CONTRACTS, _contract.Difference, _contract.Source
differences, fingerprints, modules = _contract.differences, _contract.fingerprints, _contract.modules
