"""Before time is spent: do all processes run the same thing?"""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

import meshtune.errors
from meshtune.errors import UserError
from meshtune.mesh.processes import Job

LONGEST = 120  # characters of a value that are shown
PACKAGE = pathlib.Path(meshtune.errors.__file__).parent


def agree(job: Job, about: str, fields: Mapping[str, Any], *, fix: str) -> None:
    """Compares `fields` (nested mappings of what JSON holds) between all processes; every process calls it.

    Raises, on every process: UserError naming the first field that differs, with both values and the processes.
    """
    flat = {name: _words(value) for name, value in _flat(fields)}
    digest = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()
    digests = job.exchange(f"{about}: digest", digest)
    if len(set(digests)) == 1:
        return
    # The whole of it is sent only now that it matters.
    everyone = job.exchange(f"{about}: fields", {"host": job.host, "fields": flat})
    other = next(number for number, one in enumerate(digests) if one != digests[0])
    mine, theirs = everyone[0]["fields"], everyone[other]["fields"]
    name = next(name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name))
    alike = [number for number, one in enumerate(digests) if one == digests[0]]
    group = f"; as process 0: {len(alike)} of {len(digests)} processes" if len(digests) > 2 else ""
    raise UserError(
        f"the processes differ in {about}: {name} is {mine.get(name, 'absent')} on process 0 ({everyone[0]['host']}) "
        f"and {theirs.get(name, 'absent')} on process {other} ({everyone[other]['host']}){group}",
        fix=fix,
    )


@contextlib.contextmanager
def first_alone(job: Job, what: str) -> Iterator[None]:
    """A block that process 0 runs before all others do, so that they find what it left on a disk they may share."""
    if not job.first:
        job.exchange(what, None)
    yield
    if job.first:
        job.exchange(what, None)


def code_version() -> dict[str, str]:
    """What must be the same for processes to compute the same: JAX, NumPy, and Meshtune's own source by digest."""
    return {"jax": jax.__version__, "numpy": np.__version__, "meshtune's source": source_digest()}


def source_digest(package: pathlib.Path = PACKAGE) -> str:
    """A digest of every Python file of Meshtune: a checkout that was edited differs, whatever its version says."""
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _flat(fields: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in fields.items():
        key = f"{above}{name}"
        pairs += _flat(value, key + ".") if isinstance(value, Mapping) and value else [(key, value)]
    return pairs


def _words(value: Any) -> str:
    words = json.dumps(value, sort_keys=True, default=str)
    if len(words) <= LONGEST:
        return words
    return f"{words[:LONGEST]}... ({hashlib.sha256(words.encode()).hexdigest()[:8]})"
