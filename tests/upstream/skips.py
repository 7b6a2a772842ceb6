"""Runs that skip forwards, beside those with the same settings that run them all."""

import sys
from contextlib import contextmanager, redirect_stdout
from io import StringIO

import torch
from observe import relative_error

from jagg_patch.loop.records import Records

REFUSAL = "JAGG: no forwards are skipped from here on: "


@contextmanager
def refusals():
    """A list of the lines, printed inside, that say that forwards are no longer skipped. Rank 0 prints them for all."""
    lines, printed = [], StringIO()
    try:
        with redirect_stdout(printed):
            yield lines
    finally:
        sys.stdout.write(printed.getvalue())
        lines += [line.removeprefix(REFUSAL) for line in printed.getvalue().splitlines() if line.startswith(REFUSAL)]


@contextmanager
def recorded_steps_of_rollouts():
    """A list with the `Records` of each solver step that is recorded inside, one a step."""
    steps, add = [], Records.add

    def counted_add(records, *args):
        steps.append(records)
        return add(records, *args)

    Records.add = counted_add
    try:
        yield steps
    finally:
        Records.add = add


def comparison(skipped, full):
    """What the tests need of a run that skips forwards, and of its difference to the one that runs them all."""
    return {
        "gradients": skipped["gradients"],
        "errors": [relative_error(*pair) for pair in zip(skipped["gradients"], full["gradients"], strict=True)],
        "skipped": skipped["stats"]["skipped_forwards"],
        "fewer": full["forwards"] - skipped["forwards"],
        "refusals": skipped["refusals"],
        "alike": torch.equal(skipped["rng"], full["rng"]) and skipped["passes"] == full["passes"],
        "full skipped": full["stats"]["skipped_forwards"],
    }


def check_skipped(found, n_skipped, calls=1, limit=1e-6):
    """Up to the first optimizer step that moves the weights the estimates are the outputs; `calls` of the model are a forward."""
    assert found["errors"][0] <= limit
    assert (found["skipped"], found["fewer"], found["full skipped"]) == (n_skipped, n_skipped * calls, 0)
    assert found["refusals"] == [] and found["alike"]


def check_refused(ranks, why):
    """`ranks` is what each rank found: all ran every forward, as if skipping were off, and the first one said once `why`."""
    for found in ranks:
        assert found["errors"] == [0] * len(found["errors"])
        assert (found["skipped"], found["fewer"]) == (0, 0) and found["alike"]
    (line,) = ranks[0]["refusals"]
    assert why in line
