"""Refusals of optimizers that switch on the roles of parameters."""

from __future__ import annotations

from meshtune.arrays.spec import ArraySpec, unknown_role
from meshtune.errors import UserError


def refuse_role(optimizer: str, path: str, parameter: ArraySpec) -> UserError:
    """The error for a parameter whose role an optimizer has no rule for."""
    return unknown_role(
        optimizer,
        path,
        parameter,
        where="optimizer.name",
        fix="use optimizer.name=adamw, or leave the parameter frozen (method: freeze or lora)",
    )
