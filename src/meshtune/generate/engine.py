"""Generation: a compiled prefill and a compiled decode loop over a key-value cache.

Prompts of a batch stand at the left of their rows, filled up on the right with segment 0, which nothing sees and no
cache keeps: every row of the cache has a length of its own. Lengths are rounded up, so that few programs are compiled,
and the programs are shared by all engines of the same spec: parameters are arguments, so those of a run in training do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.generate.sampling import Knobs, Sampling, Switches, compiled_form, next_token
from meshtune.mesh.layout import constrain
from meshtune.model.cache import Cache, grown
from meshtune.model.compute import Compute
from meshtune.model.decoder import cache_specs, forward, head_params, init_cache, logits
from meshtune.model.inputs import Inputs
from meshtune.model.spec import ModelSpec

DEFAULT_TOKENS = 256  # generated at most when nobody says how many
ROOM = 512  # slots made at first for tokens to come; a longer text lets the cache grow
FEWEST_SLOTS = 128  # then powers of two: empty slots cost little, another length costs a compilation
STEPS = 16  # decode steps of one call of the compiled loop


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """A batch between two decode steps. `token` is the newest, not yet in the cache; `position` is its place."""

    cache: Cache
    token: Int[Array, "B"]
    position: Int[Array, "B"]
    done: Bool[Array, "B"]
    used: Bool[Array, "B V"]
    finite: Bool[Array, "B"]


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model ready to continue token ids. `stop_ids` end a row and are its last token."""

    params: Tree
    spec: ModelSpec
    compute: Compute
    stop_ids: frozenset[int] = frozenset()

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together, at most: the config's max_position_embeddings."""
        return self.spec.max_length

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        stop_ids: Iterable[int] | None = None,
        steps: int = STEPS,
    ) -> Run:
        """Starts on a batch of prompts of any lengths; iterate over the result for the new tokens.

        `max_tokens` new tokens a row at most; None is 256, or what the context still has room for. `steps` tokens a row
        come at once (1 to 16). Raises UserError for an empty prompt, a token id outside the vocabulary, and a prompt
        and max_tokens that together are longer than the context.
        """
        rows = [np.asarray(prompt, np.int32).reshape(-1) for prompt in prompts]
        room = self.context - self._longest(rows)
        if max_tokens is None:
            max_tokens = min(DEFAULT_TOKENS, room)
        if max_tokens < 1:
            raise UserError(f"max_tokens = {max_tokens} generates nothing", fix="give 1 or more")
        if max_tokens > room:
            raise UserError(
                f"a prompt of {self.context - room} tokens and max_tokens = {max_tokens} are more than the model's "
                f"context of {self.context} tokens",
                fix=f"give max_tokens = {room} at most, or shorten the prompt",
            )
        stops = self.stop_ids if stop_ids is None else frozenset(stop_ids)
        return Run(self, rows, sampling or Sampling(), max_tokens, stops, max(1, min(steps, STEPS)))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | None = None,
        *,
        max_tokens: int | None = None,
        stop_ids: Iterable[int] | None = None,
    ) -> list[list[int]]:
        """The new tokens of each prompt, a stop id included. See `run`."""
        answers: list[list[int]] = [[] for _ in prompts]
        for piece in self.run(prompts, sampling, max_tokens=max_tokens, stop_ids=stop_ids):
            for row, tokens in zip(answers, piece, strict=True):
                row.extend(tokens)
        return answers

    def _longest(self, rows: list[np.ndarray]) -> int:
        if not rows:
            raise UserError("there is no prompt", fix="give at least one")
        for number, row in enumerate(rows):
            where = f"prompt {number}" if len(rows) > 1 else None
            if row.size == 0:
                raise UserError("the prompt is empty", where=where, fix="give at least one token to continue from")
            if row.min() < 0 or row.max() >= self.spec.vocab:
                wrong = row[(row < 0) | (row >= self.spec.vocab)][0]
                raise UserError(
                    f"token id {wrong} is outside the model's vocabulary of {self.spec.vocab}",
                    where=where,
                    fix="use the tokenizer that belongs to the model",
                )
            if row.size >= self.context:
                raise UserError(
                    f"the prompt's {row.size} tokens leave no room in the model's context of {self.context} tokens",
                    where=where,
                    fix="shorten the prompt",
                )
        return max(row.size for row in rows)


