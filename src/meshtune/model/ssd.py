"""The state-space recurrence of Mamba-2 (https://arxiv.org/abs/2405.21060) over rows of packed segments, by chunks.

For each head, with a state S [P, N] in float32 that is zero before each segment:

    S <- exp(g_t) S + u_t B_t^T;    y_t = S C_t

Within a chunk of tokens it is attention with decays for weights; between chunks the state is carried. The backward pass
keeps the state before each chunk and computes the rest of a chunk again.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshtune.model.row_chunks import CHUNK, chunk_size, in_chunks, in_rows, pair_decays, product

States = Float[Array, "B G r P N"]


class SsdInputs(NamedTuple):
    """Inputs of the recurrence for each token: u of r heads in each of G groups, B and C of each group, and float32 log
    decays g <= 0 of each head. A token with g = 0 and u = 0 leaves the state unchanged."""

    u: Float[Array, "B T G r P"]
    B: Float[Array, "B T G N"]
    C: Float[Array, "B T G N"]
    g: Float[Array, "B T G r"]
    segment_ids: Int[Array, "B T"]


def state_space(
    inputs: SsdInputs, state: States | None = None, state_segment: Int[Array, "B"] | None = None, *, chunk: int = CHUNK
) -> tuple[Float[Array, "B T G r P"], States]:
    """(y in float32, the state after the last token).

    `state` is the one before the rows, None: zero; `state_segment` its segment, None: that of each row's first token.
    """
    rows, length, *heads = inputs.u.shape
    size = chunk_size(length, chunk)
    chunks = jax.tree.map(lambda x: in_chunks(x, size), inputs)
    if state is None:
        state = jnp.zeros((rows, *heads, inputs.B.shape[-1]), jnp.float32)
    if state_segment is None:
        state_segment = inputs.segment_ids[:, 0]
    (state, _), y = lax.scan(jax.checkpoint(_chunk), (state, state_segment), chunks)
    return in_rows(y, length), state


def _chunk(carry: tuple[States, Array], chunk: SsdInputs) -> tuple[tuple[States, Array], Float[Array, "B C G r P"]]:
    state, state_segment = carry
    u, B, C = (x.astype(jnp.float32) for x in (chunk.u, chunk.B, chunk.C))
    rows, size, groups, heads = chunk.g.shape
    g = chunk.g.reshape(rows, size, -1).transpose(0, 2, 1)
    decays = pair_decays(g, chunk.segment_ids, state_segment)
    between, from_state, to_end = (x.reshape(rows, groups, heads, *x.shape[2:]) for x in decays)
    weights = product("bign,bjgn->bgij", C, B)[:, :, None] * between
    y = product("bgrij,bjgrp->bigrp", weights, u)
    y = y + product("bign,bgrpn->bigrp", C, state) * from_state.transpose(0, 3, 1, 2)[..., None]
    decayed = u * to_end.transpose(0, 3, 1, 2)[..., None]
    state = state * from_state[..., -1, None, None] + product("bjgrp,bjgn->bgrpn", decayed, B)
    return (state, chunk.segment_ids[:, -1]), y
