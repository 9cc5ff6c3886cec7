"""Formats of texts: Alpaca's instructions, prompts with completions, and plain text.

The user turn is the instruction and the input, whichever are not empty, joined by a line break (LLaMA-Factory's
data/README.md). `history` is a list of [user, assistant] pairs that come first.

The prompt is what its training script writes, with an input or without, and the output follows it. axolotl's type
`alpaca` and torchtune's `alpaca_dataset` learn from the same words. Other words are given by tags, with {instruction}
and {input} where those fields go.

Two texts are concatenated without a template or a space between them, and only the completion is trained on. With
messages the record is a conversation, where a text means one user turn (the prompt) or one assistant turn (the
completion); assistant turns in the prompt are trained on only if they have a weight of their own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from meshtune.data.conversation import Conversation, Message, Origin, Role, Text
from meshtune.data.formats.messages import read_messages
from meshtune.data.formats.record import (
    CONTEXT,
    FieldNames,
    Record,
    RecordFormat,
    check_text,
    describe,
    field_error,
    has_fields,
    is_blank,
    list_field,
    only_by_name,
    read_variables,
    refuse_beside_texts,
    same_names,
    text_field,
    with_system,
)
from meshtune.data.formats.tools import parse_tools, with_tool_use


def convert_alpaca(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Conversation:
    messages = with_system([], record, fields, origin)
    if fields["history"] and not is_blank(record.get(fields["history"])):
        messages += _history(record, fields["history"], origin)
    instruction = _optional_text(record, fields["instruction"], origin)
    extra = _optional_text(record, fields["input"], origin)
    if not instruction.strip() and not extra.strip():
        text_field(record, fields["instruction"] or "instruction", origin)
    messages.append(Message("user", "\n".join(part for part in (instruction, extra) if part)))
    messages.append(Message("assistant", text_field(record, fields["output"] or "output", origin)))
    tools = parse_tools(record, fields["tools"], origin)
    return Conversation(tuple(messages), origin, tools, read_variables(record, fields, origin))


def _optional_text(record: Record, field: str | None, origin: Origin) -> str:
    return text_field(record, field, origin, required=False) if field else ""


def _history(record: Record, field: str, origin: Origin) -> list[Message]:
    messages = []
    for index, pair in enumerate(list_field(record, field, origin, "[user, assistant] pairs")):
        item = f"{field}[{index}]"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            problem = f"expected a pair, found {describe(pair)}"
            raise field_error(problem, origin, item, 'write ["the user\'s message", "the answer"]')
        messages.append(Message("user", check_text(pair[0], origin, f"{item}[0]")))
        messages.append(Message("assistant", check_text(pair[1], origin, f"{item}[1]")))
    return messages


ALPACA = RecordFormat(
    name="alpaca",
    expects="instruction and output, text; also input, system, history ([[user, assistant], ...]), tools",
    fields=same_names("instruction", "input", "output", "history", "tools") | CONTEXT,
    required=("output",),
    aliases={"prompt": "instruction", "query": "input", "response": "output"},
    detect=has_fields("instruction", "output"),
    convert=convert_alpaca,
)


BELOW = "Below is an instruction that describes a task"
WRITE = "Write a response that appropriately completes the request.\n\n"
WITH_INPUT = (
    BELOW + ", paired with an input that provides further context. " + WRITE + "### Instruction:\n{instruction}\n\n"
    "### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = BELOW + ". " + WRITE + "### Instruction:\n{instruction}\n\n### Response:\n"
SLOTS = re.compile(r"\{instruction\}|\{input\}")
PROMPTS = {"prompt": WITH_INPUT, "prompt_without_input": WITHOUT_INPUT}  # tags
TURNS = "turns"  # the tag that makes the prompt a user turn of the chat template


def convert_stanford_alpaca(
    record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin
) -> Conversation | Text:
    instruction = text_field(record, fields["instruction"] or "instruction", origin)
    extra = text_field(record, fields["input"], origin, required=False) if fields["input"] else ""
    tag = "prompt" if extra else "prompt_without_input"
    fields_of = {"{instruction}": instruction, "{input}": extra}
    prompt = SLOTS.sub(lambda slot: fields_of[slot[0]], tags.get(tag) or PROMPTS[tag])
    output = text_field(record, fields["output"] or "output", origin)
    if tags.get(TURNS) == "chat":
        return Conversation((Message("user", prompt), Message("assistant", output)), origin)
    return Text(output, origin, prompt=prompt)


STANFORD_ALPACA = RecordFormat(
    name="stanford_alpaca",
    expects="instruction and output, text; also input; only where it is named",
    fields=same_names("instruction", "input", "output"),
    detect=only_by_name,
    convert=convert_stanford_alpaca,
    aliases={"prompt": "instruction", "query": "input", "response": "output"},
    required=("instruction", "output"),
    tags={TURNS: "plain", **PROMPTS},
)


def detect_text(record: Record, fields: FieldNames, tags: Mapping[str, str]) -> int:
    """At most 1, since records of other formats often have a rendered `text` too."""
    return 1 if isinstance(record.get(fields["text"] or ""), str) else 0


def convert_text(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Text:
    return Text(text_field(record, fields["text"] or "text", origin), origin)


TEXT = RecordFormat(
    name="text", expects="text", fields={"text": "text"}, detect=detect_text, convert=convert_text, required=("text",)
)


def convert_prompt_completion(
    record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin
) -> Conversation | Text:
    prompt, completion = fields["prompt"] or "prompt", fields["completion"] or "completion"
    if not isinstance(record.get(prompt), list) and not isinstance(record.get(completion), list):
        refuse_beside_texts(record, fields, origin, prompt, completion)
        prompt_text = text_field(record, prompt, origin)
        return Text(text_field(record, completion, origin), origin, prompt=prompt_text)
    head = with_system(_messages_of(record, prompt, "user", origin), record, fields, origin)
    head = [
        dataclasses.replace(message, weight=0.0) if message.role == "assistant" and message.weight is None else message
        for message in head
    ]
    tail = _messages_of(record, completion, "assistant", origin)
    if tail[0].role != "assistant":
        problem = f"the completion begins with {tail[0].role}"
        fix = "begin it with an assistant turn; the turns before belong to the prompt"
        raise field_error(problem, origin, f"{completion}[0]", fix)
    tools = parse_tools(record, fields["tools"], origin)
    messages = with_tool_use([*head, *tail], tools, origin, f"{prompt} + {completion}")
    return Conversation(messages, origin, tools, read_variables(record, fields, origin))


def _messages_of(record: Record, field: str, role: Role, origin: Origin) -> list[Message]:
    if isinstance(record.get(field), str):
        return [Message(role, text_field(record, field, origin))]
    return read_messages(list_field(record, field, origin, "messages"), origin, field)


PROMPT_COMPLETION = RecordFormat(
    name="prompt_completion",
    expects="prompt and completion, each text or a list of messages; also tools",
    fields=same_names("prompt", "completion", "tools") | CONTEXT,
    required=("prompt", "completion"),
    detect=has_fields("prompt", "completion"),
    convert=convert_prompt_completion,
)
