"""Verifies the files of models, adapters and checkpoints against the digests stored with them."""

from __future__ import annotations

from pathlib import Path

from meshtune.digests import (
    FILE,
    DamagedError,
    check_directory,
    damage_error,
    digest_files,
    find_damage,
    read_digests,
    share,
)
from meshtune.mesh.processes import Job
from meshtune.weights.safetensors_files import headers

FIX = f"make or copy it again; if you changed a file on purpose, delete {FILE} beside it"


def check_result(directory: Path, expected: str | None = None) -> None:
    """Raises DamagedError if a file of a model or adapter does not match its digest. Directories without digests pass.

    `expected` is the digest of digests.json itself, if the run recorded it.
    """
    hint = "" if expected is None else f", and give {directory} itself in place of its run"
    check_directory(directory, expected=expected, fix=FIX + hint)


def check_source(directory: Path, job: Job) -> None:
    """Verifies a directory that all processes of `job` read, like `check_result`; each process hashes a share of files.

    Raises: DamagedError, on all processes.
    """
    if damage := find_damage_collectively(directory, job):
        raise damage_error(directory, damage, FIX)


def find_damage_collectively(
    directory: Path, job: Job, *, required: bool = False, local: dict[str, str] | None = None
) -> dict[str, str]:
    """Finds the damaged files of a directory and the fault of each; each process of `job` hashes some of them.

    Every process gets the same result. A directory without digests counts as undamaged unless they are `required`.
    `local` is what `find_local_damage` has already found.
    """
    damage = find_local_damage(directory, job, required=required) if local is None else local
    for process_damage in job.exchange(f"digests of {directory.name}", damage):
        damage |= process_damage
    return damage


def find_local_damage(directory: Path, job: Job, *, required: bool = False) -> dict[str, str]:
    """The damage of this process's share of a directory's files."""
    if not required and not (directory / FILE).exists():
        return {}
    try:
        digests, _ = read_digests(directory)
    except DamagedError as error:
        return {FILE: error.reason}
    return find_damage(directory, share(digests, job.process_index, job.process_count))


def weights_digests(directory: Path) -> list[str]:
    """Returns the digests of all bytes of a model's weight files, for keys of caches that are computed from them."""
    files = sorted({info.file for info in headers(directory).values()})
    return [digest_files(file.parent, [file.name])[file.name].digest for file in files]
