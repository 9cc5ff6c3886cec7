"""Fields that mean something in the data of other tools: a format reads them, or a record that has one is refused.

All other fields (an id, a source) are passed over and listed in the report.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshtune.data.conversation import Origin, Sample
from meshtune.data.dialect import REASONING_KEYS
from meshtune.data.formats.record import SWITCHES, WEIGHTS, describe, field_error
from meshtune.data.formats.record_format import FieldNames, Record, RecordFormat
from meshtune.errors import UserError

MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_NO_MEDIA = "only text can be trained on"
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
    "objects": _NO_MEDIA,  # ms-swift's boxes within images
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
    for name in record.keys() & FIELDS.keys():
        if name not in fields.values() and not _is_left_out(name, form, fields) and _has_meaning(name, record[name]):
            raise unread_field_error(record, name, origin, _remedy(name, record, form, fields, tags, origin))
    return form.convert(record, fields, tags, origin)


def _is_left_out(name: str, form: RecordFormat, fields: FieldNames) -> bool:
    column = form.aliases.get(name, name)
    return column in fields and fields[column] is None


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
