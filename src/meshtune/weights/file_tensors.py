"""The tensors of a file to write: parts of arrays, or copies of tensors of other files; and the header before them."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.families.tensors import Shape, TensorMap, View, by_name
from meshtune.weights.safetensors_files import BLOCK_BYTES, STORED_DTYPES, TensorInfo

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
