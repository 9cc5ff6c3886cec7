"""A recipe under translation: what it comes to here, and what became of every key."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from meshtune.config.foreign.rules import ABSENT, Reader, Rule, Table, UnfitValueError
from meshtune.errors import nearest

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
    """What became of a key: for `translated` and `differs`, `to` is what it came to here. Of `refused` and `unknown`
    keys `fix` says what to do."""

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
    """Reads the keys of a file of `tool` and collects what they come to.

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
            self.refuse(key, f"{_shown(self.given[key])} {problem}", f"correct {key}")
            return None if rule.default is ABSENT else rule.default

    def pop(self, key: str, config: dict[str, Any], name: str, read: Reader, default: Any = None) -> Any:
        """Takes `name` out of `config`, a mapping within the value of `key`. An unfit value refuses the key."""
        value = config.pop(name, None)
        if value is None:
            return default
        try:
            return read(value)
        except UnfitValueError as problem:
            self.refuse(key, f"{name}: {_shown(value)} {problem}", f"correct {name}")
            return default

    def put(self, to: str, value: object, *keys: str, note: str = "", differs: bool = False) -> None:
        """Writes `value` at our key `to`, from `keys`, in place of what is there. With `differs`, `note` says what
        is not the same here."""
        if to in self.settings:
            self._withdraw(f"{to}: {_shown(self.settings[to].value)}")
        present = [key for key in keys if key in self.given]
        default = f"{self.tool}'s default" + (f" of {keys[0]}" if keys else "")
        origin = ", ".join(present) or default
        self.settings[to] = Setting(value, tuple(present), f"{origin}; {note}" if note else origin)
        for key in present:
            self._note(Finding(key, "differs" if differs else "translated", f"{to}: {_shown(value)}", note))
        if differs and not present:
            self.remark(f"{to}: {note}")

    def refuse(self, key: str, note: str, fix: str) -> None:
        """Refuses a key; several reasons are joined."""
        earlier = self._findings.get(key)
        if earlier is not None and earlier.verdict == "refused" and note not in earlier.note:
            note, fix = f"{earlier.note}; {note}", earlier.fix if fix == earlier.fix else f"{earlier.fix}; {fix}"
        self._findings[key] = Finding(key, "refused", note=note, fix=fix)

    def idle(self, key: str, note: str) -> None:
        if key in self.given and key not in self._findings:
            self._findings[key] = Finding(key, "no effect", note=note)

    def mention(self, key: str, note: str) -> None:
        """Adds a sentence to what became of a key that has not been refused."""
        earlier = self._findings.get(key)
        if earlier is None or earlier.verdict == "no effect":
            self.idle(key, note)
        elif earlier.verdict != "refused":
            self._note(Finding(key, "translated", note=note))

    def refuse_unread(self, key: str, remaining: dict[str, Any], *harmless: str) -> None:
        """Refuses `key` for what is left in it that nothing has read, and names what of it is without an effect."""
        given = [name for name, value in remaining.items() if value is not None and not name.startswith("_")]
        unread = [name for name in given if name not in harmless and remaining[name] is not False]
        if unread:
            listed = ", ".join(unread)
            self.refuse(key, f"{listed} in it: nothing here does that", f"leave out {listed}")
        if idle := [name for name in given if name not in unread]:
            self.mention(key, f"without an effect here: {', '.join(idle)}")

    def differ(self, key: str, note: str) -> None:
        """Reports a difference of a key that writes nothing."""
        if key in self.given:
            self._note(Finding(key, "differs", note=note))
        else:
            self.remark(note)

    def remark(self, note: str) -> None:
        """A sentence about the whole, for the head of what is written."""
        if note not in self.remarks:
            self.remarks.append(note)

    def apply(self, *keys: str) -> None:
        """Translates the direct keys of the table, or only `keys`, with the tool's defaults."""
        for key in keys or self.table:
            rule = self.table[key]
            if rule.kind != "direct" or (key not in self.given and rule.default is ABSENT):
                continue
            value = self.get(key)
            if value is not None:
                self.put(rule.to, value, key, note=rule.note, differs=rule.differs)

    def findings(self) -> list[Finding]:
        """What became of every key of the file, in its order, and after them refusals of what it leaves out."""
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
        rule: Rule | None = self.table.get(key)
        if rule is None and key.startswith(HOLDERS):
            return Finding(key, "no effect", note="a place for values that other keys refer to")
        if rule is None:
            fix = f"{nearest(key, self.table)}it does nothing there: remove it"
            return Finding(key, "unknown", note=f"{self.tool} has no such key", fix=fix)
        if key not in self.given:
            return Finding(key, "no effect", note="null: left out")
        value = self.given[key]
        if rule.kind == "refused":
            if any(value is neutral or (value == neutral and type(value) is type(neutral)) for neutral in rule.neutral):
                return Finding(key, "no effect", note=f"{_shown(value)} asks for nothing")
            return Finding(key, "refused", note=rule.note, fix=rule.fix)
        if value is False and rule.default is False:
            return Finding(key, "no effect", note="false asks for nothing")
        return Finding(key, "no effect", note=rule.note)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = "null" if value is None else repr(value) if isinstance(value, list | dict) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
