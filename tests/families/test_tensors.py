"""Views of tensors, tables of them, and refusals; numpy's own indexing says what a view is."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshtune.arrays.spec import ArraySpec
from meshtune.families.tensors import TensorMap, View, validate
from meshtune.weights.read_plan import arrange_numbers, scatter_numbers, tensor_boxes

H, K, h, D, E, F = 4, 2, 3, 5, 3, 7


def count_up(*shape: int) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.int32).reshape(shape)


@st.composite
def views(draw: st.DrawFn) -> View:
    """A tensor of up to 4 finer dimensions, merged at random into its own and into the parameter's dimensions, its
    first dimension in part or in another order."""
    split = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(split))))
    view = View.identity(merge_neighbours(draw, split)).split(*split)
    rows = draw(st.none() | st.permutations(range(split[0])))
    if rows is not None:
        view = view.permute(*rows)
    for n, size in enumerate(split):
        if n == 0 and rows is not None:
            continue
        start = draw(st.integers(0, size - 1))
        view = view.slice(n, start, draw(st.integers(start + 1, size)), draw(st.integers(1, 3)))
    view = view.transpose(*order)
    return view.merge(*merge_neighbours(draw, list(view.shape)))


def merge_neighbours(draw: st.DrawFn, shape: list[int]) -> tuple[int, ...]:
    """Neighbouring dimensions multiplied together."""
    coarse = [shape[0]]
    for size in shape[1:]:
        if draw(st.booleans()):
            coarse[-1] *= size
        else:
            coarse.append(size)
    return tuple(coarse)


@given(views())
@settings(max_examples=200, deadline=None)
def test_what_is_read_and_written_back_is_the_tensor(view: View):
    tensor = count_up(*view.tensor)
    part = view.read(tensor)
    assert part.shape == view.shape
    expected = tensor.reshape(view.split_shape)[view.slices]
    expected = expected if view.rows is None else np.stack([expected[row] for row in view.rows])
    expected = expected.transpose(view.order).reshape(view.shape)
    assert np.array_equal(part, expected)
    back = np.full_like(tensor, -1)
    view.write(part, back)
    assert np.array_equal(np.where(np.isin(tensor, part), tensor, -1), back)


@given(views(), st.data())
@settings(max_examples=200, deadline=None)
def test_any_box_of_a_part_is_boxes_of_the_tensor(view: View, data: st.DataObject):
    tensor = count_up(*view.tensor)
    starts = [data.draw(st.integers(0, n - 1)) for n in view.shape]
    box = tuple((start, data.draw(st.integers(start + 1, n))) for start, n in zip(starts, view.shape, strict=True))
    expected = view.read(tensor)[tuple(slice(*edges) for edges in box)]
    part = np.full_like(expected, -1)
    for ranges, target in tensor_boxes(view, box):
        numbers = tensor.reshape(view.split_shape)[tuple(slice(*entry) for entry in ranges)]
        assert (part[target] == -1).all(), "no number comes twice"
        part[target] = arrange_numbers(view, numbers)
        assert np.array_equal(scatter_numbers(view, ranges, part[target]), numbers)
    assert np.array_equal(part, expected)


def fused_rows(start: int, stop: int) -> View:
    return View.identity(((H + 2 * K) * h, D)).slice(0, start * h, stop * h)


def test_projections_fused_one_after_the_other():
    tensor = count_up((H + 2 * K) * h, D)
    assert np.array_equal(fused_rows(H, H + K).read(tensor), tensor[H * h : (H + K) * h])


def test_projections_fused_group_by_group():
    """InternLM2's wqkv: for each key head the queries that share it, the key, the value."""
    G = H // K
    tensor = count_up(K * (G + 2) * h, D)
    fused = View.identity(tensor.shape).split(K, G + 2, h, D)
    grouped = tensor.reshape(K, G + 2, h, D)
    queries, keys = fused.slice(1, 0, G).merge(H * h, D), fused.slice(1, G, G + 1).merge(K * h, D)
    assert np.array_equal(queries.read(tensor), grouped[:, :G].reshape(H * h, D))
    assert np.array_equal(keys.read(tensor), grouped[:, G].reshape(K * h, D))


def test_experts_fused_in_both_layouts():
    stacked, interleaved = count_up(E, 2 * F, D), count_up(E, D, 2 * F)
    up = View.identity(stacked.shape).split(E, 2, F, D).slice(1, 1, 2).merge(E, F, D)
    assert np.array_equal(up.read(stacked), stacked[:, F:])
    up = View.identity(interleaved.shape).split(E, D, F, 2).slice(3, 1, 2).transpose(0, 2, 3, 1).merge(E, F, D)
    assert np.array_equal(up.read(interleaved), interleaved[:, :, 1::2].transpose(0, 2, 1))


def test_a_transposed_projection():
    view = View.identity((D, F)).transpose(1, 0)
    assert np.array_equal(view.read(count_up(D, F)), count_up(D, F).T)


WEIGHT = ArraySpec((2, K * h, D), "float32", ("layers", "kv_heads", "embed"), role="matrix")
LEAVES = {"layers/0.0/attn/k/weight": WEIGHT, "layers/0.0/attn/v/weight": WEIGHT}


def table() -> list[TensorMap]:
    """Keys and values of two layers, fused in one tensor each."""
    fused = View.identity((2 * K * h, D))
    views = {"k": fused.slice(0, 0, K * h), "v": fused.slice(0, K * h, 2 * K * h)}
    return [
        TensorMap(f"{row}.kv", f"layers/0.0/attn/{name}/weight", (row,), WEIGHT, view)
        for row in range(2)
        for name, view in views.items()
    ]


def test_a_whole_table_is_valid():
    validate(table(), LEAVES)


def table_with(n: int, **fields) -> list[TensorMap]:
    return [dataclasses.replace(entry, **fields) if i == n else entry for i, entry in enumerate(table())]


FUSED = View.identity((2 * K * h, D))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (table()[:-1], r"layers/0\.0/attn/v/weight is read from 1 tensors, and has 2 parts"),
        (table()[::2], r"layers/0\.0/attn/v/weight is read from no tensor"),
        ([*table(), table()[0]], r"layers/0\.0/attn/k/weight\[0\] is written twice, by '0\.kv' as well"),
        (table_with(1, view=FUSED.slice(0, 0, K * h)), r"tensor '0\.kv' has a part that two leaves are written from"),
        (
            table_with(3, name="1.v"),
            r"tensor '1\.kv' is left unread in part: 30 of 60 numbers are used",
        ),
        (table_with(2, index=(2,)), r"layers/0\.0/attn/k/weight\[2\] of tensor '1\.kv' does not exist"),
        (table_with(0, path="layers/0.0/attn/q/weight"), "is no part of the model"),
        (table_with(0, view=View.identity((D, K * h)).transpose(1, 0)), "disagree about its shape or split"),
        (table_with(0, view=View.identity((D, K * h))), "its view of '0.kv' is"),
    ],
)
def test_a_table_that_is_wrong_says_where(broken: list[TensorMap], message: str):
    with pytest.raises(AssertionError, match=message):
        validate(broken, LEAVES)


def test_a_tensor_left_out_of_a_view_is_named():
    half = [TensorMap("w", "w", (), ArraySpec((2,), "float32", ("embed",)), View.identity((4,)).slice(0, 0, 4, 2))]
    with pytest.raises(AssertionError, match="tensor 'w' is left unread in part: 2 of 4 numbers are used"):
        validate(half, {"w": half[0].array})
