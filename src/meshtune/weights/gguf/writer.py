"""Writes a model as a GGUF file, tensor by tensor: host memory holds rows of one tensor, or one that is rearranged."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshtune.errors import UserError
from meshtune.families.gguf import GgufLayout, GgufPart
from meshtune.quantize.gguf import TYPES, decode, encode
from meshtune.quantize.gguf.mixture import Mixture
from meshtune.weights.gguf.file import ALIGNMENT, header
from meshtune.weights.gguf.numbers import Numbers
from meshtune.weights.publish import check_room

PART_NUMBERS = 1 << 22  # that are read, encoded and written together
LOST = 0.5  # error of a tensor from which its type holds next to nothing of it; the coarsest are at 0.15


@dataclasses.dataclass(frozen=True)
class Written:
    """What was written: tensors by type, bytes, and the error of what is stored relative to the numbers it was made
    from, of the worst tensor (root mean square). `lost` are the names and types of tensors whose numbers are too small
    for their type, which stores zeros or next to nothing of them."""

    types: Mapping[str, int]
    nbytes: int
    error: float
    worst: str
    lost: tuple[tuple[str, str], ...] = ()


def write_gguf(
    file: Path,
    layout: GgufLayout,
    numbers: Numbers,
    mixture: Mixture,
    metadata: Mapping[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Writes a file with a mixture of types; `metadata` beside the layout's. Parameters that are metadata are read
    before all others. Raises UserError for numbers that are not finite, or too large for float16."""
    shapes = layout.shapes | {name: array.shape for name, array in layout.computed.items()}
    chosen = {name: (TYPES[mixture.type_of(name, shape)], shape) for name, shape in shapes.items()}
    parts: dict[str, list[GgufPart]] = {}
    for part in sorted(layout.parts, key=lambda part: numbers.group(part.path)):
        parts.setdefault(part.name, []).append(part)
    start, offsets = header({**metadata, **layout.metadata, **_listed(layout, numbers)}, chosen)
    ends = (offsets[name] + math.prod(shape[:-1]) * kind.row_bytes(shape[-1]) for name, (kind, shape) in chosen.items())
    nbytes = -(-max(ends) // ALIGNMENT) * ALIGNMENT
    check_room(file, nbytes)
    total = sum(math.prod(shape) for _, shape in chosen.values())
    done, worst, counts, lost = 0, (0.0, ""), dict[str, int](), list[tuple[str, str]]()
    with file.open("wb") as stream:
        stream.write(start)
        for name, array in layout.computed.items():
            stream.seek(offsets[name])
            stream.write(
                encode(chosen[name][0].name, np.ascontiguousarray(array.reshape(-1, array.shape[-1]))).tobytes()
            )
        for name, tensor_parts in parts.items():
            kind = chosen[name][0].name
            counts[kind] = counts.get(kind, 0) + 1
            stream.seek(offsets[name])
            squares = differences = 0.0
            for rows in _rows(tensor_parts, numbers):
                content, stored = encoded(name, kind, rows)
                stream.write(content.tobytes())
                squares += float(np.square(rows, dtype=np.float64).sum())
                differences += float(np.square(stored - rows, dtype=np.float64).sum())
                done += rows.size
                if progress:
                    progress(done, total)
            error = (differences / squares) ** 0.5 if squares else 0.0
            if error < LOST:
                worst = max(worst, (error, name))
            else:
                lost.append((name, kind))
        stream.truncate(nbytes)
        stream.flush()
        os.fsync(stream.fileno())
    return Written(counts, nbytes, *worst, tuple(lost))


def _listed(layout: GgufLayout, numbers: Numbers) -> dict[str, list[float]]:
    lists = {
        key.name: np.concatenate([numbers.rows(path, index, 0, 1) for path, index in key.places]) for key in layout.keys
    }
    for name, values in lists.items():
        _check_finite(f"key '{name}'", values)
    return {name: values.tolist() for name, values in lists.items()}


def _rows(parts: Sequence[GgufPart], numbers: Numbers) -> Iterator[np.ndarray]:
    """The rows of the tensor of these parts [rows, columns], in order."""
    part = parts[0]
    shape: list[int] = [*part.view.tensor]
    if not part.view.is_identity or not part.is_plain:
        tensor = np.empty(part.view.tensor, np.float32)
        for entry in parts:
            entry.into_tensor(numbers.rows(entry.path, entry.index, 0, entry.array_shape[0]), tensor)
        yield tensor.reshape(-1, shape[-1])
        return
    inner = math.prod(shape[1:])
    step = max(1, PART_NUMBERS // inner) if len(shape) > 1 else shape[0]
    for start in range(0, shape[0], step):
        rows = numbers.rows(part.path, part.index, start, min(shape[0], start + step))
        yield part.finished(rows.reshape(-1, shape[-1]))
    first = part.finished(numbers.rows(part.path, part.index, 0, 1)) if part.padding else None
    for start in range(0, part.padding, step):
        assert first is not None
        yield np.repeat(first, min(step, part.padding - start), axis=0).reshape(-1, shape[-1])


def encoded(name: str, kind: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows of a tensor in a type, the numbers that this stands for). Raises UserError for numbers that are not finite,
    and for ones beyond the type."""
    _check_finite(f"tensor '{name}'", rows)
    with np.errstate(over="ignore", invalid="ignore"):
        content = encode(kind, rows)
        stored = decode(kind, content)
    if not np.isfinite(stored).all():
        within = "float16's range" if kind == "F16" else f"what {kind} holds, whose scales are float16"
        raise UserError(
            f"tensor '{name}' has numbers up to {np.abs(rows).max():.4g}, beyond {within}",
            where=name,
            fix="write it with --gguf BF16",
        )
    return content, stored


def _check_finite(subject: str, numbers: np.ndarray) -> None:
    if not np.isfinite(numbers).all():
        raise UserError(
            f"{subject} has numbers that are not finite",
            where="--gguf",
            fix="the model is damaged, or its training diverged: export an earlier checkpoint",
        )
