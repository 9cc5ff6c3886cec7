"""Fields of records: how a format is described, how fields are read and checked, and which ones mean something
elsewhere.

All other fields (an id, a source) are passed over and listed in the report.

Texts without a chat template have no place for them, nor for tools.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence

from meshtune.data.conversation import JsonObject, Message, Origin, Pair, Sample
from meshtune.data.dialect import REASONING_KEYS
from meshtune.errors import UserError, nearest

Record = Mapping[str, object]
FieldNames = Mapping[str, str | None]
"""A format's fields -> the record's; None where the records have no such field."""


def same_names(*fields: str) -> dict[str, str]:
    """Fields that records name as the format does."""
    return {field: field for field in fields}


Detect = Callable[[Record, FieldNames, Mapping[str, str]], int]


def has_fields(*fields: str) -> Detect:
    """The detection of a format whose records have all of these fields."""
    return lambda record, names, tags: 2 if all(names[field] in record for field in fields) else 0


def only_by_name(record: Record, names: FieldNames, tags: Mapping[str, str]) -> int:
    """The detection of a format whose records look like those of another, so that it must be named."""
    return 0


@dataclasses.dataclass(frozen=True, eq=False)
class RecordFormat:
    """A format of records.

    `expects` describes a record for people. `fields` maps the format's own field names to their default names in a
    record, `aliases` further names that `columns` may use for them; `required` are the fields that it cannot do
    without; `tags` are the tags it knows, with their defaults.
    `detect(record, field_names, tags)` says how well a record fits: 0 not, 1 possibly, 2 certainly.
    `convert(record, field_names, tags, origin)` returns the sample, or raises UserError naming record and field.
    `convert_bad` does so for an answer that is an example of a bad one, which may call tools that do not exist; None
    where that is no different. `has_columns`: fields that are not part of the prompt are columns for rewards.
    """

    name: str
    expects: str
    fields: Mapping[str, str]
    detect: Detect
    convert: Callable[[Record, FieldNames, Mapping[str, str], Origin], Sample]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    convert_bad: Callable[[Record, FieldNames, Mapping[str, str], Origin], Sample] | None = None
    required: tuple[str, ...] = ()
    has_columns: bool = False

    def converter(self, *, good: bool) -> Callable[[Record, FieldNames, Mapping[str, str], Origin], Sample]:
        """The converter of records of good or of bad answers."""
        return self.convert if good or self.convert_bad is None else self.convert_bad

    def has_column(self, column: str) -> bool:
        """Whether `columns` may name this field."""
        return column in self.fields or column in self.aliases

    def accepts(self, columns: FieldNames) -> bool:
        """Whether the format has all of `columns`; of those that are not to be read it needs none."""
        return all(self.has_column(column) for column, name in columns.items() if name is not None) and not (
            self.missing(columns)
        )

    def missing(self, columns: FieldNames) -> list[str]:
        """The required fields that `columns` says are not to be read."""
        unread = [self.aliases.get(column, column) for column, name in columns.items() if name is None]
        return [field for field in self.required if field in unread]

    def resolve(self, columns: FieldNames) -> dict[str, str | None]:
        """The name of every field in the records, `columns` taking precedence over the defaults. A column that the
        format does not have is in it where it is not to be read."""
        return dict(self.fields) | {self.aliases.get(key, key): name for key, name in columns.items()}


JSON_TYPES = {str: "text", bool: "true/false", int: "a number", float: "a number", list: "a list", dict: "an object"}


def field_error(problem: str, origin: Origin, field: str, fix: str) -> UserError:
    """The error for one field of one record."""
    return UserError(problem, where=f"{origin}, field '{field}'", fix=fix)


def json_type(value: object) -> str:
    """The name of a JSON value's type, for people."""
    return "null" if value is None else JSON_TYPES.get(type(value), type(value).__name__)


def describe(value: object) -> str:
    """A value for an error message: its type and its first 60 characters."""
    if value is None:
        return "null"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"{json_type(value)}: {text[:60]}{'…' if len(text) > 60 else ''}"


def text_field(record: Record, field: str, origin: Origin, *, required: bool = True) -> str:
    """The text under `field`, or "" where an optional field is missing or null.

    Raises UserError where a required field is missing or blank, and where the value is not text.
    """
    value = record.get(field)
    if value is None:
        if not required:
            return ""
        raise missing_field_error(record, field, origin)
    return check_text(value, origin, field, required=required)


