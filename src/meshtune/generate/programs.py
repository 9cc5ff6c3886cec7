"""The compiled programs of generation: reading prompts into rows of a cache, decoding all rows, moving rows.

The devices hold the caches of a batch of rows and nothing else that outlives a call: which token comes next, how long a
row is, how it is sampled and which adapter it selects are small arrays from the host. Programs are shared by all
engines of the same spec, for parameters are arguments; their shapes are bucketed (`rows_bucket`, `length_bucket`), so
that few are compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from meshtune.adapters.multi_lora import select
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.generate.sampling import Counts, Knobs, Probabilities, Switches, log_probabilities, next_token
from meshtune.mesh.layout import constrain
from meshtune.model.cache import SLOTS, Cache
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, head_params, logits
from meshtune.model.inputs import Inputs
from meshtune.model.model_cache import cache_specs, init_cache
from meshtune.model.spec import ModelSpec

STEPS = 16  # decode steps of one call, at most


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Feed:
    """The state of every row before a decode step.

    `token` is the newest and not yet in the cache, `length` the number of tokens that are; `remaining` is how many may
    still be generated (0: the row is empty or done). `stop_ids`, -1 where there is none, end a row.
    """

    token: Int[Array, "B"]
    length: Int[Array, "B"]
    remaining: Int[Array, "B"]
    stop_ids: Int[Array, "B n"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoded:
    """The result of a call of `decode`: tokens (-1 where there was none), their log-probabilities with the likeliest
    alternatives (None where they were not asked for), and whether every logit was finite."""

    tokens: Int[Array, "B STEPS"]
    probabilities: Probabilities | None
    finite: Bool[Array, "B"]


def rows_bucket(n: int) -> int:
    """The next of 1, 2, 4, 6, 8, 12, 16, ...: rows that are filled up cost less than another compilation."""
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if 4 < n <= power * 3 // 4 else power


def length_bucket(n: int) -> int:
    """The next of 32, 48, 64, 96, 128, ...: at most half as much again, and few different lengths."""
    power = 1 << max(5, (n - 1).bit_length())
    return power * 3 // 4 if 32 < n <= power * 3 // 4 else power


@partial(jax.jit, static_argnames=("spec", "compute", "rows", "slots"))
def empty_layers(spec: ModelSpec, compute: Compute, rows: int, slots: int) -> dict[str, Tree]:
    """The empty caches of `rows` rows of `slots` tokens."""
    return init_cache(spec, rows, slots, compute.dtype, compute.layout, compute.cache).layers


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
        before = Cache(jax.tree.map(lambda array: array[:, source], layers), length)
    _, after = read_tokens(select(params, adapters), spec, compute, before, tokens, count)
    return _place_rows(layers, after, target)


def read_tokens(
    params: Tree, spec: ModelSpec, compute: Compute, cache: Cache, tokens: Int[Array, "n T"], count: Int[Array, "n"]
) -> tuple[Float[Array, "n T D"], dict[str, Tree]]:
    """The hidden states of `count` more tokens a row, and the cache's layers after them."""
    steps = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    real = steps < count[:, None]
    positions = jnp.where(real, cache.lengths[:, None] + steps, 0)
    hidden, after, _ = forward(params, spec, compute, Inputs(tokens, positions, real.astype(jnp.int32)), cache=cache)
    assert after is not None
    return hidden, after.layers


def _place_rows(layers: dict[str, Tree], rows: dict[str, Tree], target: Int[Array, "n"]) -> dict[str, Tree]:
    """The caches with some rows replaced; those may have fewer slots."""

    def place(array: Array, new: Array) -> Array:
        assert array.ndim == new.ndim
        within = (slice(None), target, *(slice(0, size) for size in new.shape[2:]))
        return array.at[within].set(new, mode="drop")

    return jax.tree.map(place, layers, rows)


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
        hidden, cache, _ = forward(params, spec, compute, inputs, cache=Cache(layers, feed.length))
        assert cache is not None
        scores = logits(params, spec, hidden)[:, 0]
        token = next_token(scores, counts, feed.length + 1, switches, knobs)
        decoded = _note_step(decoded, i, alive, scores, token)
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
    decoded: Decoded, step: Array, alive: Bool[Array, "B"], scores: Float[Array, "B V"], token: Int[Array, "B"]
) -> Decoded:
    """With what step number `step` generated."""
    tokens = decoded.tokens.at[:, step].set(jnp.where(alive, token, -1))
    # A row that is not alive sees nothing, so what it computes does not matter.
    finite = decoded.finite & (~alive | jnp.isfinite(scores).all(-1))
    probabilities = decoded.probabilities
    if probabilities is not None:
        new = log_probabilities(scores, token, probabilities.tokens.shape[-1])
        probabilities = jax.tree.map(lambda all_, value: all_.at[:, step].set(value), probabilities, new)
    return Decoded(tokens, probabilities, finite)


@partial(jax.jit, static_argnames=("spec", "compute", "slots"))
def move_rows(
    layers: dict[str, Tree], source: Int[Array, "n"], *, spec: ModelSpec, compute: Compute, slots: int
) -> dict[str, Tree]:
    """The caches of `n` rows, each a copy of row `source` of these, with room for `slots` tokens.

    No row may be longer than a cache whose slots become more.
    """
    specs = cache_specs(spec, source.shape[0], slots, compute.dtype, compute.cache)

    def move(array: Array, form: ArraySpec) -> Array:
        rows = array[:, source]
        rows = jnp.pad(rows, [(0, new - old) for old, new in zip(rows.shape, form.shape, strict=True)])
        return constrain(rows, compute.layout, *form.axes)

    return jax.tree.map(move, layers, specs)


@partial(jax.jit, static_argnames="spec")
def head_scale(head: Tree, *, spec: ModelSpec) -> Array:
    """The divisors of the rows of a normalised head, once for all tokens to come."""
    return head_params({"head": head}, spec)["scale"]
