"""Drafts that a process is writing: they are locked, so that others know them from those that a killed one has left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator


@contextlib.contextmanager
def lock(draft: pathlib.Path) -> Iterator[None]:
    """Marks a file or folder that is being written. The operating system takes the mark away with the process, whatever
    ends it; clocks play no part."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the file system has no locks
            handle = os.open(draft, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def is_locked(draft: pathlib.Path) -> bool:
    """Whether a process that runs writes `draft`, or this cannot be known."""
    try:
        handle = os.open(draft, os.O_RDONLY)
    except OSError:
        return draft.exists()
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False
