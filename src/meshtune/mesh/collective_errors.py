"""Raises an error of one process on all of them: no process continues on its own, and none waits for one that has
failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from meshtune.errors import UserError
from meshtune.mesh.processes import Job


@contextlib.contextmanager
def raise_collectively(job: Job, tag: str) -> Iterator[None]:
    """Synchronises all processes at the end of the block, and raises on all a UserError or OSError that one raised.

    Every process must enter the block with the same `tag`. It may hold collective operations only if no process can
    leave it before they have completed.
    """
    local_error: UserError | OSError | None = None
    try:
        yield
    except (UserError, OSError) as error:
        local_error = error
    errors = job.exchange(tag, None if local_error is None else _fields(local_error))
    if local_error is not None:
        raise local_error
    for process_index, fields in enumerate(errors):
        if fields is not None:
            message, where, fix = fields
            raise UserError(f"process {process_index} of {job.process_count}: {message}", where=where, fix=fix)


def _fields(error: UserError | OSError) -> tuple[str, str | None, str | None]:
    if isinstance(error, UserError):
        return error.what, error.where, error.fix
    return error.strerror or str(error), str(error.filename) if error.filename else None, None
