"""Segments that continue others (completions of a prompt that the row holds once), in every backend that computes here,
against torch in float64: values and all gradients."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import meshtune.kernels.attention.blocks as blocks
from kernels.attention_cases import CLOSE, output_and_gradients, request_for_gpu
from kernels.attention_oracle import mask, normal, torch_gradients
from meshtune.kernels.attention import (
    AttentionInputs,
    AttentionRequest,
    attention,
    choose_backend,
    triton,
    triton_kernels,
)
from meshtune.kernels.attention.backend import NO_PARENTS
from meshtune.kernels.attention.cudnn import CUDNN
from meshtune.kernels.attention.splash import SPLASH
from meshtune.kernels.attention.triton_kernels import Tile, Tiles

T = 96
# Rows of (prompt, its completions): one after another, and all prompts before all completions, which take turns.
CONTIGUOUS = [(20, [13, 1, 17]), (1, [4]), (9, [3, 20])]
TURNS = [(16, [9, 11, 2]), (7, [12, 1]), (18, [5, 6, 7])]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Small blocks of several sizes, so that small rows have many, both full and partial."""
    monkeypatch.setattr(blocks, "block_sizes", lambda request: (min(8, request.q_length), min(12, request.kv_length)))
    monkeypatch.setattr(triton_kernels, "tiles_of", lambda request: Tiles(*[Tile(8, 8, 4, 1)] * 3))


def tokens_of(groups, take_turns):
    """Segments, positions and parents of a row, int32 [T]."""
    spans, parent_of, number = [], {}, 0
    for group, (prompt, _) in enumerate(groups):
        number += 1
        parent_of[group] = number
        spans.append((group, number, 0, 0, prompt))
    for group, (prompt, completions) in enumerate(groups):
        for place, length in enumerate(completions):
            number += 1
            spans.append((group, number, parent_of[group], prompt, length, place))
    if take_turns:
        spans.sort(key=lambda span: (span[2] > 0, span[5:], span[0]))
    else:
        spans.sort(key=lambda span: (span[0], span[1]))
    segments, positions, parents = np.zeros((3, T), np.int32)
    start = 0
    for _, segment, parent, first, length, *_ in spans:
        part = slice(start, start := start + length)
        segments[part], parents[part], positions[part] = segment, parent, first + np.arange(length)
    return segments, positions, parents


def arguments():
    rows = [tokens_of(CONTIGUOUS, False), tokens_of(TURNS, True)]
    segments, positions, parents = (np.stack(x) for x in zip(*rows, strict=True))
    return {
        "q_positions": positions,
        "kv_positions": positions,
        "q_segments": segments,
        "kv_segments": segments,
        "q_parents": parents,
    }


@pytest.mark.parametrize("backend", ["direct", "blockwise", "triton"])
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(None, None, False), (11, 1.5, True)])
def test_values_and_gradients_equal_torchs(backend, window, softcap, sinks):
    q, k, v, g = normal(5, (2, T, 4, 16), (2, T, 2, 16), (2, T, 2, 16), (2, T, 4, 16))
    tokens, options = arguments(), {"scale": 0.3, "window": window, "softcap": softcap}
    sink_scores = [np.linspace(-3, 3, 4).astype(np.float32)] if sinks else []

    def attend(q, k, v, *sinks):
        extra = {"sinks": sinks[0]} if sinks else {}
        if backend == "triton":
            request = request_for_gpu(q, k, options | {"sinks": bool(sinks), "parents": True})
            return triton.run(AttentionInputs(q, k, v, **tokens, **extra), request, interpret=True)
        return attention(q, k, v, **tokens, **options, **extra, backend=backend, aligned=True)

    results = output_and_gradients(attend, q, k, v, g, *sink_scores)
    expected = torch_gradients(q, k, v, g, tokens, **options, sinks=sink_scores[0] if sinks else None)
    for x, reference in zip(results, expected, strict=True):
        np.testing.assert_allclose(x, reference, **CLOSE)


