"""Batches as a pure function of (seed, step): documents in packed rows, alone or in units that are compared.

Steps are numbered across epochs, and every document is in every epoch exactly once. If the rows of an epoch do not fill
its last batch, padding rows (segment 0, weight 0) are added: no document is left out, shapes never change, and since
losses are sums over weights, padding does not affect them.

Neighbouring documents of a store are a unit; in a packed row they are neighbouring segments. Properties of units are
further arrays of a batch (see objectives.answers.Batch).
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshtune.arrays.batch import TOKEN_ARRAYS, empty_arrays
from meshtune.config.data_options import TokenOptions
from meshtune.data.conversation import Conversation, Document, Labelled, Origin, Pair
from meshtune.data.packing import (
    PackedRows,
    index_type,
    most_that_fit,
    pack,
    padded_length,
    shuffle_order,
    unpacked_rows,
)
from meshtune.data.store import Store
from meshtune.data.tokens import Example, Tokenize
from meshtune.errors import UserError
from meshtune.lazy import LazyFunction
from meshtune.objectives.config import NllMean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.data.pictures.reader import PictureReader
    from meshtune.data.pictures.rows import RowPictures
    from meshtune.objectives.stages import DatasetType

prompt_reach = LazyFunction("meshtune.data.pictures.rows:prompt_reach")
row_pictures = LazyFunction("meshtune.data.pictures.rows:row_pictures")


@dataclasses.dataclass(frozen=True)
class Units:
    """Options of the arrays that a batch of units of `segments` documents has in addition to those of tokens.

    `reference` float32 [documents] are log-probabilities of a reference model. `nll` requests the weights of the first
    documents' cross-entropy, over their answers or all their tokens. With `nll_mean` pairs the weights of each unit add
    up to one; with tokens they add up to the number of units in one update or, with `nll_share` (units per token of the
    whole store), in all updates of an epoch together.
    """

    segments: int = 2
    reference: np.ndarray | None = None
    nll: Literal["answer", "all"] | None = None
    nll_mean: NllMean = "tokens"
    nll_share: float | None = None

    def arrays(
        self,
        row_values: Sequence[Sequence[float]],
        row_units: Sequence[np.ndarray],
        sizes: Mapping[str, int],
        tokens: Mapping[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """The arrays of rows with the units `row_units`, whose values are `row_values`: units, values, and where they
        are asked for reference and nll (see arrays.batch, and `sizes` of its axes)."""
        arrays = empty_arrays(["units", "values", *(["reference"] if self.reference is not None else [])], sizes)
        for row, (units, values) in enumerate(zip(row_units, row_values, strict=True)):
            arrays["units"][row, : len(units)] = 1.0
            arrays["values"][row, : len(units)] = values
            if self.reference is not None:
                of_units = self.reference.reshape(-1, self.segments)[units].ravel()
                arrays["reference"][row, : len(of_units)] = of_units
        if self.nll is not None:
            first = (tokens["segment_ids"] > 0) & ((tokens["segment_ids"] - 1) % self.segments == 0)
            counted = first if self.nll == "all" else first & (tokens["weights"] > 0)
            if self.nll_mean == "pairs":
                share = _reciprocal_counts(tokens["segment_ids"], counted)
            else:
                share = self.nll_share or float(arrays["units"].sum()) / max(1, int(counted.sum()))
            arrays["nll"] = np.where(counted, share, 0.0).astype(np.float32)
        return arrays


def _reciprocal_counts(segment_ids: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """For each position, one over the number of counted positions of its segment: float64 [rows, T]."""
    shares = np.zeros(segment_ids.shape)
    for row, (segments, selected) in enumerate(zip(segment_ids, counted, strict=True)):
        shares[row] = 1 / np.maximum(1, np.bincount(segments[selected], minlength=segments.max() + 1))[segments]
    return shares


def nll_share(store: Store, units: Units) -> float | None:
    """Units per token that `units.nll` counts, over a whole store; None without it."""
    if units.nll is None:
        return None
    if units.nll == "all":
        tokens = int((store.lengths[:: units.segments] - 1).sum())
    else:
        documents = range(0, len(store), units.segments)
        tokens = sum(int(np.count_nonzero(store[document].weights[1:])) for document in documents)
    return len(store) / units.segments / max(1, tokens)


def tokenise_pairs(tokenize: Tokenize, pairs: Iterable[Pair], *, score_position: bool = False) -> Iterator[Example]:
    """Two examples per pair, the chosen answer first. A pair with nothing to train on in either side is left out.

    With `score_position` only the position after an answer's last token has a weight, where its score is read.
    """
    pending: list[Pair] = []

    def sides():
        for pair in pairs:
            pending.append(pair)
            yield pair.chosen
            yield pair.rejected

    examples = tokenize.tokenise_each(sides(), sides=2)
    for chosen in examples:
        rejected, pair = next(examples), pending.pop(0)
        if chosen is None or rejected is None or np.array_equal(chosen.ids, rejected.ids):
            _uncount(tokenize, chosen, rejected)
            continue
        for side in (chosen, rejected):
            example = dataclasses.replace(side, value=pair.margin)
            yield _with_score_position(example) if score_position else example


def tokenise_labelled(tokenize: Tokenize, samples: Iterable[Labelled]) -> Iterator[Example]:
    """Two examples per labelled answer: the answer itself and its companion (see `with_companions`)."""
    return with_companions(tokenise_answers(tokenize, samples), tokenize.options.max_length)


def tokenise_answers(tokenize: Tokenize, samples: Iterable[Labelled]) -> Iterator[Example]:
    """One example per labelled answer that has something to train on, whose value is its label."""
    labels: list[bool] = []

    def documents():
        for sample in samples:
            labels.append(sample.good)
            yield sample.document

    for example in tokenize.tokenise_each(documents(), sides=1):
        good = labels.pop(0)
        if example is not None:
            yield dataclasses.replace(example, value=float(good))


def with_companions(examples: Iterable[Example], max_length: int) -> Iterator[Example]:
    """Each example, and after it a companion: its prompt with the previous example's answer.

    The companion estimates the KL baseline of KTO (https://arxiv.org/abs/2402.01306). The first example takes the last
    answer of its window.
    """
    window: list[Example] = []
    previous: Example | None = None
    for example in examples:
        window.append(example)
        if len(window) == _WINDOW:
            yield from _with_companions(window, previous, max_length)
            previous, window = window[-1], []
    yield from _with_companions(window, previous, max_length)


_WINDOW = 256


def _with_companions(window: list[Example], previous: Example | None, max_length: int) -> Iterator[Example]:
    previous = previous or (window[-1] if window else None)
    for example in window:
        assert previous is not None
        yield example
        answer_start, previous_start = (int(np.argmax(side.weights > 0)) for side in (example, previous))
        # However long the prompt, at least one token of the answer must fit.
        prompt = min(answer_start, max_length - 1)
        ids = np.concatenate([example.ids[:prompt], previous.ids[previous_start:]])[:max_length]
        weights = np.concatenate([example.weights[:prompt], previous.weights[previous_start:]])[:max_length]
        yield dataclasses.replace(example, ids=ids, weights=weights)
        previous = example


def _with_score_position(example: Example) -> Example:
    # Positions are made of targets, so a further target makes a position of the last token; its id does not matter.
    ids = np.append(example.ids, example.ids[-1])
    weights = np.zeros(len(ids), np.float32)
    weights[-1] = 1.0
    return dataclasses.replace(example, ids=ids, weights=weights)


def _uncount(tokenize: Tokenize, *sides: Example | None) -> None:
    """Takes the sides of a pair that is left out back out of the counts."""
    for side in sides:
        if side is not None:
            tokenize.counts.examples -= 1
            tokenize.counts.tokens -= len(side.ids)
            tokenize.counts.trained_tokens -= int(np.count_nonzero(side.weights[1:]))
    if all(side is not None for side in sides):
        side = sides[0]
        assert side is not None
        tokenize.counts.count("nothing_after_truncation", side.origin)  # equal once truncated


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """The rows of one update, as NumPy arrays.

    `arrays` are those of arrays.batch.TOKEN_ARRAYS, each [A, B, T] (micro-batches, rows, positions), and with units
    those of units.Units.arrays. `origins[a][b]` lists the records of a row, segment 1 first, one for each unit; it is
    empty for a padding row. `counts` are its tokens and those with a weight, where other processes have other rows. The
    rest is of batches that are generated (train.loop.TrainBatch).
    """

    arrays: dict[str, np.ndarray]
    origins: list[list[list[Origin]]]
    step: int
    epoch: int
    counts: tuple[int, int] | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    rollout_rows: Sequence[Mapping[str, object]] = ()


class Loader:
    """Batches of `batch_size` rows in `accumulation` micro-batches, from a store.

    With `units` neighbouring documents of the store are a unit: they are neighbouring segments of one row, which has
    room for as many documents of `max_length`. `max_units` bounds the units (or documents) in any row. `pictures` reads
    those of documents, of which a row has `max_patches` patches at most (None: from the data).
    """

    def __init__(
        self,
        store: Store,
        *,
        max_length: int,
        batch_size: int,
        accumulation: int = 1,
        packing: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        units: Units | None = None,
        pictures: PictureReader | None = None,
        max_patches: int | None = None,
    ):
        if not len(store) or batch_size % accumulation:
            raise _rows_error(store, batch_size, accumulation)
        self.store, self.packing, self.shuffle, self.seed = store, packing, shuffle, seed
        self.batch_size, self.accumulation = batch_size, accumulation
        self.units, self.unit_size = units, 1 if units is None else units.segments
        positions = store.lengths - 1  # the last token is only a target
        is_single = self.unit_size == 1
        self._lengths = positions if is_single else positions.reshape(-1, self.unit_size).sum(1, dtype=np.int32)
        longest, max_length = int(self._lengths.max()), max_length * self.unit_size
        assert 1 <= self._lengths.min() <= longest <= max_length, f"{longest} positions, rows have {max_length}"
        self.row_length = max_length if packing else padded_length(longest, max_length)
        self.max_units = most_that_fit(self._lengths, self.row_length) if packing else 1
        self.pictures: RowPictures | None = None
        self.prefixes = pictures is not None and pictures.prefix
        self._ends: list[int] = []  # the step after the last one of each epoch that was planned
        self._plans: collections.OrderedDict[int, PackedRows] = collections.OrderedDict()
        self._lock = threading.RLock()
        if pictures is not None:
            by_tokens = self._pack(0)
            self.pictures = row_pictures(pictures, store, self.unit_size, by_tokens, max_patches)
        if self.pictures is not None:
            self.pictures = self.pictures.with_sizes(self.rows(0), batch_size)

    def _pack(self, epoch: int) -> PackedRows:
        n, pictures = len(self._lengths), self.pictures
        order = shuffle_order(n, self.seed, epoch) if self.shuffle else np.arange(n, dtype=index_type(n))
        if not self.packing:
            return unpacked_rows(order)
        if pictures is None:
            return pack(self._lengths, order, self.row_length)
        return pack(self._lengths, order, self.row_length, patches=pictures.patches, max_patches=pictures.sizes[0])

    def rows(self, epoch: int) -> PackedRows:
        """The units, or documents, in each row of an epoch."""
        with self._lock:
            if epoch not in self._plans:
                self._plans[epoch] = self._pack(epoch)
                while len(self._plans) > 2:  # at the end of an epoch, threads still read the previous one
                    self._plans.popitem(last=False)
            self._plans.move_to_end(epoch)
            return self._plans[epoch]

    def steps_per_epoch(self, epoch: int) -> int:
        """The number of updates in an epoch, which varies a little with packing."""
        with self._lock:
            while len(self._ends) <= epoch:
                if self._ends and not (self.packing and self.shuffle):
                    steps = self._ends[0]
                else:
                    steps = -(-len(self.rows(len(self._ends))) // self.batch_size)
                self._ends.append((self._ends[-1] if self._ends else 0) + steps)
            return self._ends[epoch] - (self._ends[epoch - 1] if epoch else 0)

    def total_steps(self, epochs: float) -> int:
        """The number of updates in `epochs` epochs, where a fraction of an epoch is rounded up."""
        complete = math.floor(epochs)
        fraction = epochs - complete
        steps = sum(self.steps_per_epoch(epoch) for epoch in range(complete))
        if fraction > 1e-9:
            steps += math.ceil(fraction * self.steps_per_epoch(complete) - 1e-6)
        return steps

    def epoch_position(self, step: int) -> tuple[int, int]:
        """The epoch of a step and the step's index in that epoch, both from 0."""
        with self._lock:
            while not self._ends or self._ends[-1] <= step:
                self.steps_per_epoch(len(self._ends))
            epoch = bisect.bisect_right(self._ends, step)
            return epoch, step - (self._ends[epoch - 1] if epoch else 0)

    def empty_arrays(self) -> dict[str, np.ndarray]:
        """Arrays of the shapes of most batches: those of the first one."""
        return self.batch(0).arrays

    def batch(self, step: int) -> HostBatch:
        """The batch of update `step`, counted from 0 over any number of epochs."""
        epoch, epoch_step = self.epoch_position(step)
        rows = self.rows(epoch)
        planned = epoch_step * self.batch_size + np.arange(self.batch_size)
        row_units = [rows[row] if row < len(rows) else rows.documents[:0] for row in planned.tolist()]
        documents = ((self.unit_size * units[:, None] + np.arange(self.unit_size)).ravel() for units in row_units)
        row_examples = [[self.store[index] for index in row.tolist()] for row in documents]
        return packed_batch(
            row_examples,
            row_units,
            row_sizes(self.batch_size, self.row_length, self.max_units, self.unit_size),
            step,
            epoch,
            accumulation=self.accumulation,
            units=self.units,
            pictures=self.pictures,
            prefixes=self.prefixes,
        )

    def iterate(
        self, start: int = 0, stop: int | None = None, *, threads: int = 2, prefetch: int = 4
    ) -> Iterator[HostBatch]:
        """Batches from `start` up to, not including, `stop` (None: without end). Threads prepare `prefetch` ahead.

        They are threads rather than processes, since a fork of a process that runs JAX can deadlock.
        """
        import grain

        dataset = grain.MapDataset.source(_BatchSource(self, start, sys.maxsize // 2 if stop is None else stop))
        iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)))
        try:
            yield from iterator
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()


