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
    """The last position in its document that each token sees, int32 [n]: its own, or the last of its picture, whose
    tokens see each other (`visual` int32 [n] is not 0 for them; pictures have other tokens between them)."""
    last = np.arange(len(visual), dtype=np.int32)
    inner = (visual[:-1] != 0) & (visual[1:] != 0)
    for index in np.flatnonzero(inner)[::-1]:
        last[index] = last[index + 1]
    return last
