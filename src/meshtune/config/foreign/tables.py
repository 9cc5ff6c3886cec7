"""The tables of other tools' keys, for people: what each comes to here, or why it does not."""

from __future__ import annotations

from collections.abc import Iterator

from meshtune.config.foreign import axolotl, llama_factory, llama_factory_commands, llama_factory_v1, torchtune, trl
from meshtune.config.foreign.rules import ABSENT, Rule, Table

TABLES: dict[str, Table] = {
    llama_factory.NAME: llama_factory.TRAIN,
    "LLaMA-Factory: export, inference and prediction": llama_factory_commands.SAMPLING
    | {key: rule for key, rule in llama_factory_commands.COMMAND.items() if rule.to},
    llama_factory_v1.NAME: llama_factory_v1.V1,
    axolotl.NAME: axolotl.AXOLOTL,
    trl.NAME: trl.TRL,
    torchtune.NAME: torchtune.TORCHTUNE,
}


def markdown() -> str:
    """For each tool a table of keys with an effect, and lists of those without one and of those that are refused."""
    return "\n".join(line for title, table in TABLES.items() for line in _section(title, table)).rstrip() + "\n"


def _section(title: str, table: Table) -> Iterator[str]:
    yield from (f"## {title}", "", "| key | here | default there |", "| --- | --- | --- |")
    for key, rule in sorted(table.items()):
        if rule.to:
            yield f"| `{key}` | `{rule.to}` | {_default(rule)} |"
    for kind, text in (("idle", "No effect here"), ("refused", "Refused, unless they ask for nothing")):
        reasons: dict[str, list[str]] = {}
        for key, rule in sorted(table.items()):
            if rule.kind == kind:
                reasons.setdefault(rule.note + (f": {rule.fix}" if kind == "refused" else ""), []).append(f"`{key}`")
        if reasons:
            yield from ("", f"{text}:", "")
            yield from (f"- {', '.join(keys)}: {reason}." for reason, keys in reasons.items())
    yield ""


def _default(rule: Rule) -> str:
    if rule.default is ABSENT or rule.default is None:
        return ""
    return str(rule.default).lower() if isinstance(rule.default, bool) else str(rule.default)
