"""The gated delta rule (https://arxiv.org/abs/2412.06464) over rows of packed segments, by chunks.

For each head, with a state S [dk, dv] in float32 that is zero before each segment:

    S <- exp(g_t) S;    S <- S + k_t (beta_t (v_t - S^T k_t))^T;    o_t = S^T q_t

Within a chunk of C tokens the rank-one updates are combined by the inverse of a triangular matrix, so that all work is
matrix products; between chunks the state is carried. The backward pass keeps the state before each chunk and computes
the rest of a chunk again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshtune.model.row_chunks import CHUNK, chunk_size, in_chunks, in_rows, pair_decays, product

NORM_EPS = 1e-6  # under the root of the sum of squares by which queries and keys are divided

States = Float[Array, "B H k v"]
Squares = Float[Array, "*B C C"]


class DeltaInputs(NamedTuple):
    """Inputs of the rule for each token: q and k of Hk heads, each for H / Hk neighbouring heads of v; float32 log
    decays g <= 0 and strengths beta in [0, 1] for each head of v. A token with g = beta = 0 leaves the state unchanged.
    """

    q: Float[Array, "B T Hk k"]
    k: Float[Array, "B T Hk k"]
    v: Float[Array, "B T H v"]
    g: Float[Array, "B T H"]
    beta: Float[Array, "B T H"]
    segment_ids: Int[Array, "B T"]


def gated_delta_rule(
    inputs: DeltaInputs,
    state: States | None = None,
    state_segment: Int[Array, "B"] | None = None,
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T H v"], States]:
    """(o in float32, the state after the last token). Queries and keys are divided by their length, queries by
    sqrt(dk) as well.

    `state` is the one before the rows, None: zero; `state_segment` its segment, None: that of each row's first token.
    """
    (B, T, H, dv), size_k = inputs.v.shape, inputs.k.shape[-1]
    size = chunk_size(T, chunk)
    chunks = jax.tree.map(lambda x: in_chunks(x, size), inputs)
    if state is None:
        state = jnp.zeros((B, H, size_k, dv), jnp.float32)
    if state_segment is None:
        state_segment = inputs.segment_ids[:, 0]
    (state, _), o = lax.scan(jax.checkpoint(_chunk), (state, state_segment), chunks)
    return in_rows(o.transpose(0, 1, 3, 2, 4), T), state


def _chunk(carry: tuple[States, Array], chunk: DeltaInputs) -> tuple[tuple[States, Array], Float[Array, "B H C v"]]:
    state, state_segment = carry
    repeats = chunk.v.shape[2] // chunk.k.shape[2]
    q, k = (jnp.repeat(_unit(x), repeats, axis=2).transpose(0, 2, 1, 3) for x in (chunk.q, chunk.k))
    q = q * q.shape[-1] ** -0.5
    v = chunk.v.astype(jnp.float32).transpose(0, 2, 1, 3)
    beta = chunk.beta.transpose(0, 2, 1)[..., None]
    between, from_state, to_end = pair_decays(chunk.g.transpose(0, 2, 1), chunk.segment_ids, state_segment)

    strengths = jnp.tril(product("bhik,bhjk->bhij", k * beta, k) * between, -1)
    errors = beta * (v - product("bhik,bhkv->bhiv", k * from_state[..., None], state))
    writes = product("bhij,bhjv->bhiv", unit_lower_inverse(strengths), errors)
    o = product("bhik,bhkv->bhiv", q * from_state[..., None], state)
    o = o + product("bhij,bhjv->bhiv", product("bhik,bhjk->bhij", q, k) * between, writes)
    state = state * from_state[..., -1, None, None]
    state = state + product("bhik,bhiv->bhkv", k * to_end[..., None], writes)
    return (state, chunk.segment_ids[:, -1]), o


def _unit(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + NORM_EPS)


@jax.custom_vjp
def unit_lower_inverse(lower: Squares) -> Squares:
    """The inverse of I + lower, which is strictly lower triangular; its size is a power of two.

    By doubling: the inverse of [[A, 0], [L, B]] is [[A', 0], [-B' L A', B']]. As stable as substitution, in products.
    """
    size = lower.shape[-1]
    inverses = jnp.ones((*lower.shape[:-2], size, 1, 1), lower.dtype)  # of the blocks on the diagonal
    width = 1
    while width < size:
        count = size // (2 * width)
        blocks = lower.reshape(*lower.shape[:-2], count, 2, width, count, 2, width)
        below = jnp.stack([blocks[..., n, 1, :, n, 0, :] for n in range(count)], axis=-3)
        first, second = inverses[..., 0::2, :, :], inverses[..., 1::2, :, :]
        corner = -product("...ij,...jk,...kl->...il", second, below, first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverses = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverses[..., 0, :, :]


def _inverse_forward(lower: Squares) -> tuple[Squares, Squares]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: Squares, cotangent: Any) -> tuple[Squares]:
    gradient = -product("...ji,...jk,...lk->...il", inverse, cotangent, inverse)
    return (jnp.tril(gradient, -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
