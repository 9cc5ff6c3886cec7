"""The check that whoever switches on the roles of arrays shares: a role that it does not know is refused by name."""

from __future__ import annotations

from typing import get_args

from meshtune.arrays.spec import ArraySpec, Role
from meshtune.errors import UserError

# Roles of parameters: all but optimizer state, statistics and counts.
PARAMETER_ROLES: frozenset[Role] = frozenset(get_args(Role)) - {"state"}


def unknown_role(consumer: str, path: str, array: ArraySpec, *, where: str, fix: str) -> UserError:
    """The error of a consumer ("muon", "quantize") that has no rule for the role of the array at `path`."""
    return UserError(f"{consumer} has no rule for arrays of role '{array.role}', such as {path}", where=where, fix=fix)
