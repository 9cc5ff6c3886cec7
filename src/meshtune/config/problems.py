"""Everything that is wrong with a recipe, said at once and in its own words."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshtune.config.fields import allowed, allowed_entry, choices, field_at, keys, section_at
from meshtune.config.recipe import METHODS
from meshtune.config.section import Section
from meshtune.config.stage import STAGES
from meshtune.config.yaml_text import Path
from meshtune.errors import UserError, nearest

KINDS: dict[Path, tuple[type[Section], ...]] = {("method",): METHODS, ("stage",): STAGES}
_NO_SUCH_KEY = "extra_forbidden"
_MISSING = "missing"
_OWN_WORDS = ("value_error", "empty_text")  # raised by a validator of ours: its message is the message


def as_user_error(error: ValidationError, raw: dict[str, Any], name: str, place: Callable[[Path], str]) -> UserError:
    """One UserError for all of pydantic's complaints.

    `raw` is the mapping that was validated, `name` what the user calls it, and `place` gives the words for where a path
    was written: a line of the file, or the override.
    """
    complaints = _by_path(error.errors(include_url=False), raw)
    found = [(path, _sentence(path, details, raw)) for path, details in complaints.items()]
    if len(found) == 1:
        ((path, sentence),) = found
        return UserError(sentence, where=place(path), fix="change it; `meshtune schema --markdown` lists every key")
    lines = "\n".join(f"  {sentence}  [{place(path)}]" for path, sentence in found)
    return UserError(
        f"{len(found)} problems in {name}:\n{lines}",
        where=name,
        fix="change them; `meshtune schema --markdown` lists every key",
    )


def _by_path(errors: list[ErrorDetails], raw: Any) -> dict[Path, list[ErrorDetails]]:
    """Errors by the key they are about. For a key of several forms, only those of the form that was meant."""
    grouped: dict[Path, list[ErrorDetails]] = {}
    for details in errors:
        grouped.setdefault(_written_path(details, raw), []).append(details)
    deeper = {path[:depth] for path in grouped for depth in range(len(path))}
    return {
        path: details
        for path, details in grouped.items()
        if path not in deeper or any(one["type"] in _OWN_WORDS for one in details)
    }


def _written_path(details: ErrorDetails, raw: Any) -> Path:
    """pydantic's location without the names of union branches, which nobody wrote ('lora', 'list[SourceSection]')."""
    path: list[str | int] = []
    for position, step in enumerate(details["loc"]):
        last = position + 1 == len(details["loc"])
        written: Any = dict(enumerate(raw)) if isinstance(raw, list) else raw
        if isinstance(written, dict) and step in written:
            raw = written[step]
        elif not (last and details["type"] == _MISSING):
            continue
        path.append(step)
    return tuple(path)


def _sentence(path: Path, details: list[ErrorDetails], raw: dict[str, Any]) -> str:
    name = ".".join(map(str, path)) or "the recipe"
    first = details[0]
    _, field = field_at(path, raw)
    if first["type"] == _NO_SUCH_KEY:
        return _unknown_key(path, raw)
    if first["type"] == _MISSING:
        about = f": {field.description}" if field is not None and field.description else ""
        return f"{name} is missing{about.rstrip('.')}"
    if first["type"] in _OWN_WORDS:
        return f"{name}: {first['msg'].removeprefix('Value error, ')}"
    if path in KINDS and first["type"].startswith("union_tag"):
        value = raw.get(str(path[0]))
        kind = value.get("kind") if isinstance(value, dict) else value
        kinds = [str(section.model_fields["kind"].default) for section in KINDS[path]]
        return f"{path[0]} is {_shown(kind)}: it must be one of {', '.join(kinds)}{_suggestion(kind, kinds)}"
    if field is None:
        return f"{name}: {first['msg']}"
    words = allowed_entry(field) if isinstance(path[-1], int) else allowed(field)
    return f"{name} is {_shown(first['input'])}: it must be {words}{_suggestion(first['input'], choices(field))}"


def _suggestion(value: Any, valid: list[str]) -> str:
    return f"; {hint.strip()}" if isinstance(value, str) and (hint := nearest(value, valid)) else ""


def _unknown_key(path: Path, raw: dict[str, Any]) -> str:
    """An unknown key with the nearest valid one: of its own section, or the section it belongs in."""
    name, key = ".".join(map(str, path)), str(path[-1])
    section = section_at(path[:-1], raw)
    own = list(section.model_fields) if section is not None else []
    every = [one.name for one in keys()]
    if path[:-1] in KINDS and isinstance(chosen := raw.get(str(path[0])), dict) and name in every:
        return f"{name} does not belong to {path[0]} {chosen.get('kind')}, which takes {', '.join(own)}"
    elsewhere = {one.split(".")[-1]: one for one in reversed(every)}
    if key in elsewhere:
        hint = f"did you mean '{elsewhere[key]}'? "
    elif not (hint := nearest(key, own)) and (match := difflib.get_close_matches(key, list(elsewhere), n=1)):
        hint = f"did you mean '{elsewhere[match[0]]}'? "
    place = ".".join(map(str, path[:-1])) or "a recipe"
    return f"{name} is not a key; {hint}{place} takes {', '.join(own)}"


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
