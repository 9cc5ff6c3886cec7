"""Texts to score as a tree of token runs: what several texts begin with is one node, so that it is computed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

SMALLEST_SAVING = 24  # tokens that a shared node must save: each one is one more step of the computation


@dataclasses.dataclass(frozen=True)
class ScoredText:
    """A text as token ids; those from index `first` on are scored. The first token has no score."""

    ids: tuple[int, ...]
    first: int = 1

    def __post_init__(self):
        assert 0 < self.first < len(self.ids), f"{len(self.ids)} tokens, scored from {self.first}"


@dataclasses.dataclass
class Query:
    """Tokens to score after `positions` [n] of a node: `targets` [n], those of text number `text` from `offset` on."""

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


def prefix_tree(texts: Sequence[ScoredText], *, shared: bool = True) -> list[Node]:
    """The roots of the tree of `texts`. The last token of a text is no part of it, for nothing follows.

    A node with children saves at least SMALLEST_SAVING tokens; `shared=False` gives every distinct text a root.
    """
    by_input: dict[tuple[int, ...], list[int]] = {}
    for number, text in enumerate(texts):
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
    texts: Sequence[ScoredText],
    by_input: dict[tuple[int, ...], list[int]],
    sequence: tuple[int, ...],
    branch: _Branch,
) -> None:
    """Adds a node for the tokens that only one sequence has."""
    node = _add_node(roots, branch, sequence[branch.start :])
    _ask(texts, by_input[sequence], (*branch.path, node))


def _ask(texts: Sequence[ScoredText], numbers: list[int], path: tuple[Node, ...]) -> None:
    """Puts the scored tokens of texts to the nodes that hold the tokens before them."""
    for number in numbers:
        text = texts[number]
        for node in path:
            low, high = max(node.start, text.first - 1), min(node.end, len(text.ids) - 1)
            if low < high:
                positions = np.arange(low - node.start, high - node.start, dtype=np.int32)
                targets = np.asarray(text.ids[low + 1 : high + 1], np.int32)
                node.queries.append(Query(number, low + 1 - text.first, positions, targets))
