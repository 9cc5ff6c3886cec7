"""Chat templates of other tools by name, as ours."""

from __future__ import annotations

import dataclasses

from meshtune.config.foreign.draft import Draft

TOKENIZERS_OWN = "the tokenizer's own template is used: compare what is trained with `meshtune data inspect`"
NEWLINE = "LLaMA-Factory also learns the line break after the end of a turn"
TRIMMED = "blanks at both ends of a text are dropped"
DEFAULT_JINJA = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- message['content'] + eos_token + '\\n' -}}
{%- elif message['role'] == 'user' -%}
{{- 'Human: ' + message['content'] + eos_token + '\\nAssistant:' -}}
{%- else -%}
{{- 'System: ' + message['content'] + eos_token + '\\n' -}}
{%- endif -%}
{%- endfor -%}
"""


@dataclasses.dataclass(frozen=True)
class Template:
    """What a template of another tool comes to: one that ships with Meshtune or a Jinja text, and a system prompt.

    `name` None is the tokenizer's own template.
    """

    name: str | None
    note: str = ""
    system: str = ""
    jinja: str = ""

    @property
    def differs(self) -> bool:
        return bool(self.note)


QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)
LLAMA_FACTORY: dict[str, Template] = {
    "llama3": Template("llama3", TRIMMED),
    "qwen3_nothink": Template("chatml", NEWLINE),
    "chatml": Template("chatml", NEWLINE),
    "qwen": Template("chatml", NEWLINE, QWEN_SYSTEM),
    "gemma": Template("gemma", f"{TRIMMED}; {NEWLINE}"),
    "gemma2": Template("gemma", f"{TRIMMED}; {NEWLINE}"),
    "baichuan2": Template("baichuan2"),
    "alpaca": Template(
        "alpaca",
        "LLaMA-Factory also learns the blank lines after an answer, and writes no beginning of text",
        ALPACA_SYSTEM,
    ),
    "default": Template("", "LLaMA-Factory also learns the line break after an answer", jinja=DEFAULT_JINJA),
}
AXOLOTL: dict[str, Template] = {
    "tokenizer_default": Template(None),
    "chatml": Template("chatml"),
    "alpaca": Template("alpaca", "only its words are the same: compare with `meshtune data inspect`"),
    "llama3": Template("llama3"),
    "gemma": Template("gemma"),
}


def template(draft: Draft, key: str, name: str, known: dict[str, Template]) -> Template | None:
    """Writes the template that `key` names. Returns what is known of it, None where that is nothing."""
    entry = known.get(name)
    if entry is None:
        draft.differ(key, TOKENIZERS_OWN)
        return None
    if entry.jinja:
        draft.files[".jinja"] = entry.jinja
        draft.put("model.chat_template", ".jinja", key, note=entry.note, differs=entry.differs)
    elif entry.name is None:
        draft.idle(key, "the tokenizer's own template is the default")
    else:
        draft.put("model.chat_template", entry.name, key, note=entry.note, differs=entry.differs)
    return entry
