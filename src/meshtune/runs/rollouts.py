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

NEWEST_BYTES = 1 << 22  # from the end of rollouts.jsonl, in which the newest rollout is looked for


def read_rollouts(output: pathlib.Path, newest: int | None = None) -> list[dict[str, Any]]:
    """Reads the undamaged lines of rollouts.jsonl, of its last `newest` bytes if given; [] where there is none."""
    try:
        with (output / ROLLOUTS).open("rb") as file:
            if newest is not None:
                file.seek(max(0, file.seek(0, 2) - newest))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        content, _, checksum = line.rpartition(', "crc32": ')
        if checksum.removesuffix("}") == str(zlib.crc32(content.encode())):
            rows.append(json.loads(content + "}"))
    return rows


def newest_rollout(output: pathlib.Path) -> list[dict[str, Any]]:
    """The completions of the newest rollout, best first in each group; [] where there is none."""
    rows = read_rollouts(output, NEWEST_BYTES)
    rows = [row for row in rows if row.get("step") == rows[-1].get("step")]
    return sorted(rows, key=lambda row: (row.get("group", 0), -row["advantage"]))


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a prompt's last message, with a mark in the place of each picture."""
    content = prompt if isinstance(prompt, str) else prompt[-1].get("content", "")
    if isinstance(content, list):
        return "".join(str(part.get("text", "<image>")) for part in content)
    return str(content)


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
