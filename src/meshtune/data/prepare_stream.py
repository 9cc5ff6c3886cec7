"""Prepares the data of a recipe that are tokenised during training: a stream, and a report from its first samples."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from meshtune.config.data_options import TokenOptions
from meshtune.config.recipe import Recipe
from meshtune.config.sections import DataSection
from meshtune.data.chat import ChatTemplate
from meshtune.data.checking import SkippedRecord
from meshtune.data.conversation import Conversation, Document, Labelled, Sample, Text
from meshtune.data.documents import DocumentList
from meshtune.data.loader import PartTask, Units, require_plain_text
from meshtune.data.report import DataReport, TemplateInfo, histogram
from meshtune.data.store import SHARD, fingerprint, sample_digest
from meshtune.data.stream import BLOCK, LANE_SAMPLES, PACKED_ROWS, UNIT_POSITIONS, Stream, StreamRows, TokenBlock
from meshtune.data.tokenise import (
    nothing_to_train_error,
    one_label_error,
    role_ends,
    stage_examples,
    template_info,
    token_options,
    tokenizer_hash,
)
from meshtune.data.tokens import TokenCounts, Tokenize
from meshtune.errors import UserError
from meshtune.lazy import LazyFunction
from meshtune.objectives.stages import STAGES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from meshtune.objectives.stages import DatasetType

process_count = LazyFunction("meshtune.data.tasks:process_count")
STREAM_JOURNAL = "stream.jsonl"  # in the run's directory
_REPORT_SAMPLE = 200  # documents that the report on a stream of plain text is made from
_PACKED_SAMPLE = 1024  # samples that the report on another stream is made from
# All that decides which samples are in which row. Runs with another one cannot be resumed.
_LAYOUT = (LANE_SAMPLES, BLOCK, PACKED_ROWS, UNIT_POSITIONS)
_HASHED = 64  # samples whose contents are part of a fingerprint, from the beginning and spread over all, each


def prepare_stream(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, documents: DocumentList, units: Units | None
) -> tuple[Stream, DataReport]:
    """The training data of a recipe as a stream, and the report on it. `units` are those of stages that compare
    answers. Raises UserError as `prepare_data` does, for the documents that the report is made from."""
    if recipe.stage.kind == "pt":
        return _text_stream(recipe, tokenizer, documents)
    return _packed_stream(recipe, tokenizer, documents, units)


def _text_stream(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, documents: DocumentList
) -> tuple[Stream, DataReport]:
    data = recipe.data
    options = dataclasses.replace(token_options(data, "pt"), max_length=sys.maxsize)
    stream = _stream(
        recipe, tokenizer, documents, options, None, _text_fingerprint(recipe, tokenizer, options, documents)
    )
    sample = Tokenize(tokenizer, options)
    first = require_plain_text(_first_documents(documents, skip=data.on_bad == "skip"))
    lengths = [len(example.ids) for example in sample(first)]
    if not lengths:
        raise nothing_to_train_error("train", sample.counts)
    return stream, stream_report(stream, sample.counts, np.array(lengths))


def _packed_stream(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, documents: DocumentList, units: Units | None
) -> tuple[Stream, DataReport]:
    data, stage = recipe.data, recipe.stage.kind
    options, samples = token_options(data, stage), documents.with_system(data.system)
    stream = _stream(
        recipe, tokenizer, samples, options, units, _packed_fingerprint(recipe, tokenizer, options, documents)
    )
    first = stream.rows.first_block(_PACKED_SAMPLE)
    if not first.examples:
        raise nothing_to_train_error("train", first.counts)
    if STAGES[stage].dataset_type == "labelled":
        _check_both_labels_come(samples, skip=data.on_bad == "skip")
    template = template_info(ChatTemplate(tokenizer)) if first.conversation else None
    return stream, packed_report(stream, first, template, STAGES[stage].dataset_type)


def _stream(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    documents: DocumentList,
    options: TokenOptions,
    units: Units | None,
    data_hash: str,
) -> Stream:
    data, train = recipe.data, recipe.train
    assert train.steps is not None
    is_text = recipe.stage.kind == "pt"
    rows = StreamRows(
        documents,
        PartTask(tokenizer, options, stage_examples(recipe.stage.kind)),
        row_length=data.max_length * (1 if units is None else units.segments),
        batch_size=train.batch_size,
        accumulation=train.accumulation,
        continued=is_text,
        packing=data.packing,
        shuffle=data.shuffle,
        seed=recipe.seed,
        skip=data.on_bad == "skip",
        units=units,
    )
    journal = pathlib.Path(recipe.output).expanduser() / STREAM_JOURNAL
    workers = process_count() if len(documents) > SHARD else 1
    return Stream(rows, steps=train.steps, fingerprint=data_hash, journal=journal, workers=workers)


def _text_fingerprint(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, options: TokenOptions, documents: DocumentList
) -> str:
    data = recipe.data
    files = [(checked.source.path, checked.source.revision, len(checked.records)) for checked in documents.sources]
    parts = (tokenizer_hash(tokenizer), _options_key(options), repr(files), str(data.shuffle), str(recipe.seed))
    parts += (_sampled_digests(documents), repr(_LAYOUT))
    weights = [checked.source.weight for checked in documents.sources]
    mixture = (data.mixing, repr(weights)) if data.mixing != "concat" or any(weights) else ()
    return fingerprint(*parts, str(data.max_length), str(recipe.train.batch_size), *mixture, *_held_out(data))


def _packed_fingerprint(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, options: TokenOptions, documents: DocumentList
) -> str:
    data, stage = recipe.data, STAGES[recipe.stage.kind]
    sources = [(checked.source, checked.format.name, len(checked.records)) for checked in documents.sources]
    rows = (data.max_length, recipe.train.batch_size, data.packing, data.shuffle, recipe.seed, data.mixing, data.system)
    layout = (stage.dataset_type, stage.has_score_head, *_LAYOUT)
    parts = (tokenizer_hash(tokenizer), _options_key(options), *role_ends(tokenizer))
    digests = _sampled_digests(documents)
    return fingerprint(digests, *parts, repr(sources), repr(rows), repr(layout), *_held_out(data))


def _sampled_digests(documents: DocumentList) -> str:
    """The digests of some samples, since a stream is not read before it is trained on, and the sizes of row groups,
    of each of which a sample would be decoded. Unreadable samples are counted as such, so that a run that a bad record
    has ended can be resumed without such records."""
    count = len(documents)
    spread = np.linspace(0, count - 1, min(count, _HASHED)).astype(int)
    large = [index for index, ends in enumerate(documents.shuffle_windows) if len(ends) > 1]
    spread = spread[~np.isin(documents.source[spread], large)].tolist()
    samples = documents.take(np.array([*dict.fromkeys([*range(min(count, _HASHED)), *spread])])).compact()
    digests = [repr(documents.sources[index].records.runs.tolist()) for index in large]
    for index in range(len(samples)):
        try:
            digests.append(sample_digest(samples[index]).hex())
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


def _readable(samples: DocumentList, *, skip: bool) -> Iterator[Sample]:
    """The samples in order; with `skip`, without those that cannot be read."""
    for start in range(0, len(samples), BLOCK):
        block = samples[start : start + BLOCK].compact()
        for index in range(len(block)):
            try:
                sample = block[index]
            except UserError:
                if not skip:
                    raise
            else:
                yield sample


def _check_both_labels_come(samples: DocumentList, *, skip: bool) -> None:
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


def packed_report(
    stream: Stream, first: TokenBlock, template: TemplateInfo | None, dataset_type: DatasetType
) -> DataReport:
    """The report on a stream of samples: estimates from its first ones, for all samples (documents that are left out,
    cut and so on) and for the rows of the run (tokens)."""
    rows, total = stream.rows, len(stream.documents)
    sampled, run_rows = min(total, _PACKED_SAMPLE), stream.steps * stream.batch_size
    lengths = np.array([len(example.ids) for example in first.examples], np.int64)
    share = int((lengths - 1).sum()) / (len(rows.pack(first.examples)) * rows.row_length)
    trained = first.counts.trained_tokens / max(1, first.counts.tokens)
    tokens = round(share * run_rows * rows.row_length)
    scaled = {
        field.name: round(getattr(first.counts, field.name) * total / sampled)
        for field in dataclasses.fields(TokenCounts)
        if field.name not in ("skipped", "first")
    }
    scaled |= {"tokens": tokens, "trained_tokens": round(trained * tokens)}
    counts = TokenCounts(**scaled, first=first.counts.first)
    return DataReport(
        split="train",
        counts=counts,
        skipped=tuple(SkippedRecord(origin, reason) for origin, reason in first.counts.skipped),
        rows=run_rows,
        row_length=rows.row_length,
        packing=rows.packing,
        steps_per_epoch=stream.steps,
        batch_rows=stream.batch_size,
        efficiency=share,
        histogram=histogram(lengths),
        longest=int(lengths.max()),
        copies=0,
        max_length=rows.row_length // rows.unit_size,
        template=template,
        dataset_type=dataset_type,
        sampled=sampled,
    )
