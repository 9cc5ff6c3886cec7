"""Formats of preferences: pairs of a better and a worse answer, and answers labelled good or bad.

Alpaca and sharegpt records are LLaMA-Factory's ranking data: chosen and rejected are texts, or turns that continue the
conversation. `preference` is TRL's format: with a prompt, or without one where both answers are whole conversations
that share all but the last turn; next to such conversations a prompt that is text repeats their beginning
(trl.data_utils.maybe_extract_prompt). `openai` is the format of OpenAI's preference tuning, `hh` the transcripts of
Anthropic's helpful and harmless data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from meshtune.data.conversation import Conversation, Document, Labelled, Message, Origin, Pair, Role, Text
from meshtune.data.formats.alpaca import ALPACA, PROMPT_COMPLETION, convert_alpaca
from meshtune.data.formats.messages import MESSAGES, SHAREGPT, read_messages, read_turns
from meshtune.data.formats.record import (
    CONTEXT,
    FIELDS,
    FieldNames,
    Record,
    RecordFormat,
    check_text,
    check_turns,
    describe,
    field_error,
    is_blank,
    list_field,
    missing_field_error,
    read_variables,
    refuse_beside_texts,
    same_names,
    text_field,
    with_system,
)
from meshtune.data.formats.tools import parse_tools, with_tool_use

SIDES = ("chosen", "rejected")
SPEAKER = re.compile(r"\n\n(Human|Assistant):")


def make_pair(chosen: Document, rejected: Document, record: Record, fields: FieldNames, origin: Origin) -> Pair:
    """The pair, with the record's margin. Raises UserError where both answers are the same."""
    if _content(chosen) == _content(rejected):
        field = fields.get("rejected") or "rejected"
        raise field_error("chosen and rejected are the same answer", origin, field, "remove the record")
    name = fields.get("margin")
    margin = record.get(name) if name else None
    if name is None or margin is None:
        return Pair(chosen, rejected, origin)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise field_error(f"expected a number, found {describe(margin)}", origin, name, "write a number")
    return Pair(chosen, rejected, origin, float(margin))


def _content(document: Document) -> tuple[object, ...]:
    return document.messages if isinstance(document, Conversation) else (document.prompt, document.text)


def has_both_sides(record: Record, fields: FieldNames) -> bool:
    return all((fields[side] or side) in record for side in SIDES)


