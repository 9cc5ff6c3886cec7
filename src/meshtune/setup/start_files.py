"""Writes the start model of a run: merged adapters, added layers, resized vocabulary; tensor by tensor, one process."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Iterator, Mapping

import numpy as np

from meshtune.adapters.peft_format import check_base, load_adapter
from meshtune.config.recipe import Recipe
from meshtune.data.new_tokens import NewTokens
from meshtune.families import tensors
from meshtune.families.composite import HEAD, passed_through, tensor_name, text_config, with_text_fields
from meshtune.families.expansion import origins, silent_modules
from meshtune.model.spec import ModelSpec
from meshtune.quantize.published import without_scheme
from meshtune.runs.export import export
from meshtune.runs.sources import find
from meshtune.setup.start_spec import Start
from meshtune.weights.file_tensors import ST_DTYPES
from meshtune.weights.fingerprint import base_hash
from meshtune.weights.load import load_config, load_spec, stored_dtype
from meshtune.weights.packed import model_tensors
from meshtune.weights.rewrite import WRITTEN, NewTensor, write_model
from meshtune.weights.safetensors_files import DTYPES, TensorInfo
from meshtune.weights.tensor_reader import TensorReader


def write_start(start: Start, recipe: Recipe, folder: pathlib.Path, record: Mapping[str, object]) -> None:
    """Writes a start model's weights and config into `folder`, with `record` in the metadata of the weights.

    Adapters are merged one after another, each into the result of the previous merge.

    Raises: UserError as `export` does.
    """
    source, steps = start.source, []
    for number, adapter in enumerate(recipe.model.merge_adapters):
        step = folder / f".merged-{number}"
        any_base = recipe.model.any_base or number > 0
        if number:  # check against the common base here: `export` sees the result of the previous merge
            _check(adapter, start.source, recipe.model.any_base)
        export(adapter, step, merge=True, base=source, any_base=any_base)
        source = step
        steps.append(step)
    with TensorReader() as reader:
        config = _config(start, load_config(source))
        write_model(folder, source, config, list(_tensors(start, source, reader)), {"start": record})
    for step in steps:
        shutil.rmtree(step)


def _check(adapter: str, base: pathlib.Path, any_base: bool) -> None:
    resolved = find(base, adapter)
    assert resolved.adapter is not None
    if not any_base:
        check_base(load_adapter(resolved.adapter, load_spec(base)[0]), str(base), base_hash(base))


def _config(start: Start, config: Mapping[str, object]) -> dict[str, object]:
    """Returns the source's config with the fields that the start changes."""
    changed, text = ("vocab_size", "num_hidden_layers", "layer_types"), text_config(start.config)
    return with_text_fields(without_scheme(config), {field: text[field] for field in changed if field in text})


def _tensors(start: Start, source: pathlib.Path, reader: TensorReader) -> Iterator[NewTensor]:
    """Yields every tensor of the start in the order of the source's files; copies of a layer follow its original."""
    spec, _ = load_spec(source)
    table = tensors(start.spec)
    tables = {entry.name for entry in table if entry.path in ("embed/weight", "head/weight")}
    layer_origins = origins(spec.layers, start.blocks) if start.blocks else [(n, False) for n in range(spec.layers)]
    silent = silent_modules(start.spec, start.blocks) if start.blocks else set()
    copies: dict[int, list[int]] = {}
    for number, (old, _) in enumerate(layer_origins):
        copies.setdefault(old, []).append(number)
    for name, info in _source_tensors(source, spec).items():
        if spec.tied and name == tensor_name(spec, HEAD):
            continue
        if passed_through(spec, name) is not None:
            yield _tensor(name, info, reader, None)
            continue
        before, number, after = _layer_of(name)
        if number is None:
            yield _tensor(name, info, reader, start if name in tables else None)
            continue
        for place in copies.get(number, ()):
            new = f"{before}{place}{after}"
            if new.rpartition(".")[0] in silent:
                dtype = _dtype(info)
                yield NewTensor(new, info.shape, dtype, lambda info=info, dtype=dtype: _zeros(info.shape, dtype))
            else:
                yield _tensor(new, info, reader, None)


def _source_tensors(source: pathlib.Path, spec: ModelSpec) -> dict[str, TensorInfo]:
    """Returns the tensors of the source. Weights that are published quantised have the dtype to write them in."""
    as_dtype = ST_DTYPES[stored_dtype(source, load_config(source))]
    tensors = model_tensors(source, spec.published)
    return {name: dataclasses.replace(info, dtype=as_dtype) if info.packed else info for name, info in tensors.items()}


def _layer_of(name: str) -> tuple[str, int | None, str]:
    before, mark, suffix = name.partition(".layers.")
    number, dot, after = suffix.partition(".")
    return (before + mark, int(number), dot + after) if mark and number.isdigit() else (name, None, "")


def _dtype(info: TensorInfo) -> str:
    """Returns the dtype to write a tensor in: its own, or float32 where the writer does not support it."""
    return WRITTEN.get(info.dtype, "float32")


def _tensor(name: str, info: TensorInfo, reader: TensorReader, resized: Start | None) -> NewTensor:
    dtype = _dtype(info)
    kind = DTYPES[ST_DTYPES[dtype]]
    if resized is None:
        return NewTensor(name, info.shape, dtype, lambda: reader.tensor(info).astype(kind, copy=False))
    rows, tokens = resized.spec.vocab, resized.tokens
    return NewTensor(
        name,
        (rows, *info.shape[1:]),
        dtype,
        lambda: resized_table(reader.tensor(info), rows, tokens).astype(kind, copy=False),
    )


def _zeros(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.zeros(shape, DTYPES[ST_DTYPES[dtype]])


def resized_table(table: np.ndarray, rows: int, tokens: NewTokens) -> np.ndarray:
    """Grows an embedding or head [V, D] to `rows` rows.

    The row of a new token is the mean of the rows of the tokens that its text was split into before. Padding rows,
    and those of new tokens without such pieces, are the mean of all rows.
    """
    mean = table.mean(axis=0, dtype=np.float64)
    added = np.repeat(mean[None].astype(table.dtype), rows - table.shape[0], axis=0)
    grown = np.concatenate([table, added])
    for token, pieces in zip(tokens.ids, tokens.pieces, strict=True):
        embedding = table[list(pieces)].mean(axis=0, dtype=np.float64) if pieces else mean
        grown[token] = embedding.astype(table.dtype)
    return grown
