"""UserError: a mistake that the user can correct, with where it is and what to do; StopRequested; and words of
messages."""

from __future__ import annotations

import difflib
import errno
import itertools
import re
from collections.abc import Iterable

MAX_NAME = 200  # characters of a name that is compared with others

# What to do about a path that the system refuses.
UNREADABLE = {
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions",
    errno.ELOOP: "the symbolic link leads back to itself: name the file itself, or make the link again",
    errno.ENAMETOOLONG: "give a path whose parts are below 256 bytes",
    errno.ENOTDIR: "a part of the path is a file: check the path",
    errno.EROFS: "give a path on a file system that can be written",
    errno.ENOSPC: "free space on its disk, or give a path on another",
    errno.EDQUOT: "free space on its disk, or give a path on another",
    errno.EIO: "look at the disk",
    errno.ESTALE: "look at the network's file system",
}


class UserError(ValueError):
    """A mistake that the person running Meshtune can correct.

    `what` states the problem and what was found, `where` names the file, record and field, `fix` says what to do.
    The command line prints the three parts and exits with code 2; `str(error)` holds them all.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None):
        self.what, self.where = _printable(what), _printable(where) if where else where
        self.fix = _printable(fix) if fix else None
        parts = [self.what]
        if self.where:
            parts.append(f"where: {self.where}")
        if self.fix:
            parts.append(f"fix: {self.fix}")
        super().__init__("\n".join(parts))

    def __reduce__(self):
        return _rebuild, (type(self), self.what, self.where, self.fix)


class StopRequested(Exception):
    """The run, which waits for others, is to save and stop, by the signal of this number."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def path_error(error: OSError) -> UserError | None:
    """Turns the system's refusal of a path (its name, permissions, disk) into a UserError; other errors give None."""
    if error.errno not in UNREADABLE or not error.filename:
        return None
    paths = " to ".join(str(path) for path in (error.filename, error.filename2) if path)
    return UserError(f"the path cannot be used: {error.strerror}", where=paths, fix=UNREADABLE[error.errno])


# Names in a stranger's file may hold what moves a terminal's cursor, or no encoding can write.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_LONGEST = 10_000  # characters of a part of a message


def _printable(text: str) -> str:
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 10 :]}"
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def _rebuild(error_type: type[UserError], what: str, where: str | None, fix: str | None) -> UserError:
    return error_type(what, where=where, fix=fix)


def amount(count: int, noun: str, plural: str | None = None) -> str:
    """'1 row', '2,048 rows': a number with its noun, given in the singular."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


PROJECT = "."  # what pip installs, from the folder of Meshtune's source; "meshtune" once an index has it


def pip_install(extra: str) -> str:
    """The command that installs the packages of an extra of pyproject.toml."""
    return f"in the folder of Meshtune's source: pip install '{PROJECT}[{extra}]'"


def nearest(name: str, valid: Iterable[str]) -> str:
    """`did you mean 'x'? ` for the valid name nearest to `name`, or an empty string.

    Of several close ones, one that extends `name` is preferred, then the most similar, then the one with the longest
    common prefix: adamw rather than badam, for adam and for adamv.
    """

    def similarity(candidate: str) -> tuple[bool, float, int]:
        ratio = difflib.SequenceMatcher(None, name, candidate).ratio()
        prefix = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(name, candidate, strict=False))
        return candidate.startswith(name), ratio, len(list(prefix))

    if len(name) > MAX_NAME:
        return ""
    matches = difflib.get_close_matches(name, list(valid), n=5, cutoff=0.6)
    return f"did you mean '{max(matches, key=similarity)}'? " if matches else ""
