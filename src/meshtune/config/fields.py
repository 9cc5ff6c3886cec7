"""What may be written at a key of the recipe, in words: for error messages and for the reference table."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from meshtune.config.recipe import Recipe
from meshtune.config.yaml_text import Path


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of the recipe: `name` is dotted, `allowed` and `default` are words."""

    name: str
    allowed: str
    default: str
    description: str


def keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[Key]:
    """Every key that holds a value, in the order of the schema. `data.train.N.path`: of the Nth source."""
    for name, field in section.model_fields.items():
        models = _models(field.annotation)
        dotted = f"{prefix}{name}"
        entry = f"{dotted}.N." if _is_list(field.annotation) else f"{dotted}."
        if not models or entry.endswith(".N.") or len(models) > 1:
            default = _default(field)
            yield Key(dotted, allowed(field), default, field.description or "")
        if name == "validation" and prefix == "data.":
            continue  # its sources are written as data.train's are
        inner = [(model, one) for model in models for one in keys(model, entry)]
        if len(models) == 1:
            yield from (one for _, one in inner)
            continue
        named: dict[str, list[tuple[str, Key]]] = {}
        for model, one in inner:
            if one.name != f"{entry}kind":
                named.setdefault(one.name, []).append((_section_words(model), one))
        yield from (_of_several(found) for found in named.values())


def _of_several(found: list[tuple[str, Key]]) -> Key:
    """A key that several kinds of a section have, each with its own default and meaning."""
    first = found[0][1]
    defaults: dict[str, list[str]] = {}
    for kind, one in found:
        defaults.setdefault(one.default, []).append(kind)
    default = first.default
    if len(defaults) > 1:
        default = ", ".join(f"{value} ({', '.join(kinds)})" for value, kinds in defaults.items())
    takes = " or ".join(dict.fromkeys(one.allowed for _, one in found))
    meaning = " ".join(dict.fromkeys(one.description for _, one in found))
    return Key(first.name, takes, default, meaning)


def field_at(path: Path, raw: Any) -> tuple[type[BaseModel] | None, FieldInfo | None]:
    """(the section that holds the last key of `path`, that key's field); None where there is none.

    `raw` is the mapping that was validated: its `kind` says which method's section is meant.
    """
    section: type[BaseModel] | None = Recipe
    field: FieldInfo | None = None
    for step in path:
        if isinstance(step, int):
            section = _chosen(field, raw[step]) if field is not None and isinstance(raw, list) else None
            raw = raw[step] if isinstance(raw, list) and step < len(raw) else None
            continue
        if field is not None and not isinstance(raw, list):
            section = _chosen(field, raw) or section
        if section is None or step not in section.model_fields:
            return section, None
        owner, field = section, section.model_fields[step]
        raw = raw.get(step) if isinstance(raw, dict) else None
        section = owner
        if step is path[-1]:
            return owner, field
    return section, field


def section_at(path: Path, raw: Any) -> type[BaseModel] | None:
    """The section written at `path` itself, such as LoraMethod at ('method',)."""
    section: type[BaseModel] | None = Recipe
    for step in path:
        if isinstance(step, str):
            if section is None or step not in section.model_fields:
                return None
            raw = raw.get(step) if isinstance(raw, dict) else None
            section = _chosen(section.model_fields[step], raw)
        else:
            raw = raw[step] if isinstance(raw, list) and step < len(raw) else None
    return section


def allowed(field: FieldInfo) -> str:
    """`a whole number above 0, or null`: what the field takes, in words."""
    return _either(_words(field.annotation, list(field.metadata)))


def allowed_entry(field: FieldInfo) -> str:
    """What an entry of the list takes that the field is, or may be."""
    lists = [option for option in (field.annotation, *get_args(field.annotation)) if get_origin(option) is list]
    return _either(_words(get_args(lists[0])[0], [])) if lists else allowed(field)


def choices(field: FieldInfo) -> list[str]:
    """The fixed words among what the field takes, or its entries: for suggestions."""
    pending, found = [field.annotation], []
    while pending:
        annotation = pending.pop()
        if get_origin(annotation) is Literal:
            found.extend(str(value) for value in get_args(annotation))
        else:
            pending.extend(get_args(annotation))
    return found


def _either(words: list[str]) -> str:
    words = list(dict.fromkeys(words))
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def _words(annotation: Any, metadata: list[Any]) -> list[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _words(inner, metadata + more)
    if origin in (Union, types.UnionType):
        return [words for option in get_args(annotation) for words in _words(option, metadata)]
    if origin is Literal:
        names = [str(value) for value in get_args(annotation)]
        return [names[0] if len(names) == 1 else f"one of {', '.join(names)}"]
    if origin is list:
        (entry,) = get_args(annotation)
        if get_origin(entry) is Literal:
            return [f"a list of any of {', '.join(map(str, get_args(entry)))}"]
        return ["a list of sources (paths or mappings)" if _models(entry) else "a list of texts"]
    if origin is dict:
        return ["a mapping of text to text"]
    if annotation is type(None):
        return ["null"]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [_section_words(annotation)]
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    words = plain.get(annotation, "a value")
    return [f"{words} {bounds}" if annotation in (int, float) and (bounds := _bounds(metadata)) else words]


def _section_words(section: type[BaseModel]) -> str:
    if "kind" in section.model_fields:
        return str(section.model_fields["kind"].default)
    return f"a mapping with keys of {', '.join(section.model_fields)}"


def _bounds(metadata: list[Any]) -> str:
    kinds = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
    found = [
        f"{words} {getattr(item, name)}" for item in metadata for name, words in kinds.items() if hasattr(item, name)
    ]
    return " and ".join(found)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is PydanticUndefined and field.default_factory is not None:
        value = field.default_factory()  # pyright: ignore[reportCallIssue]
    if isinstance(value, BaseModel):
        return _section_words(type(value))
    if isinstance(value, bool) or value is None:
        return str({True: "true", False: "false", None: "null"}[value])
    return str(value)


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(_is_list(option) for option in get_args(annotation))


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for option in get_args(annotation) for model in _models(option)]


def _chosen(field: FieldInfo | None, raw: Any) -> type[BaseModel] | None:
    """The section that `raw` is, of those `field` takes: methods are told apart by kind."""
    models = _models(field.annotation) if field is not None else []
    kind = raw.get("kind") if isinstance(raw, dict) else None
    for model in models:
        if "kind" in model.model_fields and model.model_fields["kind"].default == kind:
            return model
    return models[0] if models else None