def _rows_error(store: Store, batch_size: int, accumulation: int) -> UserError:
    if not len(store):
        fix = "check roles and message weights"
        return UserError("the data contain nothing to train on", where="data.train", fix=fix)
    problem = f"batch_size {batch_size} cannot be divided into {accumulation} micro-batches"
    return UserError(problem, where="train.batch_size", fix=f"use a multiple of {accumulation}")


def row_sizes(rows: int, row_length: int, max_units: int = 1, unit_size: int = 1) -> dict[str, int]:
    """The sizes of the logical axes of a batch's arrays (see arrays.batch)."""
    return {"batch": rows, "length": row_length, "units": max_units, "segments": max_units * unit_size}


def packed_batch(
    rows: Sequence[Sequence[Example]],
    row_units: Sequence[np.ndarray],
    sizes: Mapping[str, int],
    step: int,
    epoch: int,
    *,
    accumulation: int,
    units: Units | None = None,
    pictures: RowPictures | None = None,
    prefixes: bool = False,
) -> HostBatch:
    """The batch of an update, in `accumulation` micro-batches. The examples of a row become its segments 1, 2, ...

    `sizes` are those of the logical axes of its arrays, `row_units` the indices of each row's units in the data. With
    `prefixes` tokens of prompts see each other both ways. Raises UserError, naming the record, for a picture that
    cannot be read.
    """
    size, count = 1 if units is None else units.segments, sizes["batch"] // accumulation
    arrays = empty_arrays(TOKEN_ARRAYS, sizes)
    for row, examples in enumerate(rows):
        _fill_row({name: array[row] for name, array in arrays.items()}, examples)
    origins = [[example.origin for example in examples[::size]] for examples in rows]
    if units is not None:
        values = [[example.value for example in examples[::size]] for examples in rows]
        arrays |= units.arrays(values, row_units, sizes, arrays)
    if pictures is not None:
        arrays |= pictures.arrays(rows, sizes["length"])
    if prefixes:
        arrays["reach"] = prompt_reach(rows, sizes["length"])
    return HostBatch(
        {name: array.reshape(accumulation, count, *array.shape[1:]) for name, array in arrays.items()},
        [origins[start : start + count] for start in range(0, len(origins), count)],
        step,
        epoch,
    )