def missing_field_error(record: Record, field: str, origin: Origin) -> UserError:
    """The error for a required field that is null or missing."""
    if field in record:
        return field_error("the field is null", origin, field, "fill it, or remove the record")
    names = ", ".join(map(str, record)) or "none"
    problem = f"the field is missing; the record's fields are: {names}"
    return field_error(problem, origin, field, f"{nearest(field, map(str, record))}map it: columns: {{{field}: NAME}}")


def check_text(value: object, origin: Origin, field: str, *, required: bool = True) -> str:
    """`value`, if it is well-formed text that is not blank where it is required. Raises UserError otherwise."""
    if not isinstance(value, str):
        raise field_error(f"expected text, found {describe(value)}", origin, field, "write it as text, in quotes")
    if required and (not value or value.isspace()):
        raise field_error("the text is empty", origin, field, "fill it, or remove the record")
    if not value.isascii():
        _check_characters(value, origin, field)
    return value


def _check_characters(value: str, origin: Origin, field: str) -> None:
    """Raises UserError for text with half of a character (a surrogate)."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        problem = f"half of a character (\\u{ord(value[error.start]):04x}) at position {error.start}"
        raise field_error(problem, origin, field, "write whole characters") from None


def list_field(record: Record, field: str, origin: Origin, holds: str) -> Sequence[object]:
    """The list under `field`, whose items are called `holds`. Raises UserError where it is missing, no list, or
    empty."""
    value = record.get(field)
    if value is None:
        raise missing_field_error(record, field, origin)
    if not isinstance(value, list | tuple) or not value:
        raise _list_error(value, origin, field, holds)
    return value


def _list_error(value: object, origin: Origin, field: str, holds: str) -> UserError:
    if isinstance(value, list | tuple):
        return field_error("the list is empty", origin, field, "fill it, or remove the record")
    fix = f"write a list of {holds}"
    return field_error(f"expected a list of {holds}, found {describe(value)}", origin, field, fix)


# Names of a turn's weight in the loss: OpenAI's and LLaMA-Factory's are numbers, the others switches: ms-swift's loss,
# axolotl's train and training (message_field_training), tinker_cookbook's trainable.
WEIGHTS, SWITCHES = ("weight", "loss_weight", "loss_scale"), ("loss", "train", "training", "trainable")


def weight_field(turn: Mapping[str, object], origin: Origin, field: str) -> float | None:
    """The weight of a turn in the loss, a number >= 0 or a switch; None if it has neither. Raises UserError where two
    fields of the turn contradict each other."""
    weights = {
        key: _weight(turn[key], key, origin, field) for key in (*WEIGHTS, *SWITCHES) if turn.get(key) is not None
    }
    if len(set(weights.values())) > 1:
        raise _contradiction_error(turn, list(weights), origin, field)
    return next(iter(weights.values()), None)


def _contradiction_error(turn: Mapping[str, object], keys: list[str], origin: Origin, field: str) -> UserError:
    listed = " and ".join(f"{key} {turn[key]!r}" for key in keys)
    fix = "leave one of them"
    return field_error(f"the turn's {listed} contradict each other", origin, f"{field}.{keys[-1]}", fix)


def _weight(value: object, key: str, origin: Origin, field: str) -> float:
    if key in SWITCHES:
        if value not in (0, 1):
            problem = f"expected true or false, found {describe(value)}"
            raise field_error(
                problem, origin, f"{field}.{key}", "false excludes the turn from the loss; or write a weight"
            )
        return float(value)  # pyright: ignore[reportArgumentType] - 0 or 1
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        problem = f"expected a number >= 0, found {describe(value)}"
        raise field_error(problem, origin, f"{field}.{key}", "0 excludes the turn from the loss, 1 counts it in full")
    return float(value)


def parse_json(value: str, origin: Origin, field: str) -> object:
    """The value of JSON text. Raises UserError where it is not JSON."""
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise field_error(f"not JSON ({error}): {value[:60]!r}", origin, field, "correct the JSON text") from None


def check_turns(
    messages: Sequence[Message],
    origin: Origin,
    field: str,
    role_names: Sequence[str] | None = None,
    *,
    calls_in_text: bool = False,
) -> None:
    """Checks the order of roles in a conversation.

    It has at most one system turn, at the start; then user and assistant alternate, beginning with user; tool results
    follow an assistant's tool calls, before its answer; the last turn is the assistant's.

    `role_names` are the roles as the record spells them. With `calls_in_text` a tool result may follow any assistant
    turn, since its call may be in the text, as in sharegpt data. Raises UserError naming the turn.
    """
    names = role_names or [message.role for message in messages]
    previous: Message | None = None
    for index, message in enumerate(messages):
        if message.role == "system" and index == 0:
            continue
        expected = _expected_roles(previous, calls_in_text)
        if message.role not in expected:
            raise _wrong_order_error(names, index, expected, origin, field)
        previous = message
    if previous is None or previous.role != "assistant":
        raise _no_answer_error(names, origin, field)


def _no_answer_error(names: Sequence[str], origin: Origin, field: str) -> UserError:
    problem = f"the conversation ends with {names[-1]}, so there is no answer to it"
    fix = "end it with an assistant turn; correct the record"
    return field_error(problem, origin, f"{field}[{len(names) - 1}]", fix)


def _wrong_order_error(
    names: Sequence[str], index: int, expected: Sequence[str], origin: Origin, field: str
) -> UserError:
    position = f"after {names[index - 1]}" if index else "at the start"
    problem = f"wrong role order: '{names[index]}' {position}, where {' or '.join(expected)} is expected"
    fix = "after at most one system turn, user and assistant alternate; tool results follow a tool call; correct the "
    return field_error(problem, origin, f"{field}[{index}]", fix + "record")


# The roles that may follow each.
_FOLLOWING: dict[str, tuple[str, ...]] = {"user": ("assistant",), "tool": ("tool", "assistant")}


def _expected_roles(previous: Message | None, calls_in_text: bool) -> tuple[str, ...]:
    """The roles that may follow `previous`, None being the start of the conversation."""
    if previous is None or previous.role in _FOLLOWING:
        return ("user",) if previous is None else _FOLLOWING[previous.role]
    return ("tool",) if previous.tool_calls else ("user", "tool") if calls_in_text else ("user",)


PICTURES = ("images", "image")
MEDIA = (*PICTURES, "videos", "video", "audios", "audio")
_NO_MEDIA = "only text and pictures can be trained on, such as frames of a video"
_NO_TOKENS = "a mask of tokens does not fit the tokens that are made here"
_PREFERENCE = "it is an example of a bad answer"

FIELDS: dict[str, str] = {
    # System prompts: Alpaca's, Anthropic's, ms-swift's and Intel's orca_dpo_pairs; OpenOrca's name.
    "system": "it is a system prompt",
    "system_prompt": "it is a system prompt",
    # OpenAI's fine-tuning API, TRL (docs/source/dataset_formats.md), LLaMA-Factory (data/README.md).
    "tools": "it offers tools",
    "functions": "it offers tools",
    # TRL renders with it (trl.data_utils.apply_chat_template).
    "chat_template_kwargs": "it sets variables of the chat template",
    # LLaMA-Factory, ms-swift (docs, Customization/Custom-dataset) and TRL (vision data sets: image, images).
    **dict.fromkeys(MEDIA, _NO_MEDIA),
    **dict.fromkeys(PICTURES, "it holds pictures"),
    "objects": "boxes within pictures cannot be trained on",  # ms-swift's
    # Alpaca's earlier turns in LLaMA-Factory and ms-swift.
    "history": "it holds earlier turns",
    # KTO's: TRL's unpaired preference, ms-swift; LLaMA-Factory's kto_tag.
    "label": "it says whether the answer is a good one",
    "kto_tag": "it says whether the answer is a good one",
    "labels": "it holds labels of the answer's parts, or of tokens",  # TRL's stepwise supervision; transformers
    # ms-swift's pairs.
    "rejected_response": _PREFERENCE,
    "rejected_messages": _PREFERENCE,
    # Of a whole record, in the words that other tools have for turns.
    **dict.fromkeys((*WEIGHTS, *SWITCHES), "it is a weight in the loss, which whole records do not have here"),
    # NeMo: the speaker that is not trained on. TRL: masks of tokens.
    "mask": "it says what is not trained on",
    "completion_mask": _NO_TOKENS,
    "assistant_masks": _NO_TOKENS,
    "loss_mask": _NO_TOKENS,
}
"""A field of a record -> what it means. The comments say where."""

# Those of FIELDS that are part of a prompt.
OF_PROMPTS = {"system", "system_prompt", "tools", "functions", "chat_template_kwargs", "history", *MEDIA, "objects"}

LABELLED = ("alpaca", "sharegpt", "messages", "prompt_completion")  # formats that stage kto reads

TURN_FIELDS: dict[str, str] = {
    **dict.fromkeys(MEDIA, _NO_MEDIA),
    # ChatGLM's and OpenAI's cookbook's system turns.
    "tools": "tools belong beside the turns, in the record's tools",
    "functions": "tools belong beside the turns, in the record's tools",
    # FastChat and torchtune, of opposite senses: to be trained on, and not to be.
    "mask": "some tools train on a turn with a mask, others on one without",
    "masked": "some tools train on a turn with a mask, others on one without",
    "loss_mask": "some tools train on a turn with a mask, others on one without",
    "train_detail": "parts of a turn cannot be masked",  # axolotl
    "training_detail": "parts of a turn cannot be masked",
}
"""A field of a turn -> why it is not read."""

_READ_OF_TURNS = {"role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id", "id"}
_READ_OF_TURNS |= {*REASONING_KEYS, *WEIGHTS, *SWITCHES}


def is_blank(value: object) -> bool:
    """Whether a field holds nothing: null, empty, or only such values, also as JSON text."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null")
    if isinstance(value, list | tuple):
        return all(is_blank(item) for item in value)
    if isinstance(value, dict):
        return all(is_blank(item) for item in value.values())
    return value is None


