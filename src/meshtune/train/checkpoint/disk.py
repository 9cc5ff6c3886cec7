"""Converts disk errors to user errors."""

from __future__ import annotations

import contextlib
import errno
import pathlib
from collections.abc import Iterator

from meshtune.errors import UserError


@contextlib.contextmanager
def disk_errors(directory: pathlib.Path) -> Iterator[None]:
    """Converts disk errors to UserErrors that list the remaining checkpoints. Orbax wraps some in ValueError."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError) or not (reason := disk_reason(error)):
            raise
        complete = sorted(int(path.name) for path in directory.glob("[0-9]*") if path.name.isdigit())
        remaining = (
            f"whole checkpoints there: {', '.join(map(str, complete))}" if complete else "no checkpoint was saved yet"
        )
        raise UserError(
            f"a checkpoint could not be written: {reason}{_system_text(error)}; {remaining}",
            where=str(directory),
            fix="make room or make the directory writable, then run the same command with resume=true",
        ) from error


def _system_text(error: BaseException) -> str:
    return f" ({error.strerror})" if isinstance(error, OSError) and error.errno and error.filename is None else ""


def disk_reason(error: BaseException | None) -> str | None:
    """Returns why the disk refused, if an error or one of its causes says so."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK:
            return _DISK[error.errno]
        text = str(error).lower()
        for number, reason in _DISK.items():
            if any(word in text for word in (reason, errno.errorcode[number].lower(), _STRERROR[number])):
                return reason
        error = error.__cause__ or error.__context__
    return None


_DISK = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "disk quota exceeded",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.ENOTDIR: "not a directory",
    errno.EEXIST: "a file is in the way",
    errno.EIO: "input/output error",
    errno.EFBIG: "a file would be larger than is allowed here",
}
_STRERROR = {
    errno.ENOSPC: "no space left on device",
    errno.EDQUOT: "quota exceeded",
    errno.EROFS: "read-only file system",
    errno.EACCES: "permission denied",
    errno.EPERM: "operation not permitted",
    errno.ENOTDIR: "not a directory",
    errno.EEXIST: "file exists",
    errno.EIO: "input/output error",
    errno.EFBIG: "file too large",
}
