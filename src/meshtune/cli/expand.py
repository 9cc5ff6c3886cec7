"""Commands whose options are the fields of dataclasses: each option is declared once, where it is used."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Union

import typer


def expand_options(**defaults: Mapping[str, object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for commands: a parameter annotated with a dataclass becomes one option for every field that
    has a description.

    Description, bounds and flags are the field's (meshtune.options). `defaults` gives, by parameter, other defaults
    than the dataclass has: `expand_options(sampling={"temperature": 0.7})`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters: list[inspect.Parameter] = []
        sections: dict[str, type] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if not dataclasses.is_dataclass(hints[name]):
                parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            sections[name] = hints[name]
            parameters += _options(hints[name], defaults.get(name, {}))

        @functools.wraps(function)
        def command(**values: Any) -> None:
            for name, section in sections.items():
                fields = _fields(section)
                values[name] = section(**{field.name: _value(field, values.pop(field.name)) for field in fields})
            function(**values)

        command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del command.__wrapped__
        return command

    return decorate


def _options(section: type, defaults: Mapping[str, object]) -> list[inspect.Parameter]:
    """One keyword parameter for every field, annotated as typer reads it."""
    hints = typing.get_type_hints(section)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field, defaults),
            annotation=Annotated[_annotation(hints[field.name]), _typer_option(field)],
        )
        for field in _fields(section)
    ]


def _fields(section: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(section) if "description" in field.metadata]


def _typer_option(field: dataclasses.Field[Any]) -> Any:
    flags = field.metadata.get("flags") or (f"--{field.name.replace('_', '-')}",)
    bounds = {"min": field.metadata.get("ge"), "max": field.metadata.get("le")}
    nothing_to_show = field.default in (dataclasses.MISSING, None, ()) or field.default is False
    return typer.Option(
        *flags,
        help=field.metadata["description"],
        show_default=not nothing_to_show,
        **{name: bound for name, bound in bounds.items() if bound is not None},
    )


def _default(field: dataclasses.Field[Any], defaults: Mapping[str, object]) -> Any:
    value = defaults.get(field.name, field.default)
    if value is dataclasses.MISSING:
        return inspect.Parameter.empty
    return None if value == () else value


def _annotation(hint: Any) -> Any:
    """The annotation of a field as typer reads it: `tuple[str, ...]` may be given several times, Literals are text."""
    origin = typing.get_origin(hint)
    if origin is tuple:
        return list[str] | None
    if origin is typing.Literal:
        return str
    if origin in (Union, types.UnionType):
        (inner,) = [_annotation(option) for option in typing.get_args(hint) if option is not type(None)]
        return inner | None
    return hint


def _value(field: dataclasses.Field[Any], value: Any) -> Any:
    """The field's value from what typer gives: a list where an option may be repeated, None where it is absent."""
    if field.default == ():
        return tuple(value or ())
    return value
