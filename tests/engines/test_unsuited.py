"""The self-check and the comparison of weights on two ranks with different samples, engine by engine (unsuited_cells.py).

In one process tests/unit has it. That it stays silent over the matrix is in test_matrix.py.
"""

import re
from pathlib import Path

import pytest
import torch
from unsuited_cells import AUXILIARY, CELLS, CLIPPED, HEADS, HOOKED, IN_BF16, LONELY, N_RANKS, OWN_BACKWARD
from launch import forked

LATE = r"the group's gradient is \d+\.\d% off the one with each backward right after its forward"
STOPPED = {
    "Plain": None,
    "Scaled": None,
    "Experts": "which weights the model's output depends on changes in the group that began at sample 0, visited step 4",
    "SwitchedInside": "which weights (are trained|the model's output depends on).* changes in the group",
    "InTheMiddle": "the model's output depends on other weights than at the first step of its group",
    "RankMask": LATE,
    "InOneBuffer": LATE,
    "Injected": "the model's backward adds a gradient of its own",
    "ValueHead": "a loss of the group reaches weights by another way than the model's output",
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("checks")
    forked(N_RANKS, Path(__file__).parent / "unsuited_cells.py", out, cwd=out, env={"DS_ACCELERATOR": "cpu"})
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(N_RANKS)]


@pytest.mark.parametrize("cell", CELLS + AUXILIARY, ids=", ".join)
def test_every_rank_stops_with_the_same_message_or_none(ranks, cell):
    engine, model, _ = cell
    (said, *others), match = [rank[cell] for rank in ranks], STOPPED[model]
    assert others == [said]
    if match is None and said is not None:
        # Up to torch 2.6 a broadcast of buffers counts as a change of them.
        assert (engine, model) == ("DDP", "Scaled") and torch.__version__ < "2.7"
        match = "pass broadcast_buffers=False to DDP, or run with JAGG_ENABLED=0"
    assert (said is None) == (match is None)
    if said is not None:
        assert len(said.splitlines()) == 2
        assert re.search(match, said)


@pytest.mark.parametrize("cell", LONELY, ids=", ".join)
def test_no_rank_waits_for_what_one_does_alone(ranks, cell):
    """Another network's optimizer step there is none of the check's business, and a forward that fails there ends it on all."""
    found = [rank[cell] for rank in ranks]
    if cell[1] == "the model goes by the grad mode":
        assert found == [found[0]] * N_RANKS and "gives something else where no gradient is asked for" in found[0]
        return
    broken = ["its forward or backward can't be run again (KeyError: 'broken')"]
    assert found == [["agrees"] if cell[1] == "a critic steps" else broken] * N_RANKS


@pytest.mark.parametrize("cell", CLIPPED, ids=", ".join)
def test_a_helper_that_clips_after_each_backward_stops_every_rank(ranks, cell):
    """Also where torch counts no change, of the DTensors that FSDP2 has for gradients."""
    (said, *others) = [rank[cell] for rank in ranks]
    assert "gradients were changed since the group that began at sample 0, visited step" in said and others == [said]


@pytest.mark.parametrize("engine", HOOKED)
def test_hooks_of_one_rank_alone_keep_all_sequential(ranks, engine):
    """As wandb's watch on the first rank has them. In the third training step `auto` decides."""
    for rank in ranks:
        found, expected = rank["hooks", engine]
        assert torch.equal(found, expected)


@pytest.mark.parametrize("cell", HEADS, ids=", ".join)
def test_weights_that_the_output_does_not_reach_leave_ddp_unchecked_and_training_right(ranks, cell):
    """DDP would wait for them in a backward of the check's, and the next update would die of that."""
    why = "DDP waits for weights that the model's output doesn't depend on, but another term of the loss may"
    for rank in ranks:
        said, error = rank[cell]
        if cell == ("DDP", "joint"):
            assert "has given DDP gradients by another way" in said[0] and len(said[0].splitlines()) == 2
            continue
        assert said == [why] and error < 1e-6


@pytest.mark.parametrize("schedule", IN_BF16)
def test_deepspeed_s_own_bf16_adds_up_each_backward_once(ranks, schedule):
    """Groups of two are exact; of a joint one autograd adds up the two in bfloat16, and the pairs cancel in part."""
    for rank in ranks:
        expected, found = rank["bf16", schedule]
        assert expected.norm() > 0
        assert (found - expected).norm() <= (1e-6 if schedule == "sequential" else 2**-7) * expected.norm()


@pytest.mark.parametrize("schedule", OWN_BACKWARD)
def test_on_deepspeed_a_backward_that_is_not_the_engine_s_is_refused(ranks, schedule):
    for rank in ranks:
        assert "call the engine's: engine.backward(loss)" in rank["backward", schedule]


@pytest.mark.parametrize("schedule", IN_BF16)
def test_a_pair_across_two_deepspeed_engines_is_refused_in_one_backward(ranks, schedule):
    """What the first one does after its own backward would come before this."""
    for rank in ranks:
        found = rank["engines", schedule]
        if schedule == "sequential":
            assert found is None
        else:
            assert "visited step 7" in found and "run with JAGG_SCHEDULE=sequential" in found
