"""Answers to the records of a data set through the engine, with metrics and losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from meshtune.cache import cache_folder
from meshtune.config.data_options import LossPolicy, TokenOptions
from meshtune.config.sections import DataSection, SourceSection
from meshtune.data.chat import as_dicts, template_error
from meshtune.data.conversation import Conversation, Document, Sample
from meshtune.data.documents import open_documents
from meshtune.data.pictures.expansion import check_placeholders, read_pictures
from meshtune.data.pictures.files import PictureFiles
from meshtune.data.rendered import Rendered, check_has_place, check_messages_are_written, check_variables_are_read
from meshtune.data.tokens import Example, Tokenize
from meshtune.errors import UserError
from meshtune.evaluate.metrics import METRICS
from meshtune.generate.api import Model
from meshtune.generate.engine import Engine
from meshtune.generate.pictures import (
    PromptPicture,
    PromptPictures,
    TokenPrompt,
    insert_pictures,
    place_pictures,
    record_picture,
    text_only,
)
from meshtune.generate.programs import STEPS
from meshtune.generate.request import Generation, GenerationRequest, Sampling
from meshtune.generate.target_log_probs import TargetText
from meshtune.generate.text import Detokenizer, StopStrings, chat_template, continuation_ids, turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from meshtune.data.pictures.reader import PictureReader

ROWS = 16  # prompts computed at once


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A request with the strings that end its answer. `continued` writes the answer as the prompt's continuation, else
    as a separate text; `name` is that of its record."""

    request: GenerationRequest
    stop: tuple[str, ...] = ()
    continued: bool = False
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The text of an answer, its number of tokens, and why it ended: stop, or length."""

    text: str
    tokens: int
    finish_reason: str


class _Writing:
    """An answer under way."""

    def __init__(self, number: int, prompt: Prompt, tokenizer: PreTrainedTokenizerBase):
        self.number, self.prompt = number, prompt
        self._decoder = Detokenizer(tokenizer, prompt.request.prompt if prompt.continued else ())
        self._ends, self._text = StopStrings(prompt.stop), ""

    def push(self, ids: list[int]) -> bool:
        """Adds tokens; whether a stop string has ended the text."""
        self._text += self._ends.push(self._decoder.push(ids))
        return self._ends.found

    def answer(self, generation: Generation) -> Answer:
        """The answer, once no more tokens come."""
        self._text += self._ends.push(self._decoder.finish()) + self._ends.finish()
        reason = "stop" if self._ends.found else str(generation.finish_reason)
        return Answer(self._text, len(generation.tokens), reason)


def answers(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, rows: int = ROWS
) -> Iterator[tuple[int, Answer]]:
    """(number of the prompt, its answer) in the order in which they end; `rows` prompts are computed at once.

    Raises UserError naming the prompt where the model's logits are not finite.
    """
    for number, outcome in answers_or_errors(engine, tokenizer, prompts, rows=rows):
        if isinstance(outcome, UserError):
            raise UserError(outcome.what, where=prompts[number].name or None, fix=outcome.fix)
        yield number, outcome


def answers_or_errors(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, rows: int = ROWS
) -> Iterator[tuple[int, Answer | UserError]]:
    """As `answers`, with the error in place of an answer that ends with one."""
    if not prompts:
        return
    scheduler = engine.scheduler(rows=min(rows, len(prompts)))
    writing = {
        scheduler.submit(prompt.request): _Writing(number, prompt, tokenizer) for number, prompt in enumerate(prompts)
    }
    while writing:
        for progress in scheduler.step(STEPS):
            generation = progress.generation
            if generation not in writing:
                continue
            current = writing[generation]
            if generation.error is None and current.push([token.id for token in progress.tokens]):
                scheduler.cancel(generation)
            elif generation.error is None and progress.finish_reason is None:
                continue
            del writing[generation]
            yield current.number, generation.error or current.answer(generation)


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


class Records(Sequence[Record]):
    """Records that are read on access, from documents in memory or in files."""

    def __init__(self, documents: Sequence[Sample]):
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> Records: ...

    def __getitem__(self, index: int | slice) -> Record | Records:
        if isinstance(index, slice):
            assert index.start in (None, 0), "records are numbered from the first"
            return Records(self._documents[index])
        record = record_of(range(len(self))[index], self._documents[index])
        check_has_place(record.document)
        return record


def read_records(source: SourceSection, *, system: str | None = None, limit: int | None = None) -> Records:
    """The records of a source, all of them or the first `limit`. They are read, and checked, on access.

    `system` is the system prompt of conversations that have none. Raises UserError as data.documents does: here for
    an empty data set, say, and on access for a record without an answer.
    """
    if limit is not None:
        source = source.model_copy(update={"cap": min(limit, source.cap or limit)})
    files = PictureFiles(str(cache_folder() / "pictures"))
    documents = open_documents(DataSection(train=[source], packing=False), seed=0, pictures=files).train
    return Records(documents.with_system(system))


def record_of(number: int, document: Sample) -> Record:
    """A document as a record."""
    assert isinstance(document, Document)  # load_documents has converted the records to documents
    if not isinstance(document, Conversation):
        return Record(number, document.prompt, document.text, document)
    messages = as_dicts(document)
    # The readers refuse a conversation that does not end with an answer.
    last = max(n for n, message in enumerate(document.messages) if message.role == "assistant")
    return Record(number, messages[:last], document.messages[last].content, document)


def record_prompt(
    tokenizer: PreTrainedTokenizerFast, record: Record, reader: PictureReader | None = None
) -> TokenPrompt:
    """The ids of the prompt, with its pictures. Raises UserError for an empty prompt, one that the chat template
    refuses, and pictures where there is no `reader` for them."""
    if isinstance(record.prompt, str):
        try:
            return TokenPrompt(continuation_ids(tokenizer, record.prompt))
        except UserError as problem:
            raise UserError(problem.what, where=record.origin, fix=problem.fix) from problem
    chat, document = chat_template(tokenizer, reader), record.document
    assert isinstance(document, Conversation)
    if reader is None and document.pictures:
        raise UserError(text_only().what, where=record.origin, fix=text_only().fix)
    check_variables_are_read(chat, document)
    prompt = chat.messages(document)[: len(record.prompt)]
    view = Rendered(chat, document, prompt, "")
    try:
        text = view.render_strictly(prompt, generation_prompt=True)
    except chat.failures as problem:
        raise template_error(problem, where=record.origin) from problem
    check_messages_are_written(dataclasses.replace(view, text=text), generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
    if reader is None:
        return TokenPrompt(ids)
    check_placeholders(reader, document)
    pictures = [record_picture(reader, picture, record.origin) for picture in document.pictures]
    return insert_pictures(reader, ids, pictures)


def picture_digests(record: Record) -> list[str]:
    """The digests of a record's pictures, to know them again."""
    document = record.document
    return [picture.digest for picture in document.pictures] if isinstance(document, Conversation) else []


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Losses in nats: `nats` of all tokens, which weigh `weight`; `records` per token of each record (None: it has none
    to learn), and `tokens` of each."""

    nats: float
    weight: float
    records: list[float | None]
    tokens: list[int]
    truncated: int


def held_out_loss(model: Model, records: Sequence[Record], *, policy: LossPolicy = LossPolicy()) -> HeldOut:
    """The loss on every assistant turn, or the text after its prompt, of records as training tokenises them.

    Records beyond the model's context are cut, and counted.
    """
    reader = model.picture_reader
    tokenize = Tokenize(model.tokenizer, TokenOptions(max_length=model.engine.context, policy=policy), reader)
    examples = list(tokenize.tokenise_each(record.document for record in records))
    usable = [example for example in examples if example is not None]
    texts = [
        TargetText(tuple(example.ids.tolist()), _first(example), _placed_pictures(reader, example))
        for example in usable
    ]
    targets = iter(model.target_log_probs(texts) if texts else ())
    sums, weights = np.zeros(len(examples)), np.zeros(len(examples))
    for number, example in enumerate(examples):
        if example is not None:
            weight = example.weights[_first(example) :].astype(np.float64)
            sums[number] = -float(np.sum(weight * next(targets).log_probabilities))
            weights[number] = weight.sum()
    losses = [float(total / weight) if weight else None for total, weight in zip(sums, weights, strict=True)]
    tokens = [0 if example is None else int(np.count_nonzero(example.weights[1:])) for example in examples]
    return HeldOut(float(sums.sum()), float(weights.sum()), losses, tokens, tokenize.counts.truncated)


def _placed_pictures(reader: PictureReader | None, example: Example) -> PromptPictures | None:
    if reader is None or not example.extra:
        return None
    placed = [
        PromptPicture(item.start, record_picture(reader, item.picture, str(example.origin)))
        for item in read_pictures(example.extra)
    ]
    return place_pictures(reader, len(example.ids), placed) if placed else None


def _first(example: Example) -> int:
    """The first token with a weight, of those that are predicted."""
    return 1 + int(np.flatnonzero(example.weights[1:])[0])


DEFAULT_TOKENS = 512  # of an answer, at most


@dataclasses.dataclass(frozen=True)
class PredictOptions:
    """How a data set is answered and compared. `max_tokens` of an answer at most (None: 512, or what the context has
    room for); `loss`: also the loss on the data's own answers; `rows` are computed at once."""

    metrics: tuple[str, ...] = METRICS
    loss: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    rows: int = ROWS


