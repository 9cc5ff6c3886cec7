"""The translation of another tool's recipe: rules for the tool's keys, and the draft that collects their results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from meshtune.errors import nearest

ABSENT = object()
Reader = Callable[[object], object]


class UnfitValueError(ValueError):
    """A value that the other tool could not read either; the message says what it must be."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """The translation of one key of another tool.

    `direct`: the value is written at the recipe's key `to`, if `when` names the stage, method or optimizer in use, or
    nothing. `part`: a function reads it together with other keys. `idle`: it has no effect here. `refused`: it changes
    the result and cannot be done, because of `note`, and `fix` says what to do; a value among `neutral` asks for
    nothing. `default` is the tool's own, written out if the file leaves the key out.
    """

    kind: Literal["direct", "part", "idle", "refused"]
    to: str = ""
    read: Reader = lambda value: value
    default: object = ABSENT
    note: str = ""
    fix: str = ""
    neutral: tuple[object, ...] = ()
    when: str = ""


Table = dict[str, Rule]


def direct(to: str, read: Reader, default: object = ABSENT, *, when: str = "") -> Rule:
    return Rule("direct", to, read, default, when=when)


def part(to: str, read: Reader, default: object = ABSENT) -> Rule:
    return Rule("part", to, read, default)


def refused(note: str, fix: str, neutral: tuple[object, ...] = (False, 0, "", "none")) -> Rule:
    return Rule("refused", note=note, fix=fix, neutral=neutral)


def parts(to: str, read: Reader, default: object, names: str) -> Table:
    """Rules for all of `names`, separated by blanks, that are read together."""
    return dict.fromkeys(names.split(), part(to, read, default))


def idle(names: str) -> Table:
    """Rules for all of `names`, separated by blanks, that have no effect here."""
    return dict.fromkeys(names.split(), Rule("idle"))


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


# What no recipe can make the same, for the head of every file that is written.
OTHER_ORDER = (
    "The order of the data and the first values of adapters are drawn from the same seed by another generator, and "
    "differ."
)
ONE_TEXT = (
    "A conversation is tokenised as one text; the other tool tokenises each of its parts alone, which with "
    "SentencePiece (Llama 2, Mistral, Gemma) can differ by a blank at the start of an answer."
)
HOLDERS = ("x-", "_")  # keys beside a recipe's own, where people write what anchors name
Verdict = Literal["translated", "differs", "no effect", "refused", "unknown"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result for a key: for `translated` and `differs`, `to` is the setting written here. Of `refused` and
    `unknown` keys `fix` says what to do."""

    key: str
    verdict: Verdict
    to: str = ""
    note: str = ""
    fix: str = ""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A value of our recipe, or an option of our command, with the keys that it comes from."""

    value: Any
    keys: tuple[str, ...]
    note: str = ""


class Draft:
    """Reads the keys of a file of `tool` and collects our settings.

    `raw` are the file's own keys and values, `table` the rules of all keys that the tool has, `lines` the line of each.
    A null is a key left out. `devices` is the number of devices that the file was written for.
    """

    def __init__(self, tool: str, raw: dict[str, Any], table: Table, devices: int = 1):
        self.tool, self.raw, self.table, self.devices = tool, raw, table, devices
        self.given = {key: value for key, value in raw.items() if value is not None}
        self.settings: dict[str, Setting] = {}
        self.remarks: list[str] = []
        self.files: dict[str, str] = {}  # further files by suffix, such as a chat template
        self._findings: dict[str, Finding] = {}

    def get(self, key: str) -> Any:
        """The value of a key, or the tool's default, or None. A value that does not fit refuses the key."""
        rule = self.table[key]
        if key not in self.given:
            return None if rule.default is ABSENT else rule.default
        try:
            return rule.read(self.given[key])
        except UnfitValueError as problem:
            self.refuse(key, f"{_show_value(self.given[key])} {problem}", f"correct {key}")
            return None if rule.default is ABSENT else rule.default

    def put(self, to: str, value: object, *keys: str, note: str = "", differs: bool = False) -> None:
        """Writes `value` at our key `to`, from `keys`, in place of an earlier value. With `differs`, `note` names the
        difference."""
        if to in self.settings:
            self._withdraw(f"{to}: {_show_value(self.settings[to].value)}")
        present = [key for key in keys if key in self.given]
        default = f"{self.tool}'s default" + (f" of {keys[0]}" if keys else "")
        origin = ", ".join(present) or default
        self.settings[to] = Setting(value, tuple(present), f"{origin}; {note}" if note else origin)
        for key in present:
            self._note(Finding(key, "differs" if differs else "translated", f"{to}: {_show_value(value)}", note))
        if differs and not present:
            self.remark(f"{to}: {note}")

    def refuse(self, key: str, note: str, fix: str) -> None:
        """Refuses a key; several reasons are joined."""
        earlier = self._findings.get(key)
        if earlier is not None and earlier.verdict == "refused" and note not in earlier.note:
            note, fix = f"{earlier.note}; {note}", earlier.fix if fix == earlier.fix else f"{earlier.fix}; {fix}"
        self._findings[key] = Finding(key, "refused", note=note, fix=fix)

    def mention(self, key: str, note: str) -> None:
        """Adds a sentence to what became of a key that has not been refused."""
        if self._findings.get(key, Finding(key, "no effect")).verdict != "refused":
            self._note(Finding(key, "translated", note=note))

    def differ(self, key: str, note: str) -> None:
        """Reports a difference of a key that writes nothing."""
        if key in self.given:
            self._note(Finding(key, "differs", note=note))
        else:
            self.remark(note)

    def remark(self, note: str) -> None:
        """Adds a sentence for the head of the recipe."""
        if note not in self.remarks:
            self.remarks.append(note)

    def apply(self) -> None:
        """Translates the direct keys of the table, with the tool's defaults, once stage and method are in the draft."""
        used = {str(self.value(name)) for name in ("stage.kind", "optimizer.name")}
        used.add(str(self.value("method.adapter") or self.value("method.kind")))
        for key, rule in self.table.items():
            if rule.kind != "direct" or (rule.when and not used & set(rule.when.split())):
                continue
            value = self.get(key)
            if value is not None:
                self.put(rule.to, value, key)

    def value(self, to: str) -> Any:
        """The value written at our key `to`, None if there is none."""
        return self.settings[to].value if to in self.settings else None

    def findings(self) -> list[Finding]:
        """Returns the results for every key of the file, in its order, then refusals of missing keys."""
        of_file = [self._findings.get(key) or self._by_rule(key) for key in self.raw]
        return of_file + [finding for key, finding in self._findings.items() if key not in self.raw]

    def _note(self, finding: Finding) -> None:
        """Joins several results of one key; a refusal stays."""
        earlier = self._findings.get(finding.key)
        if earlier is None or earlier.verdict == "no effect":
            self._findings[finding.key] = finding
        elif earlier.verdict in ("translated", "differs"):
            verdict = "differs" if "differs" in (earlier.verdict, finding.verdict) else "translated"
            to = "; ".join(dict.fromkeys(filter(None, (earlier.to, finding.to))))
            note = "; ".join(dict.fromkeys(filter(None, (earlier.note, finding.note))))
            self._findings[finding.key] = Finding(finding.key, verdict, to, note)

    def _withdraw(self, result: str) -> None:
        """Takes a result that is no longer written out of the findings of its keys."""
        for key, finding in self._findings.items():
            remaining = "; ".join(part for part in finding.to.split("; ") if part != result)
            self._findings[key] = dataclasses.replace(finding, to=remaining)

    def _by_rule(self, key: str) -> Finding:
        rule = self.table.get(key)
        if rule is None and not key.startswith(HOLDERS):
            fix = f"{nearest(key, self.table)}it does nothing there: remove it"
            return Finding(key, "unknown", note=f"{self.tool} has no such key", fix=fix)
        if rule is None or rule.kind != "refused" or key not in self.given:
            return Finding(key, "no effect")
        value = self.given[key]
        if any(value == neutral and type(value) is type(neutral) for neutral in rule.neutral):
            return Finding(key, "no effect")
        return Finding(key, "refused", note=rule.note, fix=rule.fix)


def _show_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = "null" if value is None else repr(value) if isinstance(value, list | dict) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
