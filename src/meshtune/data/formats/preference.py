"""Pairs of a better and a worse answer: what every format of them has in common, and the formats.

Alpaca and sharegpt records are LLaMA-Factory's ranking data: chosen and rejected are texts, or turns that go on from
the conversation. `preference` is TRL's: a prompt, or none where both answers are whole conversations that begin alike;
`openai` is that of OpenAI's preference tuning, `hh` the transcripts of Anthropic's helpful and harmless data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.data.conversation import Conversation, Document, Message, Origin, Pair, Text
from meshtune.data.formats import alpaca, messages, sharegpt
from meshtune.data.formats.format import Fields, Format
from meshtune.data.formats.messages import read_messages
from meshtune.data.formats.record import bad, check_turns, list_field, shown, text, text_field, tool_list

BOTH = ("chosen", "rejected")
SPEAKER = re.compile(r"\n\n(Human|Assistant):")


def paired(chosen: Document, rejected: Document, record: Mapping[str, Any], fields: Fields, origin: Origin) -> Pair:
    """The pair, with the record's margin. Raises UserError where both answers are the same."""
    if _words(chosen) == _words(rejected):
        field = fields.get("rejected") or "rejected"
        raise bad("chosen and rejected are the same answer", origin, field, "take the record out")
    name = fields.get("margin")
    margin = record.get(name) if name else None
    if name is None or margin is None:
        return Pair(chosen, rejected, origin)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise bad(f"expected a number, found {shown(margin)}", origin, name, "write a number")
    return Pair(chosen, rejected, origin, float(margin))


def _words(document: Document) -> Any:
    return document.messages if isinstance(document, Conversation) else (document.prompt, document.text)


def has_both(record: Mapping[str, Any], fields: Fields) -> bool:
    return all((fields[side] or side) in record for side in BOTH)


def ranked_alpaca() -> Format:
    """Instruction and input, with chosen and rejected texts in place of the output."""
    own = {key: key for key in alpaca.FORMAT.fields if key != "output"} | {key: key for key in (*BOTH, "margin")}

    def detect(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str]) -> int:
        return 2 if has_both(record, fields) and fields["instruction"] in record else 0

    def convert(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str], origin: Origin) -> Pair:
        chosen, rejected = (
            alpaca.convert(record, {**fields, "output": fields[side] or side}, tags, origin) for side in BOTH
        )
        return paired(chosen, rejected, record, fields, origin)

    aliases = {"prompt": "instruction", "query": "input"}
    wants = "instruction, chosen and rejected, text; also input, system, history, tools, margin"
    return Format("alpaca", wants, own, detect, convert, aliases)  # pyright: ignore[reportArgumentType]


def ranked_turns(base: Format, turns: str, wants: str) -> Format:
    """A conversation that each of chosen and rejected, one turn (or for messages a list of them), goes on from."""

    def detect(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str]) -> int:
        return base.detect(record, fields, tags) if has_both(record, fields) else 0

    def side(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str], origin: Origin, name: str) -> Document:
        field = fields[name] or name
        answer = record.get(field)
        if not isinstance(answer, dict | list) or not answer:
            if answer is None:
                text_field(record, field, origin)  # says that it is missing or null
            raise bad(f"expected a turn, found {shown(answer)}", origin, field, "write it as the other turns are")
        said = list_field(record, fields[turns] or turns, origin, "turns")
        whole = {**record, fields[turns] or turns: [*said, *(answer if isinstance(answer, list) else [answer])]}
        return base.convert(whole, fields, tags, origin)  # pyright: ignore[reportReturnType]

    def convert(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str], origin: Origin) -> Pair:
        chosen, rejected = (side(record, fields, tags, origin, name) for name in BOTH)
        return paired(chosen, rejected, record, fields, origin)

    fields = {**base.fields, **{key: key for key in (*BOTH, "margin")}}
    return Format(base.name, wants, fields, detect, convert, base.aliases, base.tags)


def _detect_preference(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str]) -> int:
    if not has_both(record, fields):
        return 0
    whole = all(isinstance(record[fields[side] or side], list) for side in BOTH)
    return 2 if (fields["prompt"] or "prompt") in record or whole else 0


