"""Alpaca's records in the words of its authors' prompt, without a chat template (github.com/tatsu-lab/stanford_alpaca).

The prompt is what its training script writes, with an input or without, and the output follows it. axolotl's type
`alpaca` and torchtune's `alpaca_dataset` learn from the same words.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshtune.data.conversation import Conversation, Message, Origin, Text
from meshtune.data.formats.record import text_field
from meshtune.data.formats.record_format import FieldNames, Record, RecordFormat

BELOW = "Below is an instruction that describes a task"
WRITE = "Write a response that appropriately completes the request.\n\n"
WITH_INPUT = (
    BELOW + ", paired with an input that provides further context. " + WRITE + "### Instruction:\n{instruction}\n\n"
    "### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = BELOW + ". " + WRITE + "### Instruction:\n{instruction}\n\n### Response:\n"
TURNS = "turns"  # the tag that makes the prompt a user turn of the chat template


def detect(record: Record, fields: FieldNames, tags: Mapping[str, str]) -> int:
    """Never: records look like those of the format alpaca, and this one must be named."""
    return 0


def convert(record: Record, fields: FieldNames, tags: Mapping[str, str], origin: Origin) -> Conversation | Text:
    instruction = text_field(record, fields["instruction"] or "instruction", origin)
    extra = text_field(record, fields["input"], origin, required=False) if fields["input"] else ""
    head, _, tail = (WITH_INPUT if extra else WITHOUT_INPUT).partition("{instruction}")
    prompt = head + instruction + tail.replace("{input}", extra)
    output = text_field(record, fields["output"] or "output", origin)
    if tags.get(TURNS) == "chat":
        return Conversation((Message("user", prompt), Message("assistant", output)), origin)
    return Text(output, origin, prompt=prompt)


FORMAT = RecordFormat(
    name="stanford_alpaca",
    expects="instruction and output, text; also input; only where it is named",
    fields={key: key for key in ("instruction", "input", "output")},
    detect=detect,
    convert=convert,
    aliases={"prompt": "instruction", "query": "input", "response": "output"},
    tags={TURNS: "plain"},
)
