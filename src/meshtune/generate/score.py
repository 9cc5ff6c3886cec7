"""The log-probability of every token of a text, given those before it: of one text, and of many at once.

Of many texts what several begin with is read once, into a cache from which they go on (`prefix_tree`); texts that share
nothing are packed into rows. Logits exist only where a token is scored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from meshtune.arrays.tree import Tree
from meshtune.data.packing import pack
from meshtune.generate.prefix_tree import Node, Query, ScoredText, prefix_tree
from meshtune.generate.programs import empty_layers, length_bucket, move_rows, read_tokens
from meshtune.generate.request import Token
from meshtune.generate.sampling import Probabilities, log_probabilities
from meshtune.generate.score_plan import Planner, Run
from meshtune.mesh.layout import Layout, constrain
from meshtune.model.cache import Cache
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, head_logits, head_params
from meshtune.model.inputs import Inputs
from meshtune.model.spec import ModelSpec

CHUNK = 128  # tokens whose logits exist at once
ROW = 512  # tokens of a packed row, at least
TOKENS = {"cpu": 2048}  # computed at once
OTHER_TOKENS = 16384
TARGETS = 4  # tokens that are scored at once after one position
BY_LENGTH = ("dynamic", "ntk", "longrope")  # rotations that depend on a text's length: no two texts begin alike

Progress = Callable[[int, int], None]
"""(tokens computed, tokens in all)"""


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scored tokens of a text: float32 log-probabilities [n], and whether each was the likeliest, bool [n]."""

    log_probabilities: np.ndarray
    likeliest: np.ndarray


