"""The base of all sections of a recipe: unknown keys and truth values in the place of numbers are errors."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from meshtune.config.beside import expand_path

# A section is a pydantic model, or a frozen dataclass of the core that pydantic reads (meshtune.options).
SectionType: TypeAlias = type


def is_section(annotation: object) -> bool:
    """Whether an annotation is a section of the recipe."""
    return isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation))


def section_fields(section: SectionType) -> dict[str, FieldInfo]:
    """The fields of a section by name, in order."""
    if issubclass(section, BaseModel):
        return section.model_fields
    hints = typing.get_type_hints(section, include_extras=True)
    return {
        field.name: FieldInfo.from_annotated_attribute(hints[field.name], field)  # pyright: ignore[reportArgumentType]
        for field in dataclasses.fields(section)
    }


def declared(options: type, name: str) -> Any:
    """The field of a section that takes the default, description and bounds of an option of a dataclass of the core.

    For sections that are pydantic models; where all options of a dataclass form a section, it is a section itself.
    """
    field = next(field for field in dataclasses.fields(options) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return Field(default_factory=field.default_factory, **field.metadata)
    return Field(default=field.default, **field.metadata)


def refuse_truth_values(section: SectionType) -> BeforeValidator:
    """A validator that raises ValidationError for true and false where the field takes neither: pydantic reads
    `rank: true` as rank 1."""
    return BeforeValidator(_truth_values_refused(section))


def _truth_values_refused(section: SectionType) -> Callable[[object], object]:

    def check(value: object) -> object:
        fields = section_fields(section)
        unfit = [
            InitErrorDetails(
                type=PydanticCustomError("truth_value", "must not be true or false"), loc=(key,), input=entry
            )
            for key, entry in (value.items() if isinstance(value, dict) else ())
            if isinstance(entry, bool) and key in fields and not _mentions(fields[key], bool)
        ]
        if unfit:
            raise ValidationError.from_exception_data(section.__name__, unfit)
        return value

    return check


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: object) -> object:
        return _truth_values_refused(cls)(value)


def _mentions(field: FieldInfo, member: type) -> bool:
    pending = [field.annotation]
    while pending:
        annotation = pending.pop()
        if annotation is member or annotation is Any:
            return True
        pending.extend(get_args(annotation))
    return False


def _path(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("empty_text", "must not be empty")
    if "\0" in text:
        raise PydanticCustomError("empty_text", "must not hold a null character")
    return expand_path(text)


# A file, a directory or a hub id. Relative paths stay as written: they count from the current directory.
PathText = Annotated[str, AfterValidator(_path)]
