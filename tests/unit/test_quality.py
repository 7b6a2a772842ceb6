"""Cosine and relative error, whole and from shards."""

import math

import pytest
import torch

from jagg_patch.method.quality import agreement, sums


def test_cosine_and_relative_error_of_known_vectors():
    exact, approximate = [torch.tensor([3.0, 0.0])], [torch.tensor([3.0, 4.0])]
    assert agreement(sums(approximate, exact)) == (pytest.approx(0.6), pytest.approx(4 / 3))
    assert agreement(sums(exact, exact)) == (1.0, 0.0)


def test_shards_add_up():
    torch.manual_seed(0)
    exact, approximate = torch.randn(2, 3, 7, dtype=torch.float64)
    whole = agreement(sums([approximate], [exact]))
    shards = [sums([approximate[:, part]], [exact[:, part]]) for part in (slice(0, 3), slice(3, 7))]
    assert agreement(map(sum, zip(*shards, strict=True))) == pytest.approx(whole, rel=1e-12)
    assert whole.cosine == pytest.approx(torch.cosine_similarity(approximate.flatten(), exact.flatten(), 0).item(), rel=1e-12)
    assert whole.relative_error == pytest.approx(((approximate - exact).norm() / exact.norm()).item(), rel=1e-12)


def test_a_small_error_is_not_lost_to_rounding():
    exact = torch.ones(1000, dtype=torch.float32)
    assert agreement(sums([exact * (1 + 2**-20)], [exact])).relative_error == pytest.approx(2**-20, rel=1e-6)


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_without_a_gradient_there_is_no_cosine(value):
    exact, broken = torch.ones(3), torch.full([3], value)
    assert agreement(sums([broken], [exact])) == (None, None)
    assert agreement(sums([exact], [broken])) == (None, None)
