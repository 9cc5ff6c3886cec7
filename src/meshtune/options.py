"""Options of dataclasses, declared once: default, description, bounds, and names on the command line.

Recipes and the command line read these dataclasses directly, so that the core needs neither pydantic nor typer.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, TypeVar

from meshtune.errors import UserError

Value = TypeVar("Value")


def option(
    default: Value,
    description: str,
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    flags: tuple[str, ...] = (),
) -> Value:
    """A dataclass field. The bounds (above, at least, below, at most) are checked where a recipe or a command line is
    read. `flags` are its names on the command line, where `--field-name` does not do."""
    bounds = {"gt": gt, "ge": ge, "lt": lt, "le": le}
    metadata: dict[str, object] = {name: bound for name, bound in bounds.items() if bound is not None}
    if flags:
        metadata["flags"] = flags
    return dataclasses.field(default=default, metadata={"description": description, **metadata})


def required(description: str, *, flags: tuple[str, ...] = ()) -> Any:
    """A dataclass field without a default."""
    return dataclasses.field(metadata={"description": description, "flags": flags})


@dataclasses.dataclass(frozen=True)
class Shard:
    """Part `index` of `count` parts of some work, counted from 1. The units of the work are dealt out in turn."""

    index: int = 1
    count: int = 1

    def takes(self, unit: int) -> bool:
        """Whether unit number `unit`, counted from 0, belongs to this part."""
        return unit % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_shard(text: str | None) -> Shard:
    """The shard that `--shard I/N` names; all of the work without one. Raises: UserError for a shard that does not
    exist."""
    if text is None:
        return Shard()
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    index, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= index <= count:
        raise UserError(
            f"there is no shard '{text}'",
            where="--shard",
            fix=f"shards count from 1: 1/{count} to {count}/{count}" if count else "write 2/8 for the second of eight",
        )
    return Shard(index, count)
