"""Reads safetensors files (https://huggingface.co/docs/safetensors): headers first, then single tensors by byte range,
never a whole file; and writes headers. The header is read here rather than with the library so that a half-written,
truncated or stubbed file is reported by its name. Nothing pickled is ever opened.

Format: https://huggingface.co/docs/safetensors. The header is read here rather than with the library so that a
half-written, truncated or stubbed file is reported as what it is, with its name. Nothing pickled is ever opened.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from meshtune.errors import UserError
from meshtune.families.tensors import Shape, TensorMap, View, by_name
from meshtune.json_text import file_size, parse_json, read_json
from meshtune.quantize.published.scheme import Scheme

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LINK = "model.gguf"  # in the directory that stands for a GGUF file
TOKENIZER_PROBLEM = "tokenizer_problem.json"  # in place of a tokenizer that a GGUF file does not hold whole
SHARD = re.compile(r"^(.+)-(\d{5})-of-(\d{5})\.safetensors$")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# Host memory that one read may take.
BLOCK_BYTES = 16 << 20
SAMPLES, SAMPLE_BYTES = 16, 4096
HEADER_LIMIT = 100_000_000  # as in the reference implementation
LARGEST = (1 << 63) - 1  # of a size: what a file may have, and what arrays can be addressed by

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
STORED_DTYPES = {dtype.name: name for name, dtype in DTYPES.items()}
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is: its safetensors dtype name, and bytes `start` .. `start + nbytes` of `file`.

    A tensor that no file holds as such is `packed`: `start` is then that of its first part, and `nbytes` are those of
    all parts.
    """

    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int
    nbytes: int
    packed: Packed | None = None


@dataclasses.dataclass(frozen=True)
class Packed:
    """Sources of a weight that is published quantised: the tensors of files that it is made of, by role, and
    whether it is read dequantised, or as codes, scales or zeros of a quantised weight."""

    scheme: Scheme
    parts: tuple[tuple[str, TensorInfo], ...]
    content: Literal["numbers", "codes", "scales", "zeros"] = "numbers"


