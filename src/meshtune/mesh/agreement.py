"""Checks that all processes run the same code with the same settings, before time is spent on training."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping

import jax
import numpy as np

import meshtune.errors
from meshtune.errors import UserError
from meshtune.mesh.processes import Job

MAX_SHOWN = 120  # characters of a value in a message
PACKAGE = pathlib.Path(meshtune.errors.__file__).parent


def require_agreement(job: Job, subject: str, fields: Mapping[str, object], *, fix: str) -> None:
    """Compares `fields` (nested mappings of JSON values) between all processes; every process must call it.

    Raises, on every process: UserError naming the first field that differs, with both values and the processes.
    """
    flat = {name: _short_text(value) for name, value in _flatten(fields)}
    digest = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()
    digests = job.exchange(f"{subject}: digest", digest)
    if len(set(digests)) == 1:
        return
    # The fields themselves are exchanged only once a digest differs.
    processes = job.exchange(f"{subject}: fields", {"host": job.host, "fields": flat})
    differing = next(index for index, digest in enumerate(digests) if digest != digests[0])
    first, second = processes[0]["fields"], processes[differing]["fields"]
    name = next(name for name in sorted({*first, *second}) if first.get(name) != second.get(name))
    equal = digests.count(digests[0])
    group = f"; {equal} of {len(digests)} processes agree with process 0" if len(digests) > 2 else ""
    raise UserError(
        f"the processes differ in {subject}: {name} is {first.get(name, 'absent')} on process 0 "
        f"({processes[0]['host']}) and {second.get(name, 'absent')} on process {differing} "
        f"({processes[differing]['host']}){group}",
        fix=fix,
    )


@contextlib.contextmanager
def first_of_each_host(job: Job, tag: str) -> Iterator[tuple[int, int]]:
    """Runs the block on the first process of each host, on all hosts at once, and then on the others, so that they can
    reuse the files it has written. Gives the index of this host and the number of hosts."""
    processes = job.exchange(f"{tag}: hosts", job.host)
    names = list(dict.fromkeys(processes))
    is_first = processes.index(job.host) == job.process_index
    if not is_first:
        job.exchange(tag, None)
    yield names.index(job.host), len(names)
    if is_first:
        job.exchange(tag, None)


def code_version() -> dict[str, str]:
    """The versions that must be equal for processes to compute the same: JAX, NumPy, and a digest of our source."""
    return {"jax": jax.__version__, "numpy": np.__version__, "meshtune's source": source_digest()}


def source_digest(package: pathlib.Path = PACKAGE) -> str:
    """A digest of every Python file of the package, which detects an edited checkout of the same version."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _flatten(fields: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for name, value in fields.items():
        key = f"{prefix}{name}"
        pairs += _flatten(value, key + ".") if isinstance(value, Mapping) and value else [(key, value)]
    return pairs


def _short_text(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[:MAX_SHOWN]}... ({hashlib.sha256(text.encode()).hexdigest()[:8]})"
