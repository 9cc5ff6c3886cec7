"""Options of the core's dataclasses, declared once: default, description and bounds.

A recipe reads these dataclasses directly: pydantic takes the description and the bounds from the field's metadata, so
that the core needs no pydantic.
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
) -> Value:
    """A dataclass field. The bounds (above, at least, below, at most) are checked where a recipe is read."""
    bounds = {"gt": gt, "ge": ge, "lt": lt, "le": le}
    metadata: dict[str, Any] = {name: bound for name, bound in bounds.items() if bound is not None}
    return dataclasses.field(default=default, metadata={"description": description, **metadata})