def headers(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of a model directory, in file order, from nothing but headers.

    model.safetensors if there is one (as transformers prefers), else the shards of model.safetensors.index.json, else a
    complete set of -00001-of-0000N shards. Of a directory that represents a GGUF file: those in it. Raises UserError
    for missing, half-written or inconsistent files, or weights that are not safetensors.
    """
    if (directory / LINK).is_file():
        from meshtune.weights.gguf.directory import infos_of

        return infos_of(directory / LINK)
    infos: dict[str, TensorInfo] = {}
    files, listed = _files(directory)
    for file in files:
        for name, info in read_header(file).items():
            if name in infos:
                raise UserError(
                    f"tensor '{name}' is in two files, {infos[name].file.name} and {file.name}",
                    where=str(directory),
                    fix="remove the stale file, or download the model again into an empty folder",
                )
            infos[name] = info
    absent = [(name, file) for name, file in listed.items() if name not in infos]
    if absent:
        name, file = absent[0]
        raise UserError(
            f"the index names {_count(len(absent), 'tensor')} that the shards do not hold, such as '{name}', "
            f"which it says is in {file}",
            where=str(directory / INDEX),
            fix="index and shards are from different versions: download or copy them again together",
        )
    if not infos:
        raise UserError(
            "the weight files hold no tensors", where=str(directory), fix="download or copy the model again"
        )
    return infos


def tensor_names(directory: Path) -> frozenset[str]:
    """The names of the tensors of a model directory; none where it has no weights, or none that can be read."""
    try:
        if (directory / INDEX).is_file() and not (directory / SINGLE).is_file():
            return frozenset(_weight_map(directory / INDEX))
        return frozenset(headers(directory))
    except UserError:
        return frozenset()


def samples(info: TensorInfo) -> list[tuple[int, int]]:
    """(offset, length) of the pieces that represent a tensor: all of it up to 64 KiB, else 16 of 4 KiB spread evenly
    from its first byte to its last."""
    if info.nbytes <= SAMPLES * SAMPLE_BYTES:
        return [(0, info.nbytes)]
    last = info.nbytes - SAMPLE_BYTES
    return [(last * i // (SAMPLES - 1), SAMPLE_BYTES) for i in range(SAMPLES)]


def _files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The weight files, and the index's map of tensor to file where there is an index."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE], {}
    present = sorted(path.name for path in directory.glob("*.safetensors"))
    if (directory / INDEX).is_file():
        listed = _weight_map(directory / INDEX)
        names = sorted(set(listed.values()))
    else:
        listed = {}
        shards = [match for name in present if (match := SHARD.match(name)) and not name.startswith("consolidated")]
        kinds = {(match[1], match[3]) for match in shards}
        if len(kinds) != 1:
            raise _no_weights(directory, present)
        ((stem, total),) = kinds
        names = [f"{stem}-{number:05d}-of-{total}.safetensors" for number in range(1, int(total) + 1)]
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise UserError(
            f"{len(missing)} of {len(names)} shards {'is' if len(missing) == 1 else 'are'} missing: {shown}",
            where=str(directory),
            fix="download or copy the missing files; an interrupted download can simply be started again",
        )
    return [directory / name for name in names], listed


def _weight_map(file: Path) -> dict[str, str]:
    index = read_json(file)
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UserError("the index has no weight_map", where=str(file), fix="download or copy the file again")
    for name, shard in listed.items():
        # A shard is a file beside its index: no path may lead out of the directory.
        if not _is_file_name(shard) or not shard.endswith(".safetensors"):
            raise UserError(
                f"the index says that '{name}' is in {shard!r}, which is not the name of a safetensors file",
                where=str(file),
                fix="use a checkpoint saved as safetensors",
            )
    return listed


def _is_file_name(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and Path(name).name == name and len(name.encode("utf-8", "surrogatepass")) < 256


def _no_weights(directory: Path, present: list[str]) -> UserError:
    if (directory / "adapter_config.json").is_file():
        return UserError(
            "this directory holds an adapter, not a model",
            where=str(directory),
            fix="give the base model's path, and this one as the adapter",
        )
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLES)
    if pickles:
        return UserError(
            f"only pickled weights are here ({', '.join(pickles[:3])}), and Meshtune never opens a pickle: "
            "unpickling runs whatever code the file's author put in it",
            where=str(directory),
            fix="use a revision with *.safetensors, or convert it where you trust it: "
            "AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)",
        )
    present_files = f" (found {', '.join(present[:3])}, which is none of them)" if present else ""
    return UserError(
        f"no weights: neither {SINGLE}, nor {INDEX}, nor a set of numbered shards{present_files}",
        where=str(directory),
        fix="download or copy the model's *.safetensors files into this folder",
    )


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises UserError naming the file if it is not whole."""
    size = file_size(file)
    with file.open("rb") as stream:
        start = stream.read(8)
        if start.startswith(b"version "):
            raise broken(file, "it is a Git LFS pointer, not the weights themselves", "run `git lfs pull` in the clone")
        if len(start) < 8:
            raise broken(file, f"it is {size} bytes long, too short for a header")
        (length,) = struct.unpack("<Q", start)
        if length > HEADER_LIMIT:
            raise broken(file, "it does not start with a safetensors header")
        if 8 + length > size:
            raise broken(file, f"its header says {length:,} bytes, but the file ends after {size - 8:,}")
        text = stream.read(length)
    try:
        entries = parse_json(text, str(file))
    except UserError as error:
        raise broken(file, f"its header is not JSON that can be read: {error.what}") from error
    if not isinstance(entries, dict):
        raise broken(file, "its header is not a JSON object")
    entries.pop("__metadata__", None)
    tensors = {name: _tensor(file, name, entry, 8 + length) for name, entry in entries.items()}
    ordered = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes))
    at = 8 + length
    for name, info in ordered:
        if info.start != at:
            raise broken(file, f"tensor '{name}' starts at byte {info.start:,}, expected {at:,}")
        at += info.nbytes
    if at > size:
        raise broken(file, f"it is half-written: {size:,} of {at:,} bytes are there")
    if at < size:
        raise broken(file, f"it is {size:,} bytes long, but its tensors end at byte {at:,}")
    return dict(ordered)


