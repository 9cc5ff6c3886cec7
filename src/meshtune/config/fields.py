"""The keys of a recipe with the values that they take, for error messages and reference tables."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from meshtune.config.recipe import Recipe
from meshtune.config.section import SectionType, is_section, section_fields
from meshtune.config.yaml_text import Path


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of the recipe: `name` is dotted, `allowed` and `default` are shown to people."""

    name: str
    allowed: str
    default: str
    description: str


def keys(section: SectionType = Recipe, prefix: str = "") -> Iterator[Key]:
    """Every key that holds a value, in the order of the schema. `data.train.N.path`: of the Nth source."""
    for name, field in section_fields(section).items():
        sections = _sections(field.annotation)
        dotted = f"{prefix}{name}"
        entry = f"{dotted}.N." if _is_list(field.annotation) else f"{dotted}."
        if not sections or entry.endswith(".N.") or len(sections) > 1:
            yield Key(dotted, allowed(field), _default(field), field.description or "")
        if name == "validation" and prefix == "data.":
            continue  # its sources are written as data.train's are
        if len(sections) == 1:
            yield from keys(sections[0], entry)
            continue
        by_name: dict[str, list[tuple[str, Key]]] = {}
        for option in sections:
            for key in keys(option, entry):
                if key.name != f"{entry}kind":
                    by_name.setdefault(key.name, []).append((_section_text(option), key))
        yield from (_combine_kinds(variants) for variants in by_name.values())


def _combine_kinds(variants: list[tuple[str, Key]]) -> Key:
    """A key that several kinds of a section have, each with its own default and meaning."""
    first = variants[0][1]
    defaults: dict[str, list[str]] = {}
    for kind, key in variants:
        defaults.setdefault(key.default, []).append(kind)
    default = first.default
    if len(defaults) > 1:
        default = ", ".join(f"{value} ({', '.join(kinds)})" for value, kinds in defaults.items())
    takes = " or ".join(dict.fromkeys(key.allowed for _, key in variants))
    meaning = " ".join(dict.fromkeys(key.description for _, key in variants))
    return Key(first.name, takes, default, meaning)


def field_at(path: Path, raw: Any, root: SectionType = Recipe) -> FieldInfo | None:
    """The field of the last key of `path`; None where there is none.

    `raw` is the mapping that was validated: its `kind` says which method's section is meant.
    """
    section: SectionType | None = root
    field: FieldInfo | None = None
    for depth, step in enumerate(path):
        if isinstance(step, int):
            section = _choose_section(field, raw[step]) if field is not None and isinstance(raw, list) else None
            raw = raw[step] if isinstance(raw, list) and step < len(raw) else None
            continue
        if field is not None and not isinstance(raw, list):
            section = _choose_section(field, raw) or section
        fields = section_fields(section) if section is not None else {}
        if step not in fields:
            return None
        field = fields[step]
        raw = raw.get(step) if isinstance(raw, dict) else None
        if depth + 1 == len(path):
            return field
    return field


def section_at(path: Path, raw: Any, root: SectionType = Recipe) -> SectionType | None:
    """The section written at `path` itself, such as LoraOptions at ('method',)."""
    section: SectionType | None = root
    field: FieldInfo | None = None
    for step in path:
        if isinstance(step, str):
            fields = section_fields(section) if section is not None else {}
            if step not in fields:
                return None
            field = fields[step]
            raw = raw.get(step) if isinstance(raw, dict) else None
        else:
            raw = raw[step] if isinstance(raw, list) and step < len(raw) else None
        section = _choose_section(field, raw)
    return section


def allowed(field: FieldInfo) -> str:
    """`a whole number above 0, or null`: what the field takes, in words."""
    return _either(_alternatives(field.annotation, list(field.metadata)))


def allowed_entry(field: FieldInfo) -> str:
    """The values that an entry of the field's list takes."""
    lists = [option for option in (field.annotation, *get_args(field.annotation)) if get_origin(option) in SEQUENCES]
    return _either(_alternatives(get_args(lists[0])[0], [])) if lists else allowed(field)