def read_record(
    form: RecordFormat, record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin
) -> Sample:
    """The sample of a record.

    Raises UserError for a field that means something elsewhere and that the format does not read, unless `fields` says
    that it is not to be read; and as the format does.
    """
    for name in record.keys() & (OF_PROMPTS if form.has_columns else FIELDS.keys()):
        if not _is_read(name, record, form, fields) and _has_meaning(name, record[name]):
            raise unread_field_error(record, name, origin, _remedy(name, record, form, fields, tags, origin))
    return form.convert(record, fields, tags, origin)


def picture_field(record: Record, fields: FieldNames) -> str | None:
    """The field of a record that lists its pictures, or holds its only one; None where it has none."""
    name = fields.get("images")
    if name == "images" and name not in record:
        name = "image"
    return name if name in record else None


def has_pictures(sample: Sample, record: Record, fields: FieldNames) -> bool:
    """Whether a record has pictures: a list of them, or parts of its sample's turns."""
    if (fields.get("images") in record or "image" in record) and _lists_pictures(record, fields):
        return True
    documents = (sample.chosen, sample.rejected) if isinstance(sample, Pair) else (getattr(sample, "document", sample),)
    return any(message.pictures for document in documents for message in getattr(document, "messages", ()))


def _lists_pictures(record: Record, fields: FieldNames) -> bool:
    field = picture_field(record, fields)
    return field is not None and not is_blank(record[field])


