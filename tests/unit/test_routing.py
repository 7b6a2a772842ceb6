"""frac=auto: what follows from the probes' cosines, and when."""

import pytest

from jagg_patch import JaggConfig, JaggError
from jagg_patch.evidence.routing import Routing


def routed_after(*probes, n_steps=20):
    """How many of the five groups are routed after each probe."""
    said = []
    routing = Routing(JaggConfig(frac="auto", probe_every=1), said.append)
    counts = [len(routing.groups(n_steps))]
    for cosines in probes:
        assert len(routing.all_groups(n_steps)) == len(cosines)
        routing.after_probe(cosines)
        counts.append(len(routing.groups(n_steps)))
    assert len(said) == sum(before != after for before, after in zip(counts, counts[1:], strict=False))
    return counts


GOOD = [0.9] * 5


def test_it_grows_by_one_group_whenever_two_probes_in_a_row_say_so():
    assert routed_after(*[GOOD] * 6) == [3, 3, 4, 4, 5, 5, 5]


def test_it_shrinks_to_before_the_first_bad_group():
    bad = [0.9, 0.7, 0.9, 0.9, 0.9]
    assert routed_after(bad, bad) == [3, 3, 1]
    assert routed_after(bad, [0.7, 0.9, 0.9, 0.9, 0.9]) == [3, 3, 1]  # the first group was bad once
    worst = [0.7, 0.9, 0.9, 0.9, 0.9]
    assert routed_after(worst, worst, GOOD, GOOD) == [3, 3, 0, 0, 1]


@pytest.mark.parametrize("cosine", [0.751, 0.849])
def test_between_the_bounds_nothing_moves(cosine):
    assert routed_after(*[[cosine] * 5] * 4) == [3] * 5


def test_one_probe_alone_moves_nothing():
    bad = [0.9, 0.9, 0.7, 0.9, 0.9]
    middle = [0.9, 0.9, 0.9, 0.8, 0.9]
    assert routed_after(GOOD, bad, GOOD, bad, GOOD, middle, GOOD) == [3] * 8
    assert routed_after(GOOD, middle, GOOD, GOOD) == [3, 3, 3, 3, 4]


def test_a_probe_without_a_gradient_counts_as_none():
    unknown = [0.9, None, 0.9, 0.9, 0.9]
    assert routed_after(GOOD, unknown, GOOD) == [3, 3, 3, 4]


def test_a_number_is_kept_whatever_the_probes_say():
    routing = Routing(JaggConfig(frac=0.6))
    routing.after_probe([0.1] * 5)
    assert [len(group) for group in routing.groups(20)] == [4, 4, 4]


def test_what_would_be_groups_is_told_beside_the_routed_ones():
    def sizes(n_steps, **settings):
        return [len(group) for group in Routing(JaggConfig(**settings)).all_groups(n_steps)]

    assert sizes(20) == [4, 4, 4, 4, 4]
    assert sizes(11) == [3, 3, 5]  # 6 routed in two groups, then 5
    assert sizes(11, frac="auto", probe_every=1) == [4, 4, 3]
    assert sizes(9, frac=0) == [5, 4]
    assert sizes(5, group_size=2, frac=1) == [2, 2]  # the last one is exact


def test_auto_without_a_probe_is_refused():
    with pytest.raises(JaggError, match="probe_every is 0"):
        Routing(JaggConfig(frac="auto"))
    Routing(JaggConfig(frac="auto", enabled=False))
