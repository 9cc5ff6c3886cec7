"""Log-probabilities of the tokens of many texts; those that begin alike are read once.

The unit of cost is the computation of one token through the layers.

Of many texts what several begin with is read once, into a cache from which they go on (`prefix_tree`); texts that share
nothing are packed into rows. Logits exist only where a log-probability is asked for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from meshtune.arrays.tree import Tree
from meshtune.data.packing import pack
from meshtune.generate.pictures import PromptPictures, with_prefix
from meshtune.generate.programs import (
    Probabilities,
    empty_layers,
    length_bucket,
    log_probabilities,
    move_rows,
    read_tokens,
)
from meshtune.generate.request import Token
from meshtune.generate.visual import Pictures, text_pictures
from meshtune.mesh.layout import Layout, constrain
from meshtune.model.cache import Cache
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, head_logits, head_params
from meshtune.model.inputs import Inputs
from meshtune.model.model_cache import bucket, floor_bucket
from meshtune.model.spec import ModelSpec

SMALLEST_SAVING = 24  # tokens that a shared node must save: each one is one more step of the computation


@dataclasses.dataclass(frozen=True)
class TargetText:
    """A text as token ids, with its pictures; those from index `first` on are its targets. The first token cannot be
    one."""

    ids: tuple[int, ...]
    first: int = 1
    pictures: PromptPictures | None = None

    def __post_init__(self):
        assert 0 < self.first < len(self.ids), f"{len(self.ids)} tokens, targets from {self.first}"


@dataclasses.dataclass
class Query:
    """Targets after `positions` [n] of a node: `targets` [n], tokens of text number `text` from `offset` on."""

    text: int
    offset: int
    positions: np.ndarray
    targets: np.ndarray


@dataclasses.dataclass(eq=False)
class Node:
    """A run of `tokens` [n] int32 whose first is at position `start`; the tokens before it are its parents'."""

    tokens: np.ndarray
    start: int
    children: list[Node] = dataclasses.field(default_factory=list)
    queries: list[Query] = dataclasses.field(default_factory=list)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


@dataclasses.dataclass
class _Branch:
    """Sorted sequences `low` to `high` that begin alike; the nodes above hold their first `start` tokens."""

    low: int
    high: int
    start: int
    parent: Node | None
    path: tuple[Node, ...]


def prefix_tree(texts: Sequence[TargetText], *, shared: bool = True) -> list[Node]:
    """The roots of the tree of those `texts` that have no pictures. The last token of a text is no part of it, for
    nothing follows.

    A node with children saves at least SMALLEST_SAVING tokens; `shared=False` gives every distinct text a root.
    """
    by_input: dict[tuple[int, ...], list[int]] = {}
    for number, text in enumerate(texts):
        if text.pictures is None:
            by_input.setdefault(text.ids[:-1], []).append(number)
    sequences = sorted(by_input)
    roots: list[Node] = []
    branches = [_Branch(0, len(sequences), 0, None, ())] if shared and sequences else []
    if not shared:
        branches = [_Branch(n, n + 1, 0, None, ()) for n in range(len(sequences))]
    while branches:
        branch = branches.pop()
        first, last = sequences[branch.low], sequences[branch.high - 1]
        common = _common(first, last, branch.start)
        groups = _groups(sequences, branch, common)
        ends_here = branch.low if len(first) == common else None
        if groups:
            saved = (len(groups) + (ends_here is not None) - 1) * (common - branch.start)
            if saved < SMALLEST_SAVING:
                if ends_here is not None:
                    _leaf(roots, texts, by_input, sequences[ends_here], branch)
                branches += [_Branch(low, high, branch.start, branch.parent, branch.path) for low, high in groups]
                continue
        if not groups:
            _leaf(roots, texts, by_input, first, branch)
            continue
        node = _add_node(roots, branch, first[branch.start : common])
        path = (*branch.path, node)
        if ends_here is not None:
            _ask(texts, by_input[first], path)
        branches += [_Branch(low, high, common, node, path) for low, high in groups]
    return roots


def _common(first: tuple[int, ...], last: tuple[int, ...], start: int) -> int:
    """The length of what two sequences have in common, at least `start`."""
    end = min(len(first), len(last))
    equal = np.asarray(first[start:end]) == np.asarray(last[start:end])
    return start + (int(np.argmin(equal)) if not equal.all() else end - start)


