"""Prepares the data of a recipe for training: documents, tokens (cached), rows, and a report."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from meshtune.config.data_options import TokenOptions
from meshtune.config.recipe import Recipe, TrainSection
from meshtune.data.conversation import Conversation, Document, Sample, Text
from meshtune.data.documents import DocumentList, SkippedRecord, load_documents, open_documents
from meshtune.data.loader import Loader
from meshtune.data.report import DataReport, make_report, stream_report
from meshtune.data.store import Store, fingerprint
from meshtune.data.stream import Stream
from meshtune.data.system_prompt import WithSystemPrompt
from meshtune.data.tokenise import (
    Progress,
    nothing_to_train_error,
    require_plain_text,
    token_options,
    tokenised_store,
    tokenizer_hash,
)
from meshtune.data.tokenizer import check_vocabulary
from meshtune.data.tokens import Tokenize
from meshtune.data.units import Units, nll_share
from meshtune.errors import UserError
from meshtune.objectives.stages import STAGES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STREAM_JOURNAL = "stream.jsonl"  # in the run's directory
_REPORT_SAMPLE = 200  # documents that the report on a stream is made from


@dataclasses.dataclass(frozen=True)
class PreparedData:
    """The data of a run. `fingerprint` is a hash of all training tokens and weights."""

    train: Loader | Stream
    validation: Loader | None
    report: DataReport
    validation_report: DataReport | None
    fingerprint: str


def prepare_data(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    *,
    vocab: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> PreparedData:
    """Reads and tokenises the data of a recipe.

    `vocab` is the size of the model's embedding, None to skip the check. `cache` is the directory of tokenised data, by
    default $MESHTUNE_CACHE or ~/.cache/meshtune. Validation batches have the size of a micro-batch and keep the order
    of the data.

    Raises UserError as sources, formats and templates do, if the tokenizer has ids that the model does not have, and if
    there is nothing to train on.
    """
    if vocab is not None:
        check_vocabulary(tokenizer, vocab)
    preparation = _Preparation(recipe, tokenizer, cache, progress)
    if recipe.data.streaming:
        return preparation.stream()
    dataset_type = STAGES[recipe.stage.kind].dataset_type
    documents = load_documents(recipe.data, seed=recipe.seed, dataset_type=dataset_type)
    train, report = preparation.train(documents.train, documents.skipped)
    validation, validation_report = None, None
    if documents.validation is not None:
        validation, validation_report = preparation.validation(documents.validation)
    return PreparedData(train, validation, report, validation_report, train.store.path.name)


@dataclasses.dataclass(frozen=True)
class _Preparation:
    """What all splits of a recipe are prepared with."""

    recipe: Recipe
    tokenizer: PreTrainedTokenizerFast
    cache: str | os.PathLike[str] | None
    progress: Progress | None

    def train(self, samples: Sequence[Sample], skipped: Sequence[SkippedRecord]) -> tuple[Loader, DataReport]:
        train = self.recipe.train
        return self._loader(
            "train",
            samples,
            skipped,
            shuffle=self.recipe.data.shuffle,
            batch_size=train.batch_size,
            accumulation=train.accumulation,
        )

    def validation(self, samples: Sequence[Sample]) -> tuple[Loader, DataReport]:
        micro_batch = self.recipe.train.batch_size // self.recipe.train.accumulation
        return self._loader("validation", samples, [], shuffle=False, batch_size=micro_batch, accumulation=1)

    def _loader(
        self,
        split: str,
        samples: Sequence[Sample],
        skipped: Sequence[SkippedRecord],
        *,
        shuffle: bool,
        batch_size: int,
        accumulation: int,
    ) -> tuple[Loader, DataReport]:
        data, stage = self.recipe.data, self.recipe.stage.kind
        store, counts, template = tokenised_store(
            split,
            WithSystemPrompt(samples, data.system),
            self.tokenizer,
            token_options(data, stage),
            stage,
            self.cache,
            self.progress,
        )
        if not len(store):
            raise nothing_to_train_error(split, counts)
        if STAGES[stage].dataset_type == "labelled" and split == "train":
            _check_both_labels(store)
        loader = Loader(
            store,
            max_length=data.max_length,
            batch_size=batch_size,
            accumulation=accumulation,
            packing=data.packing,
            shuffle=shuffle,
            seed=self.recipe.seed,
            units=self._units(split, store),
        )
        report = make_report(
            split,
            loader,
            counts,
            skipped,
            max_length=data.max_length,
            template=template,
            dataset_type=STAGES[stage].dataset_type,
        )
        return loader, report

    def _units(self, split: str, store: Store) -> Units | None:
        if STAGES[self.recipe.stage.kind].dataset_type == "documents":
            return None
        nll = _nll(self.recipe)
        # The validation loss is summed over all batches, so its weights are computed over the whole store.
        return Units(nll=nll, nll_share=nll_share(store, nll) if split == "validation" else None)

    def stream(self) -> PreparedData:
        """Training documents as a stream; validation documents as usual."""
        recipe, tokenizer = self.recipe, self.tokenizer
        data, train = recipe.data, recipe.train
        _check_streaming(recipe)
        assert train.steps is not None
        documents = open_documents(data, seed=recipe.seed)
        options = dataclasses.replace(token_options(data, recipe.stage.kind), max_length=sys.maxsize)
        stream = Stream(
            documents,
            Tokenize(tokenizer, options),
            max_length=data.max_length,
            batch_size=train.batch_size,
            steps=train.steps,
            accumulation=train.accumulation,
            shuffle=data.shuffle,
            seed=recipe.seed,
            skip=data.on_bad == "skip",
            fingerprint=_stream_fingerprint(recipe, tokenizer, options, documents),
            journal=pathlib.Path(recipe.output).expanduser() / STREAM_JOURNAL,
        )
        sample = Tokenize(tokenizer, options)
        first = require_plain_text(_first_documents(documents, skip=data.on_bad == "skip"))
        lengths = [len(example.ids) for example in sample(first)]
        if not lengths:
            raise nothing_to_train_error("train", sample.counts)
        report = stream_report(stream, sample.counts, np.array(lengths))
        validation, validation_report = None, None
        if isinstance(data.validation, list):
            changes = {"train": data.validation, "validation": None, "streaming": False, "shuffle": False}
            batch = TrainSection(epochs=1, batch_size=train.batch_size // train.accumulation)
            alone = recipe.model_copy(update={"data": data.model_copy(update=changes), "train": batch})
            prepared = prepare_data(alone, tokenizer, cache=self.cache, progress=self.progress)
            assert isinstance(prepared.train, Loader)
            validation, validation_report = (
                prepared.train,
                dataclasses.replace(prepared.report, split="validation"),
            )
        return PreparedData(stream, validation, report, validation_report, stream.fingerprint)


def _check_streaming(recipe: Recipe) -> None:
    """Raises UserError for options that are not possible with data.streaming."""
    data, train = recipe.data, recipe.train
    obstacles = {
        "stage": recipe.stage.kind != "pt" and "only plain text (stage: pt) can be continued in the next row",
        "train.steps": train.steps is None
        and "the length of an epoch of a stream is unknown before its end: give train.steps",
        "data.validation": isinstance(data.validation, float) and "nothing can be held out of a stream: give a file",
        "data.packing": not data.packing and "a stream fills its rows: leave data.packing out",
    }
    for where, reason in obstacles.items():
        if reason:
            fix = "or set data.streaming=false"
            raise UserError(f"data.streaming is not possible here: {reason}", where=where, fix=fix)


def _stream_fingerprint(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, options: TokenOptions, documents: DocumentList
) -> str:
    data = recipe.data
    files = [(checked.source.path, checked.source.revision, len(checked.records)) for checked in documents.sources]
    parts = (tokenizer_hash(tokenizer), options.cache_key(), repr(files), str(data.shuffle), str(recipe.seed))
    weights = [checked.source.weight for checked in documents.sources]
    mixture = (data.mixing, repr(weights)) if data.mixing != "concat" or any(weights) else ()
    return fingerprint((), *parts, str(data.max_length), str(recipe.train.batch_size), *mixture)


def _first_documents(documents: DocumentList, *, skip: bool) -> Iterator[Document]:
    """The first documents, which are all that is read before training."""
    for index in range(min(_REPORT_SAMPLE, len(documents))):
        try:
            document = documents[index]
        except UserError:
            if not skip:
                raise
            continue
        assert isinstance(document, Conversation | Text)
        yield document


def _nll(recipe: Recipe) -> Literal["answer", "all"] | None:
    """Which tokens of chosen answers the loss's cross-entropy covers; None without such a term."""
    stage = STAGES[recipe.stage.kind]
    if not stage.uses_nll(recipe.stage):
        return None
    return "all" if recipe.data.train_on_prompt else "answer"


def _check_both_labels(store: Store) -> None:
    """Raises UserError if all labels are the same, since there would be nothing to compare."""
    labels = store.values[::2]
    if labels.min() == labels.max():
        raise UserError(
            f"all {len(labels)} answers are labelled {'true' if labels[0] else 'false'}, so there is nothing to tell "
            "good answers from bad ones",
            where="data.train",
            fix="add answers with the other label; or train on the good ones with stage: sft",
        )
