"""Weights that are published quantised, as tensors that can be checked and read like all others.

`with_packed` puts one tensor in place of those that it is made of in the files. Boxes of it are decoded when they are
read, from the boxes of its parts that they need.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.families.quantised import is_quantised
from meshtune.families.tensors import TensorMap
from meshtune.model.spec import ModelSpec
from meshtune.quantize.published.scheme import Scheme
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.safetensors_files import DTYPES, STORED_DTYPES, Packed, TensorInfo, headers
from meshtune.weights.tensor_reader import StoredParts, TensorReader


def model_tensors(directory: Path, scheme: Scheme | None) -> dict[str, TensorInfo]:
    """The tensors of a model directory as its model names them. Raises UserError as `headers` and `with_packed` do."""
    return with_packed(headers(directory), scheme)


def with_packed(infos: Mapping[str, TensorInfo], scheme: Scheme | None) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint as its model names them, given those in its files, in their order.

    Raises UserError, naming tensor and file, for a weight that lacks a part, is there twice, or has parts that do not
    fit together.
    """
    if scheme is None:
        return dict(infos)
    packed = _group_parts(infos, scheme)
    owner = {name: stem for stem, parts in packed.items() for name in parts.values()}
    result: dict[str, TensorInfo] = {}
    with TensorReader() as reader:
        for name, info in infos.items():
            if name not in owner:
                if not name.endswith(scheme.ignored):
                    result[name] = info
            elif (weight := owner[name] + scheme.ending) not in result:
                parts = {role: infos[part] for role, part in packed[owner[name]].items()}
                result[weight] = _packed_info(weight, parts, scheme, reader)
    return result


def as_in_files(spec: ModelSpec, infos: Mapping[str, TensorInfo]) -> ModelSpec:
    """The spec of a model with the tensors `infos`: modules not quantised there, whatever the config says, are among
    those that are skipped."""
    scheme = spec.published
    if scheme is None:
        return spec
    plain = {
        name: None
        for entry in tensors(spec)
        if is_quantised(entry.path, entry.array)
        and scheme.converts(name := entry.name.removesuffix(".weight"), entry.array)
        and entry.name in infos
        and infos[entry.name].packed is None
    }
    skip = (*scheme.skip, *map(re.escape, plain))
    return dataclasses.replace(spec, published=dataclasses.replace(cast(Any, scheme), skip=skip)) if plain else spec


def parts_to_read(
    entry: TensorMap, leaf: QuantisedWeight, info: TensorInfo
) -> Iterator[tuple[str, TensorMap, TensorInfo]]:
    """(field, entry, tensor) of the codes, scales and zeros of a part of a leaf whose published codes are taken
    unchanged: the reads for each field of the quantised weight."""
    assert info.packed is not None, f"'{entry.name}' is not quantised in its file"
    for field in ("codes", "scales", "zeros"):
        array: ArraySpec | None = getattr(leaf, field)
        if array is None:
            continue
        view = entry.view.with_columns(array.shape[-1])
        name, path = f"{entry.name} ({field})", f"{entry.path}/{field}"
        packed = dataclasses.replace(info.packed, content=field)
        stored = dataclasses.replace(info, shape=view.tensor, dtype=STORED_DTYPES[array.dtype], packed=packed)
        as_it_is = next((part for _, part in packed.parts if part.shape == view.tensor), None)
        if (
            field == "codes"
            and as_it_is is not None
            and DTYPES[as_it_is.dtype].itemsize == DTYPES[stored.dtype].itemsize == 1
        ):
            stored = dataclasses.replace(as_it_is, dtype=stored.dtype)  # codes of e4m3 are held as bytes
        yield field, dataclasses.replace(entry, name=name, path=path, array=array, view=view), stored


def _group_parts(infos: Mapping[str, TensorInfo], scheme: Scheme) -> dict[str, dict[str, str]]:
    """Stem -> role -> the tensor's name, of every quantised weight: those with a part that has its own ending."""
    stems: dict[str, None] = {}
    for name, info in infos.items():
        for ending in scheme.endings.values():
            if ending != scheme.ending and name.endswith(ending):
                stems[name.removesuffix(ending)] = None
        if info.dtype == "F8_E4M3" and name.endswith(scheme.ending):
            stems[name.removesuffix(scheme.ending)] = None
    grouped: dict[str, dict[str, str]] = {}
    for stem in stems:
        parts = {role: stem + ending for role, ending in scheme.endings.items() if stem + ending in infos}
        present = next(iter(parts.values()))
        where = str(infos[present].file)
        if missing := [stem + scheme.endings[role] for role in scheme.required if role not in parts]:
            raise UserError(
                f"tensor '{missing[0]}' is missing, a part of the weight quantised by {scheme.method} of which "
                f"'{present}' is there",
                where=where,
                fix="download or copy the model again",
            )
        if stem + scheme.ending in infos and stem + scheme.ending not in parts.values():
            raise UserError(
                f"the weight '{stem}{scheme.ending}' is there twice: as it is, and quantised, in '{present}'",
                where=where,
                fix="files of two checkpoints are mixed: download or save the model again into an empty folder",
            )
        grouped[stem] = parts
    return grouped


def _packed_info(weight: str, infos: Mapping[str, TensorInfo], scheme: Scheme, reader: TensorReader) -> TensorInfo:
    first = min(infos.values(), key=lambda info: (str(info.file), info.start))
    try:
        shape = scheme.shape(StoredParts(infos, reader))
    except ValueError as error:
        raise UserError(
            f"the parts of the quantised weight '{weight}' do not fit together: {error}",
            where=str(first.file),
            fix="download or copy the model again; config.json and weights must be of the same checkpoint",
        ) from error
    nbytes = sum(info.nbytes for info in infos.values())
    return TensorInfo(shape, "F32", first.file, first.start, nbytes, Packed(scheme, tuple(infos.items())))