def _groups(sequences: list[tuple[int, ...]], branch: _Branch, common: int) -> list[tuple[int, int]]:
    """The ranges of sequences that go on with one token after the `common` ones."""
    groups: list[tuple[int, int]] = []
    number = branch.low + (len(sequences[branch.low]) == common)
    while number < branch.high:
        start, token = number, sequences[number][common]
        while number < branch.high and sequences[number][common] == token:
            number += 1
        groups.append((start, number))
    return groups


def _add_node(roots: list[Node], branch: _Branch, tokens: tuple[int, ...]) -> Node:
    node = Node(np.asarray(tokens, np.int32), branch.start)
    (roots if branch.parent is None else branch.parent.children).append(node)
    return node


def _leaf(
    roots: list[Node],
    texts: Sequence[TargetText],
    by_input: dict[tuple[int, ...], list[int]],
    sequence: tuple[int, ...],
    branch: _Branch,
) -> None:
    """Adds a node for the tokens that only one sequence has."""
    node = _add_node(roots, branch, sequence[branch.start :])
    _ask(texts, by_input[sequence], (*branch.path, node))


def _ask(texts: Sequence[TargetText], numbers: list[int], path: tuple[Node, ...]) -> None:
    """Puts the targets of texts to the nodes that hold the tokens before them."""
    for number in numbers:
        text = texts[number]
        for node in path:
            low, high = max(node.start, text.first - 1), min(node.end, len(text.ids) - 1)
            if low < high:
                positions = np.arange(low - node.start, high - node.start, dtype=np.int32)
                targets = np.asarray(text.ids[low + 1 : high + 1], np.int32)
                node.queries.append(Query(number, low + 1 - text.first, positions, targets))


