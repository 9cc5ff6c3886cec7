"""From logits to the next token: the processors of transformers' `generate`, in its order, inside a compiled step.

Order: grammar mask, logit bias, repetition, frequency and presence penalties, temperature, top-k, top-p, min-p
(transformers' `_get_logits_processor`, with OpenAI's penalties where vLLM has them); then a draw with a key that
depends on only the row's seed and the token's position, so the same seed gives the same text however the work is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from meshtune.generate.config import Sampling
from meshtune.generate.constraint import WORD

COLDEST = 1e-20  # a lower temperature would divide logits to infinity
BIAS_SIZES = (0, 8, 64, 512)  # biased tokens of a row that a program is compiled for


@dataclasses.dataclass(frozen=True)
class Switches:
    """Which processors a compiled step contains; their numbers are arguments, so changing those compiles nothing.

    A row whose numbers turn a processor off is not changed by it, so that rows of any kind share a batch.
    """

    drawn: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    repetition: bool = False
    frequency: bool = False
    bias: bool = False
    constrained: bool = False

    @property
    def counts(self) -> bool:
        """Whether a step reads which tokens a row has."""
        return self.repetition or self.frequency


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Knobs:
    """The numbers of the processors, and the seed, of every row. `allowed` is the packed mask of the tokens that its
    grammar allows (`generate.constraint`), of no words where no row has a grammar."""

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    repetition: Float[Array, "B"]
    presence: Float[Array, "B"]
    frequency: Float[Array, "B"]
    biased: Int[Array, "B n"]
    bias: Float[Array, "B n"]
    seeds: UInt32[Array, "B"]
    allowed: UInt32[Array, "B W"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """The tokens of every row: those of its prompt, and how often each was generated since. V is 0 where no processor
    reads them."""

    prompted: Bool[Array, "B V"]
    generated: Int[Array, "B V"]

    def add(self, tokens: Int[Array, "B"], alive: Bool[Array, "B"]) -> Counts:
        """With one more generated token in every row that is alive."""
        if not self.generated.shape[1]:
            return self
        rows = jnp.arange(tokens.shape[0])
        return dataclasses.replace(self, generated=self.generated.at[rows, tokens].add(alive.astype(jnp.int32)))


def compiled_form(
    samplings: Sequence[Sampling], allowed: UInt32[np.ndarray, "B W"] | None = None
) -> tuple[Switches, Knobs]:
    """The switches to compile and the numbers to pass for a batch whose row i is sampled by `samplings[i]`, of the
    tokens that `allowed` has bits for (None: of all)."""
    if allowed is None:
        allowed = np.zeros((len(samplings), 0), np.uint32)
    drawn = [sampling for sampling in samplings if sampling.temperature > 0]
    switches = Switches(
        drawn=bool(drawn),
        top_k=any(sampling.top_k > 0 for sampling in drawn),
        top_p=any(sampling.top_p < 1 for sampling in drawn),
        min_p=any(sampling.min_p > 0 for sampling in drawn),
        repetition=any(sampling.repetition_penalty != 1 for sampling in samplings),
        frequency=any(sampling.presence_penalty or sampling.frequency_penalty for sampling in samplings),
        bias=any(sampling.logit_bias for sampling in samplings),
        constrained=allowed.shape[1] > 0,
    )

    def numbers(name: str, dtype: str) -> Any:
        return np.asarray([getattr(sampling, name) for sampling in samplings], dtype)

    longest = max((len(sampling.logit_bias) for sampling in samplings), default=0)
    size = next((size for size in BIAS_SIZES if size >= longest), longest)
    biased: Any = np.full((len(samplings), size), -1, np.int32)
    bias: Any = np.zeros((len(samplings), size), np.float32)
    for row, sampling in enumerate(samplings):
        for n, (token, value) in enumerate(sampling.logit_bias):
            biased[row, n], bias[row, n] = token, value
    knobs = Knobs(
        temperature=numbers("temperature", "float32"),
        top_k=numbers("top_k", "int32"),
        top_p=numbers("top_p", "float32"),
        min_p=numbers("min_p", "float32"),
        repetition=numbers("repetition_penalty", "float32"),
        presence=numbers("presence_penalty", "float32"),
        frequency=numbers("frequency_penalty", "float32"),
        biased=biased,
        bias=bias,
        seeds=numbers("seed", "uint32"),
        allowed=allowed,  # pyright: ignore[reportArgumentType] - numpy goes into the compiled step
    )
    return switches, knobs


def process_logits(
    logits: Float[Array, "B V"], counts: Counts, switches: Switches, knobs: Knobs
) -> Float[Array, "B V"]:
    """The logits to draw from: float32, minus infinity where a token is ruled out."""
    scores = logits.astype(jnp.float32)
    if switches.constrained:
        scores = jnp.where(_unpack_mask(knobs.allowed, scores.shape[1]), scores, -jnp.inf)
    if switches.bias:
        rows = jnp.arange(scores.shape[0])[:, None]
        scores = scores.at[rows, jnp.where(knobs.biased < 0, scores.shape[1], knobs.biased)].add(
            knobs.bias, mode="drop"
        )
    if switches.repetition:
        # https://arxiv.org/abs/1909.05858, section 4.1; dividing a negative score would favour it.
        penalty = knobs.repetition[:, None]
        occurred = counts.prompted | (counts.generated > 0)
        scores = jnp.where(occurred, jnp.where(scores < 0, scores * penalty, scores / penalty), scores)
    if switches.frequency:
        scores -= knobs.frequency[:, None] * counts.generated
        scores -= knobs.presence[:, None] * (counts.generated > 0)
    if not switches.drawn:
        return scores
    scores = scores / jnp.where(knobs.temperature > 0, jnp.maximum(knobs.temperature, COLDEST), 1)[:, None]
    if switches.top_k:
        scores = _top_k(scores, knobs.top_k)
    if switches.top_p:
        scores = _top_p(scores, knobs.top_p)
    if switches.min_p:
        scores = _min_p(scores, knobs.min_p)
    return scores


def next_token(
    logits: Float[Array, "B V"],
    counts: Counts,
    positions: Int[Array, "B"],
    switches: Switches,
    knobs: Knobs,
) -> Int[Array, "B"]:
    """One token a row. `positions` are those that the tokens will have; they and the seeds are all the randomness."""
    scores = process_logits(logits, counts, switches, knobs)
    likeliest = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    if not switches.drawn:
        return likeliest

    def draw(seed: Array, position: Array, row: Array) -> Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), position), row)

    tokens = jax.vmap(draw)(knobs.seeds, positions, scores).astype(jnp.int32)
    return jnp.where(knobs.temperature > 0, tokens, likeliest)


class Probabilities(NamedTuple):
    """float32 log-probabilities of the model itself, before any processor: of the chosen token [B], and the likeliest
    tokens with theirs [B, n]."""

    chosen: Float[Array, "B"]
    tokens: Int[Array, "B n"]
    likeliest: Float[Array, "B n"]


def log_probabilities(logits: Float[Array, "B V"], tokens: Int[Array, "B"], alternatives: int) -> Probabilities:
    """The log-probability of each row's token, and of the `alternatives` likeliest tokens."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(scores, tokens[:, None], axis=-1)[:, 0]
    likeliest, ids = jax.lax.top_k(scores, alternatives)
    return Probabilities(chosen, ids.astype(jnp.int32), likeliest)


