"""The arrays of a batch: one table of their dtypes and logical axes, for loaders, placement and planning.

An array of another stage, of rewards or of pictures, is one more entry, of any rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


class BatchArray(NamedTuple):
    """The dtype of an array, and its logical axes after the axis of micro-batches."""

    dtype: type[np.generic]
    axes: tuple[str, ...]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape where its logical axes have these sizes."""
        return tuple(sizes[axis] for axis in self.axes)


_PATCHES = ("batch", "patches")
_TOKENS, _UNITS, _SEGMENTS = ("batch", "length"), ("batch", "units"), ("batch", "segments")
# `parent_ids` are the segments that tokens' segments continue (0: none), in rows that hold a prompt once.
# A unit is a group of neighbouring segments of a row that are trained on together, such as the two answers of a pair.
BATCH_ARRAYS = {
    "tokens": BatchArray(np.int32, _TOKENS),
    "targets": BatchArray(np.int32, _TOKENS),
    "positions": BatchArray(np.int32, _TOKENS),
    "segment_ids": BatchArray(np.int32, _TOKENS),
    "weights": BatchArray(np.float32, _TOKENS),
    "parent_ids": BatchArray(np.int32, _TOKENS),
    "rope_positions": BatchArray(np.int32, _TOKENS),
    "nll": BatchArray(np.float32, _TOKENS),
    "units": BatchArray(np.float32, _UNITS),
    "values": BatchArray(np.float32, _UNITS),
    "reference": BatchArray(np.float32, _SEGMENTS),
    "advantages": BatchArray(np.float32, _TOKENS),
    "completion": BatchArray(np.float32, _TOKENS),
    "policy_weights": BatchArray(np.float32, _TOKENS),
    "entropy_weights": BatchArray(np.float32, _TOKENS),
    "values_old": BatchArray(np.float32, _TOKENS),
    "returns": BatchArray(np.float32, _TOKENS),
    "old": BatchArray(np.float32, _TOKENS),
    "sampled": BatchArray(np.float32, _TOKENS),
    "reference_tokens": BatchArray(np.float32, _TOKENS),
    # Pictures (see model.inputs.Visual), with the positions of M-RoPE and what tokens of pictures see of each other.
    "patches": BatchArray(np.float32, (*_PATCHES, "pixels")),
    "patch_segments": BatchArray(np.int32, _PATCHES),
    "patch_grid": BatchArray(np.int32, (*_PATCHES, "grid")),
    "visual": BatchArray(np.int32, _TOKENS),
    "mrope_positions": BatchArray(np.int32, (*_TOKENS, "axes")),
    "reach": BatchArray(np.int32, _TOKENS),
    # The tokens that a server names in place of a target, with their log-probabilities; -1 is no token.
    "named_ids": BatchArray(np.int32, (*_TOKENS, "named")),
    "named_log_probs": BatchArray(np.float32, (*_TOKENS, "named")),
}
TOKEN_ARRAYS = ("tokens", "targets", "positions", "segment_ids", "weights")  # those of every batch


LANES = 128  # rows of more patches have a multiple of this where pictures have no tiles, for the attention's blocks


def row_patches(limit: int, tile: int | None, merge: int) -> int:
    """The patches of a row that has room for `limit`: in whole tiles of `tile` patches, or without tiles in features of
    `merge` x `merge` patches and a multiple of LANES."""
    multiple = tile or (math.lcm(merge**2, LANES) if limit > LANES else merge**2)
    return -(-limit // multiple) * multiple


def empty_arrays(names: Iterable[str], sizes: Mapping[str, int]) -> dict[str, np.ndarray[Any, Any]]:
    """Zeros for the arrays of some rows; `sizes` has the size of each logical axis."""
    return {name: np.zeros(BATCH_ARRAYS[name].shape(sizes), BATCH_ARRAYS[name].dtype) for name in names}


def batch_axes(name: str, dimensions: int) -> tuple[str, ...]:
    """The logical axes of an array of a batch; one of one more dimension has micro-batches in front."""
    axes = BATCH_ARRAYS[name].axes
    assert 0 <= dimensions - len(axes) <= 1, f"{name} has {dimensions} dimensions, its axes are {axes}"
    return ("whole", *axes)[-dimensions:]