@pytest.mark.parametrize("window", [None, 11])
def test_no_visible_block_is_skipped_and_no_block_is_visited_twice(window):
    """Random parents, also of later segments, in any order: the ranges and lists hold every visible pair once."""
    random, size = np.random.default_rng(1), 8
    for _ in range(12):
        segments, parents = random.integers(0, 5, (2, 1, T)) if random.random() < 0.3 else _runs(random)
        positions = random.integers(0, 40, (1, T))
        positions, segments, parents = (x.astype(np.int32) for x in (positions, segments, parents))
        queries, keys = (
            blocks.token_blocks(size, positions, segments, parents),
            blocks.token_blocks(size, positions, segments),
        )
        pairs = mask(positions[0], positions[0], segments[0], segments[0], window, parents[0])
        pairs = pairs.reshape(T // size, size, T // size, size).swapaxes(1, 2)
        any_pair, all_pairs = pairs.any((2, 3)), pairs.all((2, 3))
        visible = np.asarray(blocks.any_visible(queries, keys, window))
        assert not (any_pair & ~visible).any()
        for ranges, transpose in (
            (blocks.visible_key_ranges(queries, keys, window), False),
            (blocks.visible_query_ranges(queries, keys, window), True),
        ):
            expected, full = (any_pair.T, all_pairs.T) if transpose else (any_pair, all_pairs)
            for row, numbers in enumerate(np.asarray(ranges)[0]):
                visits = [n for start, _, _, stop in numbers.reshape(2, 4) for n in range(start, stop)]
                unmasked = [n for _, first, last, _ in numbers.reshape(2, 4) for n in range(first, last)]
                assert len(set(visits)) == len(visits)
                assert set(np.flatnonzero(expected[row])) <= set(visits)
                assert all(full[row, n] for n in unmasked)
                assert set(unmasked) <= set(visits)


def _runs(random):
    """Segments in runs of random lengths, each of which continues an earlier one or none."""
    ends = np.sort(random.choice(np.arange(1, T), 7, replace=False))
    numbers = np.searchsorted(ends, np.arange(T), side="right") + 1
    parent_of = np.array([0, *(random.integers(0, n) for n in range(1, 9))])
    return numbers[None], parent_of[numbers][None]


def test_completions_skip_the_blocks_of_other_completions():
    """A prompt of 4 blocks with 8 completions of 4 blocks: each sees the prompt and itself, 4 * 4 + 10 pairs of blocks;
    ranges from the first visible block to the last would hold 306."""
    size, length = 8, 32
    starts = np.arange(9) * length
    segments = np.repeat(np.arange(1, 10), length)[None].astype(np.int32)
    parents = np.where(segments > 1, 1, 0).astype(np.int32)
    positions = (np.arange(9 * length)[None] - np.repeat(np.maximum(starts - length, 0), length)).astype(np.int32)
    queries, keys = (
        blocks.token_blocks(size, positions, segments, parents),
        blocks.token_blocks(size, positions, segments),
    )
    visited = 8 * (4 * 4 + 10) + 10
    assert int(blocks.any_visible(queries, keys, None).sum()) == visited
    for ranges in (blocks.visible_key_ranges, blocks.visible_query_ranges):
        bounds = np.asarray(ranges(queries, keys, None)).reshape(-1, 4)
        assert int((bounds[:, 3] - bounds[:, 0]).sum()) == visited


def test_a_row_without_parents_runs_the_program_of_today():
    """Parents that are all 0 give the bits of none, and none adds nothing to the program."""
    q, k, v, _ = normal(6, (2, T, 4, 16), (2, T, 2, 16), (2, T, 2, 16), (2, T, 4, 16))
    tokens = arguments()
    parents = np.zeros_like(tokens.pop("q_parents"))

    for backend in ("direct", "blockwise"):

        def attend(q, k, v, backend=backend, **extra):
            return attention(q, k, v, **tokens, **extra, scale=0.3, backend=backend, aligned=True)

        np.testing.assert_array_equal(attend(q, k, v), attend(q, k, v, q_parents=parents))
        text = str(jax.make_jaxpr(attend)(q, k, v))
        assert "sort" not in text
        assert text.count(" or ") < str(jax.make_jaxpr(lambda *x: attend(*x, q_parents=parents))(q, k, v)).count(" or ")


def test_kernels_without_parents_say_so():
    request = AttentionRequest(
        batch=1, q_length=512, kv_length=512, heads=4, kv_heads=2, head_dim=128, dtype="bfloat16", platform="tpu",
        scale=0.1, aligned=True, parents=True,
    )  # fmt: skip
    assert SPLASH.refusal(request) == NO_PARENTS
    assert SPLASH.refusal(dataclasses.replace(request, parents=False)) is None
    backend, reason = choose_backend(request)
    assert backend.name == "blockwise"
    assert f"not splash: {NO_PARENTS}" in reason
    gpu = dataclasses.replace(request, platform="cuda", chip="sm_90a", packed=False)
    assert CUDNN.refusal(gpu) == NO_PARENTS
    assert choose_backend(gpu)[0].name == "triton"