def _fill_row(row: dict[str, np.ndarray], examples: Iterable[Example]) -> None:
    position = 0
    for segment, example in enumerate(examples, start=1):
        length = len(example.ids) - 1
        span = slice(position, position := position + length)
        row["tokens"][span] = example.ids[:-1]
        row["targets"][span] = example.ids[1:]
        row["weights"][span] = example.weights[1:]
        row["positions"][span] = np.arange(length)
        row["segment_ids"][span] = segment


@dataclasses.dataclass(frozen=True)
class _BatchSource:
    """A loader as a random-access data source of grain."""

    loader: Loader
    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __getitem__(self, index: int) -> HostBatch:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.loader.batch(self.start + int(index))


@dataclasses.dataclass(frozen=True)
class StageExamples:
    """Makes the examples of samples for a stage. Those of labelled answers have no companions yet
    (units.with_companions).

    `score_position`: pairs are trained on only after their last token. `plain_text`: conversations are refused.
    """

    dataset_type: DatasetType
    score_position: bool = False
    plain_text: bool = False

    def __call__(self, tokenize: Tokenize, samples: Iterable[Any]) -> Iterator[Example]:
        match self.dataset_type:
            case "pairs":
                return tokenise_pairs(tokenize, samples, score_position=self.score_position)
            case "labelled":
                return tokenise_answers(tokenize, samples)
            case "prompts":
                return tokenize.prompts(samples)
            case "documents":
                return tokenize(require_plain_text(samples) if self.plain_text else samples)


@dataclasses.dataclass(frozen=True)
class PartTask:
    """The tokenizer and the options that a store is made with."""

    tokenizer: PreTrainedTokenizerFast
    options: TokenOptions
    convert: StageExamples
    pictures: PictureReader | None = None

    def tokenize(self) -> Tokenize:
        """The tokenizer with its options, for one thread."""
        return Tokenize(self.tokenizer, self.options, self.pictures)


def require_plain_text(documents: Iterable[Document]) -> Iterator[Document]:
    """Passes texts through. Raises UserError for a conversation."""
    for document in documents:
        if isinstance(document, Conversation):
            raise UserError(
                "stage pt trains on plain text, but the record is a conversation",
                where=str(document.origin),
                fix="set stage: sft, or name the column that holds the text: format: text, columns: {text: NAME}",
            )
        yield document
