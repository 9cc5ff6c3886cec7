"""What one process meets, all raise: no process goes on alone, and none waits for one that will not come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from meshtune.errors import UserError
from meshtune.mesh.peers import Place
from meshtune.mesh.processes import Job

ALONE = Job(Place())


@contextlib.contextmanager
def together(job: Job, tag: str) -> Iterator[None]:
    """Every process enters and leaves the block; a UserError or OSError of one is raised on all when all have left.

    The block may hold collective operations only if no process leaves it before they are done.
    """
    error: UserError | OSError | None = None
    try:
        yield
    except (UserError, OSError) as own:
        error = own
    told = job.exchange(tag, None if error is None else _fields(error))
    if error is not None:
        raise error
    for process, fields in enumerate(told):
        if fields is not None:
            what, where, fix = fields
            raise UserError(f"process {process} of {job.processes}: {what}", where=where, fix=fix)


def _fields(error: UserError | OSError) -> tuple[str, str | None, str | None]:
    if isinstance(error, UserError):
        return error.what, error.where, error.fix
    return error.strerror or str(error), str(error.filename) if error.filename else None, None
