"""Texts longer than the original context of a model with LongRoPE.

All tokens of a text are rotated by one set of factors or by the other, so a text that becomes longer than the original
context is read again from its first token, as transformers does, and no part of a long text is read by the short
factors.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from meshtune.model.rope import LONGROPE_FACTORS, RopeSpec
from meshtune.model.spec import ModelSpec


def original_context(spec: ModelSpec) -> int | None:
    """Tokens of a text up to which it is rotated by the short factors; None for a model without LongRoPE."""
    return min((rope.original_length for rope in spec.ropes if rope.kind == "longrope"), default=None)


@functools.cache
def by_long_factors(spec: ModelSpec) -> ModelSpec:
    """The same model with texts of all lengths rotated by the long factors: for the first tokens of a long text."""
    return _by_long_factors(spec)


def _by_long_factors(value: Any) -> Any:
    if isinstance(value, RopeSpec):
        short, long = LONGROPE_FACTORS
        numbers = dict(value.parameters)
        if value.kind != "longrope":
            return value
        return dataclasses.replace(value, parameters=tuple(sorted((numbers | {short: numbers[long]}).items())))
    if type(value) is tuple:
        return tuple(map(_by_long_factors, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        changed = {name: new for name, old in fields.items() if (new := _by_long_factors(old)) != old}
        return dataclasses.replace(value, **changed) if changed else value
    return value
