"""The one way Meshtune tells a person that something is wrong."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the person running Meshtune can mend.

    `what` states the problem and what was found, `where` names the file, record and field, `fix` says what to do.
    The command line prints the three parts and exits with code 2; `str(error)` holds them all.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None):
        self.what, self.where, self.fix = what, where, fix
        parts = [what]
        if where:
            parts.append(f"where: {where}")
        if fix:
            parts.append(f"fix: {fix}")
        super().__init__("\n".join(parts))

    def __reduce__(self):
        return _rebuild, (type(self), self.what, self.where, self.fix)


def _rebuild(kind: type[UserError], what: str, where: str | None, fix: str | None) -> UserError:
    return kind(what, where=where, fix=fix)


def nearest(word: str, valid: Iterable[str]) -> str:
    """`did you mean 'x'? ` for the valid name nearest to `word`, or an empty string.

    Of several that are near, one that goes on where `word` ends, then the most alike, then the one that begins most
    alike: adamw rather than badam, for adam and for adamv.
    """

    def alike(name: str) -> tuple[bool, float, int]:
        ratio = difflib.SequenceMatcher(None, word, name).ratio()
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(word, name, strict=False))
        return name.startswith(word), ratio, len(list(same))

    found = difflib.get_close_matches(word, list(valid), n=5, cutoff=0.6)
    return f"did you mean '{max(found, key=alike)}'? " if found else ""
