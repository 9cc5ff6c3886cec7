"""Rows of training batches that hold a prompt once for all of its completions.

A row holds prompt[:-1] as one segment, which predicts nothing, and every completion as a segment [last prompt token,
completion[:-1]] that continues it (`parent_ids`): its first position, the branch token, predicts the completion's first
token. So every position has one target, and the last prompt token of each completion is all that is repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from meshtune.kernels.attention import BACKENDS
from meshtune.kernels.attention.backend import NO_PARENTS
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec
from meshtune.model.stacks import adjusted_buffers
from meshtune.translatable import Translatable

ROPES_BY_LENGTH = ("dynamic", "longrope")


def shared_prompts_obstacle(spec: ModelSpec, compute: Compute) -> str | None:
    """The reason why completions cannot share their prompt in rows of this model and these kernels, or None.

    The way out is always to repeat the prompts (rollout.shared_prompts=false).
    """
    if not compute.packed:
        return Translatable("a row holds one document (data.packing)")
    for layer in spec.layer_kinds:
        if layer.mixer is not None and layer.mixer.row_params() is None:
            return Translatable("its layers '{mixer}' read tokens in the order of the row", mixer=layer.mixer.name)
    for rope in spec.ropes:
        if rope.kind in ROPES_BY_LENGTH:
            return Translatable("its rotary embedding '{kind}' depends on the length of a document", kind=rope.kind)
    counts = ({name: jnp.zeros(shape) for name, shape in block.sums().items()} for block in spec.blocks)
    losses = [block.loss(sums) for block, sums in zip(spec.blocks, counts, strict=True)]
    if adjusted_buffers(spec) or any(loss is not None for loss in losses):
        return Translatable("its routers are balanced by the number of tokens, in which a prompt would count once")
    return _backend_obstacle(spec, dataclasses.replace(compute, shared_prompts=True))


def _backend_obstacle(spec: ModelSpec, compute: Compute) -> str | None:
    """The reason of a backend that compute.attention names."""
    requests = [layer.mixer.attention_request(1, 1024, 1024, compute) for layer in spec.layer_kinds if layer.mixer]
    for backend in BACKENDS:
        refusals = [backend.refusal(request) for request in requests if request is not None]
        if backend.name == compute.attention and NO_PARENTS in refusals:
            return Translatable("attention backend '{name}': {reason}", name=backend.name, reason=NO_PARENTS)
    return None


class Placement(NamedTuple):
    """Some of a group's completions in one row, by their numbers, after the group's prompt."""

    group: int
    completions: tuple[int, ...]


Row = list[Placement]


def plan_shared_rows(
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[Sequence[int]],
    row_length: int,
    *,
    together: bool = False,
    patches: Sequence[int] | None = None,
    max_patches: int = 0,
) -> list[Row]:
    """Places all completions of all groups in rows of `row_length` positions, whose pictures have `max_patches` at
    most, each group's prompt `patches`.

    A group (one prompt, one entry in each argument, lengths in tokens) takes prompt - 1 positions and those of its
    completions, which have one each for every token. Groups are placed whole, by decreasing size in the fullest row
    with room; one that is longer than a row is split over rows, each with its prompt. Then rows are emptied, the
    emptiest first, where all of their completions find room in others, also apart; not so if they must be `together`.
    Equal arguments give equal rows.
    Raises: ValueError for a prompt and a completion that are longer than a row, or a prompt without tokens.
    """
    lengths = [list(group) for group in completion_lengths]
    for group, (prompt, completions) in enumerate(zip(prompt_lengths, lengths, strict=True)):
        if prompt < 1 or prompt - 1 + max(completions, default=0) > row_length:
            sizes = f"{prompt} and {max(completions, default=0)} tokens"
            raise ValueError(f"group {group}: a prompt and a completion of {sizes} for rows of {row_length}")
    prompts = [prompt - 1 for prompt in prompt_lengths]
    rows = _Rows(prompts, lengths, row_length, patches or [0] * len(prompts), max_patches)
    pieces = [piece for group in range(len(lengths)) for piece in rows.split(group)]
    for group, completions in sorted(pieces, key=lambda piece: (-rows.size(*piece), piece)):
        place = rows.fullest_row(group, rows.size(group, completions))
        rows.contents[place].setdefault(group, []).extend(completions)
    if not together:
        rows.remove_sparse_rows()
    return [
        [Placement(group, tuple(sorted(completions))) for group, completions in sorted(content.items())]
        for content in rows.contents
    ]


@dataclasses.dataclass
class _Rows:
    """The rows of a plan: `contents` are the completions of each group in each row, `prompts` the positions that each
    group's prompt takes, `lengths` those of its completions, `patches` those of its prompt's pictures."""

    prompts: list[int]
    lengths: list[list[int]]
    row_length: int
    patches: Sequence[int]
    max_patches: int
    contents: list[dict[int, list[int]]] = dataclasses.field(default_factory=list)

    def size(self, group: int, completions: Sequence[int]) -> int:
        """The positions of a prompt with some of its completions."""
        return self.prompts[group] + sum(self.lengths[group][n] for n in completions)

    def free(self, content: dict[int, list[int]]) -> int:
        return self.row_length - sum(self.size(group, completions) for group, completions in content.items())

    def has_patches(self, content: dict[int, list[int]], group: int) -> bool:
        """Whether a row has room for the pictures of one more group."""
        return sum(self.patches[n] for n in {*content, group}) <= self.max_patches

    def split(self, group: int) -> list[tuple[int, list[int]]]:
        """The group in pieces that fit a row each: one, or as few as first-fit by decreasing length makes."""
        pieces: list[list[int]] = []
        for n in self.by_length(group, range(len(self.lengths[group]))):
            fitting = (piece for piece in pieces if self.size(group, [*piece, n]) <= self.row_length)
            piece = next(fitting, None)
            if piece is None:
                pieces.append([n])
            else:
                piece.append(n)
        return [(group, piece) for piece in pieces]

    def by_length(self, group: int, completions: Sequence[int]) -> list[int]:
        return sorted(completions, key=lambda n: (-self.lengths[group][n], n))

    def fullest_row(self, group: int, size: int) -> int:
        """The index of the fullest row with room for `size` positions of a group, of a new one if there is none."""
        fitting = [
            (free, place)
            for place, content in enumerate(self.contents)
            if (free := self.free(content)) >= size and self.has_patches(content, group)
        ]
        if fitting:
            return min(fitting)[1]
        self.contents.append({})
        return len(self.contents) - 1

    def remove_sparse_rows(self) -> None:
        """Removes rows, the emptiest first, whose completions all find room in other rows."""
        while True:
            emptiest_first = sorted(range(len(self.contents)), key=lambda place: -self.free(self.contents[place]))
            plans = (self._without_row(place) for place in emptiest_first)
            fewer = next((plan for plan in plans if plan is not None), None)
            if fewer is None:
                return
            self.contents = fewer

    def _without_row(self, place: int) -> list[dict[int, list[int]]] | None:
        """The contents of all rows but one, with its completions among them; None where they have no room."""
        rows = [{group: list(numbers) for group, numbers in content.items()} for content in self.contents]
        content = rows.pop(place)
        for group in sorted(content):
            for n in self.by_length(group, content[group]):
                if not self._add(rows, group, n):
                    return None
        return rows

    def _add(self, contents: list[dict[int, list[int]]], group: int, n: int) -> bool:
        """Adds a completion to the fullest row with room that has its prompt, else to the emptiest one; False where
        none has room."""
        length, prompt = self.lengths[group][n], self.prompts[group]
        room = [(place, self.free(content), group in content) for place, content in enumerate(contents)]
        sharing = [(free, place) for place, free, has_prompt in room if has_prompt and free >= length]
        emptier = [
            (-free, place)
            for place, free, has_prompt in room
            if not has_prompt and free >= prompt + length and self.has_patches(contents[place], group)
        ]
        if not (sharing or emptier):
            return False
        contents[min(sharing or emptier)[1]].setdefault(group, []).append(n)
        return True


class Span(NamedTuple):
    """The positions start..stop of a row that predict a completion's tokens, and the number of their segment."""

    row: int
    start: int
    stop: int
    segment: int


