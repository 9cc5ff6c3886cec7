"""Alpaca's records in the words of its authors' prompt, without a chat template (github.com/tatsu-lab/stanford_alpaca).

The prompt is what its training script writes, with an input or without, and the output follows it. axolotl's type
`alpaca` and torchtune's `alpaca_dataset` learn from the same words. Other words are given by tags, with {instruction}
and {input} where those fields go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from meshtune.data.conversation import Conversation, Message, Origin, Text
from meshtune.data.formats.record import text_field
from meshtune.data.formats.record_format import FieldNames, Record, RecordFormat, only_by_name, same_names

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