def _is_read(name: str, record: Record, form: RecordFormat, fields: FieldNames) -> bool:
    """Whether the format reads a field, or `fields` says that it is not to be read."""
    if name in fields.values() or name == picture_field(record, fields):
        return True
    columns = {name, "images"} if name in PICTURES else {form.aliases.get(name, name)}
    return any(column in fields and fields[column] is None for column in columns)


def _has_meaning(name: str, value: object) -> bool:
    if name in ("label", "kto_tag"):
        return isinstance(value, bool) or (isinstance(value, str) and value.strip().lower() in ("true", "false"))
    if name in SWITCHES:
        return value in (False, 0) or (isinstance(value, str) and value.strip().lower() == "false")
    if name in WEIGHTS:
        return isinstance(value, bool | int | float) and value != 1
    if name == "labels":
        return isinstance(value, list | tuple) and not is_blank(value)
    return not is_blank(value)


def _remedy(
    name: str, record: Record, form: RecordFormat, fields: FieldNames, tags: Mapping[str, str], origin: Origin
) -> str:
    """A way to read the field, "" where there is none: under another name if the record can be read so."""
    if name in ("label", "kto_tag") and form.name in LABELLED and not {"chosen", "label"} & form.fields.keys():
        return "set stage: kto, which learns from labels" + (f", and columns: {{label: {name}}}" * (name != "label"))
    column = {"system_prompt": "system", "functions": "tools"}.get(name)
    if column is None or column not in form.fields or column in record:
        return ""
    try:
        form.convert(record, {**fields, column: name}, tags, origin)
    except UserError:
        return ""
    return f"columns: {{{column}: {name}}} reads it"


def unread_field_error(
    record: Record, name: str, origin: Origin, remedy: str = "", column: str | None = None
) -> UserError:
    """The error for a field of a record that is not read, with a way to read it, if there is one, and the way to train
    without it. `column` is the format's name of the field."""
    column = column or name
    fix = f"columns: {{{column}: null}} trains without it"
    if name == "kto_tag" and "label" in record:
        fix = "remove one of label and kto_tag"
    problem = f"the field is not read, and {FIELDS[column]}: {describe(record[name])}"
    return field_error(problem, origin, name, f"{remedy}; or {fix}" if remedy else fix)


def check_turn(turn: Mapping[str, object], origin: Origin, field: str) -> None:
    """Raises UserError for a field of a turn that means something elsewhere and is not read."""
    for name in turn.keys() & TURN_FIELDS.keys():
        if not is_blank(turn[name]):
            raise _unread_turn_field_error(turn, name, origin, field)


