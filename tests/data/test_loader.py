"""The loader: shapes, shifted targets, epochs without loss or repeats, and steps that are pure functions."""

from __future__ import annotations

import hashlib
import pathlib
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtune.arrays.batch import BATCH_ARRAYS, batch_axes
from meshtune.data.conversation import Origin
from meshtune.data.loader import Loader, Units, row_sizes
from meshtune.data.store import write_store
from meshtune.data.tokens import Example
from meshtune.errors import UserError


def store_of(lengths, cache):
    """Documents whose tokens tell where they are from: id = 1000 * document + place."""
    examples = [
        Example(
            np.arange(n, dtype=np.int32) + 1000 * (index + 1),
            (np.arange(n) % 3 / 2).astype(np.float32),
            Origin("made.jsonl", index),
        )
        for index, n in enumerate(lengths)
    ]
    key = hashlib.sha256(repr(list(lengths)).encode()).hexdigest()[:16]
    return write_store(pathlib.Path(cache, key), examples, dict)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


def documents_of(batch):
    """(tokens, targets, weights, positions) of every segment in a batch."""
    contents = []
    flat = {name: array.reshape(-1, array.shape[-1]) for name, array in batch.arrays.items()}
    origins = [row for micro in batch.origins for row in micro]
    for row, names in enumerate(origins):
        segments = flat["segment_ids"][row]
        assert sorted(set(segments.tolist()) - {0}) == list(range(1, len(names) + 1))
        for segment, origin in enumerate(names, start=1):
            span = segments == segment
            contents.append(
                (origin, *(flat[name][row][span] for name in ("tokens", "targets", "weights", "positions")))
            )
    return contents


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=60),
    batch_size=st.sampled_from([1, 2, 4, 6]),
    packing=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_each_record_appears_exactly_once_per_epoch(cache, lengths, batch_size, packing, shuffle, seed):
    loader = Loader(
        store_of(lengths, cache), max_length=48, batch_size=batch_size, packing=packing, shuffle=shuffle, seed=seed
    )
    step = 0
    for epoch in range(2):
        batches = []
        for _ in range(loader.steps_per_epoch(epoch)):
            batch = loader.batch(step)
            assert batch.epoch == epoch
            assert batch.arrays["tokens"].shape == (1, batch_size, loader.row_length)
            step += 1
            for origin, tokens, targets, _, positions in documents_of(batch):
                batches.append(origin.record)
                n = lengths[origin.record]
                expected = np.arange(n) + 1000 * (origin.record + 1)
                # Every document predicts its own next token and nothing else, from position 0.
                assert tokens.tolist() == expected[:-1].tolist()
                assert targets.tolist() == expected[1:].tolist()
                assert positions.tolist() == list(range(n - 1))
        assert sorted(batches) == list(range(len(lengths)))
    assert loader.total_steps(2) == step


def test_no_document_predicts_the_first_token_of_the_next(cache):
    loader = Loader(store_of([5, 6, 7, 8] * 10, cache), max_length=64, batch_size=2)
    for step in range(loader.steps_per_epoch(0)):
        targets = loader.batch(step).arrays["targets"]
        assert not np.isin(targets[targets > 0] % 1000, [0]).any()  # place 0 of a document is never a target


def test_weights_belong_to_targets(cache):
    loader = Loader(store_of([5, 9], cache), max_length=32, batch_size=1, shuffle=False)
    arrays = loader.batch(0).arrays
    used = arrays["segment_ids"] > 0
    assert np.array_equal(arrays["weights"][used], arrays["targets"][used] % 1000 % 3 / 2)


def test_padding_is_zero_everywhere(cache):
    loader = Loader(store_of([5, 9, 30], cache), max_length=40, batch_size=4)
    arrays = loader.batch(0).arrays
    padding = arrays["segment_ids"] == 0
    assert padding.any()
    assert all((array[padding] == 0).all() for array in arrays.values())
    assert loader.batch(0).origins[0][-1] == []  # the batch is filled up with rows of padding


def test_arrays_have_the_promised_types_and_shape(cache):
    loader = Loader(store_of([10] * 50, cache), max_length=32, batch_size=6, accumulation=3)
    arrays = loader.batch(0).arrays
    assert {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == {
        **dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), ("int32", (3, 2, 32))),
        "weights": ("float32", (3, 2, 32)),
    }


def test_accumulation_only_reshapes(cache):
    expected = Loader(store_of([10] * 50, cache), max_length=32, batch_size=6).batch(1)
    parts = Loader(store_of([10] * 50, cache), max_length=32, batch_size=6, accumulation=3).batch(1)
    for name, array in expected.arrays.items():
        assert np.array_equal(array[0], parts.arrays[name].reshape(array.shape[1:]))
    assert expected.origins[0] == [row for micro in parts.origins for row in micro]


def test_padded_rows_are_as_long_as_the_longest_document_needs(cache):
    loader = Loader(store_of([10, 70, 5], cache), max_length=1024, batch_size=3, packing=False)
    assert loader.row_length == 128
    assert (loader.batch(0).arrays["segment_ids"].max(axis=-1) == 1).all()


def digest(loader, steps):
    segments = hashlib.sha256()
    for step in steps:
        batch = loader.batch(step)
        for name in sorted(batch.arrays):
            segments.update(batch.arrays[name].tobytes())
        segments.update(repr(batch.origins).encode())
    return segments.hexdigest()


