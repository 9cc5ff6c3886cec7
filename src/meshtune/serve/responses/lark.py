"""Pieces of grammars in llguidance's dialect of Lark: texts with special tokens in them, JSON, text up to an end."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from meshtune.serve.grammar import WHITESPACE

ANY = r": /(.|\n)*/"


class Lark:
    """A grammar under construction. `special` are the tokens that are no text to the grammar, by their content."""

    def __init__(self, special: Mapping[str, int]):
        self._special, self._rules = special, []
        contents = sorted(special, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, contents)) + ")" if contents else "(?!)")

    def literal(self, text: str) -> str:
        """Exactly this text."""
        parts = [part for part in self._pattern.split(text) if part]
        return " ".join(f"<[{self._special[part]}]>" if part in self._special else _quote_text(part) for part in parts)

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON text of a schema."""
        content = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        return self._add_rule("json", f": %json {json.dumps(content)}")

    def until(self, end: str) -> str:
        """Any text up to `end`, and `end`."""
        if end in self._special:
            return f"{self._add_rule('text', ANY)} {self.literal(end)}"
        return self._add_rule("text", f"[suffix={_quote_text(end)}]{ANY}")

    def whole(self, start: str) -> str:
        """The grammar whose texts are `start`."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _add_rule(self, kind: str, definition: str) -> str:
        name = f"{kind}_{len(self._rules)}"
        self._rules.append(f"{name}{definition}")
        return name


def _quote_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
