"""Models that jobs of the kind `serve` answer with: where each listens, read from its files."""

from __future__ import annotations

import dataclasses
import re

from meshtune.board.job import Job
from meshtune.board.kinds.serve import TOKEN

HEAD = 1 << 20  # bytes of a log in which the address stands
_ADDRESS = re.compile(rb"^address  (http://127\.0\.0\.1:(\d{1,5}))/v1\r?$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a model listens, as http://127.0.0.1:PORT, and what it asks for."""

    url: str
    token: str


def address_of(job: Job) -> Address | None:
    """Where the model of a running job listens; None before it answers, and after it has ended."""
    if job.request.kind != "serve" or job.state != "running":
        return None
    try:
        with job.log.open("rb") as file:
            match = _ADDRESS.search(file.read(HEAD))
        token = (job.folder / TOKEN).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return Address(match[1].decode(), token) if match and token else None