@pytest.mark.parametrize("packing", [True, False])
def test_a_fresh_process_in_the_middle_sees_the_same_batches(cache, packing):
    """Killed and resumed: another process, which never saw the steps before, in a later epoch, gives the same bytes."""
    lengths = [3 + (7 * index) % 29 for index in range(200)]
    loader = Loader(store_of(lengths, cache), max_length=40, batch_size=4, accumulation=2, packing=packing, seed=5)
    middle = loader.steps_per_epoch(0) + loader.steps_per_epoch(1) + 2
    steps = [middle, middle + 1, middle + loader.steps_per_epoch(2)]
    ours = digest(loader, [*range(middle), *steps][-3:])
    code = f"""
        import sys; sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
        from test_loader import store_of, digest, Loader
        lengths = [3 + (7 * index) % 29 for index in range(200)]
        loader = Loader(store_of(lengths, {str(cache)!r}), max_length=40, batch_size=4, accumulation=2,
                        packing={packing}, seed=5)
        print(digest(loader, {steps}))
    """
    theirs = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert theirs == ours


def test_the_order_is_a_function_of_the_seed(cache):
    lengths = [3 + index % 20 for index in range(100)]
    first, repeated, different = (
        digest(Loader(store_of(lengths, cache), max_length=32, batch_size=4, seed=seed), range(3)) for seed in (1, 1, 2)
    )
    assert first == repeated
    assert first != different


def test_epochs_are_shuffled_differently_unless_shuffling_is_off(cache):
    lengths = [3 + index % 20 for index in range(100)]
    for shuffle in (True, False):
        loader = Loader(store_of(lengths, cache), max_length=32, batch_size=4, shuffle=shuffle)
        first, second = digest(loader, [0]), digest(loader, [loader.steps_per_epoch(0)])
        # Origins and arrays alone: the step is not in the digest.
        assert (first != second) == shuffle


def test_iterating_gives_what_batch_gives(cache):
    loader = Loader(store_of([3 + index % 20 for index in range(100)], cache), max_length=32, batch_size=4)
    batches = list(loader.iterate(2, 30))
    assert [batch.step for batch in batches] == list(range(2, 30))
    for batch in batches:
        again = loader.batch(batch.step)
        assert all(np.array_equal(array, again.arrays[name]) for name, array in batch.arrays.items())
        assert batch.origins == again.origins


def test_iterating_without_end_leaves_no_threads_behind(cache):
    loader = Loader(store_of([10] * 20, cache), max_length=32, batch_size=4)
    before = threading.active_count()
    iterator = loader.iterate(0)
    assert [next(iterator).step for _ in range(40)] == list(range(40))
    iterator.close()
    until = time.monotonic() + 10  # they finish what they are at
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_a_fraction_of_an_epoch_is_rounded_up_to_whole_steps(cache):
    loader = Loader(store_of([31] * 40, cache), max_length=32, batch_size=4)
    assert loader.steps_per_epoch(0) == 10
    assert [loader.total_steps(epochs) for epochs in (1, 0.25, 2.5, 0.01, 0.3)] == [10, 3, 25, 1, 3]


def test_an_error_in_a_thread_reaches_the_caller(cache):
    loader = Loader(store_of([10] * 20, cache), max_length=32, batch_size=4)
    loader.batch = lambda step: (_ for _ in ()).throw(UserError(f"bad at {step}"))
    with pytest.raises(UserError, match="bad at 3"):
        next(loader.iterate(3))


def test_an_empty_store_and_a_batch_that_does_not_divide_are_refused(cache):
    with pytest.raises(UserError, match="nothing to train on"):
        Loader(store_of([], cache), max_length=32, batch_size=4)
    with pytest.raises(UserError, match="cannot be divided"):
        Loader(store_of([5], cache), max_length=32, batch_size=4, accumulation=3)


def test_units_of_three_documents_are_neighbouring_segments_of_a_row(cache):
    """Values are of each unit's first document, references of every one, in the order of the store."""
    store = store_of([5, 6, 4, 3, 8, 7, 9, 2, 4], cache)
    values = np.arange(9, dtype=np.float32)
    units = Units(3, reference=-values, nll="all", nll_mean="pairs")
    loader = Loader(store, max_length=13, batch_size=1, units=units)
    assert loader.row_length == 39
    arrays = {name: array[0, 0] for name, array in loader.batch(0).arrays.items()}
    (order,) = loader.rows(0)
    count = len(order)
    assert arrays["units"].tolist() == [1.0] * count + [0.0] * (loader.max_units - count)
    documents = [3 * unit + side for unit in order for side in range(3)]
    segments = [arrays["segment_ids"] == segment for segment in range(1, len(documents) + 1)]
    assert [int(arrays["tokens"][segment][0]) // 1000 - 1 for segment in segments] == documents
    assert arrays["reference"][: 3 * count].tolist() == [-float(document) for document in documents]
    np.testing.assert_allclose(
        [arrays["nll"][segment].sum() for segment in segments], [float(n % 3 == 0) for n in documents], rtol=1e-6
    )


def test_every_array_of_a_batch_is_declared_with_its_axes(cache):
    reference = np.zeros(4, np.float32)
    loader = Loader(store_of([5, 6, 4, 3], cache), max_length=8, batch_size=2, units=Units(2, reference, "all"))
    sizes = row_sizes(2, 16, loader.max_units, 2)
    for name, array in loader.batch(0).arrays.items():
        assert array.shape == (1, *BATCH_ARRAYS[name].shape(sizes))
        assert array.dtype == BATCH_ARRAYS[name].dtype
        assert len(batch_axes(name, array.ndim)) == array.ndim
