"""Mixtures are pure functions of lengths, weights and seed, and have the shares asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtune.data.mixing import apportion, draw, mix
from meshtune.errors import UserError

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=4)


def counts(source, record, which: int) -> np.ndarray:
    """How often each record of a source appears."""
    return np.bincount(record[source == which])


def test_concat_without_weights_is_every_source_once_in_order():
    source, record = mix([3, 2], [None, None], "concat", 0)
    assert source.tolist() == [0, 0, 0, 1, 1]
    assert record.tolist() == [0, 1, 2, 0, 1]


def test_concat_with_weights_subsamples_and_repeats_to_the_shares():
    source, record = mix([100, 20], [1.0, 1.0], "concat", 3)
    assert np.bincount(source).tolist() == [60, 60]
    assert counts(source, record, 0).max() == 1, "a thinned source has no record twice"
    assert counts(source, record, 1).tolist() == [3] * 20
    source, record = mix([10, 10], [3.0, 1.0], "concat", 3)
    assert np.bincount(source).tolist() == [15, 5]
    assert sorted(set(counts(source, record, 0).tolist())) == [1, 2]


@given(
    lengths=LENGTHS,
    strategy=st.sampled_from(["concat", "interleave_under", "interleave_over"]),
    weighted=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_a_mixture_depends_on_its_arguments_alone_and_stays_inside_the_sources(lengths, strategy, weighted, seed):
    weights = [1.0 + index for index in range(len(lengths))] if weighted else [None] * len(lengths)
    source, record = mix(lengths, weights, strategy, seed)
    again = mix(lengths, weights, strategy, seed)
    assert np.array_equal(source, again[0])
    assert np.array_equal(record, again[1])
    assert len(source) == len(record) > 0
    assert (record >= 0).all()
    assert (record < np.array(lengths)[source]).all()


@given(lengths=LENGTHS, seed=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_interleaving_takes_each_source_in_order_until_one_or_all_are_exhausted(lengths, seed):
    """Against the definition, walked one draw at a time."""
    for strategy in ("interleave_under", "interleave_over"):
        source, record = mix(lengths, [None] * len(lengths), strategy, seed)
        read_so_far = [0] * len(lengths)
        for index, (chosen, number) in enumerate(zip(source, record, strict=True)):
            assert number == read_so_far[chosen] % lengths[chosen]
            read_so_far[chosen] += 1
            used_up = [count >= length for count, length in zip(read_so_far, lengths, strict=True)]
            done = any(used_up) if strategy == "interleave_under" else all(used_up)
            assert done == (index == len(source) - 1)


def test_interleaving_draws_by_weight():
    """30,000 draws at 3 to 1: the share is within 1% (4 standard deviations of a fair draw: 1.0%)."""
    source, _ = mix([200_000, 7_500], [3.0, 1.0], "interleave_under", 0)
    assert abs((source == 0).mean() - 0.75) < 0.01


def test_interleaving_is_continuous_across_blocks_of_draws():
    source, record = mix([100_000, 100_000], [None, None], "interleave_over", 1)
    assert len(source) > 1 << 16
    for which in (0, 1):
        assert np.array_equal(record[source == which], np.arange((source == which).sum()) % 100_000)
        assert (source == which).sum() >= 100_000


def test_other_seeds_give_other_mixtures():
    for strategy in ("interleave_under", "interleave_over"):
        assert not np.array_equal(
            mix([50, 50], [None, None], strategy, 0)[0], mix([50, 50], [None, None], strategy, 1)[0]
        )
    assert not np.array_equal(mix([50, 10], [1.0, 1.0], "concat", 0)[1], mix([50, 10], [1.0, 1.0], "concat", 1)[1])


@given(
    total=st.integers(0, 10_000),
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
)
def test_apportionment_sums_to_the_total_and_is_within_one_of_the_exact_share(total, weights):
    share = np.array(weights) / np.sum(weights)
    given_out = apportion(total, share)
    assert given_out.sum() == total
    assert (np.abs(given_out - total * share) < 1 + 1e-6).all()


def test_a_draw_is_whole_passes_and_a_sample_without_repeats():
    drawn = draw(7, 17, np.random.default_rng(0))
    assert len(drawn) == 17
    assert set(np.bincount(drawn)) == {2, 3}


def test_weights_for_some_sources_only_are_an_error():
    with pytest.raises(UserError) as caught:
        mix([1, 1], [1.0, None], "concat", 0)
    assert caught.value.where == "data.train[1].weight"


def test_an_unknown_strategy_suggests_the_nearest():
    with pytest.raises(UserError) as caught:
        mix([1], [None], "interleave_undr", 0)
    assert "did you mean 'interleave_under'?" in caught.value.fix
