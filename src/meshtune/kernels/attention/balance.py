"""The order in which a row's tokens are held so that the devices of a ring have the same causal work."""

from __future__ import annotations

import numpy as np

from meshtune.errors import UserError


def balanced_order(length: int, parts: int) -> np.ndarray:
    """A permutation of 0..length-1, int32 [length]: `row[balanced_order(...)]` is to be cut into `parts` equal pieces.

    A token sees those before it, so the last piece of a row in its own order has the most work and a ring waits for it.
    Here the row is cut into 2 * parts chunks, and device i holds chunks i and 2 * parts - 1 - i: an early one and a
    late one (Brandon et al., Striped Attention, arXiv:2311.09431, describe the problem; this order is the zig-zag one).
    Everything but attention treats each token alone, and attention goes by positions and segments, which are permuted
    with the tokens. Raises UserError for a length that 2 * parts does not divide.
    """
    if parts == 1:
        return np.arange(length, dtype=np.int32)
    chunks = 2 * parts
    if length % chunks:
        near = [n for n in (length // chunks * chunks, -(-length // chunks) * chunks) if n]
        raise UserError(
            f"rows of {length} tokens cannot be cut into the {chunks} equal chunks that cp {parts} needs",
            where="mesh.cp",
            fix=f"make rows {' or '.join(map(str, near))} tokens long (any multiple of {chunks}), or change mesh.cp",
        )
    first = np.arange(length, dtype=np.int32).reshape(chunks, -1)
    return np.stack([first[:parts], first[: parts - 1 : -1]], 1).reshape(-1)
