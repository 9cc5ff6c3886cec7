"""Prepares the data of a recipe that are tokenised during training: a stream, and a report from its first samples."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshtune.config.data_options import TokenOptions
from meshtune.config.recipe import Recipe
from meshtune.config.sections import DataSection
from meshtune.data.conversation import Conversation, Document, Labelled, Sample, Text
from meshtune.data.documents import DocumentList, SkippedRecord
from meshtune.data.loader import Units, require_plain_text, with_companions
from meshtune.data.report import DataReport, TemplateInfo, histogram
from meshtune.data.store import fingerprint, sample_digest
from meshtune.data.stream import UNIT_POSITIONS, WINDOW, Stream, TextRows, WindowRows
from meshtune.data.tokenise import (
    nothing_to_train_error,
    one_label_error,
    role_ends,
    stage_examples,
    template_info,
    token_options,
    tokenizer_hash,
)
from meshtune.data.tokens import Example, TokenCounts, Tokenize
from meshtune.errors import UserError
from meshtune.objectives.stages import STAGES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.objectives.stages import DatasetType

STREAM_JOURNAL = "stream.jsonl"  # in the run's directory
_REPORT_SAMPLE = 200  # documents that the report on a stream of plain text is made from
_HASHED = 64  # samples whose contents are part of a fingerprint, from the beginning and spread over all, each


def prepare_stream(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, documents: DocumentList, units: Units | None
) -> tuple[Stream, DataReport]:
    """The training data of a recipe as a stream, and the report on it. `units` are those of stages that compare
    answers. Raises UserError as `prepare_data` does, for the documents that the report is made from."""
    if recipe.stage.kind == "pt":
        return _text_stream(recipe, tokenizer, documents)
    return _window_stream(recipe, tokenizer, documents, units)


def _text_stream(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, documents: DocumentList
) -> tuple[Stream, DataReport]:
    data, train = recipe.data, recipe.train
    options = dataclasses.replace(token_options(data, "pt"), max_length=sys.maxsize)
    rows = TextRows(
        documents,
        Tokenize(tokenizer, options),
        row_length=data.max_length,
        batch_size=train.batch_size,
        accumulation=train.accumulation,
        shuffle=data.shuffle,
        seed=recipe.seed,
        skip=data.on_bad == "skip",
    )
    stream = _stream(recipe, rows, _text_fingerprint(recipe, tokenizer, options, documents))
    sample = Tokenize(tokenizer, options)
    first = require_plain_text(_first_documents(documents, skip=data.on_bad == "skip"))
    lengths = [len(example.ids) for example in sample(first)]
    if not lengths:
        raise nothing_to_train_error("train", sample.counts)
    return stream, stream_report(stream, sample.counts, np.array(lengths))


def _window_stream(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, documents: DocumentList, units: Units | None
) -> tuple[Stream, DataReport]:
    data, train, stage = recipe.data, recipe.train, recipe.stage.kind
    options = token_options(data, stage)
    tokenize = Tokenize(tokenizer, options)
    samples = documents.with_system(data.system)
    rows = WindowRows(
        samples,
        tokenize,
        functools.partial(_examples, stage=stage),
        max_length=data.max_length,
        batch_size=train.batch_size,
        accumulation=train.accumulation,
        packing=data.packing,
        shuffle=data.shuffle,
        seed=recipe.seed,
        skip=data.on_bad == "skip",
        units=units,
    )
    stream = _stream(recipe, rows, _window_fingerprint(recipe, tokenizer, options, documents))
    first = rows.window(0, 0)
    if not len(first.rows):
        raise nothing_to_train_error("train", first.counts)
    if STAGES[stage].dataset_type == "labelled":
        _check_both_labels_come(samples, skip=data.on_bad == "skip")
    template = template_info(tokenize.chat) if tokenize.saw_conversation else None
    return stream, window_report(stream, rows, template, STAGES[stage].dataset_type)


def _examples(tokenize: Tokenize, samples: Iterable[Sample], stage: str) -> Iterator[Example]:
    """The examples of a window's samples for a stage, with companions."""
    examples = stage_examples(stage)(tokenize, samples)
    labelled = STAGES[stage].dataset_type == "labelled"
    return with_companions(examples, tokenize.options.max_length) if labelled else examples


def _stream(recipe: Recipe, rows: TextRows | WindowRows, data_hash: str) -> Stream:
    assert recipe.train.steps is not None
    journal = pathlib.Path(recipe.output).expanduser() / STREAM_JOURNAL
    return Stream(rows, steps=recipe.train.steps, fingerprint=data_hash, journal=journal)


def _text_fingerprint(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, options: TokenOptions, documents: DocumentList
) -> str:
    data = recipe.data
    files = [(checked.source.path, checked.source.revision, len(checked.records)) for checked in documents.sources]
    parts = (tokenizer_hash(tokenizer), _options_key(options), repr(files), str(data.shuffle), str(recipe.seed))
    parts += (_sampled_digests(documents),)
    weights = [checked.source.weight for checked in documents.sources]
    mixture = (data.mixing, repr(weights)) if data.mixing != "concat" or any(weights) else ()
    return fingerprint(*parts, str(data.max_length), str(recipe.train.batch_size), *mixture, *_held_out(data))


