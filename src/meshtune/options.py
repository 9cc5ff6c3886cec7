"""Options of dataclasses, declared once: default, description, bounds, and names on the command line.

Recipes and the command line read these dataclasses directly, so that the core needs neither pydantic nor typer.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

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
