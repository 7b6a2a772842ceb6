"""What the rollout's model calls gave, kept until the update is over and found again by the content of the latents.

Content survives what trainers do between rollout and update: repeat, shuffle, select, put into other batches, widen the dtype.
"""

from functools import lru_cache
from typing import NamedTuple

import torch


class Entry(NamedTuple):
    """One step of one sample, as the rollout took it: which of its batches, which row of that, which step."""

    batch: int
    row: int
    step: int

    def moved(self, n_steps):
        return self._replace(step=self.step + n_steps)


class _Batch:
    """Steps of a batch of B samples, in the order in which the rollout took them."""

    def __init__(self, first_number):
        self.first_number = first_number  # of its samples among the rollout's
        self.marks = []  # tensors, and lists once a step has been looked for, so that a rollout needn't wait for the device
        self.latents, self.outputs = [], []


@lru_cache(maxsize=8)
def _multipliers(n_elements, device):
    return torch.randint(-(2**62), 2**62, [n_elements], generator=torch.Generator().manual_seed(0)).to(device) * 2 + 1


def fingerprints(latents):
    """64 bits for each row of `[B, ...]`, `[B]`: those of its values in float32, whatever dtype they come in."""
    bits = latents.detach().float().flatten(1).contiguous().view(torch.int32).long()
    return (bits * _multipliers(bits.shape[1], bits.device)).sum(1)


class Records:
    """The records of one rollout, on the latents' device or, with `on_host`, in the host's memory."""

    def __init__(self, on_host=False):
        self.is_on_host = on_host
        self.clear()

    def clear(self):
        self._batches = []
        self._entries = None  # by fingerprint; made when the first step is looked for

    @property
    def n_bytes(self):
        kept = [tensor for batch in self._batches for tensor in batch.latents + batch.outputs]
        return sum(tensor.nbytes for tensor in kept)

    @property
    def n_batches(self):
        return len(self._batches)

    @property
    def n_samples(self):
        return sum(len(batch.marks[0]) for batch in self._batches if batch.marks)

    @property
    def first_numbers(self):
        """Of each batch's samples among the rollout's."""
        return [batch.first_number for batch in self._batches]

    def n_rows(self, batch):
        return len(self._batches[batch].marks[0])

    def number(self, entry):
        """Which of the rollout's samples it is of."""
        return self._batches[entry.batch].first_number + entry.row

    def batch_of(self, entries):
        """The batch and the step that have just these rows, in this order; None where none has."""
        first = entries[0]
        whole = [first._replace(row=row) for row in range(self.n_rows(first.batch))]
        return (first.batch, first.step) if entries == whole else None

    @property
    def n_steps(self):
        """Of the running batch so far."""
        return len(self._batches[-1].marks)

    def begin_batch(self):
        self._batches.append(_Batch(self.n_samples))
        self._entries = None

    def drop_batch(self):
        self._batches.pop()

    def add(self, latents, output):
        """A step of the running batch: the model gave `output` for `latents` `[B, ...]`.

        `output` may hold the B samples several times over, `[n * B, ...]`, as with guidance.
        """
        batch, n_samples = self._batches[-1], len(latents)
        batch.marks.append(fingerprints(latents))
        batch.latents.append(self._kept(latents))
        batch.outputs.append(self._kept(output.unflatten(0, (-1, n_samples)).transpose(0, 1)))

    def _kept(self, tensor):
        tensor = tensor.detach()
        # A copy: the trainer may change its own in place, and a view would hold on to all that it is a part of.
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if self.is_on_host else tensor.device)
        return kept.copy_(tensor)

    def find(self, latents, next_latents, number):
        """The `Entry` of each row of `latents` `[B, ...]`, or None unless all are found.

        Samples that begin alike are told apart by `next_latents`, those of the next step, where the caller has them, else by
        their number: the rollout's samples are counted from 0, and `number` would be the first row's if none had been moved.
        """
        if self._entries is None:
            self._entries = {}
            for n, batch in enumerate(self._batches):
                batch.marks = [marks if isinstance(marks, list) else marks.tolist() for marks in batch.marks]
                for step, marks in enumerate(batch.marks):
                    for row, mark in enumerate(marks):
                        self._entries.setdefault(mark, []).append(Entry(n, row, step))
        nexts = [None] * len(latents) if next_latents is None else fingerprints(next_latents).tolist()
        found = []
        for row, (mark, next_mark) in enumerate(zip(fingerprints(latents).tolist(), nexts, strict=True)):
            entries = self._entries.get(mark, [])
            if next_mark is not None:
                entries = [entry for entry in entries if self._mark(entry.moved(1)) in (next_mark, None)]
            if not entries:
                return None
            numbered = [entry for entry in entries if self.number(entry) == number + row]
            found.append((numbered or entries)[0])
        return found

    def _mark(self, entry):
        marks = self._batches[entry.batch].marks
        return marks[entry.step][entry.row] if entry.step < len(marks) else None

    def are_at(self, entries, latents):
        """Whether the rows of `latents` are those of `entries`."""
        return fingerprints(latents).tolist() == [self._mark(entry) for entry in entries]

    def latents(self, entries):
        """`[B, ...]`, as the solver step was given them."""
        return torch.stack([self._batches[entry.batch].latents[entry.step][entry.row] for entry in entries])

    def outputs(self, entries):
        """The model outputs `[n * B, ...]`; None where the rollout stopped short of one of `entries`."""
        if any(entry.step >= len(self._batches[entry.batch].marks) for entry in entries):
            return None
        rows = [self._batches[entry.batch].outputs[entry.step][entry.row] for entry in entries]
        return torch.stack(rows, 1).flatten(0, 1)
