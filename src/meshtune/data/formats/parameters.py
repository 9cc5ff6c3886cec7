"""Parameters of tools as xLAM's data describe them, {name: {type, description, default}}, as JSON schemas.

Types are Python's there. Templates that write parameters in words of their own (Gemma 4, gpt-oss) read schemas alone
and would leave such ones out. Specification: the card of the data set Salesforce/xlam-function-calling-60k.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object"}
TYPES |= dict.fromkeys(("list", "tuple", "set"), "array")
_OPTIONAL = re.compile(r",\s*optional\s*$", re.IGNORECASE)


def is_schema(parameters: Mapping[str, object]) -> bool:
    """Whether parameters are a JSON schema (or empty), not descriptions of each by its name."""
    described = [isinstance(value, Mapping) and isinstance(value.get("type"), str) for value in parameters.values()]
    return not described or not all(described)


def as_schema(parameters: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """The JSON schema of described parameters. One without a default whose type is not called optional is required."""
    properties = {name: _property(parameter) for name, parameter in parameters.items()}
    required = [name for name, parameter in parameters.items() if _is_required(parameter)]
    return {"type": "object", "properties": properties, "required": required}


def _property(parameter: Mapping[str, object]) -> dict[str, object]:
    name = _OPTIONAL.sub("", str(parameter["type"])).strip()
    base, _, item = name.partition("[")
    fields = {key: value for key, value in parameter.items() if key not in ("type", "required")}
    schema: dict[str, object] = {"type": TYPES.get(base.lower(), name), **fields}
    if schema["type"] == "array" and (kind := TYPES.get(item.removesuffix("]").lower())):
        schema["items"] = {"type": kind}
    return schema


def _is_required(parameter: Mapping[str, object]) -> bool:
    required = parameter.get("required")
    if isinstance(required, bool):
        return required
    return "default" not in parameter and "optional" not in str(parameter.get("type", "")).lower()
