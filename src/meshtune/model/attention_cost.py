"""What mixers that attend cost, and what they ask of the attention kernels."""

from __future__ import annotations

from typing import Any

import jax

from meshtune.kernels.attention import AttentionRequest
from meshtune.model.block import Activation
from meshtune.model.compute import Compute


def attention_activations(
    queries: tuple[int, int], keys: tuple[int, int] | None, axis: str, gates: int = 0
) -> tuple[Activation, ...]:
    """The arrays of a token: queries, `gates` as wide as they, keys, values, the result and its log-sum-exp.

    `queries` and `keys` are (numbers of all heads, heads); values are as wide as keys, and `axis` is theirs. `keys` is
    None where keys and values are those of another layer.
    """
    H, heads = queries
    past = () if keys is None else (Activation(axis, *keys, kept=True, elementwise=2, whole_rows=True),) * 2
    return (
        Activation("heads", H, heads, kept=True, elementwise=2),
        *(Activation("heads", H, heads, kept=True, elementwise=1),) * gates,
        *past,
        Activation("heads", H, heads, kept=True),
        # The log-sum-exp of every head's scores, in float32.
        Activation("heads", heads, heads, kept=True, products=0, itemsize=4),
    )


def request(
    rows: tuple[int, int, int],
    heads: tuple[int, int, int],
    compute: Compute,
    *,
    chunk: int | None = None,
    **scores: Any,
) -> AttentionRequest:
    """What is asked of the kernels for `rows` (their number, tokens that attend and tokens that are attended to, of
    each) with `heads` (of queries, of keys and values, numbers in each).

    `chunk` is that of `attend`; `scores` are fields of AttentionRequest.
    """
    batch, q_length, kv_length = rows
    count, kv_heads, head_dim = heads
    return AttentionRequest(
        batch=batch,
        q_length=q_length,
        kv_length=kv_length,
        heads=count,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=compute.dtype,
        platform=compute.platform or jax.default_backend(),
        chip=compute.chip,
        packed=compute.packed or chunk is not None,
        aligned=q_length == kv_length,
        **scores,
    )