def _unpack_mask(packed: UInt32[Array, "B W"], vocab: int) -> Bool[Array, "B V"]:
    """A packed mask as one bool a token."""
    bits = (packed[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    return bits.reshape(packed.shape[0], -1)[:, :vocab] == 1


def _top_k(scores: Float[Array, "B V"], k: Int[Array, "B"]) -> Float[Array, "B V"]:
    """Keeps the k greatest, and all that equal the k-th; all where k is 0."""
    keys = _ordered_bits(scores)
    count = jnp.where(k > 0, jnp.minimum(k, scores.shape[-1]), scores.shape[-1])
    least = _greatest(lambda key: jnp.sum(keys >= key[:, None], axis=-1) >= count, scores.shape[0])
    return jnp.where(keys < least[:, None], -jnp.inf, scores)


def _top_p(scores: Float[Array, "B V"], p: Float[Array, "B"]) -> Float[Array, "B V"]:
    """Keeps the smallest set of likeliest tokens whose probability reaches p (https://arxiv.org/abs/1904.09751)."""
    keys, probabilities = _ordered_bits(scores), jax.nn.softmax(scores, axis=-1)

    def ruled_out(key: Array) -> Array:
        return jnp.sum(jnp.where(keys < key[:, None], probabilities, 0), axis=-1) <= 1 - p

    # The likeliest stays even where rounding leaves the whole row's sum at or below 1 - p.
    least = jnp.minimum(_greatest(ruled_out, scores.shape[0]), keys.max(-1))
    return jnp.where((keys < least[:, None]) & (p < 1)[:, None], -jnp.inf, scores)


def _min_p(scores: Float[Array, "B V"], p: Float[Array, "B"]) -> Float[Array, "B V"]:
    """Keeps tokens at least p times as likely as the likeliest (https://arxiv.org/abs/2407.01082)."""
    probabilities = jax.nn.softmax(scores, axis=-1)
    return jnp.where(probabilities < p[:, None] * probabilities.max(-1, keepdims=True), -jnp.inf, scores)


def _ordered_bits(scores: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
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
