"""The recipe described: as JSON schema for editors and other programs, as a Markdown table for people."""

from __future__ import annotations

from meshtune.config.fields import keys
from meshtune.config.recipe import Recipe


def json_schema() -> dict[str, object]:
    """JSON schema (https://json-schema.org/draft/2020-12) of a recipe in its long form."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}


def markdown() -> str:
    """Every key of the recipe as an item, under its section: what it takes, its default, what it means."""
    lines: list[str] = []
    section = None
    for key in keys():
        first = key.name.partition(".")[0]
        if first != section:
            section = first
            lines += ["", f"## {section}", ""]
        allowed = key.allowed.removesuffix(" or null") if key.default == "null" else key.allowed
        default = key.default if key.default == "required" else f"default {key.default}"
        lines.append(f"- `{key.name}` ({_escaped(allowed)}; {_escaped(default)}): {_escaped(key.description)}")
    return "\n".join(lines).lstrip("\n")


def _escaped(text: str) -> str:
    return text.replace("*", "\\*")
