"""Prompts for rollouts, in an order that is a function of (seed, rollout)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshtune.data.conversation import Origin
from meshtune.data.packing import shuffle_order
from meshtune.data.store import Store
from meshtune.lazy import LazyFunction

if TYPE_CHECKING:
    from meshtune.config.sections import RolloutSection
    from meshtune.data.answered_prompts import AnsweredPrompts
    from meshtune.data.pictures.expansion import DocumentPicture
    from meshtune.data.pictures.reader import PictureReader
    from meshtune.data.pictures.rows import RowPictures

read_pictures = LazyFunction("meshtune.data.pictures.expansion:read_pictures")
prompt_pictures = LazyFunction("meshtune.data.pictures.rows:prompt_pictures")


@dataclasses.dataclass(frozen=True)
class PromptRecord:
    """A prompt: its token ids with those of its pictures, and the text or messages and the columns that rewards get.
    `index` is its place in the data."""

    index: int
    ids: list[int]
    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    origin: Origin
    pictures: Sequence[DocumentPicture] = ()


SHORT_ROW, MULTIPLE, LONG_MULTIPLE = 1024, 16, 128  # positions of a row that are a multiple of


def rollout_row_length(longest: int, rollout: RolloutSection, most: int, *, cp: int = 1) -> int:
    """Positions of a row for completions of prompts of at most `longest` tokens, `most` at most.

    As many whole groups (a prompt with all of its completions at their longest) fit as in rows of `most`; where none
    does, rows have `most` positions. A prompt is there once for its completions, or for each.
    """
    samples, prompt = rollout.samples, longest - 1
    prompts = 1 if rollout.shared_prompts is not False else samples
    group = prompts * prompt + samples * rollout.max_tokens
    multiple = max(2 * cp, MULTIPLE if most < SHORT_ROW else LONG_MULTIPLE)
    fitted = -(-(most // group) * group // multiple) * multiple
    return min(most, fitted) or most


def prompts_in_row(longest: int, rollout: RolloutSection, row_length: int, together: int = 1) -> int:
    """How many prompts of `longest` tokens are in a row with completions at their longest, at least the `together` of
    neighbours. A prompt is there once for its completions, or for each."""
    samples = 1 if rollout.shared_prompts is False else rollout.samples
    prompts = row_length // (longest - 1 + samples * rollout.max_tokens)
    return max(together, min(prompts, rollout.completions // samples))


class PromptLoader:
    """The prompts of every rollout, from a store. A rollout of `prompts` prompts serves `updates` updates.

    Every prompt is in every epoch once; a rollout may cross the border of two epochs. Batches have `batch_size` rows
    of `row_length` positions at most, in `accumulation` micro-batches. `reader` reads pictures; a row has `max_patches`
    patches (None: those of as many of the largest prompts as a row has room for, which are `copies`), and `pictures`
    makes their arrays (None: no prompt has one).
    """

    def __init__(
        self,
        store: Store | AnsweredPrompts,
        *,
        prompts: int,
        updates: int,
        row_length: int,
        batch_size: int,
        accumulation: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        reader: PictureReader | None = None,
        copies: int = 1,
        max_patches: int | None = None,
    ):
        self.store, self.prompts, self.updates, self.shuffle, self.seed = store, prompts, updates, shuffle, seed
        self.row_length, self.batch_size, self.accumulation, self.reader = row_length, batch_size, accumulation, reader
        self.pictures: RowPictures | None = None
        if reader is not None:
            self.pictures = prompt_pictures(reader, store, copies, max(1, prompts // updates), max_patches)

    def record(self, index: int) -> PromptRecord:
        """Reads a prompt of the store."""
        example = self.store[index]
        extra, pictures, columns = json.loads(example.extra), (), {}
        if "pictures" in extra:
            pictures = read_pictures(example.extra)
            columns = {"images": [item.picture.path for item in pictures]}
        columns |= extra["columns"]
        return PromptRecord(index, example.ids.tolist(), extra["prompt"], columns, example.origin, pictures)

    def rollout(self, number: int) -> list[PromptRecord]:
        """The prompts of a rollout, counted from 0."""
        count = len(self.store)
        places = range(number * self.prompts, (number + 1) * self.prompts)
        orders = {epoch: self._order(epoch) for epoch in {place // count for place in places}}
        return [self.record(int(orders[place // count][place % count])) for place in places]

    def _order(self, epoch: int) -> np.ndarray:
        count = len(self.store)
        return shuffle_order(count, self.seed, epoch) if self.shuffle else np.arange(count)

    def total_steps(self, epochs: float) -> int:
        """The number of updates in `epochs` epochs; the last rollout is complete."""
        return math.ceil(epochs * len(self.store) / self.prompts - 1e-9) * self.updates

    def epoch_position(self, step: int) -> tuple[int, int]:
        """The epoch of a step and the step's index in that epoch, both from 0."""
        epoch = step // self.updates * self.prompts // len(self.store)
        return epoch, step - self._first_step(epoch)

    def steps_per_epoch(self, epoch: int) -> int:
        """The number of updates whose rollouts begin in an epoch."""
        return self._first_step(epoch + 1) - self._first_step(epoch)

    def _first_step(self, epoch: int) -> int:
        return -(-epoch * len(self.store) // self.prompts) * self.updates