def _convert_preference(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str], origin: Origin) -> Pair:
    prompt, sides = fields["prompt"] or "prompt", [fields[side] or side for side in BOTH]
    if not any(isinstance(record.get(field), list) for field in (prompt, *sides)):
        first = text_field(record, prompt, origin)
        made = [Text(text_field(record, field, origin), origin, prompt=first) for field in sides]
        return paired(made[0], made[1], record, fields, origin)
    head = _messages(record, prompt, "user", origin) if record.get(prompt) is not None else []
    tails = [_messages(record, field, "assistant", origin) for field in sides]
    tools = tool_list(record.get(fields["tools"]), origin, fields["tools"]) if fields["tools"] else ()
    for field, tail in zip(sides, tails, strict=True):
        check_turns([*head, *tail], origin, f"{prompt} + {field}" if head else field)
    made = [Conversation((*head, *tail), origin, tools) for tail in tails]
    if not head:
        _begin_alike(made, origin, sides[1])
    return paired(made[0], made[1], record, fields, origin)


def _begin_alike(sides: Sequence[Conversation], origin: Origin, field: str) -> None:
    one, other = (side.messages for side in sides)
    if one[:-1] != other[:-1]:
        what = "chosen and rejected are answers to different conversations"
        raise bad(what, origin, field, "both must be the same but for the last turn; or take the record out")


def _messages(record: Mapping[str, Any], field: str, role: Any, origin: Origin) -> list[Message]:
    value = record.get(field)
    if isinstance(value, str):
        return [Message(role, text_field(record, field, origin))]
    if isinstance(value, dict):
        return read_messages([value], origin, field)
    return read_messages(list_field(record, field, origin, "messages"), origin, field)


def _detect_openai(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str]) -> int:
    return 2 if has_both(record, fields) and isinstance(record.get(fields["input"] or "input"), dict) else 0


def _convert_openai(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str], origin: Origin) -> Pair:
    given = record.get(fields["input"] or "input")
    if not isinstance(given, dict):
        raise bad(f"expected an object, found {shown(given)}", origin, "input", 'write {"messages": [...]}')
    flat = {"prompt": given.get("messages"), "tools": given.get("tools")}
    flat |= {side: record.get(fields[side] or side) for side in BOTH}
    names = {"prompt": "prompt", "tools": "tools", "margin": None, **{side: side for side in BOTH}}
    return _convert_preference(flat, names, tags, origin)


def _detect_hh(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str]) -> int:
    sides = [record.get(fields[side] or side) for side in BOTH]
    return 2 if all(isinstance(side, str) and SPEAKER.match(side) for side in sides) and "prompt" not in record else 0


def _convert_hh(record: Mapping[str, Any], fields: Fields, tags: Mapping[str, str], origin: Origin) -> Pair:
    sides = [_transcript(record, fields[side] or side, origin) for side in BOTH]
    _begin_alike(sides, origin, fields["rejected"] or "rejected")
    return paired(sides[0], sides[1], record, fields, origin)


def _transcript(record: Mapping[str, Any], field: str, origin: Origin) -> Conversation:
    whole = text_field(record, field, origin)
    before, *parts = SPEAKER.split(whole)
    if before.strip() or not parts:
        what = f"the transcript does not begin with a speaker: {whole[:40]!r}"
        raise bad(what, origin, field, r"write \n\nHuman: ... \n\nAssistant: ...")
    said: list[Message] = []
    for speaker, words in zip(parts[::2], parts[1::2], strict=True):
        role, words = ("user" if speaker == "Human" else "assistant"), words.strip()
        if said and said[-1].role == role:  # somebody goes on: one turn
            said[-1] = Message(role, f"{said[-1].content}\n\n{words}".strip())
        else:
            said.append(Message(role, words))
    for index, message in enumerate(said):
        text(message.content, origin, f"{field}, turn {index}")
    check_turns(said, origin, field)
    return Conversation(tuple(said), origin)


_SIDES = {side: side for side in BOTH}
FORMATS: tuple[Format, ...] = (
    ranked_alpaca(),
    ranked_turns(
        sharegpt.FORMAT, "conversations", "conversations (turns of from and value), chosen and rejected, a turn each"
    ),
    ranked_turns(
        messages.FORMAT, "messages", "messages (role and content), chosen and rejected, a message each or a list"
    ),
    Format(
        "preference",
        "prompt, chosen and rejected, each text or a list of messages; without prompt whole conversations; margin",
        {"prompt": "prompt", **_SIDES, "tools": "tools", "margin": "margin"},
        _detect_preference,
        _convert_preference,
    ),
    Format(
        "openai",
        "input: {messages: [...]}, preferred_output and non_preferred_output, lists of messages",
        {"input": "input", "chosen": "preferred_output", "rejected": "non_preferred_output"},
        _detect_openai,
        _convert_openai,
    ),
    Format(
        "hh",
        r"chosen and rejected, transcripts of \n\nHuman: and \n\nAssistant: turns",
        {**_SIDES, "margin": "margin"},
        _detect_hh,
        _convert_hh,
    ),
)
