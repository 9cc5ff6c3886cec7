"""What every part of a recipe has in common: unknown keys and half-right values are errors, nothing changes later."""

from __future__ import annotations

import os
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _true_is_not_one(cls, value: Any) -> Any:
        """pydantic reads `rank: true` as rank 1; here a truth value fits only where one is asked for."""
        unfit = [
            InitErrorDetails(
                type=PydanticCustomError("truth_value", "must not be true or false"), loc=(key,), input=entry
            )
            for key, entry in (value.items() if isinstance(value, dict) else ())
            if isinstance(entry, bool) and key in cls.model_fields and not _mentions(cls, key, bool)
        ]
        if unfit:
            raise ValidationError.from_exception_data(cls.__name__, unfit)
        return value


def _mentions(section: type[BaseModel], field: str, kind: type) -> bool:
    pending = [section.model_fields[field].annotation]
    while pending:
        annotation = pending.pop()
        if annotation is kind or annotation is Any:
            return True
        pending.extend(get_args(annotation))
    return False


def _filled(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("empty_text", "must not be empty")
    return text


# A file, a directory or a hub id. Relative paths stay as written: they count from the current directory.
PathText = Annotated[str, AfterValidator(_filled), AfterValidator(os.path.expanduser)]