def fill_shared_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Sequence[int]]],
    rows: Sequence[Row],
    row_length: int,
) -> tuple[dict[str, np.ndarray[Any, Any]], list[list[Span]]]:
    """(tokens, targets, positions, segment_ids and parent_ids int32 [rows, row_length]; the span of every completion of
    every group), from the token ids of prompts and completions and their rows by `plan_shared_rows`, of which some may
    be empty."""
    names = ("tokens", "targets", "positions", "segment_ids", "parent_ids")
    arrays = {name: np.zeros((len(rows), row_length), np.int32) for name in names}
    spans = [[Span(0, 0, 0, 0)] * len(group) for group in completions]
    for number, row in enumerate(rows):
        start = segment = 0
        for group, chosen in row:
            *prompt, branch = prompts[group]
            parent = 0
            if prompt:
                parent = segment = segment + 1
                span = slice(start, start := start + len(prompt))
                arrays["tokens"][number, span] = prompt
                arrays["targets"][number, span] = prompts[group][1:]
                arrays["positions"][number, span] = np.arange(len(prompt))
                arrays["segment_ids"][number, span] = segment
            for n in chosen:
                ids = completions[group][n]
                segment += 1
                span = slice(start, start := start + len(ids))
                arrays["tokens"][number, span] = [branch, *ids][:-1]
                arrays["targets"][number, span] = ids
                arrays["positions"][number, span] = len(prompt) + np.arange(len(ids))
                arrays["segment_ids"][number, span] = segment
                arrays["parent_ids"][number, span] = parent
                spans[group][n] = Span(number, span.start, span.stop, segment)
    return arrays, spans
