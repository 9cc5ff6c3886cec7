"""From a recipe to its loaders: documents, tokens (from the cache if they were made before), rows, and the report."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from meshtune.config.data import DataSection
from meshtune.config.recipe import Recipe
from meshtune.data.conversation import Conversation, Document, Message
from meshtune.data.documents import documents
from meshtune.data.loader import Loader
from meshtune.data.masks import Learn
from meshtune.data.report import Report, Skipped, Template, make_report
from meshtune.data.store import Store, fingerprint, open_or_build
from meshtune.data.tokenizer import check_vocabulary
from meshtune.data.tokens import Counts, Tokenize, TokenOptions
from meshtune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Progress = Callable[[str, int, int], None]  # (what is done, documents done, documents in all)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What training reads: loaders, reports, and a hash of all training tokens and weights (`fingerprint`)."""

    train: Loader
    validation: Loader | None
    report: Report
    validation_report: Report | None
    fingerprint: str


def prepare(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    *,
    vocab: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Prepared:
    """The data of a recipe, tokenised and ready to be read.

    `vocab` is the number of rows of the model's embedding, None to leave it unchecked. `cache` is where tokens are
    kept, instead of $MESHTUNE_CACHE or ~/.cache/meshtune. Validation rows come in micro-batches, in their own order.

    Raises UserError: as the sources, formats and templates do; if the tokenizer makes ids that the model does not
    have; if there is nothing to learn anywhere.
    """
    if vocab is not None:
        check_vocabulary(tokenizer, vocab)
    data = recipe.data
    options = token_options(data)
    found = documents(data, seed=recipe.seed)
    skipped = [Skipped(str(skip.origin), skip.reason) for skip in found.skipped]
    micro_batch = recipe.train.batch_size // recipe.train.accumulation

    def loader(split: str, read: Sequence[Document], *, shuffle: bool, rows: int, accumulation: int):
        store, counts, template = _tokens(split, WithSystem(read, data.system), tokenizer, options, cache, progress)
        if not len(store):
            raise _nothing(split, counts)
        made = Loader(
            store,
            max_length=data.max_length,
            batch_size=rows,
            accumulation=accumulation,
            packing=data.packing,
            shuffle=shuffle,
            seed=recipe.seed,
        )
        left_out = skipped if split == "train" else []
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
    return Prepared(train, validation, report, validation_report, train.store.path.name)


def token_options(data: DataSection) -> TokenOptions:
    """What the data section says about tokens."""
    return TokenOptions(
        max_length=data.max_length,
        learn=Learn(train_on_prompt=data.train_on_prompt, last_turn_only=data.last_turn_only),
        overlong=data.overlong,
        skip_bad=data.on_bad == "skip",
    )


@dataclasses.dataclass(frozen=True)
class WithSystem:
    """Documents, with a system prompt before conversations that have none. Read one at a time."""

    documents: Sequence[Document]
    system: str | None

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Document:
        document = self.documents[index]
        if self.system is None or not isinstance(document, Conversation):
            return document
        if any(message.role == "system" for message in document.messages):
            return document
        return dataclasses.replace(document, messages=(Message("system", self.system), *document.messages))

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))


def _tokens(
    split: str,
    read: WithSystem,
    tokenizer: PreTrainedTokenizerFast,
    options: TokenOptions,
    cache: str | os.PathLike[str] | None,
    progress: Progress | None,
) -> tuple[Store, Counts, Template | None]:
    def build():
        tokenize = Tokenize(tokenizer, options)

        def note():
            return {"counts": dataclasses.asdict(tokenize.counts), "template": _template(tokenize)}

        return tokenize(_counted(read, f"tokenising {split} data", progress)), note

    tokenizer_hash = _hash_of(tokenizer)
    key = fingerprint(_counted(read, f"reading {split} data", progress), tokenizer_hash, repr(options))
    store = open_or_build(key, build, cache)
    counts = Counts(**{**store.meta["counts"], "skipped": [tuple(one) for one in store.meta["counts"]["skipped"]]})
    template = store.meta["template"]
    return store, counts, Template(**template) if template else None


def _template(tokenize: Tokenize) -> dict | None:
    if not tokenize.met_conversations:
        return None
    end = tokenize.chat.end_of_turn
    return dataclasses.asdict(Template(end.head, end.token is not None, tokenize.chat.writes_date))


def _counted(read: WithSystem, what: str, progress: Progress | None) -> Iterable[Document]:
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


def _nothing(split: str, counts: Counts) -> UserError:
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
