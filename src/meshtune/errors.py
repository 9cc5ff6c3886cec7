"""The one way Meshtune tells a person that something is wrong."""

from __future__ import annotations

import difflib
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

    Of several that are near, the first that goes on where `word` ends: adamw rather than badam for adam.
    """
    found = difflib.get_close_matches(word, list(valid), n=5, cutoff=0.6)
    longer = [name for name in found if name.startswith(word)]
    return f"did you mean '{(longer or found)[0]}'? " if found else ""
