"""From a recipe to its loaders: documents, tokens (from the cache if they were made before), rows, and the report."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshtune.config.data import DataSection
from meshtune.config.recipe import Recipe, TrainSection
from meshtune.data.conversation import Conversation, Document, Labelled, Message, Pair, Sample
from meshtune.data.documents import DocumentList, load_documents, open_documents
from meshtune.data.loader import Loader
from meshtune.data.masks import Learn
from meshtune.data.report import DataReport, TemplateInfo, make_report, stream_report
from meshtune.data.store import Store, fingerprint, open_or_build
from meshtune.data.stream import Stream
from meshtune.data.tokenizer import check_vocabulary
from meshtune.data.tokens import Example, TokenCounts, Tokenize, TokenOptions
from meshtune.data.units import Units, nll_share, tokenised_labelled, tokenised_pairs
from meshtune.errors import UserError
from meshtune.objectives import STAGES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

STREAM = "stream.jsonl"  # in the run's directory: where updates begin in the stream
_SAMPLE = 200  # documents that a stream's report is made from

Progress = Callable[[str, int, int], None]  # (what is done, documents done, documents in all)


@dataclasses.dataclass(frozen=True)
class PreparedData:
    """What training reads: loaders, reports, and a hash of all training tokens and weights (`fingerprint`)."""

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
    """The data of a recipe, tokenised and ready to be read.

    `vocab` is the number of rows of the model's embedding, None to leave it unchecked. `cache` is where tokens are
    kept, instead of $MESHTUNE_CACHE or ~/.cache/meshtune. Validation rows come in micro-batches, in their own order.

    Raises UserError: as the sources, formats and templates do; if the tokenizer makes ids that the model does not
    have; if there is nothing to learn anywhere.
    """
    if vocab is not None:
        check_vocabulary(tokenizer, vocab)
    data = recipe.data
    stage = STAGES[recipe.stage.kind]
    options = token_options(data, recipe.stage.kind)
    if data.streaming:
        return _streamed(recipe, tokenizer, options, cache, progress)
    found = load_documents(data, seed=recipe.seed, dataset_type=stage.dataset_type)
    micro_batch = recipe.train.batch_size // recipe.train.accumulation

    nll = _nll(recipe)

    def loader(split: str, read: Sequence[Sample], *, shuffle: bool, rows: int, accumulation: int):
        dressed = WithSystem(read, data.system)
        store, counts, template = _tokens(split, dressed, tokenizer, options, recipe.stage.kind, cache, progress)
        if not len(store):
            raise _nothing(split, counts)
        units = None
        if stage.dataset_type != "documents":
            # Validation is summed over all its batches, so its weights are those of all.
            units = Units(nll=nll, nll_share=nll_share(store, nll) if split == "validation" else None)
        if stage.dataset_type == "labelled" and split == "train":
            _both_kinds(store)
        made = Loader(
            store,
            max_length=data.max_length,
            batch_size=rows,
            accumulation=accumulation,
            packing=data.packing,
            shuffle=shuffle,
            seed=recipe.seed,
            units=units,
        )
        left_out = found.skipped if split == "train" else []
        return made, make_report(split, made, counts, left_out, max_length=data.max_length, template=template)

    train, report = loader(
        "train",
        found.train,
        shuffle=data.shuffle,
        rows=recipe.train.batch_size,
        accumulation=recipe.train.accumulation,
    )
    validation, validation_report = None, None
    if found.validation is not None:
        validation, validation_report = loader(
            "validation", found.validation, shuffle=False, rows=micro_batch, accumulation=1
        )
    return PreparedData(train, validation, report, validation_report, train.store.path.name)


def token_options(data: DataSection, stage: str = "sft") -> TokenOptions:
    """What the data section says about tokens. Of answers that are compared the last turn counts, and of plain text
    everything."""
    learn = Learn(train_on_prompt=data.train_on_prompt, last_turn_only=data.last_turn_only)
    if STAGES[stage].dataset_type != "documents":
        learn = Learn(last_turn_only=True)
    elif stage == "pt":
        learn = Learn(train_on_prompt=True)
    return TokenOptions(
        max_length=data.max_length,
        learn=learn,
        overlong=data.overlong,
        skip_bad=data.on_bad == "skip",
    )


def _streamed(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    options: TokenOptions,
    cache: str | os.PathLike[str] | None,
    progress: Progress | None,
) -> PreparedData:
    """Training documents as a stream; validation documents as always."""
    data, train = recipe.data, recipe.train
    wrong = {
        "stage": recipe.stage.kind != "pt" and "only plain text (stage: pt) can be cut at the end of a row and go on",
        "train.steps": train.steps is None
        and "how long an epoch of a stream is, is known at its end: give train.steps",
        "data.validation": isinstance(data.validation, float) and "nothing is drawn from a stream: give a file",
        "data.packing": not data.packing and "a stream fills its rows: leave data.packing out",
        "data.mixing": data.mixing != "concat"
        and "a stream takes its sources one after the other (shuffled: all mixed)",
    }
    for where, why in wrong.items():
        if why:
            fix = "or set data.streaming=false"
            raise UserError(f"data.streaming is not possible here: {why}", where=where, fix=fix)
    assert train.steps is not None
    documents_ = open_documents(data, seed=recipe.seed)
    endless = dataclasses.replace(options, max_length=sys.maxsize)
    files = [(one.source.path, one.source.revision, len(one.records)) for one in documents_.sources]
    marks = (_hash_of(tokenizer), repr(endless), repr(files), str(data.shuffle), str(recipe.seed), str(data.max_length))
    stream = Stream(
        documents_,
        Tokenize(tokenizer, endless),
        max_length=data.max_length,
        batch_size=train.batch_size,
        steps=train.steps,
        accumulation=train.accumulation,
        shuffle=data.shuffle,
        seed=recipe.seed,
        skip=data.on_bad == "skip",
        fingerprint=fingerprint((), *marks, str(train.batch_size)),
        journal=pathlib.Path(recipe.output).expanduser() / STREAM,
    )
    sample = Tokenize(tokenizer, endless)
    lengths = [len(one.ids) for one in sample(_plain(_first(documents_, skip=data.on_bad == "skip")))]
    if not lengths:
        raise _nothing("train", sample.counts)
    report = stream_report(stream, sample.counts, np.array(lengths))
    validation, validation_report = None, None
    if isinstance(data.validation, list):
        alone = data.model_copy(update={"train": data.validation, "validation": None, "streaming": False})
        rows = train.batch_size // train.accumulation
        short = TrainSection(epochs=1, batch_size=rows)
        held = prepare_data(
            recipe.model_copy(update={"data": alone.model_copy(update={"shuffle": False}), "train": short}),
            tokenizer,
            cache=cache,
            progress=progress,
        )
        assert isinstance(held.train, Loader)
        validation, validation_report = held.train, dataclasses.replace(held.report, split="validation")
    return PreparedData(stream, validation, report, validation_report, stream.fingerprint)


def _first(documents: DocumentList, *, skip: bool) -> Iterator[Any]:
    """The first few documents, all that is looked at before training."""
    for number in range(min(_SAMPLE, len(documents))):
        try:
            yield documents[number]
        except UserError:
            if not skip:
                raise


@dataclasses.dataclass(frozen=True)
class WithSystem:
    """Documents, with a system prompt before conversations that have none. Read one at a time."""

    documents: Sequence[Sample]
    system: str | None

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Sample:
        sample = self.documents[index]
        match sample:
            case Pair():
                chosen, rejected = self._dressed(sample.chosen), self._dressed(sample.rejected)
                return dataclasses.replace(sample, chosen=chosen, rejected=rejected)
            case Labelled():
                return dataclasses.replace(sample, document=self._dressed(sample.document))
            case _:
                return self._dressed(sample)

    def _dressed(self, document: Document) -> Document:
        if self.system is None or not isinstance(document, Conversation):
            return document
        if any(message.role == "system" for message in document.messages):
            return document
        return dataclasses.replace(document, messages=(Message("system", self.system), *document.messages))

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))


def _tokens(
    split: str,
    read: WithSystem,
    tokenizer: PreTrainedTokenizerFast,
    options: TokenOptions,
    stage: str,
    cache: str | os.PathLike[str] | None,
    progress: Progress | None,
) -> tuple[Store, TokenCounts, TemplateInfo | None]:
    def build():
        tokenize = Tokenize(tokenizer, options)

        def note():
            return {"counts": dataclasses.asdict(tokenize.counts), "template": _template(tokenize)}

        return _examples(tokenize, _counted(read, f"tokenising {split} data", progress), stage), note

    # Two stages that make the same of the same records share them.
    made = ("scored",) if STAGES[stage].has_score_head else ()
    parts = (_hash_of(tokenizer), repr(options), *made)
    key = fingerprint(_counted(read, f"reading {split} data", progress), *parts)
    store = open_or_build(key, build, cache)
    counts = TokenCounts(**{**store.meta["counts"], "skipped": [tuple(one) for one in store.meta["counts"]["skipped"]]})
    template = store.meta["template"]
    return store, counts, TemplateInfo(**template) if template else None


def _examples(tokenize: Tokenize, samples: Iterable[Any], stage: str) -> Iterator[Example]:
    kind = STAGES[stage]
    if kind.dataset_type == "pairs":
        return tokenised_pairs(tokenize, samples, scored=kind.has_score_head)
    if kind.dataset_type == "labelled":
        return tokenised_labelled(tokenize, samples)
    return tokenize(_plain(samples) if stage == "pt" else samples)


def _plain(documents: Iterable[Document]) -> Iterator[Document]:
    for document in documents:
        if isinstance(document, Conversation):
            raise UserError(
                "a conversation, and stage pt learns plain text",
                where=str(document.origin),
                fix="set stage: sft, or name the column that holds the text: format: text, columns: {text: NAME}",
            )
        yield document


def _nll(recipe: Recipe) -> Literal["answer", "all"] | None:
    stage = STAGES[recipe.stage.kind]
    if not stage.uses_nll(recipe.stage):
        return None
    return "all" if recipe.data.train_on_prompt else "answer"


def _both_kinds(store: Store) -> None:
    """Raises UserError for labels that are all the same: there would be nothing to tell apart."""
    labels = store.values[::2]
    if labels.min() == labels.max():
        raise UserError(
            f"all {len(labels)} answers are labelled {'true' if labels[0] else 'false'}, so nothing tells good from "
            "bad",
            where="data.train",
            fix="add answers with the other label; or learn the good ones with stage: sft",
        )


def _template(tokenize: Tokenize) -> dict | None:
    if not tokenize.met_conversations:
        return None
    end = tokenize.chat.end_of_turn
    return dataclasses.asdict(TemplateInfo(end.head, end.token is not None, tokenize.chat.writes_date))


def _counted(read: WithSystem, what: str, progress: Progress | None) -> Iterable[Any]:
    for done, document in enumerate(read):
        if progress is not None and done % 256 == 0:
            progress(what, done, len(read))
        yield document
    if progress is not None:
        progress(what, len(read), len(read))


def _hash_of(tokenizer: PreTrainedTokenizerFast) -> str:
    """Of everything in a tokenizer that decides ids."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    told = {name: str(value) for name, value in sorted(tokenizer.special_tokens_map.items())}
    parts = [backend.to_str(), json.dumps(tokenizer.chat_template), json.dumps(told), str(tokenizer("a")["input_ids"])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _nothing(split: str, counts: TokenCounts) -> UserError:
    reasons = {
        "have nothing to learn": counts.nothing_to_learn,
        "have nothing to learn after truncation": counts.nothing_after_truncation,
        "are longer than max_length": counts.dropped,
        "cannot be rendered": len(counts.skipped),
    }
    told = ", ".join(f"{number} {reason}" for reason, number in reasons.items() if number)
    return UserError(
        f"there is nothing to learn anywhere in the {split} data: of {counts.documents} documents, {told or 'none'}",
        where=f"data.{split}",
        fix="see `meshtune data inspect`; raise data.max_length, or check roles and message weights",
    )
