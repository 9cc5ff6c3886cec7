"""The zig-zag order of a row's tokens, which gives every device of a ring the same causal work."""

from __future__ import annotations

import numpy as np

from meshtune.errors import UserError


def zigzag_order(length: int, parts: int) -> np.ndarray:
    """A permutation of 0..length-1, int32 [length], after which a row is cut into `parts` equal shards.

    A token attends to those before it, so with contiguous shards the last device has the most work and the ring waits
    for it. Here the row is cut into 2 * parts chunks, and device i holds an early and a late one: chunks i and
    2 * parts - 1 - i. (The imbalance is described by Brandon et al., Striped Attention, arXiv:2311.09431; this is the
    zig-zag order.) Apart from attention every operation treats tokens one by one, and attention uses only their
    positions and segments, which are permuted with them.
    Raises: UserError for a length that 2 * parts does not divide.
    """
    if parts == 1:
        return np.arange(length, dtype=np.int32)
    chunks = 2 * parts
    if length % chunks:
        nearest = [n for n in (length // chunks * chunks, -(-length // chunks) * chunks) if n]
        raise UserError(
            f"rows of {length} tokens cannot be cut into the {chunks} equal chunks that cp {parts} needs",
            where="mesh.cp",
            fix=f"make rows {' or '.join(map(str, nearest))} tokens long (any multiple of {chunks}), or change mesh.cp",
        )
    by_chunk = np.arange(length, dtype=np.int32).reshape(chunks, -1)
    return np.stack([by_chunk[:parts], by_chunk[: parts - 1 : -1]], 1).reshape(-1)