CACHED = 8  # slots of a cache for each token computed at once, at most
COPY = 1 / 16  # of a slot of a row's cache
ATTENTION = 1 / 3000  # of a slot, for every token that sees it
CALL = {"cpu": 64.0}  # of reading the weights once
OTHER_CALL = 256.0
STEP = {"cpu": 4}  # what lengths are multiples of
OTHER_STEP = 16  # of the tiles of matrix units
COMPILE = {"cpu": 1.5e11}  # of a program: the FLOPs that its seconds are worth
OTHER_COMPILE = 3e14


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of `length` tokens that ends at position `end` of its text."""

    length: int
    end: int


@dataclasses.dataclass(frozen=True)
class Shape:
    """The number of rows, of tokens in each, and of slots of their cache."""

    rows: int
    length: int
    slots: int

    @property
    def cost(self) -> float:
        """Of computing all of it, padding included."""
        return self.rows * (self.length * (1 + ATTENTION * self.slots) + COPY * self.slots)


@dataclasses.dataclass
class Planner:
    """Groups runs into shapes of at most `at_once` tokens; `compiled` are the shapes that need no compilation.

    `total` are the tokens of all runs to come; `call` and `compile` are the costs of a call and of a program,
    and lengths are multiples of `step`.
    """

    at_once: int
    total: int
    call: float
    compile: float
    step: int
    compiled: set[Shape] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, backend: str, parameters: int, at_once: int, total: int) -> Planner:
        """A planner for a model with this number of parameters: the more, the fewer tokens a compilation is worth."""
        cost = COMPILE.get(backend, OTHER_COMPILE) / (2 * max(1, parameters))
        return cls(at_once, total, CALL.get(backend, OTHER_CALL), cost, STEP.get(backend, OTHER_STEP))

    def groups(self, runs: Sequence[Run], slots_before: int) -> list[tuple[list[int], Shape]]:
        """The numbers of the runs that are computed at once, with their shape; no cache has fewer slots than before.

        Runs sorted by length are cut where the sum of all costs is least. A program that is new is expected to be of
        use to later groups too, the more the smaller a part of all runs these are.
        """
        tokens = max(self.at_once, sum(run.length for run in runs))
        compile = self.compile / math.sqrt(max(1, self.total / tokens))
        order = sorted(range(len(runs)), key=lambda n: (runs[n].length, runs[n].end))
        steps = [list(members) for _, members in itertools.groupby(order, lambda n: bucket(runs[n].length, self.step))]
        ends = [max(runs[n].end for n in members) for members in steps]
        best: list[tuple[float, int]] = [(0.0, 0)]  # (cost of the first n steps, where the last of their spans begins)
        for high in range(1, len(steps) + 1):
            length, count, end, options = bucket(runs[steps[high - 1][0]].length, self.step), 0, slots_before, []
            for low in range(high - 1, -1, -1):
                count, end = count + len(steps[low]), max(end, ends[low])
                span = self._span(count, length, end, compile)
                options.append((best[low][0] + self._cost(span, compile), low))
            best.append(min(options))
        groups, high = [], len(steps)
        while high:
            low = best[high][1]
            members = [n for step in steps[low:high] for n in step]
            end = max(slots_before, *ends[low:high])
            length = bucket(runs[members[-1]].length, self.step)
            for times, shape in self._span(len(members), length, end, compile):
                self.compiled.add(shape)
                for _ in range(times):
                    groups.append((members[-shape.rows :], shape))
                    members = members[: -shape.rows]
            assert not members
            high = low
        return groups

    def _span(self, count: int, length: int, slots: int, compile: float) -> list[tuple[int, Shape]]:
        """How often which shape is computed for `count` rows, the cheapest way: full ones, and one for what remains."""
        slots = bucket(slots, 32)
        row_limit = max(1, min(self.at_once // length, CACHED * self.at_once // slots))
        existing = [shape for shape in self.compiled if shape.length >= length and shape.slots >= slots]
        exact = {
            Shape(floor_bucket(min(row_limit, count)), length, slots),
            Shape(min(bucket(count, 1), row_limit), length, slots),
        }
        spans = []
        for full in (*exact, *existing):
            times, remaining = divmod(count, full.rows)
            span = [(times, full)] if times else []
            if remaining:
                remainders = [shape for shape in (*existing, full) if shape.rows >= remaining]
                remainders.append(Shape(min(bucket(remaining, 1), row_limit), length, slots))
                span.append((1, min(remainders, key=lambda shape: self._cost([*span, (1, shape)], compile))))
            spans.append(span)
        return min(spans, key=lambda span: (self._cost(span, compile), str(span)))

    def _cost(self, span: Sequence[tuple[int, Shape]], compile: float) -> float:
        new = {shape for _, shape in span} - self.compiled
        return sum(times * (shape.cost + self.call) for times, shape in span) + len(new) * compile


CHUNK = 128  # tokens whose logits exist at once
ROW = 512  # tokens of a packed row, at least
TOKENS = {"cpu": 2048}  # computed at once
OTHER_TOKENS = 16384
TARGETS = 4  # targets at once after one position
BY_LENGTH = ("dynamic", "ntk", "longrope")  # rotations that depend on a text's length: no two texts begin alike

Progress = Callable[[int, int], None]
"""(tokens computed, tokens in all)"""


@dataclasses.dataclass(frozen=True)
class TargetLogProbs:
    """The targets of a text: float32 log-probabilities [n], and whether each was the likeliest, bool [n]."""

    log_probabilities: np.ndarray
    likeliest: np.ndarray


def token_log_probabilities(
    params: Tree, spec: ModelSpec, compute: Compute, ids: list[int], alternatives: int = 0
) -> list[Token]:
    """Every token of a text but the first, with its float32 log-probability and the likeliest tokens in its place."""
    padded = -(-length_bucket(len(ids)) // CHUNK) * CHUNK
    tokens = np.zeros(padded, np.int32)
    tokens[: len(ids)] = ids
    log_probs = _token_log_probs(
        params, tokens, np.int32(len(ids)), spec=spec, compute=compute, alternatives=alternatives
    )
    chosen, likeliest, values = (np.asarray(part)[: len(ids) - 1].tolist() for part in log_probs)
    return [
        Token(id_, probability, tuple(zip(ids_likely, log_probs, strict=True)))
        for id_, probability, ids_likely, log_probs in zip(ids[1:], chosen, likeliest, values, strict=True)
    ]


def target_log_probs(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    texts: Sequence[TargetText],
    progress: Progress | None = None,
) -> list[TargetLogProbs]:
    """The log-probabilities of every text's targets, in order; never over a cache in codes, whatever `compute` says."""
    compute = dataclasses.replace(compute, cache=None)
    if spec.vision is not None and spec.vision.mutual == "prefix":
        texts = [dataclasses.replace(text, pictures=with_prefix(text.pictures, text.first)) for text in texts]
    shared = not any(rope.kind in BY_LENGTH for rope in spec.ropes)
    roots = prefix_tree(texts, shared=shared)
    pictured = [number for number, text in enumerate(texts) if text.pictures is not None]
    total = _size(roots) + sum(len(texts[number].ids) - 1 for number in pictured)
    tree_pass = _TreePass(params, spec, compute, texts, progress or (lambda done, total: None), total)
    tree_pass.packed([node for node in roots if not node.children])
    tree_pass.branches([node for node in roots if node.children])
    for number in pictured:
        tree_pass.pictured(number)
    return tree_pass.results


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