def _tensor(file: Path, name: str, entry: Any, data: int) -> TensorInfo:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(n) is int and 0 <= n <= LARGEST for n in (*shape, start, stop)) or start > stop:
            raise ValueError("not byte ranges and sizes")
        if not isinstance(dtype, str):
            raise TypeError("not the name of a dtype")
    except (KeyError, TypeError, ValueError) as error:
        raise broken(file, f"the header's entry for tensor '{name}' is malformed: {entry!r}") from error
    if dtype in DTYPES:
        expected = math.prod(shape) * DTYPES[dtype].itemsize
        if expected != stop - start:
            raise broken(
                file,
                f"tensor '{name}' {dtype}{list(shape)} needs {expected:,} bytes, the header gives {stop - start:,}",
            )
    return TensorInfo(shape, dtype, file, data + start, stop - start)


def broken(file: Path, reason: str, fix: str = "download or copy the file again") -> UserError:
    """The error for a safetensors file that is damaged."""
    return UserError(f"{file.name} is not a whole safetensors file: {reason}", where=str(file), fix=fix)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


ST_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclasses.dataclass(frozen=True)
class Part:
    """`leaf[index]`, whose numbers are `view` of a tensor. `leaf` may be abstract where nothing is written."""

    leaf: jax.Array | np.ndarray
    index: tuple[int, ...]
    view: View


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file, in `dtype`, and the parts of leaves that it is made of."""

    name: str
    shape: Shape
    dtype: str
    parts: tuple[Part, ...]

    @classmethod
    def of(
        cls, name: str, leaf: jax.Array | np.ndarray, dtype: str, index: tuple[int, ...] = (), view: View | None = None
    ) -> Tensor:
        """A tensor that is `leaf[index]`, unchanged or rearranged by the view."""
        view = view or View.identity(tuple(leaf.shape[len(index) :]))
        return cls(name, view.tensor, dtype, (Part(leaf, index, view),))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    @property
    def stored_dtype(self) -> str:
        """Its dtype as safetensors names it."""
        return STORED_DTYPES[self.dtype]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file that is copied byte for byte from another file, in whatever dtype it has there."""

    name: str
    info: TensorInfo

    @property
    def shape(self) -> Shape:
        return self.info.shape

    @property
    def nbytes(self) -> int:
        return self.info.nbytes

    @property
    def stored_dtype(self) -> str:
        """Its dtype as safetensors names it."""
        return self.info.dtype

    def blocks(self) -> Iterator[tuple[int, int]]:
        """(offset, length) of its bytes in pieces of at most BLOCK_BYTES."""
        for offset in range(0, self.nbytes, BLOCK_BYTES):
            yield offset, min(BLOCK_BYTES, self.nbytes - offset)


FileTensor = Tensor | StoredTensor


def tensors_of(table: Iterable[TensorMap], leaves: Mapping[str, jax.Array | np.ndarray], dtype: str) -> list[Tensor]:
    """The tensors of a table in `dtype`, in its order, with arrays (or their ShapeDtypeStructs) from `leaves`, path to
    array. Buffers are float32 whatever the dtype."""
    return [
        Tensor(
            name,
            entries[0].view.tensor,
            "float32" if entries[0].array.role == "buffer" else dtype,
            tuple(Part(leaves[entry.path], entry.index, entry.view) for entry in entries),
        )
        for name, entries in by_name(table).items()
    ]


def header(tensors: Sequence[FileTensor], metadata: dict[str, str]) -> bytes:
    """The bytes before the data of a file of these tensors, with the header's length."""
    entries: dict[str, object] = {"__metadata__": metadata}
    for tensor, at in zip(tensors, offsets(tensors), strict=True):
        data_offsets = [at, at + tensor.nbytes]
        entries[tensor.name] = {
            "dtype": tensor.stored_dtype,
            "shape": list(tensor.shape),
            "data_offsets": data_offsets,
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of eight bytes
    return struct.pack("<Q", len(text)) + text


def offsets(tensors: Sequence[FileTensor]) -> list[int]:
    """Where the bytes of each tensor start in the data of their file."""
    at, starts = 0, []
    for tensor in tensors:
        starts.append(at)
        at += tensor.nbytes
    return starts