def choices(field: FieldInfo) -> list[str]:
    """The fixed words among what the field takes, or its entries: for suggestions."""
    pending: list[Any] = [field.annotation]
    literals: list[str] = []
    while pending:
        annotation = pending.pop()
        if get_origin(annotation) is Literal:
            literals.extend(str(value) for value in get_args(annotation))
        else:
            pending.extend(get_args(annotation))
    return literals


SEQUENCES = (list, tuple)
SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}


# In the list of all keys, whose reader looks for a key's values and not for a sentence.
SHORT = {"a whole number": "integer", "a number": "number", "a list of": "list of", "a mapping of": "mapping of"}
SHORT |= {"one of ": "", " of at least ": " >= ", " of at most ": " <= ", " above ": " > ", " below ": " < "}


def _either(alternatives: list[str]) -> str:
    alternatives = list(dict.fromkeys(alternatives))
    *init, last = alternatives
    return f"{', '.join(init)} or {last}" if init else last


def _alternatives(annotation: Any, metadata: list[object]) -> list[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *inner_metadata = get_args(annotation)
        return _alternatives(inner, metadata + inner_metadata)
    if origin in (Union, types.UnionType):
        return [text for option in get_args(annotation) for text in _alternatives(option, metadata)]
    if origin is Literal:
        names = [str(value) for value in get_args(annotation)]
        return [names[0] if len(names) == 1 else f"one of {', '.join(names)}"]
    if origin in SEQUENCES:
        entry = get_args(annotation)[0]
        if get_origin(entry) is Literal:
            return [f"a list of any of {', '.join(map(str, get_args(entry)))}"]
        return ["a list of sources (paths or mappings)" if _sections(entry) else "a list of texts"]
    if origin in (dict, Mapping):
        return ["a mapping of text to text"]
    if annotation is type(None):
        return ["null"]
    if is_section(annotation):
        return [_section_text(annotation)]
    text = SCALARS.get(annotation, "a value")
    return [f"{text} {bounds}" if annotation in (int, float) and (bounds := _bounds(metadata)) else text]


def _section_text(section: SectionType) -> str:
    fields = section_fields(section)
    return str(fields["kind"].default) if "kind" in fields else f"a mapping with keys of {', '.join(fields)}"


def _bounds(metadata: list[object]) -> str:
    return " and ".join(
        f"{text} {getattr(item, name)}" for item in metadata for name, text in BOUNDS.items() if hasattr(item, name)
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is PydanticUndefined and field.default_factory is not None:
        value = field.default_factory()  # pyright: ignore[reportCallIssue]
    if is_section(type(value)):
        return _section_text(type(value))
    if isinstance(value, bool) or value is None:
        return str({True: "true", False: "false", None: "null"}[value])
    return str(list(value) if isinstance(value, tuple) else value)


def _is_list(annotation: object) -> bool:
    return get_origin(annotation) is list or any(_is_list(option) for option in get_args(annotation))


def _sections(annotation: Any) -> list[SectionType]:
    if is_section(annotation):
        return [annotation]
    return [section for option in get_args(annotation) for section in _sections(option)]


def _choose_section(field: FieldInfo | None, raw: Any) -> SectionType | None:
    """The section that `raw` is, of those `field` takes: `kind` decides between methods."""
    sections = _sections(field.annotation) if field is not None else []
    kind = raw.get("kind") if isinstance(raw, dict) else None
    for section in sections:
        fields = section_fields(section)
        if "kind" in fields and fields["kind"].default == kind:
            return section
    return sections[0] if sections else None


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
        allowed = functools.reduce(lambda text, short: text.replace(*short), SHORT.items(), allowed)
        limits = [allowed] * (allowed != "true or false") + [default] * (default != "default null")
        lines.append(f"- `{key.name}` ({_escaped('; '.join(limits))}): {_escaped(key.description)}")
    return "\n".join(lines).lstrip("\n")


def _escaped(text: str) -> str:
    return text.replace("*", "\\*")
