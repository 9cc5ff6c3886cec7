"""Splits a streamed answer into content, reasoning and calls of tools."""

from __future__ import annotations

import dataclasses
import json
from typing import Protocol

from meshtune.calls.formats import HARMONY, AnswerFormat, CallFormat, ToolCall, Tools, call_of
from meshtune.generate.text import overlap

# What reading a call raises where a model has written something else: a literal that JSON does not have, say.
UNREADABLE = (ValueError, TypeError, LookupError, RecursionError, MemoryError)


@dataclasses.dataclass(frozen=True)
class Delta:
    """A new part of an answer: content, reasoning, or a call."""

    content: str = ""
    reasoning: str = ""
    call: ToolCall | None = None


class Reader(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> list[Delta]:
        """The parts that this text completes."""
        ...

    def finish(self) -> list[Delta]:
        """The parts that were held back, when no more text comes."""
        ...


class TaggedReader:
    """Reads answers whose reasoning is between `think` tags, and whose calls are of a `form`.

    `thinks`: the prompt ended within the reasoning already. `think` None: there is none; `form` None: calls are not
    read. Text that looks like a call and is none is content, and so is a call of a tool that there is not, unless
    `any_name`.
    """

    def __init__(
        self,
        think: tuple[str, str] | None,
        thinks: bool,
        form: CallFormat | None,
        tools: Tools,
        *,
        any_name: bool = False,
    ):
        self._think, self._form, self._tools, self._any_name = think, form, tools, any_name
        self._text, self._blank = "", ""
        self._state = "reasoning" if think and thinks else "start"
        self._trims, self._called = self._state == "reasoning", False

    def push(self, text: str) -> list[Delta]:
        """The parts that this text completes."""
        self._text += text
        return self._read(ended=False)

    def finish(self) -> list[Delta]:
        """The parts that were held back, when no more text comes."""
        deltas = self._read(ended=True)
        if self._blank and not self._called and self._state != "reasoning":
            deltas.append(Delta(content=self._blank))
        return deltas

    def _read(self, ended: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while True:
            before = (self._state, self._text)
            step = {"start": self._start, "reasoning": self._reasoning, "content": self._content, "call": self._call}
            deltas += step[self._state](ended)
            if (self._state, self._text) == before:
                return deltas

    def _start(self, ended: bool) -> list[Delta]:
        """Decides what the answer begins with."""
        text = self._text.lstrip()
        if self._think and (text.startswith(self._think[0]) or (self._think[0].startswith(text) and not ended)):
            if text.startswith(self._think[0]):
                self._state, self._text, self._trims = "reasoning", text[len(self._think[0]) :], True
            return []
        if self._form is not None and not self._form.opens:
            if not text and not ended:
                return []
            marker = next(
                (m for m in self._form.markers if text.startswith(m) or (m.startswith(text) and not ended)), ""
            )
            if marker and not text.startswith(marker):
                return []
            if marker or text.startswith(("{", "[")):
                self._state, self._text = "call", self._text if not marker else text[len(marker) :]
                return []
        self._state = "content"
        return []

    def _reasoning(self, ended: bool) -> list[Delta]:
        assert self._think is not None
        if self._trims:
            self._text = self._text.lstrip("\n")
            self._trims = not self._text
        text, marked = self._until(self._think[1], ended)
        if marked:
            self._state, self._text = "start", self._text.lstrip("\n")
            self._think, self._trims = None, True
            self._blank = ""
            return [Delta(reasoning=text.rstrip("\n"))] if text.rstrip("\n") else []
        shown = text.rstrip("\n")
        self._text = text[len(shown) :] + self._text if not ended else ""
        return [Delta(reasoning=shown)] if shown else []

    def _content(self, ended: bool) -> list[Delta]:
        if self._trims and not self._called:  # the lines between reasoning and answer
            self._text = self._text.lstrip("\n")
            self._trims = not self._text
        if self._form is None or not self._form.opens:
            text, self._text = self._text, ""
            return [Delta(content=text)] if text else []
        text, marked = self._until(self._form.opens, ended)
        if marked:
            self._state = "call"
        # White space before a call is not part of the content.
        text = self._blank + text
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        return [Delta(content=shown)] if shown else []

    def _call(self, ended: bool) -> list[Delta]:
        assert self._form is not None
        closes = self._form.closes
        if closes and closes in self._text:
            body, _, self._text = self._text.partition(closes)
        elif ended:
            body, self._text, closes = self._text, "", ""
        else:
            return []
        self._state = "content"
        try:
            calls = self._form.read(body, self._tools)
            if not calls or not (self._any_name or all(call.name in self._tools for call in calls)):
                raise ValueError("a call of no tool")
        except UNREADABLE:
            text = self._blank + self._form.opens + body + closes
            self._blank = ""
            return [Delta(content=text)] if text else []
        self._called, self._blank = True, ""
        return [Delta(call=call) for call in calls]

    def _until(self, marker: str, ended: bool) -> tuple[str, bool]:
        """The text before a marker, and whether it is there; what may be its beginning stays."""
        before, marked, after = self._text.partition(marker)
        if marked:
            self._text = after
            return before, True
        keep = 0 if ended else overlap(self._text, marker)
        text, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        return text, False


class HarmonyReader:
    """Reads answers in gpt-oss' form: messages of channels, each a header and a text between special tokens."""

    ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")

    def __init__(self, tools: Tools, *, any_name: bool = False):
        self._tools, self._any_name = tools, any_name
        self._text, self._header, self._body = "", None, ""

    def push(self, text: str) -> list[Delta]:
        """The parts that this text completes."""
        self._text += text
        return self._read(ended=False)

    def finish(self) -> list[Delta]:
        """The parts that were held back, when no more text comes."""
        return self._read(ended=True)

    def _read(self, ended: bool) -> list[Delta]:
        deltas = []
        while True:
            if self._header is None:
                header, marked, after = self._text.partition("<|message|>")
                if not marked:
                    if ended and "<|" not in header and header.strip():  # a text of no channel
                        deltas.append(Delta(content=header))
                    return deltas
                self._header, self._text, self._body = header, after, ""
            ends = [(self._text.index(end), end) for end in self.ENDS if end in self._text]
            if not ends:
                keep = 0 if ended else max(overlap(self._text, end) for end in self.ENDS)
                deltas += self._add_body(self._text[: len(self._text) - keep])
                self._text = self._text[len(self._text) - keep :]
                return deltas + (self._close_message() if ended else [])
            at, end = min(ends)
            deltas += self._add_body(self._text[:at])
            deltas += self._close_message()
            self._text = self._text[at + len(end) :]

    def _add_body(self, text: str) -> list[Delta]:
        header = self._header or ""
        if not text:
            return []
        if "to=" in header:
            self._body += text
            return []
        return [Delta(reasoning=text) if "<|channel|>analysis" in header else Delta(content=text)]

    def _close_message(self) -> list[Delta]:
        header, body, self._header = self._header or "", self._body, None
        if "to=" not in header:
            return []
        name = (header.split("to=", 1)[1].split("<|")[0].split() or [""])[0].removeprefix("functions.")
        try:
            if name not in self._tools and not self._any_name:
                raise ValueError(f"no tool is called {name}")
            return [Delta(call=call_of(name, json.loads(body)))]
        except UNREADABLE:
            return [Delta(content=body)]


def answer_reader(form: AnswerFormat, tools: Tools, *, any_name: bool = False) -> Reader:
    """A reader of one answer, which may call `tools`, or with `any_name` tools of other names too."""
    if form.calls is HARMONY:
        return HarmonyReader(tools, any_name=any_name)
    return TaggedReader(form.think, form.thinks, form.calls if tools else None, tools, any_name=any_name)
