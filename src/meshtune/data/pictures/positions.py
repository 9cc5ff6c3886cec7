"""Positions of documents with pictures, for models whose rotary embeddings or masks know where pictures are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mrope_positions(length: int, pictures: Sequence[tuple[int, tuple[int, int, int]]]) -> np.ndarray:
    """Positions in time, height and width of the tokens of a document, int32 [length, 3], as `get_rope_index` of
    transformers' Qwen2-VL computes them.

    `pictures` are (first token, (frames, rows, columns) of features), in order. A text's three positions are equal;
    what follows a picture begins after its longer side.
    """
    positions, token, position = np.zeros((length, 3), np.int32), 0, 0
    for start, (frames, rows, columns) in pictures:
        positions[token:start] = position + np.arange(start - token)[:, None]
        position += start - token
        token = start + frames * rows * columns
        places = np.indices((frames, rows, columns)).reshape(3, -1).T
        positions[start:token] = position + places[: max(0, length - start)]
        position += max(rows, columns)
    positions[token:] = position + np.arange(max(0, length - token))[:, None]
    return positions


def reach_positions(visual: np.ndarray) -> np.ndarray:
    """The last position in its document that each token of a picture sees, whose tokens see each other, int32 [n]; 0
    for others (`visual` int32 [n] is 0 for them; pictures have other tokens between them)."""
    last = np.where(visual != 0, np.arange(len(visual), dtype=np.int32), 0)
    inner = (visual[:-1] != 0) & (visual[1:] != 0)
    for index in np.flatnonzero(inner)[::-1]:
        last[index] = last[index + 1]
    return last


def prefix_reach(length: int, prefix: int) -> np.ndarray:
    """The last position that each of `length` tokens sees where the first `prefix` of them see each other, int32
    [length]; 0 for those after."""
    return np.where(np.arange(length) < prefix, prefix - 1, 0).astype(np.int32)
