"""Everything that is wrong with a recipe, reported at once, in the recipe's own terms."""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from meshtune.config.fields import allowed, allowed_entry, choices, field_at, keys, section_at
from meshtune.config.recipe import Recipe
from meshtune.config.section import SectionType, section_fields
from meshtune.config.sections import METHODS, STAGES
from meshtune.config.yaml_text import Path, value_at
from meshtune.errors import UserError, nearest

KINDS: dict[Path, tuple[SectionType, ...]] = {("method",): METHODS, ("stage",): STAGES}
UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")  # of models, of dataclasses
MISSING = "missing"
CUSTOM = ("value_error", "empty_text")  # raised by a validator of ours: its message is the message
MOST_PROBLEMS = 200  # that are put into words
LIST_KEYS = "change it; `meshtune schema --markdown` lists every key"
HINT = "did you mean '"
# Names of other tools for a value: what there is in their place.
OTHER_NAMES: dict[str, str] = dict.fromkeys(("fp16", "half", "16", "16-mixed", "f16"), "did you mean 'float16'?")
OTHER_NAMES |= dict.fromkeys(("fp32", "single", "32", "f32"), "did you mean 'float32'?")

# Where the value at a path was written, "recipe.yaml, line 3" or the override, and how long the written path is.
Locate = Callable[[Path], tuple[str, int]]


class RecipeError(UserError):
    """The problems of a recipe. `problems` are (path, sentence, fix) for each key, as `train.steps`; "" is the
    recipe."""

    problems: tuple[tuple[str, str, str | None], ...] = ()


def as_user_error(
    error: ValidationError, raw: Mapping[str, object], name: str, locate: Locate, root: SectionType = Recipe
) -> RecipeError:
    """One error for all of pydantic's complaints.

    `raw` is the mapping that was validated as a `root`, `name` what the user calls it.
    """
    all_problems = _by_path(error.errors(include_url=False), raw)
    by_path = dict(itertools.islice(all_problems.items(), MOST_PROBLEMS))
    problems: list[tuple[Path, str, str | None]] = []
    for path, details in by_path.items():
        sentence = _sentence(path, details, raw, root)
        problems.append((path, sentence, _fix(details[0], sentence, root)))
    located = [(sentence, _where(path, sentence, raw, name, locate, root)) for path, sentence, _ in problems]
    fixes = [fix for _, _, fix in problems if fix is not None]
    if len(located) == 1:
        ((sentence, where),) = located
        as_one = RecipeError(sentence, where=where, fix=fixes[0] if fixes else None)
    else:
        lines = "\n".join(f"  {sentence}  [{where}]" for sentence, where in located)
        lines += f"\n  and {len(all_problems) - len(by_path)} more" if len(all_problems) > len(by_path) else ""
        fix = _list_keys(root).replace("it", "them", 1) if fixes else None
        as_one = RecipeError(f"{len(all_problems)} problems in {name}:\n{lines}", where=name, fix=fix)
    as_one.problems = tuple((".".join(map(str, path)), sentence, fix) for path, sentence, fix in problems)
    return as_one


def _list_keys(root: SectionType) -> str:
    return LIST_KEYS if root is Recipe else "change it; docs/generate-data.md lists the keys"


def _fix(details: ErrorDetails, sentence: str, root: SectionType) -> str | None:
    """How to correct what the sentence says is wrong; None where it names the right word, or the ways out, itself."""
    if details["type"] in CUSTOM or HINT in sentence:
        return None
    return _list_keys(root).replace("change", "add") if details["type"] == MISSING else _list_keys(root)


def _where(path: Path, sentence: str, raw: Mapping[str, object], name: str, locate: Locate, root: SectionType) -> str:
    """Where to look: the written keys below `path` that the sentence names, or else `path` itself.

    A rule about several keys is reported by pydantic at the section, or the recipe, that holds them all. Overrides come
    first, since the recipe was most likely right without them.
    """
    prefix = "".join(f"{step}." for step in path)
    places: dict[str, None] = {}
    for key in (*_names(root), "quantize"):
        below, steps = key.removeprefix(prefix), tuple(key.split("."))
        if not key.startswith(prefix) or value_at(raw, steps) is None:
            continue
        if re.search(rf"(?<![\w.]){re.escape(below)}(?!\.?\w)", sentence):
            place, depth = locate(steps)
            if depth > len(path):
                places[place] = None
    if not places:
        return locate(path)[0]
    in_file = f"{name}, line "
    numbers = sorted(int(place.removeprefix(in_file)) for place in places if place.startswith(in_file))
    lines = [f"{name}, line{'s' * (len(numbers) > 1)} {' and '.join(map(str, numbers))}"] if numbers else []
    return "; ".join([place for place in places if not place.startswith(in_file)] + lines)


