"""A model directory written tensor by tensor from numbers on the host: a base made from another one, or a result
in other codes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from meshtune.errors import UserError
from meshtune.families.tensors import Shape, TensorMap
from meshtune.weights.check import check
from meshtune.weights.ends import config_with_ends
from meshtune.weights.export import (
    MODEL_FILES,
    TOKENIZER_FILES,
    check_destination,
    copy_files,
    write_chat_template,
    write_generation,
    write_json,
)
from meshtune.weights.file_tensors import ST_DTYPES, Tensor, header
from meshtune.weights.finite import all_finite
from meshtune.weights.load import load_spec
from meshtune.weights.packed import model_tensors
from meshtune.weights.publish import disk_errors, publish_directory
from meshtune.weights.read_into import Progress
from meshtune.weights.safetensors_files import DTYPES, INDEX, SINGLE, STORED_DTYPES
from meshtune.weights.tensor_reader import TensorReader
from meshtune.weights.verify import ExportError, relative_difference, written_logits

MAX_SHARD_BYTES = 5_000_000_000
WRITTEN = {short: dtype for dtype, short in ST_DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class NewTensor:
    """A tensor to write: `make` gives its numbers (in `dtype`, a name such as bfloat16) when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], np.ndarray]

    @property
    def entry(self) -> Tensor:
        """Its entry in a file's header."""
        return Tensor(self.name, self.shape, self.dtype, ())


@dataclasses.dataclass(frozen=True)
class Publication:
    """Where a model goes and what goes with it: `tokenizer` is the directory of its files, `chat_template` replaces
    theirs, and `record`, as JSON, goes into the metadata of every file. `ends` are further ids that end a text."""

    dest: Path
    tokenizer: Path
    chat_template: str | None
    record: Mapping[str, object]
    overwrite: bool
    max_shard_bytes: int
    ends: tuple[int, ...] = ()


def publish_model(
    publication: Publication,
    source: Path,
    config: Mapping[str, object],
    tensors: Callable[[TensorReader], Iterator[NewTensor]],
    expected: Float[np.ndarray, "B T V"],
    progress: Progress | None = None,
) -> float:
    """Writes a whole model directory, which appears once it is complete, and reads it back: how far the probe's logits
    are from `expected` (root mean square, relative).

    `tensors` gives those of all files; one is in memory at a time. Raises as `write_model` does, and
    ExportError where the written files compute no numbers.
    """
    dest = publication.dest
    check_destination(dest, (source, publication.tokenizer), publication.overwrite)
    with publish_directory(dest, "config.json") as folder, disk_errors(dest), TensorReader() as reader:
        record, size = publication.record, publication.max_shard_bytes
        config = config_with_ends(config, publication.ends)
        write_model(folder, source, config, list(tensors(reader)), record, size, progress)
        write_generation(folder, source, publication.ends)
        copy_files(publication.tokenizer, folder, TOKENIZER_FILES)
        if publication.chat_template is not None:
            write_chat_template(folder, publication.chat_template)
        difference = relative_difference(expected, written_logits(folder))
        if not np.isfinite(difference):
            raise ExportError("the logits of the written model are not finite", where=str(dest))
    return difference


def whole_tensor(entries: Sequence[TensorMap], leaves: Mapping[str, np.ndarray], shape: Shape) -> np.ndarray:
    """A tensor of the files in float32, of the parts of leaves (path -> array)."""
    numbers = np.empty(shape, np.float32)
    for entry in entries:
        entry.view.write(np.asarray(leaves[entry.path][entry.index], np.float32), numbers)
    return numbers


def round_numbers(numbers: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Finite numbers in another dtype. Raises UserError, naming the tensor, where they are beyond it."""
    with np.errstate(over="ignore"):
        result = numbers.astype(dtype)
    if not all_finite(result) and all_finite(numbers):
        raise UserError(
            f"tensor '{name}' has numbers up to {np.abs(numbers).max():.4g}, beyond {dtype}'s range",
            where=name,
            fix="leave --format out, and give --dtype float32",
        )
    return result


def write_model(
    folder: Path,
    source: Path,
    config: Mapping[str, object],
    tensors: Sequence[NewTensor],
    record: Mapping[str, object],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Writes the files of a model into an existing folder, but for a tokenizer: `source` gives the files that travel
    with it.

    One tensor is in memory at a time. `record`, as JSON, goes into the metadata of every file; `progress(done, total)`
    counts bytes. Raises UserError where
    the written files do not match the config, OSError where the disk refuses.
    """
    shards = list(_shards(tensors, max_shard_bytes))
    names = [SINGLE] if len(shards) == 1 else [_name(n, len(shards)) for n in range(1, len(shards) + 1)]
    metadata = {"format": "pt", "meshtune": json.dumps(record)}
    done, total = 0, sum(tensor.entry.nbytes for tensor in tensors)
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(header([tensor.entry for tensor in shard], metadata))
            for tensor in shard:
                numbers = np.ascontiguousarray(tensor.make())
                assert numbers.shape == tensor.shape, (tensor.name, numbers.shape, tensor.shape)
                assert numbers.dtype == DTYPES[STORED_DTYPES[tensor.dtype]], (tensor.name, numbers.dtype, tensor.dtype)
                file.write(numbers.reshape(-1).view("u1").data)
                done += tensor.entry.nbytes
                if progress:
                    progress(done, total)
    if len(shards) > 1:
        where = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    write_json(folder / "config.json", config)
    copy_files(source, folder, MODEL_FILES)
    spec, _ = load_spec(folder)
    check(folder, spec, model_tensors(folder, spec.published))


def _shards(tensors: Sequence[NewTensor], max_bytes: int) -> Iterator[list[NewTensor]]:
    shard: list[NewTensor] = []
    for tensor in tensors:
        if shard and sum(entry.entry.nbytes for entry in shard) + tensor.entry.nbytes > max_bytes:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _name(number: int, of: int) -> str:
    return f"model-{number:05d}-of-{of:05d}.safetensors"
