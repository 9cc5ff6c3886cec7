"""The records of a data set for an evaluation: prompts and the data's own answers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtune.config.data import DataSection, SourceSection
from meshtune.data.chat import as_dicts, template_error
from meshtune.data.conversation import Conversation, Document, Sample
from meshtune.data.documents import load_documents
from meshtune.data.rendered import check_has_place, check_messages_are_written, check_variables_are_read
from meshtune.data.turns import Rendered
from meshtune.errors import UserError
from meshtune.generate.prompts import chat_template, continuation_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Messages = list[dict[str, object]]


@dataclasses.dataclass(frozen=True)
class Record:
    """A record of the data. `prompt` is a conversation that ends before its last assistant turn, or text to continue;
    `reference` is that turn, or the rest of the text. `document` is the record as a run would train on it."""

    number: int
    prompt: Messages | str
    reference: str
    document: Document

    @property
    def origin(self) -> str:
        """The file and record that it comes from."""
        return str(self.document.origin)


def read_records(source: SourceSection, *, system: str | None = None, limit: int | None = None) -> list[Record]:
    """The records of a source, all of them or the first `limit`.

    `system` is the system prompt of conversations that have none. Raises UserError as data.documents does:
    for an empty data set, say, and for a record without an answer.
    """
    if limit is not None:
        source = source.model_copy(update={"cap": min(limit, source.cap or limit)})
    documents = load_documents(DataSection(train=[source], packing=False), seed=0).train
    records = [record_of(number, document) for number, document in enumerate(documents.with_system(system))]
    for record in records:
        check_has_place(record.document)
    return records


def record_of(number: int, document: Sample) -> Record:
    """A document as a record."""
    assert isinstance(document, Document)  # load_documents has converted the records to documents
    if not isinstance(document, Conversation):
        return Record(number, document.prompt, document.text, document)
    messages = as_dicts(document)
    # The readers refuse a conversation that does not end with an answer.
    last = max(n for n, message in enumerate(document.messages) if message.role == "assistant")
    return Record(number, messages[:last], document.messages[last].content, document)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, record: Record) -> list[int]:
    """The ids of the prompt. Raises UserError for an empty prompt, and one that the chat template refuses."""
    if isinstance(record.prompt, str):
        try:
            return continuation_ids(tokenizer, record.prompt)
        except UserError as problem:
            raise UserError(problem.what, where=record.origin, fix=problem.fix) from problem
    chat, document = chat_template(tokenizer), record.document
    assert isinstance(document, Conversation)
    check_variables_are_read(chat, document)
    prompt = chat.messages(document)[: len(record.prompt)]
    view = Rendered(chat, document, prompt, "")
    try:
        text = view.render_strictly(prompt, generation_prompt=True)
    except chat.failures as problem:
        raise template_error(problem, where=record.origin) from problem
    check_messages_are_written(dataclasses.replace(view, text=text), generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportReturnType]


def digest(records: Sequence[Record]) -> str:
    """A hash of all prompts and references, to know a data set again."""
    hashed = hashlib.sha256()
    for record in records:
        hashed.update(json.dumps([record.prompt, record.reference], sort_keys=True, default=str).encode() + b"\n")
    return f"sha256:{hashed.hexdigest()}"