def _by_path(errors: list[ErrorDetails], raw: Any) -> dict[Path, list[ErrorDetails]]:
    """Errors by the key they are about. For a key of several forms, only those of the form that was meant."""
    grouped: dict[Path, list[ErrorDetails]] = {}
    for details in errors:
        grouped.setdefault(_written_path(details, raw), []).append(details)
    deeper = {path[:depth] for path in grouped for depth in range(len(path))}
    return {
        path: details
        for path, details in grouped.items()
        if path not in deeper or any(item["type"] in CUSTOM for item in details)
    }


def _written_path(details: ErrorDetails, raw: Any) -> Path:
    """pydantic's location without the names of union branches, which nobody wrote ('lora', 'list[SourceSection]')."""
    path: list[str | int] = []
    for position, step in enumerate(details["loc"]):
        last = position + 1 == len(details["loc"])
        entries: Any = dict(enumerate(raw)) if isinstance(raw, list) else raw
        if isinstance(entries, dict) and step in entries:
            raw = entries[step]
        elif not (last and details["type"] == MISSING):
            continue
        path.append(step)
    return tuple(path)


def _sentence(path: Path, details: list[ErrorDetails], raw: Mapping[str, object], root: SectionType) -> str:
    name = ".".join(map(str, path)) or "the recipe"
    first = details[0]
    field = field_at(path, raw, root)
    if first["type"] in UNKNOWN_KEY:
        return _unknown_key(path, raw, root)
    if first["type"] == MISSING:
        about = f": {field.description}" if field is not None and field.description else ""
        return f"{name} is missing{about.rstrip('.')}"
    if first["type"] in CUSTOM:
        return f"{name}: {_own_message(first)}"
    if root is Recipe and path in KINDS and first["type"].startswith("union_tag"):
        value = raw.get(str(path[0]))
        kind = value.get("kind") if isinstance(value, dict) else value
        kinds = [str(section_fields(section)["kind"].default) for section in KINDS[path]]
        return f"{path[0]} is {_quote_value(kind)}: it must be one of {', '.join(kinds)}{_suggestion(kind, kinds)}"
    if field is None:
        return f"{name}: {first['msg']}"
    takes = allowed_entry(field) if isinstance(path[-1], int) else allowed(field)
    return f"{name} is {_quote_value(first['input'])}: it must be {takes}{_suggestion(first['input'], choices(field))}"


def _own_message(details: ErrorDetails) -> str:
    error = details.get("ctx", {}).get("error")
    if isinstance(error, UserError):  # of a dataclass of the core
        return f"{error.what}: {error.fix}" if error.fix else error.what
    return details["msg"].removeprefix("Value error, ")


def _suggestion(value: object, valid: list[str]) -> str:
    if "bfloat16" in valid and str(value).lower() in OTHER_NAMES:
        return f"; {OTHER_NAMES[str(value).lower()]}"
    return f"; {hint.strip()}" if isinstance(value, str) and (hint := nearest(value, valid)) else ""


def _foreign_keys() -> dict[str, str]:
    """Other tools' names of our keys; their tables are imported only for a key that is unknown."""
    from meshtune.config.foreign.keys import suggestions

    return suggestions()


def _unknown_key(path: Path, raw: Mapping[str, object], root: SectionType) -> str:
    """An unknown key with the key that was meant: another tool's name for one of ours, else the nearest."""
    name, key = ".".join(map(str, path)), str(path[-1])
    section = section_at(path[:-1], raw, root)
    valid = list(section_fields(section)) if section is not None else []
    names = _names(root)
    if len(path) == 1 and "." in key and key in names:
        return f"{key} is written so on the command line alone; in a recipe it is {_nest_key(key)}"
    if path[:-1] in KINDS and isinstance(chosen := raw.get(str(path[0])), dict) and name in names:
        return f"{name} does not belong to {path[0]} {chosen.get('kind')}, which takes {', '.join(valid)}"
    by_last = {entry.split(".")[-1]: entry for entry in reversed(names)}
    if key in by_last:
        hint = f"did you mean '{by_last[key]}'? "
    elif root is Recipe and (ours := _foreign_keys().get(key)):
        hint = f"did you mean '{ours}'? "
    elif not (hint := nearest(key, valid)) and (match := difflib.get_close_matches(key, list(by_last), n=1)):
        hint = f"did you mean '{by_last[match[0]]}'? "
    owner = ".".join(map(str, path[:-1])) or "a recipe"
    return f"{name} is not a key; {hint}{owner} takes {', '.join(valid)}"


@functools.cache
def _names(root: SectionType) -> tuple[str, ...]:
    """Every key of a recipe."""
    return tuple(entry.name for entry in keys(root))


def _nest_key(name: str) -> str:
    """A key as YAML has it: model: {chat_template: ...}."""
    text = "..."
    for step in reversed(name.split(".")):
        text = f"{{{step}: {text}}}"
    return text[1:-1]


def _quote_value(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
