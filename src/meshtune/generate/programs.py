"""The compiled programs of generation: reading prompts into rows of a cache, decoding all rows, choosing the next
token.

Order: grammar mask, logit bias, repetition, frequency and presence penalties, temperature, top-k, top-p, min-p
(transformers' `_get_logits_processor`, with OpenAI's penalties where vLLM has them); then a draw with a key that
depends on only the row's seed and the token's position, so the same seed gives the same text however the work is cut.

The devices hold the caches of a batch of rows and nothing else that outlives a call: which token comes next, how long a
row is, how it is sampled and which adapter it selects are small arrays from the host. Programs are shared by all
engines of the same spec, for parameters are arguments; their shapes are bucketed (`rows_bucket`, `length_bucket`), so
that few are compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from meshtune.adapters.adapter_set import select
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.generate.request import WORD, Sampling
from meshtune.mesh.layout import constrain
from meshtune.model.cache import SLOTS, Cache
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, head_params, logits
from meshtune.model.inputs import Inputs
from meshtune.model.model_cache import cache_specs, init_cache, split_layers, stack_layers
from meshtune.model.spec import ModelSpec

if TYPE_CHECKING:
    from meshtune.generate.visual import Pictures

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
    reports_drawn: bool = False  # log-probabilities are those of the processed logits

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


# The fields of Sampling that are the numbers of Knobs.
COLUMNS = {
    "temperature": ("temperature", "float32"),
    "top_k": ("top_k", "int32"),
    "top_p": ("top_p", "float32"),
    "min_p": ("min_p", "float32"),
    "repetition": ("repetition_penalty", "float32"),
    "presence": ("presence_penalty", "float32"),
    "frequency": ("frequency_penalty", "float32"),
    "seeds": ("seed", "uint32"),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """The tokens of every row: those of its prompt, and how often each was generated since. V is 0 where no processor
    reads them."""

    prompted: Bool[Array, "B V"]
    generated: Int[Array, "B V"]

    @classmethod
    def empty(cls, rows: int) -> Counts:
        """Counts of rows that no processor reads."""
        return cls(np.zeros((rows, 0), bool), np.zeros((rows, 0), np.int32))  # pyright: ignore[reportArgumentType]

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
    no_biases: Any = (np.zeros((len(samplings), 0), np.int32), np.zeros((len(samplings), 0), np.float32))
    biased, bias = _bias_arrays(samplings) if switches.bias else no_biases
    columns: dict[str, Any] = {
        knob: np.asarray([getattr(sampling, name) for sampling in samplings], dtype)
        for knob, (name, dtype) in COLUMNS.items()
    }
    return switches, Knobs(biased=biased, bias=bias, allowed=allowed, **columns)  # pyright: ignore[reportArgumentType]


def _bias_arrays(samplings: Sequence[Sampling]) -> tuple[Any, Any]:
    """The biased tokens of each row and what is added to their logits, in one of BIAS_SIZES columns; -1: no token."""
    longest = max(len(sampling.logit_bias) for sampling in samplings)
    size = next((size for size in BIAS_SIZES if size >= longest), longest)
    biased = np.full((len(samplings), size), -1, np.int32)
    bias = np.zeros((len(samplings), size), np.float32)
    for row, sampling in enumerate(samplings):
        for n, (token, value) in enumerate(sampling.logit_bias):
            biased[row, n], bias[row, n] = token, value
    return biased, bias


def process_logits(
    logits: Float[Array, "B V"], counts: Counts, switches: Switches, knobs: Knobs
) -> Float[Array, "B V"]:
    """The logits to draw from: float32, minus infinity where a token is ruled out."""
    logits = logits.astype(jnp.float32)
    if switches.constrained:
        logits = jnp.where(_unpack_mask(knobs.allowed, logits.shape[1]), logits, -jnp.inf)
    if switches.bias:
        rows = jnp.arange(logits.shape[0])[:, None]
        logits = logits.at[rows, jnp.where(knobs.biased < 0, logits.shape[1], knobs.biased)].add(
            knobs.bias, mode="drop"
        )
    if switches.repetition:
        # https://arxiv.org/abs/1909.05858, section 4.1; dividing a negative logit would favour it.
        penalty = knobs.repetition[:, None]
        occurred = counts.prompted | (counts.generated > 0)
        logits = jnp.where(occurred, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)
    if switches.frequency:
        logits -= knobs.frequency[:, None] * counts.generated
        logits -= knobs.presence[:, None] * (counts.generated > 0)
    if not switches.drawn:
        return logits
    logits = logits / jnp.where(knobs.temperature > 0, jnp.maximum(knobs.temperature, COLDEST), 1)[:, None]
    if switches.top_k:
        logits = _top_k(logits, knobs.top_k)
    if switches.top_p:
        logits = _top_p(logits, knobs.top_p)
    if switches.min_p:
        logits = _min_p(logits, knobs.min_p)
    return logits


def next_token(
    logits: Float[Array, "B V"],
    counts: Counts,
    positions: Int[Array, "B"],
    switches: Switches,
    knobs: Knobs,
) -> Int[Array, "B"]:
    """One token a row. `positions` are those that the tokens will have; they and the seeds are all the randomness."""
    return draw_token(process_logits(logits, counts, switches, knobs), positions, switches, knobs)


def draw_token(
    logits: Float[Array, "B V"], positions: Int[Array, "B"], switches: Switches, knobs: Knobs
) -> Int[Array, "B"]:
    """One token a row from processed logits: the likeliest, or the same as by `jax.random.categorical`."""
    if not switches.drawn:
        return _likeliest(logits)

    def noise(seed: Array, position: Array) -> Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), logits.shape[1:])

    perturbed = logits + jax.vmap(noise)(knobs.seeds, positions)
    return _likeliest(jnp.where((knobs.temperature > 0)[:, None], perturbed, logits))


def _likeliest(logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """The first of the greatest logits of each row; any token of a row with NaN.

    XLA on a CPU computes jnp.argmax one element after the other, and so whatever it reads: the noise of a draw.
    """
    size = logits.shape[1]
    tokens = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    first = jnp.where(logits == logits.max(-1, keepdims=True), tokens, size).min(-1)
    return jnp.minimum(first, size - 1)


class Probabilities(NamedTuple):
    """float32 log-probabilities of the model itself, before any processor, or of the distribution that was drawn from:
    of the chosen token [B], and the likeliest tokens with theirs [B, n]."""

    chosen: Float[Array, "B"]
    tokens: Int[Array, "B n"]
    likeliest: Float[Array, "B n"]


def log_probabilities(logits: Float[Array, "B V"], tokens: Int[Array, "B"], alternatives: int) -> Probabilities:
    """The log-probability of each row's token, and of the `alternatives` likeliest tokens."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]
    likeliest, ids = jax.lax.top_k(log_probs, alternatives)
    return Probabilities(chosen, ids.astype(jnp.int32), likeliest)


