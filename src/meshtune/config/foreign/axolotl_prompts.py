"""axolotl's prompts that are texts of their own, as words of the format stanford_alpaca."""

from __future__ import annotations

from typing import Any

from meshtune.config.foreign.draft import Draft
from meshtune.config.foreign.rules import text

NO_INPUT = "no_input"  # a column that records do not have
PAIRED = "Below is an instruction that describes a task, paired with an input that provides further context. "
ALONE = "Below is an instruction that describes a task. "
WRITE = "Write a response that appropriately completes the request."
CONCISE = (
    "Below is an instruction from a USER that describes a task, paired with an input that provides further context. "
    "The ASSISTANT writes a response that concisely and appropriately completes the request.\n\n",
    "Below is an instruction from a USER that describes a task. The ASSISTANT writes a response that appropriately and "
    "concisely completes the request.\n\n",
)
CHAT = ("SYSTEM: {}\nUSER: {{instruction}}\n{{input}}\nASSISTANT:", "SYSTEM: {}\nUSER: {{instruction}}\nASSISTANT:")
PHI = (
    "<|system|>\n{}<|end|>\n<|user|>\n{{instruction}}<|end|>{{input}}<|assistant|>",
    "<|system|>\n{}<|end|>\n<|user|>\n{{instruction}}<|end|>\n<|assistant|>\n",
)
CHATML = (
    "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{{instruction}}\n{{input}}<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{{instruction}}<|im_end|>\n<|im_start|>assistant\n",
)


def _tags(forms: tuple[str, str], systems: tuple[str, str]) -> dict[str, str]:
    return dict(zip(("prompt", "prompt_without_input"), map(str.format, forms, systems), strict=True))


USUAL = (PAIRED + WRITE, ALONE + WRITE)
# Types whose prompts are texts of their own: (columns, tags) of the format stanford_alpaca.
LITERAL: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "alpaca:chat": ({}, _tags(CHAT, USUAL)),
    "alpaca:phi": ({}, _tags(PHI, USUAL)),
    "alpaca:chatml": ({}, _tags(CHATML, USUAL)),
    "alpaca_chat.load_qa": ({"instruction": "question", "output": "answer", "input": NO_INPUT}, _tags(CHAT, CONCISE)),
    "alpaca_chat.load_concise": ({}, _tags(CHAT, CONCISE)),
}
WRITTEN_KEYS = {
    "system_prompt", "field_system", "field_instruction", "field_input", "field_output", "format", "no_input_format",
    "system_format",
}  # fmt: skip


class RefusedError(Exception):
    """Why a data set cannot be read as axolotl reads it, and what to do."""

    def __init__(self, why: str, fix: str):
        super().__init__(why)
        self.why, self.fix = why, fix


def written_out(draft: Draft, key: str, to: str, prompts: dict[str, Any]) -> None:
    """A prompt whose parts the file writes out."""
    values = {name: text(value) for name, value in prompts.items() if value is not None}
    unknown = set(values) - WRITTEN_KEYS
    if unknown:
        raise RefusedError(f"{', '.join(sorted(unknown))} of a prompt: nothing here does that", "leave it out")
    if values.get("field_system", "system") != "system":
        raise RefusedError("system prompts of records are not put in a written prompt", "write them into the records")
    system = values.get("system_prompt", "")
    system = values.get("system_format", "{system}").replace("{system}", system) if system else ""
    with_input = values.get("format", "{instruction} {input} ")
    tags = {
        "prompt": system + with_input,
        "prompt_without_input": system + values.get("no_input_format", "{instruction} "),
    }
    renamed = {
        field: values[f"field_{field}"] for field in ("instruction", "input", "output") if f"field_{field}" in values
    }
    note = "type: a prompt written out; a column system of the records would take the place of system_prompt there"
    draft.put(f"{to}.format", "stanford_alpaca", key, note=note, differs=True)
    if renamed:
        draft.put(f"{to}.columns", renamed, key)
    draft.put(f"{to}.tags", tags, key)
