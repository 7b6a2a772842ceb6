"""Unpatched copies of the checkouts, one each a session."""

import pytest
from checkouts import DANCEGRPO, FLOW_GRPO, unpatched_copy


@pytest.fixture(scope="session")
def dancegrpo(tmp_path_factory):
    return unpatched_copy(DANCEGRPO, ("fastvideo", "scripts/finetune"), tmp_path_factory.mktemp("upstream") / "DanceGRPO")


@pytest.fixture(scope="session")
def flow_grpo(tmp_path_factory):
    return unpatched_copy(FLOW_GRPO, ("flow_grpo", "config", "scripts"), tmp_path_factory.mktemp("upstream") / "flow_grpo")
