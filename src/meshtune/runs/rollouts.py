"""Reads and shows the completions of a run of an online stage."""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from meshtune import terminal
from meshtune.runs.output import ROLLOUTS


def read_rollouts(output: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the undamaged lines of rollouts.jsonl; [] where there is none."""
    try:
        lines = (output / ROLLOUTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        content, _, checksum = line.rpartition(', "crc32": ')
        if checksum.removesuffix("}") == str(zlib.crc32(content.encode())):
            rows.append(json.loads(content + "}"))
    return rows


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a prompt's last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))


def print_rollouts(rows: Sequence[Mapping[str, Any]], limit: int, console: Console | None = None) -> None:
    """Prints completions under their prompts, those with the largest advantage first."""
    console = console or terminal.console()
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(json.dumps([row.get("group"), row["prompt"]]), []).append(row)
    shown = 0
    for group in groups.values():
        if shown >= limit:
            break
        console.print(Text.assemble((prompt_text(group[0]["prompt"]), "bold"), (f"  {group[0]['origin']}", "dim")))
        for row in sorted(group, key=lambda row: -row["advantage"])[: limit - shown]:
            shown += 1
            values = "  ".join(
                f"{name} {'-' if value is None else f'{value:.3g}'}" for name, value in row["rewards"].items()
            )
            head = f"  {row['advantage']:+6.2f}  {values}  {row['tokens']} tokens, {row['reason']}"
            console.print(Text(head, style="cyan"))
            console.print(Text(f"    {row['completion'].strip() or '(nothing)'}"))
    if len(rows) > shown:
        console.print(Text(f"{len(rows) - shown} more; --limit shows them", style="dim"))
