"""The rollout's records: found again by the content of the latents, whatever the trainer has made of its batches since."""

import pytest
import torch

from jagg_patch.loop.records import Entry, Records, fingerprints

T, B, SHAPE = 4, 3, (5, 2)


def rolled_out(on_host=False, n_batches=2, dtype=torch.float32, copies=1, noise=None):
    """Records of `n_batches` of B samples, T steps each; the latents `[n_batches * B, T, ...]` and outputs, one row a sample."""
    torch.manual_seed(0)
    records, n_samples = Records(on_host), n_batches * B
    latents = torch.randn(n_samples, T, *SHAPE).to(dtype)
    if noise is not None:
        latents[:, 0] = noise
    outputs = torch.randn(copies, n_samples, T, *SHAPE).to(dtype)
    for batch in torch.arange(n_samples).split(B):
        records.begin_batch()
        for step in range(T):
            records.add(latents[batch, step], outputs[:, batch, step].flatten(0, 1))
    return records, latents, outputs


def place(sample, step):
    return Entry(sample // B, sample % B, step)


@pytest.mark.parametrize(
    "rows",
    [[0], [4], [0, 1, 2], [2, 0, 1], [5, 1], [3, 3, 0, 3], list(range(6))],
    ids=["alone", "alone in the second batch", "a batch", "shuffled", "selected from both", "repeated", "all in one batch"],
)
def test_found_in_other_batches_than_the_rollout_s(rows):
    records, latents, outputs = rolled_out()
    for step in range(T):
        found = records.find(latents[rows, step], None, 0)
        assert found == [place(row, step) for row in rows]
        assert torch.equal(records.outputs(found), outputs[0, rows, step])
        assert torch.equal(records.latents(found), latents[rows, step])


def test_each_row_may_be_at_a_step_of_its_own():
    records, latents, outputs = rolled_out()
    rows, steps = [4, 0, 5], [2, 0, 3]
    found = records.find(latents[rows, steps], None, 0)
    assert found == [place(row, step) for row, step in zip(rows, steps, strict=True)]
    assert torch.equal(records.outputs(found), outputs[0, rows, steps])


def test_a_widened_dtype_is_found_and_a_narrowed_one_is_not():
    """A trainer may keep bf16 latents and train on float32: the values are the same. The other way round they aren't."""
    records, latents, _ = rolled_out(dtype=torch.bfloat16)
    found = records.find(latents[1:2, 2].float(), latents[1:2, 3].double(), 0)
    assert found == [place(1, 2)]
    assert records.are_at(found, latents[1:2, 2].float())
    assert records.latents(found).dtype == records.outputs(found).dtype == torch.bfloat16
    records, latents, _ = rolled_out()
    assert records.find(latents[1:2, 2].bfloat16(), None, 0) is None


def test_rows_in_memory_of_another_layout_are_found():
    records, latents, _ = rolled_out()
    assert records.find(latents[:2, 1].transpose(1, 2).contiguous().transpose(1, 2), None, 0) == [place(0, 1), place(1, 1)]


def test_the_same_initial_noise_is_told_apart_by_the_next_latents():
    records, latents, outputs = rolled_out(noise=torch.ones(SHAPE))
    rows = [4, 1, 0]
    found = records.find(latents[rows, 0], latents[rows, 1], 0)
    assert found == [place(row, 0) for row in rows]
    assert torch.equal(records.outputs(found), outputs[0, rows, 0])
    assert records.find(latents[rows, 0], torch.zeros(3, *SHAPE), 0) is None


def test_the_same_initial_noise_is_told_apart_by_number_without_them():
    records, latents, _ = rolled_out(noise=torch.ones(SHAPE))
    for first in range(5):
        rows = [first, first + 1]
        assert records.find(latents[rows, 0], None, first) == [place(row, 0) for row in rows]
    assert records.find(latents[5:, 0], None, 17) == [place(0, 0)]  # one of them; what is compared next finds out


def test_the_last_recorded_step_is_found_whatever_comes_next():
    """Its next latents were no model input, so they have no record."""
    records, latents, _ = rolled_out()
    assert records.find(latents[:1, T - 1], torch.zeros(1, *SHAPE), 0) == [place(0, T - 1)]


def test_a_sample_or_step_that_the_rollout_had_not_is_none():
    records, latents, _ = rolled_out()
    assert records.find(torch.cat([latents[:1, 0], torch.zeros(1, *SHAPE)]), None, 0) is None  # one of two
    assert records.find(latents[:1, 0], latents[1:2, 1], 0) is None  # another sample's next
    (last,) = records.find(latents[:1, T - 1], None, 0)
    assert records.outputs([last]) is not None
    assert records.outputs([place(1, 0), last.moved(1)]) is None
    assert not records.are_at([last.moved(1)], latents[:1, 0])
    assert Records().find(latents[:1, 0], None, 0) is None
    records.clear()
    assert records.find(latents[:1, 0], None, 0) is None and records.n_bytes == 0


def test_whether_rows_are_at_places():
    records, latents, _ = rolled_out()
    places = [place(4, 1), place(2, 3)]
    assert records.are_at(places, latents[[4, 2], [1, 3]])
    assert not records.are_at(places, latents[[2, 4], [3, 1]])
    assert not records.are_at(places, latents[[4, 2], [1, 2]])


def test_steps_that_are_recorded_after_a_search_are_found():
    """As where a trainer rolls out and trains by turns within one training step."""
    records, latents, outputs = rolled_out(n_batches=1)
    assert records.find(latents[:1, 0], None, 0) == [place(0, 0)]
    records.begin_batch()
    more = torch.randn(2, *SHAPE)
    records.add(more, 2 * more)
    assert records.find(torch.cat([more[1:], latents[:1, 2]]), None, 0) == [Entry(1, 1, 0), place(0, 2)]
    assert torch.equal(records.outputs([Entry(1, 1, 0)]), 2 * more[1:])


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_outputs_with_guidance_copies_come_in_the_model_s_order(copies):
    """The model's batch is every sample's first copy, then every sample's second one."""
    records, latents, outputs = rolled_out(copies=copies)
    rows = [4, 1]
    found = records.outputs(records.find(latents[rows, 2], None, 0))
    assert torch.equal(found, torch.cat([outputs[copy, rows, 2] for copy in range(copies)]))


@pytest.mark.parametrize("on_host", [False, True])
def test_what_the_trainer_changes_in_place_stays_as_recorded(on_host):
    records, latent, output = Records(on_host), torch.randn(2, *SHAPE, requires_grad=True), torch.randn(4, *SHAPE)
    before = latent.detach().clone(), output.clone()
    records.begin_batch()
    records.add(latent, output)
    with torch.no_grad():
        latent += 1
    output.zero_()
    found = records.find(before[0], None, 0)
    assert torch.equal(records.latents(found), before[0]) and torch.equal(records.outputs(found), before[1])
    assert not records.latents(found).requires_grad
    records.outputs(found).zero_()  # a copy too
    assert torch.equal(records.outputs(found), before[1])


@pytest.mark.parametrize("on_host", [False, True])
def test_views_do_not_hold_on_to_what_they_are_a_part_of(on_host):
    records, whole = Records(on_host), torch.randn(2, 100, *SHAPE)
    records.begin_batch()
    records.add(whole[:, 7], whole.transpose(0, 1)[:2].flatten(0, 1)[:4])  # outputs of two copies
    kept = [tensor for batch in records._batches for tensor in batch.latents + batch.outputs]
    assert [tensor.untyped_storage().nbytes() for tensor in kept] == [2 * 10 * 4, 4 * 10 * 4]
    assert records.n_bytes == 6 * 10 * 4


def test_on_the_host_they_are_found_as_on_the_device():
    (records, latents, outputs), (on_device, *_) = rolled_out(on_host=True), rolled_out()
    found = records.find(latents[:, 1], latents[:, 2], 0)
    assert found == on_device.find(latents[:, 1], latents[:, 2], 0)
    assert torch.equal(records.outputs(found), outputs[0, :, 1])
    assert records.n_bytes == on_device.n_bytes == 2 * 6 * T * 10 * 4


def test_on_the_host_a_device_s_tensors_are_copied_out_of_it():
    """The meta device stands for another than the host's: nothing can be copied out of it."""
    there = torch.empty(3, device="meta")
    assert Records()._kept(there).is_meta
    with pytest.raises(NotImplementedError, match="copy out of meta"):
        Records(on_host=True)._kept(there)


def test_fingerprints_tell_rows_apart_and_leave_random_numbers_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    rows = torch.arange(1000.0).view(-1, 1) * torch.tensor([1.0, 2.0, 3.0, 7.0])  # a size no other test has cached
    assert torch.equal(torch.get_rng_state(), before)
    marks = fingerprints(rows)
    assert marks.shape == (1000,) and marks.dtype == torch.int64 and len(set(marks.tolist())) == 1000
    assert torch.equal(torch.get_rng_state(), before)
    assert marks[0] != fingerprints(-rows[:1])[0]  # zero and minus zero differ in bits, and a permutation of values counts
    assert fingerprints(rows[1:2])[0] != fingerprints(rows[1:2].flip(1))[0]
    assert fingerprints(torch.nextafter(rows[1:2], rows[2:3]))[0] not in marks  # not even rounding is passed over