def _unpack_mask(packed: UInt32[Array, "B W"], vocab: int) -> Bool[Array, "B V"]:
    """A packed mask as one bool a token."""
    bits = (packed[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    return bits.reshape(packed.shape[0], -1)[:, :vocab] == 1


def _top_k(logits: Float[Array, "B V"], k: Int[Array, "B"]) -> Float[Array, "B V"]:
    """Keeps the k greatest, and all that equal the k-th; all where k is 0."""
    keys = _ordered_bits(logits)
    count = jnp.where(k > 0, jnp.minimum(k, logits.shape[-1]), logits.shape[-1])
    least = _greatest(lambda key: jnp.sum(keys >= key[:, None], axis=-1) >= count, logits.shape[0])
    return jnp.where(keys < least[:, None], -jnp.inf, logits)


def _top_p(logits: Float[Array, "B V"], p: Float[Array, "B"]) -> Float[Array, "B V"]:
    """Keeps the smallest set of likeliest tokens whose probability reaches p (https://arxiv.org/abs/1904.09751)."""
    keys, probabilities = _ordered_bits(logits), jax.nn.softmax(logits, axis=-1)

    def ruled_out(key: Array) -> Array:
        return jnp.sum(jnp.where(keys < key[:, None], probabilities, 0), axis=-1) <= 1 - p

    # The likeliest stays even where rounding leaves the whole row's sum at or below 1 - p.
    least = jnp.minimum(_greatest(ruled_out, logits.shape[0]), keys.max(-1))
    return jnp.where((keys < least[:, None]) & (p < 1)[:, None], -jnp.inf, logits)


def _min_p(logits: Float[Array, "B V"], p: Float[Array, "B"]) -> Float[Array, "B V"]:
    """Keeps tokens at least p times as likely as the likeliest (https://arxiv.org/abs/2407.01082)."""
    probabilities = jax.nn.softmax(logits, axis=-1)
    return jnp.where(probabilities < p[:, None] * probabilities.max(-1, keepdims=True), -jnp.inf, logits)


def _ordered_bits(logits: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Whole numbers in the same order as the floats (their bits, with the negative half turned over)."""
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _greatest(holds: Callable[[Array], Array], rows: int) -> UInt32[Array, "B"]:
    """The greatest number of 32 bits for which `holds`, which holds below it and not above; 0 if it never does.

    A cut in a row of logits is found so, bit by bit in 32 passes, because sorting 50,000 of them takes XLA on a CPU as
    long as half a decode step of a 135M model.
    """

    def step(i: Array, threshold: Array) -> Array:
        tried = threshold | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(holds(tried), tried, threshold)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros(rows, jnp.uint32))


STEPS = 16  # decode steps of one call, at most


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Feed:
    """The state of every row before a decode step.

    `token` is the newest and not yet in the cache, `length` the number of tokens that are; `remaining` is how many may
    still be generated (0: the row is empty or done). `stop_ids`, -1 where there is none, end a row. `rope_offset` is
    added to a token's place for its M-RoPE position, and `prefix` is the number of a row's first tokens that see each
    other whatever the window; None: no row has one.
    """

    token: Int[Array, "B"]
    length: Int[Array, "B"]
    remaining: Int[Array, "B"]
    stop_ids: Int[Array, "B n"]
    rope_offset: Int[Array, "B"] | None = None
    prefix: Int[Array, "B"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoded:
    """The result of a call of `decode`: tokens (-1 where there was none), their log-probabilities with the likeliest
    alternatives (None where they were not asked for), and whether every logit was finite."""

    tokens: Int[Array, "B STEPS"]
    probabilities: Probabilities | None
    finite: Bool[Array, "B"]


def length_bucket(n: int) -> int:
    """The next of 16, 32, 48, 64, 96, 128, ...: at most half as much again, and few different lengths."""
    power = 1 << max(4, (n - 1).bit_length())
    return power * 3 // 4 if 32 < n <= power * 3 // 4 else power


@partial(jax.jit, static_argnames=("spec", "compute", "rows", "slots", "by_layer"))
def empty_layers(
    spec: ModelSpec, compute: Compute, rows: int, slots: int, *, by_layer: bool = False
) -> dict[str, Tree]:
    """The empty caches of `rows` rows of `slots` tokens."""
    return init_cache(spec, rows, slots, compute.dtype, compute.layout, compute.cache, by_layer=by_layer).layers


@functools.lru_cache(maxsize=64)
def holds_every_token(spec: ModelSpec, compute: Compute, slots: int) -> bool:
    """Whether a cache remembers each of its tokens by itself, so that a row can go back to any earlier length: true of
    keys, values and latents, false of windows and of recurrent states."""
    specs = jax.tree.leaves(
        cache_specs(spec, 1, slots, compute.dtype, compute.cache), is_leaf=lambda leaf: isinstance(leaf, ArraySpec)
    )
    return all(SLOTS in leaf.axes and leaf.shape[leaf.axes.index(SLOTS)] == slots for leaf in specs)


@partial(jax.jit, static_argnames=("spec", "compute"), donate_argnames=("layers",))
def read(
    params: Tree,
    layers: dict[str, Tree],
    tokens: Int[Array, "n T"],
    count: Int[Array, "n"],
    target: Int[Array, "n"],
    source: Int[Array, "n"] | None = None,
    length: Int[Array, "n"] | None = None,
    pictures: Pictures | None = None,
    *,
    spec: ModelSpec,
    compute: Compute,
    adapters: Float[Array, "n N"] | None = None,
) -> dict[str, Tree]:
    """Reads the first `count` tokens of each text into rows `target` of a cache (rows beyond its end: nowhere).

    A text continues after the first `length` tokens of row `source`; None: it begins. `adapters` are one where a text
    selects an adapter (adapters.multi_lora); None where there are none to select.
    """
    if source is None:
        rows, width = tokens.shape
        before = init_cache(spec, rows, width, compute.dtype, compute.layout, compute.cache)
    else:
        assert length is not None
        before = Cache(stack_layers(_rows_of(layers, source)), length)
    _, after = read_tokens(select(params, adapters), spec, compute, before, tokens, count, pictures)
    return _place_rows(layers, split_layers(after, layers), target)


def _rows_of(layers: dict[str, Tree], rows: Int[Array, "n"]) -> dict[str, Tree]:
    return jax.tree.map(lambda array: array[:, rows], layers)


def read_tokens(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    cache: Cache,
    tokens: Int[Array, "n T"],
    count: Int[Array, "n"],
    pictures: Pictures | None = None,
) -> tuple[Float[Array, "n T D"], dict[str, Tree]]:
    """The hidden states of `count` more tokens a row, and the cache's layers after them."""
    steps = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    real = steps < count[:, None]
    positions = jnp.where(real, cache.lengths[:, None] + steps, 0)
    inputs = Inputs(tokens, positions, real.astype(jnp.int32))
    inputs = inputs if pictures is None else pictures.add_to(inputs)
    hidden, after, _ = forward(params, spec, compute, inputs, cache=cache)
    assert after is not None
    return hidden, after.layers


def _place_rows(layers: dict[str, Tree], rows: dict[str, Tree], target: Int[Array, "n"]) -> dict[str, Tree]:
    """The caches with some rows replaced; those may have fewer slots."""

    def place(array: Array, new: Array) -> Array:
        assert array.ndim == new.ndim
        within = (slice(None), target, *(slice(0, size) for size in new.shape[2:]))
        return array.at[within].set(new, mode="drop")

    return jax.tree.map(place, layers, rows)


@partial(jax.jit, donate_argnames=("layers",))
def copy_rows(layers: dict[str, Tree], source: Int[Array, "n"], target: Int[Array, "n"]) -> dict[str, Tree]:
    """The caches with rows `target` replaced by copies of rows `source` (rows beyond the end: nowhere)."""
    return _place_rows(layers, _rows_of(layers, source), target)


@partial(jax.jit, static_argnames=("spec", "compute", "switches", "alternatives"), donate_argnames=("layers", "counts"))
def decode(
    params: Tree,
    layers: dict[str, Tree],
    counts: Counts,
    feed: Feed,
    knobs: Knobs,
    steps: Int[Array, ""],
    leave: Bool[Array, ""],
    *,
    spec: ModelSpec,
    compute: Compute,
    switches: Switches,
    alternatives: int | None,
    adapters: Float[Array, "B N"] | None = None,
) -> tuple[dict[str, Tree], Counts, Decoded]:
    """`steps` decode steps (at most STEPS), fewer once every row is done, or with `leave` one of them.

    `alternatives` is the number of likeliest tokens to report with each one; None: no log-probabilities.
    `adapters` are as in `read`.
    """
    params = select(params, adapters)
    B, started = feed.token.shape[0], jnp.sum(feed.remaining > 0)

    def step(carry: tuple[Array, dict[str, Tree], Counts, Feed, Decoded]):
        i, layers, counts, feed, decoded = carry
        alive = feed.remaining > 0
        inputs = Inputs(feed.token[:, None], feed.length[:, None], alive.astype(jnp.int32)[:, None])
        if feed.rope_offset is not None:
            inputs = dataclasses.replace(inputs, rope_positions=(feed.length + feed.rope_offset)[:, None])
        if (prefix := feed.prefix) is not None:
            inputs = dataclasses.replace(inputs, reach=jnp.where(feed.length < prefix, prefix - 1, 0)[:, None])
        hidden, cache, _ = forward(params, spec, compute, inputs, cache=Cache(layers, feed.length))
        assert cache is not None
        token_logits = logits(params, spec, hidden)[:, 0]
        processed = process_logits(token_logits, counts, switches, knobs)
        token = draw_token(processed, feed.length + 1, switches, knobs)
        decoded = _note_step(
            decoded, i, alive, token_logits, token, processed if switches.reports_drawn else token_logits
        )
        stopped = (token[:, None] == feed.stop_ids).any(-1)
        remaining = jnp.where(alive & ~stopped, feed.remaining - 1, 0)
        feed = dataclasses.replace(feed, token=token, length=cache.lengths, remaining=remaining)
        return i + 1, cache.layers, counts.add(token, alive), feed, decoded

    def is_unfinished(carry: tuple[Array, dict[str, Tree], Counts, Feed, Decoded]) -> Array:
        alive = jnp.sum(carry[3].remaining > 0)
        return (carry[0] < steps) & (alive > jnp.where(leave, started - 1, 0))

    start = (jnp.int32(0), layers, counts, feed, _empty_decoded(B, alternatives))
    _, layers, counts, _, decoded = jax.lax.while_loop(is_unfinished, step, start)
    # A process sees only its own devices' parts, and all processes continue from the generated tokens.
    decoded = jax.tree.map(lambda x: constrain(x, compute.layout, *("whole",) * x.ndim), decoded)
    return layers, counts, decoded


def _empty_decoded(rows: int, alternatives: int | None) -> Decoded:
    probabilities = None
    if alternatives is not None:
        chosen, several = jnp.zeros((rows, STEPS)), (rows, STEPS, alternatives)
        probabilities = Probabilities(chosen, jnp.zeros(several, jnp.int32), jnp.zeros(several))
    return Decoded(jnp.full((rows, STEPS), -1, jnp.int32), probabilities, jnp.ones(rows, bool))


def _note_step(
    decoded: Decoded,
    step: Array,
    alive: Bool[Array, "B"],
    logits: Float[Array, "B V"],
    token: Int[Array, "B"],
    reported: Float[Array, "B V"],
) -> Decoded:
    """With what step number `step` generated; log-probabilities are those of the logits `reported`."""
    tokens = decoded.tokens.at[:, step].set(jnp.where(alive, token, -1))
    # A row that is not alive sees nothing, so what it computes does not matter.
    finite = decoded.finite & (~alive | jnp.isfinite(logits).all(-1))
    probabilities = decoded.probabilities
    if probabilities is not None:
        new = log_probabilities(reported, token, probabilities.tokens.shape[-1])
        probabilities = jax.tree.map(lambda all_, value: all_.at[:, step].set(value), probabilities, new)
    return Decoded(tokens, probabilities, finite)


@partial(jax.jit, static_argnames=("spec", "compute", "slots"))
def move_rows(
    layers: dict[str, Tree], source: Int[Array, "n"], *, spec: ModelSpec, compute: Compute, slots: int
) -> dict[str, Tree]:
    """The caches of `n` rows, each a copy of row `source` of these, with room for `slots` tokens.

    No row may be longer than a cache whose slots become more.
    """
    by_layer = any(isinstance(node, tuple) for node in layers.values())
    specs = cache_specs(spec, source.shape[0], slots, compute.dtype, compute.cache, by_layer=by_layer)

    def move(array: Array, form: ArraySpec) -> Array:
        rows = array[:, source]
        rows = jnp.pad(rows, [(0, new - old) for old, new in zip(rows.shape, form.shape, strict=True)])
        return constrain(rows, compute.layout, *form.axes)

    return jax.tree.map(move, layers, specs)


@partial(jax.jit, static_argnames="spec")
def head_scale(head: Tree, *, spec: ModelSpec) -> Array:
    """The divisors of the rows of a normalised head, once for all tokens to come."""
    return head_params({"head": head}, spec)["scale"]


def every_logit(
    params: Tree, spec: ModelSpec, compute: Compute, ids: Int[np.ndarray, "B T"]
) -> Float[np.ndarray, "B T V"]:
    """The float32 logits of every position, computed over rows of a bucketed length."""
    B, T = ids.shape
    tokens = np.zeros((B, length_bucket(T)), np.int32)
    tokens[:, :T] = ids
    return np.array(_logits(params, tokens, np.int32(T), spec=spec, compute=compute)[:, :T])


@functools.partial(jax.jit, static_argnames=("spec", "compute"))
def _logits(params: Tree, tokens: jax.Array, length: jax.Array, *, spec: ModelSpec, compute: Compute) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    real = positions < length
    inputs = Inputs(tokens, jnp.where(real, positions, 0), real.astype(jnp.int32))
    token_logits = logits(params, spec, forward(params, spec, compute, inputs).hidden)
    return constrain(token_logits, compute.layout, *("whole",) * token_logits.ndim)


def token_rows(token_ids: ArrayLike | Sequence[object], vocab: int) -> np.ndarray:
    """Token ids as rows [B, T]. Raises UserError for rows of different lengths and ids outside the vocabulary."""
    try:
        ids = np.asarray(token_ids)
    except ValueError as problem:
        raise UserError(
            "rows of token ids differ in length", where="token_ids", fix="give one row at a time"
        ) from problem
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(
            f"token_ids has shape {ids.shape} and dtype {ids.dtype}",
            where="token_ids",
            fix="give a row of whole numbers, or several rows of one length",
        )
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if wrong.size:
        raise UserError(f"token id {wrong[0]} is outside the model's vocabulary of {vocab}", where="token_ids")
    return ids
