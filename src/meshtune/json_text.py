"""Reads JSON that strangers may have written, in bounded time and memory: whatever is wrong with it is a UserError."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from meshtune.errors import UserError

MAX_BYTES = 32 << 20  # an index of a hundred thousand tensors has a third of that
MAX_DEPTH = 64
MAX_DIGITS = 308  # no float holds more


def read_json(file: Path, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises UserError for a file that is not there, cannot be read or is too large, and as `parse_json` does.
    """
    value = parse_json(read_bytes(file, max_bytes=max_bytes), str(file))
    if not isinstance(value, dict):
        fix = "download the file again, or write an object: {...}"
        raise UserError(f"expected a JSON object, found {type(value).__name__}", where=str(file), fix=fix)
    return value


def token_ids(value: Any, where: str) -> list[int]:
    """The ids of a field such as eos_token_id: one, several, or none where it is null; UserError for all else."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(id_) is int and 0 <= id_ < 2**31 for id_ in ids):
        raise UserError(f"expected the number of a token, or a list of them, found {value!r}", where=where)
    return ids


def read_bytes(file: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a file of at most `max_bytes`. Raises UserError as `file_size` does, and for a larger one."""
    if (size := file_size(file)) > max_bytes:
        raise UserError(
            f"the file has {size:,} bytes, and at most {max_bytes:,} are read",
            where=str(file),
            fix="download or copy the file again",
        )
    try:
        with file.open("rb") as stream:
            return stream.read(max_bytes)
    except OSError as error:
        raise _unreadable(file, error) from error


def file_size(file: Path) -> int:
    """The bytes of a regular file. Raises UserError where there is none, or it is a folder, a pipe, which might never
    end, or a device."""
    try:
        state = file.stat()
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise _unreadable(file, error) from error
    if not stat.S_ISREG(state.st_mode):
        kind = "a folder" if stat.S_ISDIR(state.st_mode) else "a pipe or a device"
        raise UserError(f"expected a file, found {kind}", where=str(file), fix="give a regular file")
    return state.st_size


def _unreadable(file: Path, error: Exception) -> UserError:
    reason = error.strerror if isinstance(error, OSError) else None
    return UserError(f"the file cannot be read: {reason or error}", where=str(file), fix="check its path and rights")


def parse_json(content: bytes | str, where: str) -> Any:
    """The value of a JSON text, in which NaN and Infinity may stand, as Python writes them.

    Raises UserError, with line and column where there are any, for text that is malformed or not UTF-8, for a key that
    an object has twice, for nesting of more than MAX_DEPTH and whole numbers of more than MAX_DIGITS.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = _DECODER.decode(text)
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text: byte {error.start} cannot be decoded", where=where) from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"malformed JSON: {error.msg}", where=f"{where}, line {error.lineno}, column {error.colno}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(_DEEP if isinstance(error, RecursionError) else str(error), where=where) from error
    if _is_deeper(value, MAX_DEPTH):
        raise UserError(_DEEP, where=where)
    return value


_DEEP = f"the JSON is nested more than {MAX_DEPTH} levels deep"


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        values = (node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list))
        level = [child for children in values for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a decoder's (name, value) pairs. Raises ValueError for a name that is there twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = set[str]()
        twice = next(name for name, _ in pairs if name in names or names.add(name))
        raise ValueError(f"an object has the key {twice!r} twice")
    return fields


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number has {len(digits):,} digits, and at most {MAX_DIGITS} are read")
    return int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=object_of, parse_int=_integer)
