"""The file that keeps a reference's log-probabilities: an .npy array followed by its digest."""

from __future__ import annotations

import io
import os
import pathlib
import tempfile

import numpy as np

from meshtune.digests import DamagedError, digest_bytes
from meshtune.errors import UserError

DIGEST_BYTES = 32  # hex digits at the end of a file


def read_log_probabilities(file: pathlib.Path, documents: int) -> np.ndarray | None:
    """The log-probabilities in a file, float32 [documents]; None where there is none.

    Raises: DamagedError where the file does not end in the digest of what comes before it.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"{file.name} cannot be read: {error.strerror}", where=str(file)) from error
    array, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    if digest_bytes(array).encode() != digest:
        raise DamagedError(f"{file.name} is damaged: its contents are not those that were written", where=str(file))
    values = np.load(io.BytesIO(array), allow_pickle=False)
    assert values.shape == (documents,), "the file's name is a digest of the data"
    return values


def write_log_probabilities(file: pathlib.Path, values: np.ndarray) -> None:
    """Writes log-probabilities and their digest, as one atomic replacement.

    Raises: UserError for values that are not finite, and where the file cannot be written.
    """
    if not np.isfinite(values).all():
        raise UserError(
            "the reference gives log-probabilities that are not finite",
            where="stage.reference",
            fix="use compute.precision=float32, or another reference",
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=file.parent, prefix=".writing-", suffix=".npy")
        with os.fdopen(descriptor, "wb") as stream:
            array = io.BytesIO()
            np.save(array, values)
            stream.write(array.getvalue() + digest_bytes(array.getvalue()).encode())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, file)
    except OSError as problem:
        raise UserError(
            f"the reference's log-probabilities cannot be written: {problem.strerror or problem}",
            where=str(file.parent),
            fix="make room there, or set MESHTUNE_CACHE to a directory that can be written",
        ) from problem
