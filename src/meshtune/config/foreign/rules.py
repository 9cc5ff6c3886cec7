"""What becomes of a key of another tool, as data: one Rule a key, and the readers of values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

ABSENT = object()
Reader = Callable[[object], object]


class UnfitValueError(ValueError):
    """A value that the other tool could not read either; the message says what it must be."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """What becomes of one key of another tool.

    `direct`: the value is written at the recipe's key `to`. `part`: a function reads it together with other keys, and
    without an effect it is reported with `note`. `idle`: it has no effect, because of `note`. `refused`: it cannot be
    done, because of `note`, and `fix` says what to do; a value among `neutral` asks for nothing. `default` is the
    tool's own, written out where the file leaves the key out. `differs` says that `note` names a difference.
    """

    kind: Literal["direct", "part", "idle", "refused"]
    to: str = ""
    read: Reader = lambda value: value
    default: object = ABSENT
    note: str = ""
    fix: str = ""
    neutral: tuple[object, ...] = ()
    differs: bool = False


Table = dict[str, Rule]


def direct(to: str, read: Reader, default: object = ABSENT, note: str = "", differs: bool = False) -> Rule:
    return Rule("direct", to, read, default, note, differs=differs)


def part(to: str, read: Reader, default: object = ABSENT, note: str = "") -> Rule:
    return Rule("part", to, read, default, note or "has no effect together with the other keys of this file")


def refused(note: str, fix: str, neutral: tuple[object, ...] = (False, 0, "", "none")) -> Rule:
    return Rule("refused", note=note, fix=fix, neutral=neutral)


def idle(note: str, names: str) -> Table:
    """Rules for all of `names`, separated by blanks, that have no effect for the same reason."""
    return dict.fromkeys(names.split(), Rule("idle", note=note))


def refused_keys(note: str, fix: str, names: str) -> Table:
    """Rules for all of `names`, separated by blanks, that are refused for the same reason."""
    return dict.fromkeys(names.split(), refused(note, fix))


def number(value: object) -> int | float:
    """A number, also as text: YAML 1.1 reads 2e-5 as text, and so do the tools before they convert it."""
    if isinstance(value, str):
        try:
            value = float(value.replace("_", ""))
        except ValueError:
            raise UnfitValueError("must be a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnfitValueError("must be a number")
    if not math.isfinite(value):
        raise UnfitValueError("must be a finite number")
    return value


def integer(value: object) -> int:
    result = number(value)
    if result != int(result):
        raise UnfitValueError("must be a whole number")
    return int(result)


def flag(value: object) -> bool:
    """true or false; yes, no, on and off as YAML 1.1 reads them."""
    if isinstance(value, str) and value.lower() in ("true", "yes", "on", "1"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "no", "off", "0"):
        return False
    if not isinstance(value, bool):
        raise UnfitValueError("must be true or false")
    return value


def text(value: object) -> str:
    if isinstance(value, bool | dict | list) or value is None:
        raise UnfitValueError("must be text")
    return str(value)


def names(value: object) -> list[str]:
    """A list of names, or names separated by commas."""
    if isinstance(value, list):
        return [text(entry).strip() for entry in value]
    return [name.strip() for name in text(value).split(",") if name.strip()]


def name_or_names(value: object) -> str | list[str]:
    """One text, such as an expression, or a list of names."""
    return names(value) if isinstance(value, list) else text(value)


def sources(value: object) -> object:
    """A data set by name or as a mapping, or a list of such."""
    if not isinstance(value, str | dict | list):
        raise UnfitValueError("must be a data set, or a list of such")
    return value


def two_numbers(value: object) -> tuple[float, float]:
    """A list of two numbers, such as the betas of an optimizer."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise UnfitValueError("must be a list of two numbers")
    return float(number(value[0])), float(number(value[1]))


def mapping(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise UnfitValueError("must be a mapping of keys to values")
    return value


def entries(value: object) -> list[object]:
    if not isinstance(value, list):
        raise UnfitValueError("must be a list")
    return value


def anything(value: object) -> object:
    return value