def ranked_alpaca() -> RecordFormat:
    """Instruction and input, with chosen and rejected texts in place of the output."""
    names = {key: key for key in ALPACA.fields if key != "output"} | same_names(*SIDES, "margin")

    def detect(record: Record, fields: FieldNames, tags: Mapping[str, str]) -> int:
        return 2 if has_both_sides(record, fields) and fields["instruction"] in record else 0

    def convert(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Pair:
        chosen, rejected = (
            convert_alpaca(record, {**fields, "output": fields[side] or side}, tags, origin) for side in SIDES
        )
        return make_pair(chosen, rejected, record, fields, origin)

    aliases = {"prompt": "instruction", "query": "input"}
    expects = "instruction, chosen and rejected, text; also input, system, history, tools, margin"
    return RecordFormat("alpaca", expects, names, detect, convert, aliases, required=SIDES)


def ranked_turns(base: RecordFormat, turns: str, expects: str) -> RecordFormat:
    """A conversation under the field `turns` that chosen and rejected continue, each with a turn or a list of them."""

    def detect(record: Record, fields: FieldNames, tags: Mapping[str, str]) -> int:
        if not has_both_sides(record, fields) or any(_is_whole(record[fields[side] or side]) for side in SIDES):
            return 0
        return base.detect(record, fields, tags)

    def continue_with(
        record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin, side: str
    ) -> Document:
        field = fields[side] or side
        answer = record.get(field)
        if answer is None:
            raise missing_field_error(record, field, origin)
        if not isinstance(answer, dict | list) or not answer:
            problem = f"expected a turn, found {describe(answer)}"
            raise field_error(problem, origin, field, "write it like the other turns")
        if _is_whole(answer):
            problem = f"{field} is a whole conversation, not how {fields[turns] or turns} goes on"
            raise field_error(problem, origin, field, _whole_fix(answer, record))
        prompt = list_field(record, fields[turns] or turns, origin, "turns")
        conversation = [*prompt, *(answer if isinstance(answer, list) else [answer])]
        convert = base.converter(good=side == "chosen")
        document = convert({**record, fields[turns] or turns: conversation}, fields, tags, origin)
        assert isinstance(document, Conversation | Text)
        return document

    def convert(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Pair:
        chosen, rejected = (continue_with(record, fields, tags, origin, side) for side in SIDES)
        return make_pair(chosen, rejected, record, fields, origin)

    names = {**base.fields, **same_names(*SIDES, "margin")}
    required = (*base.required, *SIDES)
    return RecordFormat(base.name, expects, names, detect, convert, base.aliases, base.tags, required=required)


def _whole_fix(answer: object, record: Record) -> str:
    """The way to read whole conversations that come with a prompt."""
    if any("role" not in turn for turn in answer if isinstance(turn, dict)):  # pyright: ignore[reportGeneralTypeIssues]
        return "leave out of it the turns that stand before the answer"
    fix = "set format: preference, which reads two whole conversations"
    return fix + (", with columns: {prompt: null}" if isinstance(record.get("prompt"), list) else "")


def _is_whole(side: object) -> bool:
    """Whether an answer is a conversation from its beginning: it begins with another role than the assistant's."""
    first = side[0] if isinstance(side, list | tuple) and side else None
    role = (first.get("role") or first.get("from")) if isinstance(first, dict) else None
    return role in ("system", "developer", "user", "human")


def _detect_preference(record: Record, fields: FieldNames, tags: Mapping[str, str]) -> int:
    if not has_both_sides(record, fields):
        return 0
    conversations = all(isinstance(record[fields[side] or side], list) for side in SIDES)
    return 2 if fields["prompt"] in record or conversations else 0


def _convert_preference(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Pair:
    prompt, sides = fields["prompt"], [fields[side] or side for side in SIDES]
    if not any(isinstance(record.get(field), list) for field in (prompt or "", *sides)):
        if prompt is None:
            fix = "name the field that holds it: columns: {prompt: NAME}"
            raise field_error("answers that are texts need a prompt", origin, "prompt", fix)
        refuse_beside_texts(record, fields, origin, prompt)
        prompt_text = text_field(record, prompt, origin)
        texts = [Text(text_field(record, field, origin), origin, prompt=prompt_text) for field in sides]
        return make_pair(texts[0], texts[1], record, fields, origin)
    head = _messages(record, prompt, "user", origin) if prompt and record.get(prompt) is not None else []
    tails = [_messages(record, field, "assistant", origin) for field in sides]
    if head and all(_is_whole(record[field]) for field in sides):
        _check_prompt_is_repeated(record, prompt or "prompt", tails, origin)
        head = []
    tools, variables = parse_tools(record, fields["tools"], origin), read_variables(record, fields, origin)
    conversations = []
    for field, tail in zip(sides, tails, strict=True):
        messages, where = with_system([*head, *tail], record, fields, origin), f"{prompt} + {field}" if head else field
        turns = with_tool_use(messages, tools, origin, where, good=field == sides[0])
        conversations.append(Conversation(turns, origin, tools, variables))
    if not head:
        _check_same_prompt(conversations, origin, sides[1])
    return make_pair(conversations[0], conversations[1], record, fields, origin)


def _check_prompt_is_repeated(record: Record, prompt: str, sides: Sequence[Sequence[Message]], origin: Origin) -> None:
    """Raises UserError unless whole conversations contain the text of the record's prompt."""
    text = record[prompt]
    fix = "columns: {prompt: null} reads the conversations alone"
    if not isinstance(text, str):
        problem = "chosen and rejected are whole conversations, and there is a prompt of messages too"
        raise field_error(problem, origin, prompt, fix)
    for side in sides:
        if not any(text.strip() in message.content for message in side[:-1]):
            problem = "chosen and rejected are whole conversations, and the prompt is not in them"
            raise field_error(problem, origin, prompt, fix)


def _check_same_prompt(sides: Sequence[Conversation], origin: Origin, field: str) -> None:
    chosen, rejected = (side.messages for side in sides)
    if chosen[:-1] != rejected[:-1]:
        problem = "chosen and rejected are answers to different conversations"
        raise field_error(problem, origin, field, "they may differ in the last turn alone; or remove the record")


def _messages(record: Record, field: str, role: Role, origin: Origin) -> list[Message]:
    value = record.get(field)
    if isinstance(value, str):
        return [Message(role, text_field(record, field, origin))]
    if isinstance(value, dict):
        value = [value]
    turns = list_field({**record, field: value}, field, origin, "messages")
    if isinstance(turns[0], dict) and turns[0].keys() >= {"from", "value"}:  # trl.data_utils.maybe_convert_to_chatml
        return read_turns({field: turns}, {"conversations": field}, {}, origin)[0]
    return read_messages(turns, origin, field)


def _detect_openai(record: Record, fields: FieldNames, tags: Mapping[str, str]) -> int:
    return 2 if has_both_sides(record, fields) and isinstance(record.get(fields["input"] or "input"), dict) else 0


def _convert_openai(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Pair:
    prompt = record.get(fields["input"] or "input")
    if not isinstance(prompt, dict):
        problem = f"expected an object, found {describe(prompt)}"
        raise field_error(problem, origin, "input", 'write {"messages": [...]}')
    for side in SIDES:
        field = fields[side] or side
        if _is_whole(record.get(field)):
            problem = f"{field} is a whole conversation, not how input goes on"
            raise field_error(problem, origin, field, "leave out of it the turns that are in input")
    for name in (prompt.keys() & FIELDS.keys()) - {"tools"}:
        if not is_blank(prompt[name]):
            problem = f"the field is not read, and {FIELDS[name]}: {describe(prompt[name])}"
            raise field_error(
                problem, origin, f"{fields['input'] or 'input'}.{name}", "write it beside input; or remove it"
            )
    beside = [fields[key] for key in (*CONTEXT, "margin")]
    flat = {name: record.get(name) for name in beside if name}
    flat |= {"prompt": prompt.get("messages"), "tools": prompt.get("tools")}
    flat |= {side: record.get(fields[side] or side) for side in SIDES}
    names = {**fields, "prompt": "prompt", "tools": "tools", **{side: side for side in SIDES}}
    return _convert_preference(flat, names, tags, origin)


def _detect_hh(record: Record, fields: FieldNames, tags: Mapping[str, str]) -> int:
    sides = [record.get(fields[side] or side) for side in SIDES]
    transcripts = all(isinstance(side, str) and SPEAKER.match(side) for side in sides)
    return 2 if transcripts and fields.get("prompt", "prompt") not in record else 0


def _convert_hh(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Pair:
    sides = [_transcript(record, fields[side] or side, origin) for side in SIDES]
    _check_same_prompt(sides, origin, fields["rejected"] or "rejected")
    variables = read_variables(record, fields, origin)
    chosen, rejected = (
        Conversation(tuple(with_system(side.messages, record, fields, origin)), origin, variables=variables)
        for side in sides
    )
    return make_pair(chosen, rejected, record, fields, origin)


def _transcript(record: Record, field: str, origin: Origin) -> Conversation:
    transcript = text_field(record, field, origin)
    preamble, *parts = SPEAKER.split(transcript)
    if preamble.strip() or not parts:
        problem = f"the transcript does not begin with a speaker: {transcript[:40]!r}"
        raise field_error(problem, origin, field, r"write \n\nHuman: ... \n\nAssistant: ...")
    turns: list[Message] = []
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        role: Role = "user" if speaker == "Human" else "assistant"
        content = content.strip()
        if turns and turns[-1].role == role:  # the same speaker continues: one turn
            turns[-1] = Message(role, f"{turns[-1].content}\n\n{content}".strip())
        else:
            turns.append(Message(role, content))
    for index, message in enumerate(turns):
        check_text(message.content, origin, f"{field}, turn {index}")
    check_turns(turns, origin, field)
    return Conversation(tuple(turns), origin)


_SIDE_FIELDS = {side: side for side in SIDES}
_BESIDE = {"margin": "margin", **CONTEXT}
_PREFERENCE_FORMATS: tuple[RecordFormat, ...] = (
    ranked_alpaca(),
    ranked_turns(
        SHAREGPT, "conversations", "conversations (turns of from and value), chosen and rejected, a turn each"
    ),
    ranked_turns(MESSAGES, "messages", "messages (role and content), chosen and rejected, a message each or a list"),
    RecordFormat(
        "preference",
        "prompt, chosen and rejected, each text or a list of messages; without prompt whole conversations; margin",
        {"prompt": "prompt", **_SIDE_FIELDS, "tools": "tools", "margin": "margin", **CONTEXT},
        _detect_preference,
        _convert_preference,
        required=SIDES,
    ),
    RecordFormat(
        "openai",
        "input: {messages: [...]}, preferred_output and non_preferred_output, lists of messages",
        {"input": "input", "chosen": "preferred_output", "rejected": "non_preferred_output", **_BESIDE},
        _detect_openai,
        _convert_openai,
        required=("input", *SIDES),
    ),
    RecordFormat(
        "hh",
        r"chosen and rejected, transcripts of \n\nHuman: and \n\nAssistant: turns",
        {**_SIDE_FIELDS, **_BESIDE},
        _detect_hh,
        _convert_hh,
        required=SIDES,
    ),
)


def with_label(base: RecordFormat) -> RecordFormat:
    """The format `base` with a label; `kto_tag` is LLaMA-Factory's name for that column."""

    def detect(record: Record, fields: FieldNames, tags: Mapping[str, str]) -> int:
        return base.detect(record, fields, tags) if (fields["label"] or "label") in record else 0

    def convert(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Labelled:
        field = fields["label"] or "label"
        good = record.get(field)
        if good is None:
            raise missing_field_error(record, field, origin)
        if isinstance(good, str) and good.strip().lower() in ("true", "false"):  # in a CSV file
            good = good.strip().lower() == "true"
        if not isinstance(good, bool):
            problem = f"expected true or false, found {describe(good)}"
            raise field_error(problem, origin, field, "write true or false")
        document = base.converter(good=good)(record, fields, tags, origin)
        assert isinstance(document, Conversation | Text)
        return Labelled(document, good, origin)

    fields = {**base.fields, "label": "label"}
    aliases = {**base.aliases, "kto_tag": "label"}
    expects = f"{base.expects}; and label, true or false"
    required = (*base.required, "label")
    return RecordFormat(base.name, expects, fields, detect, convert, aliases, base.tags, required=required)


PREFERENCE_FORMATS: dict[str, RecordFormat] = {form.name: form for form in _PREFERENCE_FORMATS}
LABELLED_FORMATS: dict[str, RecordFormat] = {
    form.name: with_label(form) for form in (ALPACA, SHAREGPT, MESSAGES, PROMPT_COMPLETION)
}