class _TreePass:
    """A pass over a tree; `results` are filled node by node."""

    def __init__(
        self,
        params: Tree,
        spec: ModelSpec,
        compute: Compute,
        texts: Sequence[TargetText],
        progress: Progress,
        total: int,
    ):
        self._params, self._spec, self._compute, self._texts = params, spec, compute, texts
        self._progress, self._done, self._total = progress, 0, total
        self._at_once = TOKENS.get(jax.default_backend(), OTHER_TOKENS)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(params["layers"]))
        self._planner = Planner.of(jax.default_backend(), parameters, self._at_once, total)
        lengths = [len(text.ids) - text.first for text in texts]
        self.results = [TargetLogProbs(np.zeros(n, np.float32), np.zeros(n, bool)) for n in lengths]

    def packed(self, nodes: Sequence[Node]) -> None:
        """Computes nodes that are whole texts, several in a row, each a segment."""
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

    def pictured(self, number: int) -> None:
        """Computes a text with pictures, in a row by itself."""
        text, options = self._texts[number], {"spec": self._spec, "compute": self._compute}
        assert text.pictures is not None
        node = Node(np.asarray(text.ids[:-1], np.int32), 0)
        _ask(self._texts, [number], (node,))
        count, length = len(node.tokens), length_bucket(len(node.tokens))
        tokens, positions, segments = np.zeros((3, 1, length), np.int32)
        tokens[0, :count], positions[0, :count], segments[0, :count] = node.tokens, np.arange(count), 1
        pictures = text_pictures(self._params, text.pictures, count, length, **options)
        hidden = _hidden(self._params, tokens, positions, segments, pictures, **options)
        self._answer(hidden, [(0, query) for query in node.queries])
        self._count(count)

    def branches(self, nodes: Sequence[Node], parents: _Parents | None = None) -> None:
        """Computes nodes that go on from rows of a cache (None: from nothing), and all below them."""
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
        log_probs, likeliest = self._heads(hidden, places, targets)
        at = 0
        for _, query in queries:
            end = at + len(query.targets)
            result = self.results[query.text]
            span = slice(query.offset, query.offset + len(query.targets))
            result.log_probabilities[span], result.likeliest[span] = log_probs[at:end], likeliest[at:end]
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
            _log_probs_of_targets(
                self._params,
                hidden,
                place[n : n + size],
                several[n : n + size],
                spec=self._spec,
                layout=self._compute.layout,
            )
            for n in range(0, padded, size)
        ]
        log_probs, likeliest = np.empty(len(order), np.float32), np.empty(len(order), bool)
        values, greedy = (np.concatenate([np.asarray(part[n]) for part in parts]) for n in (0, 1))
        log_probs[order] = values[entry, within % TARGETS]
        likeliest[order] = greedy[entry, within % TARGETS]
        return log_probs, likeliest

    def _count(self, tokens: int) -> None:
        self._done += tokens
        self._progress(self._done, self._total)


@partial(jax.jit, static_argnames=("spec", "compute"))
def _hidden(
    params: Tree,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    pictures: Pictures | None = None,
    *,
    spec: ModelSpec,
    compute: Compute,
) -> Array:
    inputs = Inputs(tokens, positions, segments)
    hidden = forward(params, spec, compute, inputs if pictures is None else pictures.add_to(inputs)).hidden
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
def _log_probs_of_targets(
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
def _token_log_probs(
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