def token_log_probabilities(
    params: Tree, spec: ModelSpec, compute: Compute, ids: list[int], alternatives: int = 0
) -> list[Token]:
    """Every token of a text but the first, with its float32 log-probability and the likeliest tokens in its place."""
    padded = -(-length_bucket(len(ids)) // CHUNK) * CHUNK
    tokens = np.zeros(padded, np.int32)
    tokens[: len(ids)] = ids
    scored = _score_tokens(params, tokens, np.int32(len(ids)), spec=spec, compute=compute, alternatives=alternatives)
    chosen, likeliest, values = (np.asarray(part)[: len(ids) - 1].tolist() for part in scored)
    return [
        Token(id_, probability, tuple(zip(ids_likely, scores, strict=True)))
        for id_, probability, ids_likely, scores in zip(ids[1:], chosen, likeliest, values, strict=True)
    ]


def score_texts(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    texts: Sequence[ScoredText],
    progress: Progress | None = None,
) -> list[Scores]:
    """The scores of every text, in their order; never over a cache in codes, whatever `compute` says of answers."""
    compute = dataclasses.replace(compute, cache=None)
    shared = not any(rope.kind in BY_LENGTH for rope in spec.ropes)
    roots = prefix_tree(texts, shared=shared)
    scorer = _Scorer(params, spec, compute, texts, progress or (lambda done, total: None), _size(roots))
    scorer.packed([node for node in roots if not node.children])
    scorer.branches([node for node in roots if node.children])
    return scorer.scores


def _size(nodes: Sequence[Node]) -> int:
    """The tokens of nodes and all below them."""
    total, remaining = 0, list(nodes)
    while remaining:
        node = remaining.pop()
        total += len(node.tokens)
        remaining += node.children
    return total


@dataclasses.dataclass(frozen=True)
class _Parents:
    """The caches of nodes, with their number of slots, and the row of the parent of each of their children."""

    layers: dict[str, Tree]
    slots: int
    row_of: dict[Node, int]


class _Scorer:
    """A pass over a tree; `scores` is filled node by node."""

    def __init__(
        self,
        params: Tree,
        spec: ModelSpec,
        compute: Compute,
        texts: Sequence[ScoredText],
        progress: Progress,
        total: int,
    ):
        self._params, self._spec, self._compute = params, spec, compute
        self._progress, self._done, self._total = progress, 0, total
        self._at_once = TOKENS.get(jax.default_backend(), OTHER_TOKENS)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(params["layers"]))
        self._planner = Planner.of(jax.default_backend(), parameters, self._at_once, total)
        lengths = [len(text.ids) - text.first for text in texts]
        self.scores = [Scores(np.zeros(n, np.float32), np.zeros(n, bool)) for n in lengths]

    def packed(self, nodes: Sequence[Node]) -> None:
        """Scores nodes that are whole texts, several in a row, each a segment."""
        if not nodes:
            return
        lengths = np.asarray([len(node.tokens) for node in nodes])
        length = (
            max(ROW, length_bucket(int(lengths.max()))) if lengths.sum() > ROW else length_bucket(int(lengths.sum()))
        )
        planned = pack(lengths, np.arange(len(nodes)), length)
        rows = [planned[n].tolist() for n in range(len(planned))]
        count = max(1, self._at_once // length)
        for start in range(0, len(rows), count):
            group = rows[start : start + count]
            tokens, positions, segments = (np.zeros((min(count, len(rows)), length), np.int32) for _ in range(3))
            queries: list[tuple[int, Query]] = []
            for row, members in enumerate(group):
                at = 0
                for segment, number in enumerate(members, 1):
                    node = nodes[number]
                    end = at + len(node.tokens)
                    tokens[row, at:end], segments[row, at:end] = node.tokens, segment
                    positions[row, at:end] = np.arange(len(node.tokens))
                    queries += [(row * length + at, query) for query in node.queries]
                    at = end
            inputs = (tokens, positions, segments)
            self._answer(_hidden(self._params, *inputs, spec=self._spec, compute=self._compute), queries)
            self._count(sum(len(nodes[number].tokens) for members in group for number in members))

    def branches(self, nodes: Sequence[Node], parents: _Parents | None = None) -> None:
        """Scores nodes that go on from rows of a cache (None: from nothing), and all below them."""
        row_of = parents.row_of if parents else {}
        runs = [Run(len(node.tokens), node.end) for node in nodes]
        for members, shape in self._planner.groups(runs, parents.slots if parents else 32):
            chunk, rows, length, slots = [nodes[n] for n in members], shape.rows, shape.length, shape.slots
            source, start, count = (np.zeros(rows, np.int32) for _ in range(3))
            tokens = np.zeros((rows, length), np.int32)
            queries: list[tuple[int, Query]] = []
            for row, node in enumerate(chunk):
                source[row], start[row], count[row] = row_of.get(node, 0), node.start, len(node.tokens)
                tokens[row, : len(node.tokens)] = node.tokens
                queries += [(row * length, query) for query in node.queries]
            static = {"spec": self._spec, "compute": self._compute}
            if parents is None:
                before = empty_layers(self._spec, self._compute, rows, slots)
            else:
                before = move_rows(parents.layers, source, slots=slots, **static)
            hidden, after = _read(self._params, before, tokens, start, count, **static)
            self._answer(hidden, queries)
            self._count(int(count.sum()))
            below = {child: row for row, node in enumerate(chunk) for child in node.children}
            if below:
                self.branches(list(below), _Parents(after, slots, below))

    def _answer(self, hidden: Array, queries: Sequence[tuple[int, Query]]) -> None:
        """Answers queries from hidden states [N, D], each query with the index of its node's first token."""
        if not queries:
            return
        places = np.concatenate([base + query.positions for base, query in queries])
        targets = np.concatenate([query.targets for _, query in queries])
        scored, likeliest = self._heads(hidden, places, targets)
        at = 0
        for _, query in queries:
            end = at + len(query.targets)
            scores = self.scores[query.text]
            span = slice(query.offset, query.offset + len(query.targets))
            scores.log_probabilities[span], scores.likeliest[span] = scored[at:end], likeliest[at:end]
            at = end

    def _heads(self, hidden: Array, places: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The log-probability of each target after its place, and whether it is the likeliest token there."""
        order = np.argsort(places, kind="stable")
        ordered = places[order]
        new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
        first = np.maximum.accumulate(np.where(new, np.arange(len(ordered)), 0))
        within = np.arange(len(ordered)) - first  # the how-manieth target of its place
        entry = np.cumsum(within % TARGETS == 0) - 1
        entries = int(entry[-1]) + 1
        size = 32 if entries <= 32 else CHUNK
        padded = -(-entries // size) * size
        place, several = np.zeros(padded, np.int32), np.zeros((padded, TARGETS), np.int32)
        place[entry], several[entry, within % TARGETS] = ordered, targets[order]
        parts = [
            _target_scores(
                self._params,
                hidden,
                place[n : n + size],
                several[n : n + size],
                spec=self._spec,
                layout=self._compute.layout,
            )
            for n in range(0, padded, size)
        ]
        scored, likeliest = np.empty(len(order), np.float32), np.empty(len(order), bool)
        values, greedy = (np.concatenate([np.asarray(part[n]) for part in parts]) for n in (0, 1))
        scored[order] = values[entry, within % TARGETS]
        likeliest[order] = greedy[entry, within % TARGETS]
        return scored, likeliest

    def _count(self, tokens: int) -> None:
        self._done += tokens
        self._progress(self._done, self._total)


@partial(jax.jit, static_argnames=("spec", "compute"))
def _hidden(
    params: Tree,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    *,
    spec: ModelSpec,
    compute: Compute,
) -> Array:
    hidden = forward(params, spec, compute, Inputs(tokens, positions, segments)).hidden
    return hidden.reshape(-1, hidden.shape[-1])


@partial(jax.jit, static_argnames=("spec", "compute"), donate_argnames=("layers",))
def _read(
    params: Tree,
    layers: dict[str, Tree],
    tokens: Int[Array, "n T"],
    start: Int[Array, "n"],
    count: Int[Array, "n"],
    *,
    spec: ModelSpec,
    compute: Compute,
) -> tuple[Array, dict[str, Tree]]:
    """Reads `count` tokens a row into a cache whose rows hold `start` tokens: hidden states [n * T, D], the caches."""
    hidden, after = read_tokens(params, spec, compute, Cache(layers, start), tokens, count)
    return hidden.reshape(-1, hidden.shape[-1]), after


@partial(jax.jit, static_argnames=("spec", "layout"))
def _target_scores(
    params: Tree,
    hidden: Array,
    places: Int[Array, "n"],
    targets: Int[Array, "n k"],
    *,
    spec: ModelSpec,
    layout: Layout | None,
) -> tuple[Array, Array]:
    """The log-probabilities [n, k] of `targets` after the hidden states at `places`, and whether each is the
    likeliest; whole on every device."""
    logits = head_logits(head_params(params, spec), hidden[places], spec)
    chosen = jnp.take_along_axis(logits, targets, axis=-1)
    total = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
    likeliest = targets == jnp.argmax(logits, axis=-1)[:, None]
    return constrain(chosen - total, layout, "whole", "whole"), constrain(likeliest, layout, "whole", "whole")


@partial(jax.jit, static_argnames=("spec", "compute", "alternatives"))
def _score_tokens(
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
    head, following = head_params(params, spec, hidden), jnp.roll(tokens, -1)

    def chunk(part: tuple[Array, Array]) -> Probabilities:
        return log_probabilities(head_logits(head, part[0], spec), part[1], alternatives)

    parts = jax.lax.map(chunk, (hidden.reshape(-1, CHUNK, hidden.shape[-1]), following.reshape(-1, CHUNK)))
    flat = jax.tree.map(lambda part: part.reshape(part.shape[0] * part.shape[1], *part.shape[2:]), parts)
    return jax.tree.map(lambda part: constrain(part, compute.layout, *("whole",) * part.ndim), flat)