def _unread_turn_field_error(turn: Mapping[str, object], name: str, origin: Origin, field: str) -> UserError:
    problem = f"the field is not read, and {TURN_FIELDS[name]}: {describe(turn[name])}"
    fix = "remove it"
    if "mask" in name or "detail" in name:
        fix = "write weight: 0 in turns that are not to be trained on, and remove it"
    elif name in ("tools", "functions"):
        fix = "move it there, beside the list of turns"
    return field_error(problem, origin, f"{field}.{name}", fix)


def passed_over(record: Record, tags: Mapping[str, str]) -> set[str]:
    """The names of a record's fields that hold something, and `messages[].NAME` for fields of its turns that no format
    reads. A chat template may read those."""
    names = {name for name, value in record.items() if name not in FIELDS or not is_blank(value)}
    known = _READ_OF_TURNS.union(tags.values()) if tags else _READ_OF_TURNS
    for name, turns in record.items():
        for turn in turns if isinstance(turns, list) else ():
            if isinstance(turn, dict) and not turn.keys() <= known and not known.isdisjoint(turn):
                names.update(f"{name}[].{key}" for key in turn.keys() - known if not is_blank(turn[key]))
    return names


MARGIN = "margin (stage rm alone reads it)"


def unread_fields(names: frozenset[str] | set[str], fields: FieldNames) -> list[str]:
    """The names of fields that are passed over, in order, and MARGIN where there is one."""
    margin = [MARGIN] if fields.get("margin") in names else []
    return sorted([*(names - {name for name in fields.values() if name is not None}), *margin])


CONTEXT = {"system": "system", "chat_template_kwargs": "chat_template_kwargs", "images": "images"}
# Parameters of apply_chat_template that are no variables of a template.
_RESERVED = ("tools", "messages", "conversation", "chat_template", "add_generation_prompt", "continue_final_message")
_RESERVED += ("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs")
_RESERVED += ("return_assistant_tokens_mask",)


def with_system(messages: Sequence[Message], record: Record, fields: FieldNames, origin: Origin) -> list[Message]:
    """Puts the record's own system prompt, if it has one, before the messages. Raises UserError where they begin
    with another."""
    field = fields.get("system")
    value = record.get(field) if field else None
    if not field or value == "" or (not isinstance(value, str) and is_blank(value)):
        return list(messages)
    return _with_own_system(messages, text_field(record, field, origin, required=False), origin, field)


def _with_own_system(messages: Sequence[Message], system: str, origin: Origin, field: str) -> list[Message]:
    if messages and messages[0].role == "system" and messages[0].content.strip() == system.strip():
        return list(messages)
    if messages and messages[0].role == "system":
        problem = "there is a system prompt here and another as the first turn"
        fix = "remove one of the two; or columns: {system: null} trains without this one"
        raise field_error(problem, origin, field, fix)
    return [Message("system", system), *messages]


def read_variables(record: Record, fields: FieldNames, origin: Origin) -> JsonObject:
    """The variables that a record sets for the chat template, from an object or JSON text. Raises UserError where they
    are none."""
    field = fields.get("chat_template_kwargs")
    value = record.get(field) if field else None
    return {} if not field or is_blank(value) else _parse_variables(value, field, origin)


def _parse_variables(value: object, field: str, origin: Origin) -> JsonObject:
    if isinstance(value, str):
        value = parse_json(value, origin, field)
    if not isinstance(value, Mapping):
        problem = f"expected an object of variables, found {describe(value)}"
        raise field_error(problem, origin, field, 'write {"enable_thinking": false}, say')
    for name in value:
        if name in _RESERVED or not isinstance(name, str):
            fix = "move them to 'tools', beside it" if name == "tools" else "remove it"
            raise field_error("not a variable of a chat template", origin, f"{field}.{name}", fix)
    return {name: item for name, item in value.items() if item is not None}


def refuse_beside_texts(record: Record, fields: FieldNames, origin: Origin, instruction: str, output: str = "") -> None:
    """Raises UserError for fields that need a chat template, in records of plain text.

    `instruction` and `output` are the fields of the texts that the format alpaca would read as turns of a conversation.
    """
    for column in (*CONTEXT, "tools"):
        name = picture_field(record, fields) if column == "images" else fields.get(column)
        if name and not is_blank(record.get(name)):
            answer = f", output: {output}" if output else ""
            columns = f"{{instruction: {instruction}{answer}}}"
            remedy = "texts are trained on without a chat template, which would write it: "
            remedy += f"format: alpaca, columns: {columns} reads them as a conversation"
            raise unread_field_error(record, name, origin, remedy, column)