class Run:
    """A batch being generated: iterating yields, piece by piece, each row's new tokens (none for a finished row)."""

    def __init__(
        self,
        engine: Engine,
        rows: list[np.ndarray],
        sampling: Sampling,
        max_tokens: int,
        stop_ids: frozenset[int],
        steps: int,
    ):
        self._engine, self._rows, self._max_tokens, self._steps = engine, rows, max_tokens, steps
        self._computed = _rows(len(rows))
        switches, self._knobs = compiled_form(sampling, self._computed)
        self._static = {"spec": engine.spec, "compute": engine.compute, "switches": switches}
        # Filled up to a multiple of 8 with an id that no token has, so that their number rarely compiles anew.
        stops = sorted(stop_ids)
        self._stop_ids = np.asarray(stops + [-1] * (8 - len(stops) % 8), np.int32)
        self._stopped = np.arange(self._computed) >= len(rows)

    def stop(self, row: int) -> None:
        """Ends a row, for reasons that only the reader of its text sees."""
        self._stopped[row] = True

    def __iter__(self) -> Iterator[list[list[int]]]:
        params, count = _with_head_settled(self._engine.params, self._engine.spec), len(self._rows)
        longest = max(row.size for row in self._rows)
        length = min(bucket(longest), self._engine.context)
        tokens = np.zeros((self._computed, length), np.int32)
        lengths = np.ones(self._computed, np.int32)
        for number, row in enumerate(self._rows):
            tokens[number, : row.size], lengths[number] = row, row.size
        state = _prefill(params, tokens, lengths, self._stop_ids, self._knobs, **self._static)
        self._check(state, 0)
        yield [[token] for token in np.asarray(state.token)[:count].tolist()]
        generated, filled = 1, length
        slots = length + min(self._max_tokens, ROOM)
        slots = max(FEWEST_SLOTS, 1 << (slots - 1).bit_length())
        state = _grown(state, spec=self._engine.spec, slots=slots, dtype=self._engine.compute.dtype)
        while generated < self._max_tokens and not (self._stopped | np.asarray(state.done)).all():
            steps = min(self._steps, self._max_tokens - generated)
            if filled + steps > slots:
                slots *= 2
                state = _grown(state, spec=self._engine.spec, slots=slots, dtype=self._engine.compute.dtype)
            state = dataclasses.replace(state, done=state.done | self._stopped)
            state, new = _decode(params, state, np.int32(steps), self._stop_ids, self._knobs, **self._static)
            self._check(state, generated)
            generated, filled = generated + steps, filled + steps
            yield [[token for token in row if token >= 0] for row in np.asarray(new)[:count].tolist()]

    def _check(self, state: State, generated: int) -> None:
        if not (finite := np.asarray(state.finite)).all():
            row = int(np.flatnonzero(~finite)[0])
            raise UserError(
                f"the model's logits are not finite near new token {generated}",
                where=f"prompt {row}" if len(self._rows) > 1 else None,
                fix="the weights overflow in this dtype (try float32), or hold NaN or infinity",
            )


def _with_head_settled(params: Tree, spec: ModelSpec) -> Tree:
    """With what the rows of a normalised head are divided by, once for all tokens to come."""
    if not spec.norm_head or spec.scored:
        return params
    return params | {"head": params["head"] | {"scale": _head_scale(params["head"], spec=spec)}}


@partial(jax.jit, static_argnames="spec")
def _head_scale(head: Tree, *, spec: ModelSpec) -> Array:
    return head_params({"head": head}, spec)["scale"]


def _rows(n: int) -> int:
    """The next of 1, 2, 4, 6, 8, 12, 16, ...: rows that are filled up cost less than another compilation."""
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if 4 < n <= power * 3 // 4 else power


def bucket(n: int) -> int:
    """The next of 32, 48, 64, 96, 128, ...: at most half as much again, and few different lengths."""
    power = 1 << max(5, (n - 1).bit_length())
    return power * 3 // 4 if 32 < n <= power * 3 // 4 else power


