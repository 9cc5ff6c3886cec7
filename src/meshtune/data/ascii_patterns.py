"""Translates the regular expressions by which tokenizers cut text into words to Python's, for ASCII text alone.

Among ASCII characters, classes such as `\\p{L}` are the same in every version of Unicode and in every engine.
"""

from __future__ import annotations

import re
import unicodedata

# Byte-level tokenizers without an expression of their own cut text as GPT-2 does.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ASCII = [chr(code) for code in range(128)]
_SPACE = "\t\n\v\f\r "
_CATEGORY = re.compile(r"[LMNPSZC][a-z]?")
_PART = re.compile(
    r"\\(?P<negated>[pP])\{(?P<property>\^?\w+)\}|\\(?P<space>[sS])|\\(?P<digit>[dD])|\\(?P<escape>[rntf]|[^\w\s])"
    r"|(?P<group>\(\?(?:i:|:|=|!|<=|<!|>))|(?P<bare>\()|(?P<repeat>\{\d*,?\d*\})|(?P<other>[^\\(])",
    re.DOTALL,
)


def translate(pattern: str) -> re.Pattern[str] | None:
    """The expression that finds in ASCII text what `pattern` (Oniguruma's syntax) does; None where that is not certain:
    for back references, anchors, classes inside classes, and whatever is not known here."""
    translated, position, in_class = [], 0, False
    while position < len(pattern):
        part = _PART.match(pattern, position)
        text = None if part is None else _translate(part, in_class)
        if part is None or text is None:
            return None
        if part["other"] == "[":
            in_class = True
            if pattern.startswith("^", part.end()):
                translated.append("[^\x80")  # a class must not be empty; ASCII text has no such character
                position = part.end() + 1
                continue
        elif part["other"] == "]":
            in_class = False
        position = part.end()
        # Possessive intervals mean something else in Oniguruma.
        if part["repeat"] and pattern.startswith("+", position):
            return None
        translated.append(text)
    try:
        return re.compile("".join(translated), re.ASCII)
    except re.error:
        return None


def _translate(part: re.Match[str], in_class: bool) -> str | None:
    if part["property"]:
        name = part["property"].removeprefix("^")
        if not _CATEGORY.fullmatch(name):
            return None
        chosen = [character for character in _ASCII if unicodedata.category(character).startswith(name)]
        return _class(chosen, (part["negated"] == "P") != part["property"].startswith("^"), in_class)
    if part["space"]:
        return _class(list(_SPACE), part["space"] == "S", in_class)
    if part["digit"]:
        return _class(list("0123456789"), part["digit"] == "D", in_class)
    if part["escape"]:
        return part[0]
    if part["repeat"]:
        return part[0] if not in_class else None
    if part["group"] or part["bare"]:
        if in_class:
            return re.escape(part[0])
        return part["group"] or "(?:"  # a group's number does not matter without references to it
    if in_class:
        if part[0] == "[" or part.string.startswith("&&", part.start()):
            return None
        return re.escape(part[0]) if part[0] in "&|~" else part[0]
    if part[0] == "[":
        return "[\x80"
    return None if part[0] in "^$.{" else part[0]


def _class(characters: list[str], negated: bool, in_class: bool) -> str:
    chosen = [character for character in _ASCII if (character in characters) != negated]
    inner = "".join(map(re.escape, chosen))
    return inner if in_class else f"[\x80{inner}]"
