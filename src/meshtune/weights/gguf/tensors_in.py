"""The tensors of a GGUF file by the names that a Hugging Face checkpoint of the same model has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.families.gguf import GgufPart, gguf_layout
from meshtune.families.tensors import TensorMap, View, by_name
from meshtune.model.spec import ModelSpec
from meshtune.quantize.gguf import decode
from meshtune.weights.gguf.decode import ROLE, AssembledScheme, GgufScheme, Piece
from meshtune.weights.gguf.file import GgufFile, GgufTensor
from meshtune.weights.safetensors_files import Packed, TensorInfo

PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


def tensor_infos(gguf: GgufFile, spec: ModelSpec) -> dict[str, TensorInfo]:
    """Where the tensors of a model's table lie in a file; tensors that are quantised or arranged otherwise are decoded
    when read. Raises UserError for tensors that are missing, have another shape, or belong to nothing."""
    layout = gguf_layout(spec)
    by_leaf: dict[str, dict[tuple[int, ...], list[GgufPart]]] = {}
    for part in layout.parts:
        by_leaf.setdefault(part.path, {}).setdefault(part.index, []).append(part)
    _check(gguf, layout.shapes, set(layout.computed))
    return {name: _info(gguf, entries, by_leaf) for name, entries in by_name(tensors(spec)).items()}


def _info(
    gguf: GgufFile, entries: list[TensorMap], by_leaf: Mapping[str, Mapping[tuple[int, ...], list[GgufPart]]]
) -> TensorInfo:
    entry = entries[0]
    parts = by_leaf[entry.path]
    first = parts.get(entry.index, [])
    rearranged = not entry.view.is_identity and any(entry.view != part.view for part in first)
    if len(entries) > 1 or rearranged or any(not part.is_plain for part in first):
        return _assemble_tensor(gguf, entries, by_leaf)
    (part,) = first or parts[entry.index[:-1]]
    view = part.view
    if part.index != entry.index:  # an expert of those that are together in the file's tensor
        assert view.is_identity
        expert = entry.index[-1]
        view = view.slice(0, expert, expert + 1).merge(*view.tensor[1:])
    elif not entry.view.is_identity:
        # Packed rows, which both kinds of file have in the same order.
        assert entry.view == view, f"{entry.name} and {part.name} are arranged in different ways"
        view = View.identity(view.tensor)
    stored = gguf.tensors[part.name]
    if view.is_identity and not part.offset and stored.type.name in PLAIN:
        return TensorInfo(view.shape, PLAIN[stored.type.name], stored.file, stored.start, stored.nbytes)
    scheme: Any = GgufScheme(stored.type.name, view, part.offset)
    packed = Packed(scheme, ((ROLE, _as_bytes(stored)),))
    return TensorInfo(view.shape, "F32", stored.file, stored.start, stored.nbytes, packed)


def _assemble_tensor(
    gguf: GgufFile, entries: list[TensorMap], by_leaf: Mapping[str, Mapping[tuple[int, ...], list[GgufPart]]]
) -> TensorInfo:
    """A tensor that is put together of whole tensors of the file, which have another arrangement."""
    pieces: list[Piece] = []
    stored: list[tuple[str, TensorInfo]] = []
    for entry in entries:
        tensors: list[tuple[GgufPart, str, str]] = []
        for part in by_leaf[entry.path][entry.index]:
            tensor, role = gguf.tensors[part.name], f"{ROLE}{len(stored)}"
            tensors.append((part, tensor.type.name, role))
            stored.append((role, _as_bytes(tensor)))
        pieces.append(Piece(tuple(tensors), entry.view))
    nbytes = sum(info.nbytes for _, info in stored)
    scheme: Any = AssembledScheme(tuple(pieces))
    first = stored[0][1]
    return TensorInfo(entries[0].view.tensor, "F32", first.file, first.start, nbytes, Packed(scheme, tuple(stored)))


def _as_bytes(tensor: GgufTensor) -> TensorInfo:
    rows = math.prod(tensor.shape[:-1])
    return TensorInfo((rows, tensor.nbytes // rows), "U8", tensor.file, tensor.start, tensor.nbytes)


def small_tensor(gguf: GgufFile, name: str) -> np.ndarray:
    """A whole tensor of a file, for small ones."""
    tensor = gguf.tensors[name]
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        content = np.frombuffer(stream.read(tensor.nbytes), np.uint8)
    return decode(tensor.type.name, content.reshape(1, -1)).reshape(tensor.shape)


def _check(gguf: GgufFile, expected: Mapping[str, tuple[int, ...]], computed: set[str]) -> None:
    problems: list[str] = []
    for name, shape in expected.items():
        if name not in gguf.tensors:
            problems.append(f"tensor '{name}' is missing")
        elif gguf.tensors[name].shape != shape:
            problems.append(f"tensor '{name}' is {list(gguf.tensors[name].shape)}, and its metadata says {list(shape)}")
    problems += [
        f"tensor '{name}' belongs to nothing in the metadata"
        for name in gguf.tensors
        if name not in expected and name not in computed
    ]
    if problems:
        shown = "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise UserError(
            f"the file's tensors are not those of the model in its metadata: {shown}",
            where=str(gguf.file),
            fix="convert the model again with a current converter, or give its safetensors",
        )