def _window_fingerprint(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, options: TokenOptions, documents: DocumentList
) -> str:
    data, stage = recipe.data, STAGES[recipe.stage.kind]
    sources = [(checked.source, checked.format.name, len(checked.records)) for checked in documents.sources]
    rows = (data.max_length, recipe.train.batch_size, data.packing, data.shuffle, recipe.seed, data.mixing, data.system)
    layout = (stage.dataset_type, stage.has_score_head, WINDOW, UNIT_POSITIONS)
    parts = (tokenizer_hash(tokenizer), _options_key(options), *role_ends(tokenizer))
    digests = _sampled_digests(documents)
    return fingerprint(digests, *parts, repr(sources), repr(rows), repr(layout), *_held_out(data))


def _sampled_digests(documents: DocumentList) -> str:
    """The digests of some samples, since a stream is not read before it is trained on. Unreadable ones
    are counted as such, so that a run that a bad record has ended can be resumed without such records."""
    count = len(documents)
    spread = np.linspace(0, count - 1, min(count, _HASHED)).astype(int).tolist()
    digests = []
    for index in dict.fromkeys([*range(min(count, _HASHED)), *spread]):
        try:
            digests.append(sample_digest(documents[index]).hex())
        except UserError:
            digests.append("unreadable")
    return " ".join(digests)


def _options_key(options: TokenOptions) -> str:
    """The options that decide what a stream holds. A run that a bad record has ended may go on without such records."""
    return dataclasses.replace(options, skip_bad=False).cache_key()


def _held_out(data: DataSection) -> tuple[str, ...]:
    """The share or number of records that are held out, which are no part of the stream."""
    return (f"held out: {data.validation}",) if isinstance(data.validation, float) else ()


def _first_documents(documents: DocumentList, *, skip: bool) -> Iterator[Document]:
    """The first documents, which are all that is read before training."""
    for document in _readable(documents[:_REPORT_SAMPLE], skip=skip):
        assert isinstance(document, Conversation | Text)
        yield document


def _readable(samples: Sequence[Sample], *, skip: bool) -> Iterator[Sample]:
    """The samples in order; with `skip`, without those that cannot be read."""
    for index in range(len(samples)):
        try:
            sample = samples[index]
        except UserError:
            if not skip:
                raise
        else:
            yield sample


def _check_both_labels_come(samples: Sequence[Sample], *, skip: bool) -> None:
    """Raises UserError if all labels are the same. Reads answers until it meets the other label."""
    labels = (sample.good for sample in _readable(samples, skip=skip) if isinstance(sample, Labelled))
    first = next(labels)
    if all(label == first for label in labels):
        raise one_label_error(len(samples), first)


def stream_report(stream: Stream, counts: TokenCounts, lengths: np.ndarray) -> DataReport:
    """The report on a stream: counts and lengths of a sample of its documents, tokens and documents of the run."""
    rows = stream.steps * stream.batch_size
    tokens = rows * stream.row_length
    documents = len(stream.documents)
    counts = dataclasses.replace(counts, documents=documents, examples=documents, tokens=tokens, trained_tokens=tokens)
    return DataReport(
        split="train",
        counts=counts,
        skipped=(),
        rows=rows,
        row_length=stream.row_length,
        packing=True,
        steps_per_epoch=stream.steps,
        batch_rows=stream.batch_size,
        efficiency=1.0,
        histogram=histogram(lengths),
        longest=int(lengths.max()),
        copies=0,
        max_length=stream.row_length,
    )


def window_report(
    stream: Stream, rows: WindowRows, template: TemplateInfo | None, dataset_type: DatasetType
) -> DataReport:
    """The report on a stream of samples: estimates from its first window, for all samples (documents that are left out,
    cut and so on) and for the rows of the run (tokens)."""
    window, total = rows.window(0, 0), len(rows.documents)
    sampled, run_rows = min(total, rows.window_size), stream.steps * stream.batch_size
    used = int((window.lengths - 1).sum())
    share = used / (len(window.rows) * rows.row_length)
    trained = window.counts.trained_tokens / max(1, window.counts.tokens)
    tokens = round(share * run_rows * rows.row_length)
    scaled = {
        field.name: round(getattr(window.counts, field.name) * total / sampled)
        for field in dataclasses.fields(TokenCounts)
        if field.name not in ("skipped", "first")
    }
    scaled |= {"tokens": tokens, "trained_tokens": round(trained * tokens)}
    counts = TokenCounts(**scaled, first=window.counts.first)
    return DataReport(
        split="train",
        counts=counts,
        skipped=tuple(SkippedRecord(origin, reason) for origin, reason in window.counts.skipped),
        rows=run_rows,
        row_length=rows.row_length,
        packing=rows.packing,
        steps_per_epoch=stream.steps,
        batch_rows=rows.batch_size,
        efficiency=share,
        histogram=histogram(window.lengths),
        longest=int(window.lengths.max()),
        copies=0,
        max_length=rows.row_length // rows.unit_size,
        template=template,
        dataset_type=dataset_type,
        sampled=sampled,
    )
