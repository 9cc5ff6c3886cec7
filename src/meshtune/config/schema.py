"""The recipe described: as JSON schema for editors and other programs, as a Markdown table for people."""

from __future__ import annotations

from meshtune.config.fields import keys
from meshtune.config.recipe import Recipe


def json_schema() -> dict[str, object]:
    """JSON schema (https://json-schema.org/draft/2020-12) of a recipe in its long form."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}


def markdown() -> str:
    """Every key of the recipe as a row: what it takes, its default, what it means."""
    rows = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    rows += [
        f"| `{key.name}` | {_cell(key.allowed)} | {_cell(key.default)} | {_cell(key.description)} |" for key in keys()
    ]
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
