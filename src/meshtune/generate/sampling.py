"""From logits to the next token: the processors of transformers' `generate`, in its order, inside a compiled step.

Order: repetition penalty, temperature, top-k, top-p, min-p (transformers' `_get_logits_processor`); then a draw with a
key that depends on the seed and the token's position alone, so the same seed gives the same text however the work is
cut into steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from meshtune.generate.config import Sampling


@dataclasses.dataclass(frozen=True)
class Switches:
    """Which processors a compiled step contains; their numbers are arguments, so changing those compiles nothing."""

    greedy: bool = True
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalty: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Knobs:
    """The numbers of the processors, and each row's seed, as arrays."""

    temperature: Float[Array, ""]
    top_k: Int[Array, ""]
    top_p: Float[Array, ""]
    min_p: Float[Array, ""]
    penalty: Float[Array, ""]
    seeds: UInt32[Array, "B"]


def compiled_form(sampling: Sampling, rows: int) -> tuple[Switches, Knobs]:
    """`sampling` as what is compiled and what is passed; row i gets seed + i."""
    drawn = sampling.temperature > 0
    switches = Switches(
        greedy=not drawn,
        top_k=drawn and sampling.top_k > 0,
        top_p=drawn and sampling.top_p < 1,
        min_p=drawn and sampling.min_p > 0,
        penalty=sampling.repetition_penalty != 1,
    )
    return switches, Knobs(
        temperature=jnp.float32(sampling.temperature),
        top_k=jnp.int32(sampling.top_k),
        top_p=jnp.float32(sampling.top_p),
        min_p=jnp.float32(sampling.min_p),
        penalty=jnp.float32(sampling.repetition_penalty),
        seeds=jnp.uint32(sampling.seed) + jnp.arange(rows, dtype=jnp.uint32),
    )


def processed(
    logits: Float[Array, "B V"], used: Bool[Array, "B V"], switches: Switches, knobs: Knobs
) -> Float[Array, "B V"]:
    """The logits to draw from: float32, minus infinity where a token is ruled out.

    `seen` marks the tokens of the prompt and of what was generated; it is read only if switches.penalty is set.
    """
    scores = logits.astype(jnp.float32)
    if switches.penalty:
        # https://arxiv.org/abs/1909.05858, section 4.1; dividing a negative score would favour it.
        punished = jnp.where(scores < 0, scores * knobs.penalty, scores / knobs.penalty)
        scores = jnp.where(used, punished, scores)
    if switches.greedy:
        return scores
    scores = scores / knobs.temperature
    if switches.top_k:
        scores = _top_k(scores, knobs.top_k)
    if switches.top_p:
        scores = _top_p(scores, knobs.top_p)
    if switches.min_p:
        scores = _min_p(scores, knobs.min_p)
    return scores


def next_token(
    logits: Float[Array, "B V"],
    used: Bool[Array, "B V"],
    positions: Int[Array, "B"],
    switches: Switches,
    knobs: Knobs,
) -> Int[Array, "B"]:
    """One token a row. `positions` are those the tokens will stand at; they and the seeds are all the randomness."""
    scores = processed(logits, used, switches, knobs)
    if switches.greedy:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)

    def draw(seed: Array, position: Array, row: Array) -> Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), row)

    return jax.vmap(draw)(knobs.seeds, positions, scores).astype(jnp.int32)


def _top_k(scores: Float[Array, "B V"], k: Int[Array, ""]) -> Float[Array, "B V"]:
    """Keeps the k greatest, and all that equal the k-th."""
    keys = _ordered(scores)
    count = jnp.minimum(k, scores.shape[-1])
    least = _greatest(lambda key: jnp.sum(keys >= key[:, None], axis=-1) >= count, scores.shape[0])
    return jnp.where(keys < least[:, None], -jnp.inf, scores)


def _top_p(scores: Float[Array, "B V"], p: Float[Array, ""]) -> Float[Array, "B V"]:
    """Keeps the smallest set of likeliest tokens whose probability reaches p (https://arxiv.org/abs/1904.09751)."""
    keys, probabilities = _ordered(scores), jax.nn.softmax(scores, axis=-1)

    def ruled_out(key: Array) -> Array:
        return jnp.sum(jnp.where(keys < key[:, None], probabilities, 0), axis=-1) <= 1 - p

    # The likeliest stays even where rounding leaves the whole row's sum at or below 1 - p.
    least = jnp.minimum(_greatest(ruled_out, scores.shape[0]), keys.max(-1))
    return jnp.where(keys < least[:, None], -jnp.inf, scores)


def _min_p(scores: Float[Array, "B V"], p: Float[Array, ""]) -> Float[Array, "B V"]:
    """Keeps tokens at least p times as likely as the likeliest (https://arxiv.org/abs/2407.01082)."""
    probabilities = jax.nn.softmax(scores, axis=-1)
    return jnp.where(probabilities < p * probabilities.max(-1, keepdims=True), -jnp.inf, scores)


def _ordered(scores: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Whole numbers in the same order as the floats (their bits, with the negative half turned over)."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _greatest(holds: Callable[[Array], Array], rows: int) -> UInt32[Array, "B"]:
    """The greatest number of 32 bits for which `holds`, which holds below it and not above; 0 if it never does.

    A cut in a row of scores is found so, bit by bit in 32 passes, because sorting 50,000 of them takes XLA on a CPU as
    long as half a decode step of a 135M model.
    """

    def step(i: Array, threshold: Array) -> Array:
        tried = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(holds(tried), tried, threshold)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros(rows, jnp.uint32))
