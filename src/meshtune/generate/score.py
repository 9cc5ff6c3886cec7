"""The log-probability of every token of a text, given those before it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from meshtune.arrays.tree import Tree
from meshtune.generate.programs import length_bucket
from meshtune.generate.request import Token
from meshtune.generate.sampling import Probabilities, log_probabilities
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, head_logits, head_params
from meshtune.model.inputs import Inputs
from meshtune.model.spec import ModelSpec

CHUNK = 128  # tokens whose logits exist at once


def token_log_probabilities(
    params: Tree, spec: ModelSpec, compute: Compute, ids: list[int], alternatives: int = 0
) -> list[Token]:
    """Every token of a text but the first, with its float32 log-probability and the likeliest tokens in its place."""
    padded = -(-length_bucket(len(ids)) // CHUNK) * CHUNK
    tokens = np.zeros(padded, np.int32)
    tokens[: len(ids)] = ids
    scored = _scored(params, tokens, np.int32(len(ids)), spec=spec, compute=compute, alternatives=alternatives)
    chosen, likeliest, values = (np.asarray(part)[: len(ids) - 1].tolist() for part in scored)
    return [
        Token(id_, probability, tuple(zip(others, scores, strict=True)))
        for id_, probability, others, scores in zip(ids[1:], chosen, likeliest, values, strict=True)
    ]


@partial(jax.jit, static_argnames=("spec", "compute", "alternatives"))
def _scored(
    params: Tree,
    tokens: Int[Array, "T"],
    length: Int[Array, ""],
    *,
    spec: ModelSpec,
    compute: Compute,
    alternatives: int,
) -> Probabilities:
    """The log-probabilities [T, ..] of the token after each one."""
    places = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    real = places < length
    inputs = Inputs(tokens[None], jnp.where(real, places, 0)[None], real.astype(jnp.int32)[None])
    hidden = forward(params, spec, compute, inputs).hidden[0]
    head, following = head_params(params, spec), jnp.roll(tokens, -1)

    def chunk(part: tuple[Array, Array]) -> Probabilities:
        return log_probabilities(head_logits(head, part[0], spec), part[1], alternatives)

    parts = jax.lax.map(chunk, (hidden.reshape(-1, CHUNK, hidden.shape[-1]), following.reshape(-1, CHUNK)))
    return jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), parts)
