"""ASCII characters that stand for others where a tokenizer cuts text into words.

An expression that names letters, numbers and white space by class, and only ASCII characters otherwise, treats all
other letters alike, and so on. Which class a character has is asked of the tokenizers library, whose version of Unicode
may be another one than Python's.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from tokenizers import Regex, normalizers, pre_tokenizers

UNKNOWN = "\x80"  # of characters that no other stands for
_LETTER, _NUMBER, _SPACE, _OTHER = "Q7\t~"
_STANDS_FOR_ALL = re.compile(r"(?:\\p\{[LN]\}|\\[sSrn]|[^\\Qq7~\-\t\x80-\U0010ffff])*")
_DIGITS = pre_tokenizers.Digits(True)


class CharacterClasses(dict[str, str]):
    """For each character beyond ASCII one of ASCII that stands for it, or UNKNOWN, for expressions for which
    `stand_for_all`."""

    def __init__(self, expressions: Sequence[str]):
        super().__init__()
        self._expressions = "\n".join(expressions).lower()
        self._classes = {
            _LETTER: normalizers.Replace(Regex(r"\p{L}"), _LETTER),
            _NUMBER: normalizers.Replace(Regex(r"\p{N}"), _NUMBER),
            _SPACE: normalizers.Replace(Regex(r"\s"), _SPACE),
        }

    def __missing__(self, character: str) -> str:
        self[character] = self._class(character)
        return self[character]

    def _class(self, character: str) -> str:
        folded = character.casefold()
        # A character that Python does not know may be changed by a normaliser that does; and where case is ignored,
        # a long s is an s.
        if unicodedata.category(character) in ("Cn", "Cs") or (folded.isascii() and folded in self._expressions):
            return UNKNOWN
        classes = [name for name, replace in self._classes.items() if replace.normalize_str(character) == name]
        name = _OTHER if not classes else classes[0] if len(classes) == 1 else UNKNOWN
        return name if (name == _NUMBER) == (len(_DIGITS.pre_tokenize_str(f"a{character}")) == 2) else UNKNOWN


def stand_for_all(expressions: Sequence[str]) -> bool:
    """Whether expressions treat all letters beyond ASCII alike, and numbers, white space, and everything else."""
    return all(_STANDS_FOR_ALL.fullmatch(expression) for expression in expressions)
