"""Settings for all tests."""

import gc
import signal

import hypothesis
import pytest

# Whoever starts the tests may have them ignore these (nohup, a shell's &), and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The processor is shared: a slow example says nothing.
hypothesis.settings.register_profile("jagg", deadline=None)
hypothesis.settings.load_profile("jagg")


# For tests/run.sh's two processes: the files that take longest, first, so that neither process is left alone with one.
LONGEST = "test_matrix test_mini test_memory test_skipping test_probe test_faults test_demo test_apply test_skip".split()


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what was imported, which tests that collect garbage would go through every time


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    """The user's own JAGG_* must not reach the tests."""
    import os

    for name in [name for name in os.environ if name.startswith("JAGG_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def one_thread():
    """For what runs in the test's own process: the processor is shared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