@dataclasses.dataclass(frozen=True)
class Predictions:
    """The rows of predictions.jsonl, and the totals of metrics.json."""

    rows: Sequence[dict[str, Any]]
    totals: dict[str, Any]


def make_prompts(model: Model, records: Sequence[Record], options: PredictOptions) -> list[Prompt]:
    """The requests to the engine. Raises UserError for a prompt that is too long, naming the record."""
    prompts = []
    for record in records:
        ids, pictures = record_prompt(model.tokenizer, record, model.picture_reader)
        turn_ids, turn_strings = (frozenset(), ()) if isinstance(record.prompt, str) else turn_end(model.tokenizer)
        room = model.engine.context - len(ids)
        if room < (options.max_tokens or 1):
            raise UserError(
                f"the prompt has {len(ids)} tokens and the model's context {model.engine.context}, so there is no room "
                f"for an answer of {options.max_tokens or 1}",
                where=record.origin,
                fix="shorten or remove the record, or give a smaller --max-tokens",
            )
        request = model.engine.request(
            ids,
            options.sampling.of_row(record.number),
            max_tokens=options.max_tokens or min(DEFAULT_TOKENS, room),
            stop_ids=model.stop_ids | turn_ids,
            pictures=pictures,
            where=record.origin,
        )
        stop = (*options.stop, *turn_strings)
        prompts.append(Prompt(request, stop, continued=isinstance(record.prompt, str), name=record.origin))
    return prompts