@partial(jax.jit, static_argnames=("spec", "compute", "switches"))
def _prefill(
    params: Tree,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    stop_ids: Int[Array, "n"],
    knobs: Knobs,
    *,
    spec: ModelSpec,
    compute: Compute,
    switches: Switches,
) -> State:
    """Reads the prompts and chooses each row's first new token."""
    B, T = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    real = positions < lengths[:, None]
    cache = init_cache(spec, B, T, compute.dtype, compute.layout)
    positions = jnp.where(real, positions, 0)
    hidden, cache, _ = forward(params, spec, compute, Inputs(tokens, positions, real.astype(jnp.int32)), cache=cache)
    assert cache is not None
    last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)
    used = jnp.zeros((B, spec.vocab if switches.penalty else 0), bool)
    if switches.penalty:
        # Padding is scattered out of bounds, which is dropped.
        used = used.at[jnp.arange(B)[:, None], jnp.where(real, tokens, spec.vocab)].set(True, mode="drop")
    none_done = jnp.zeros(B, bool)
    before = State(cache, tokens[:, 0], lengths - 1, none_done, used, ~none_done)
    return _on_all(_chosen(params, spec, before, last, stop_ids, switches, knobs), compute)


@partial(jax.jit, static_argnames=("spec", "compute", "switches"), donate_argnames=("state",))
def _decode(
    params: Tree,
    state: State,
    steps: Int[Array, ""],
    stop_ids: Int[Array, "n"],
    knobs: Knobs,
    *,
    spec: ModelSpec,
    compute: Compute,
    switches: Switches,
) -> tuple[State, Int[Array, "B STEPS"]]:
    """`steps` decode steps, fewer once all rows are done; tokens that were not made are -1."""

    def step(carry: tuple[Array, State, Array]) -> tuple[Array, State, Array]:
        i, state, new = carry
        alive = (~state.done).astype(jnp.int32)[:, None]
        inputs = Inputs(state.token[:, None], state.position[:, None], alive)
        hidden, cache, _ = forward(params, spec, compute, inputs, cache=state.cache)
        after = dataclasses.replace(state, cache=cache)
        after = _chosen(params, spec, after, hidden, stop_ids, switches, knobs)
        return i + 1, after, new.at[:, i].set(jnp.where(state.done, -1, after.token))

    def unfinished(carry: tuple[Array, State, Array]) -> Array:
        i, state, _ = carry
        return (i < steps) & ~state.done.all()

    new = jnp.full((state.token.shape[0], STEPS), -1, jnp.int32)
    _, state, new = jax.lax.while_loop(unfinished, step, (jnp.int32(0), state, new))
    return _on_all(state, compute), constrain(new, compute.layout, "whole", "whole")


def _on_all(state: State, compute: Compute) -> State:
    """What the host reads of a state, on every device: a process sees only its own devices' parts."""
    token, done, finite = (constrain(x, compute.layout, "whole") for x in (state.token, state.done, state.finite))
    return dataclasses.replace(state, token=token, done=done, finite=finite)


def _chosen(
    params: Tree,
    spec: ModelSpec,
    state: State,
    hidden: Array,
    stop_ids: Int[Array, "n"],
    switches: Switches,
    knobs: Knobs,
) -> State:
    """The state with the token after `hidden` [B, 1, D] chosen."""
    scores = logits(params, spec, hidden)[:, 0]
    position = state.position + 1
    token = next_token(scores, state.used, position, switches, knobs)
    used = state.used
    if switches.penalty:
        used = used.at[jnp.arange(token.shape[0]), token].set(True)
    # A finished row sees nothing, so what it computes does not matter.
    finite = state.finite & (state.done | jnp.isfinite(scores).all(-1))
    done = state.done | (token[:, None] == stop_ids).any(-1)
    return State(state.cache, token, position, done, used, finite)


@partial(jax.jit, static_argnames=("spec", "slots", "dtype"))
def _grown(state: State, *, spec: ModelSpec, slots: int, dtype: str) -> State:
    """The same state with room for `slots` tokens a row."""
    specs = cache_specs(spec, state.token.shape[0], slots, dtype)
    return dataclasses.replace(state, cache=grown(state.cache, specs))
