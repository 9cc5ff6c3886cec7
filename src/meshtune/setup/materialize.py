"""Writes the base of a run that differs from the published model (new tokens, new layers, merges), once, to base/ in
the output directory, before weights are loaded.

The base is written once, to base/ in the output directory, before weights are loaded. It is then loaded, sharded,
quantised and hashed like any other model, and adapters record it as their base.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from meshtune.adapters.peft_format import BaseRecord, check_base, load_adapter
from meshtune.config.recipe import Recipe
from meshtune.data.tokenizer import NewTokens
from meshtune.digests import damage_error, write_digests
from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.families.composite import HEAD, passed_through, tensor_name, text_config, with_text_fields
from meshtune.families.expansion import group_layers, origins, silent_modules
from meshtune.json_text import read_json
from meshtune.lazy import LazyFunction
from meshtune.mesh.processes import Job, raise_collectively
from meshtune.model.spec import ModelSpec
from meshtune.quantize.published import without_scheme
from meshtune.runs.output import BASE, find_damage_collectively
from meshtune.runs.sources import find
from meshtune.setup.run import Run
from meshtune.setup.start import Start, spec_for_stage
from meshtune.weights.export import WRITTEN, NewTensor, write_json, write_model
from meshtune.weights.inspect import base_hash
from meshtune.weights.load import load_config, load_spec, stored_dtype
from meshtune.weights.packed import model_tensors
from meshtune.weights.publish import disk_errors, publish_directory
from meshtune.weights.safetensors_files import DTYPES, ST_DTYPES, TensorInfo
from meshtune.weights.tensor_reader import TensorReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RECORD = "start.json"
check_continued = LazyFunction("meshtune.adapters.continued:check_continued")
content_hash = LazyFunction("meshtune.adapters.continued:content_hash")
export = LazyFunction("meshtune.runs.export:export")  # of merges, which few recipes have


def materialize_start(
    start: Start,
    recipe: Recipe,
    output: pathlib.Path,
    tokenizer: PreTrainedTokenizerFast,
    hash: str,
    job: Job,
    log: Callable[[str], None],
) -> pathlib.Path:
    """Returns the directory to load the run's weights from: output/base, or the source if nothing changes.

    `hash` is the source's. Process 0 writes the base, one tensor at a time; adapters are merged like
    `meshtune export --merge` does. A resumed run reuses an existing undamaged base.

    Raises: UserError as `start_of` and `export` do.
    """
    if not start.changed:
        return start.source
    dest = (output / BASE).absolute()
    record = {
        "path": recipe.model.path,
        "hash": hash,
        "merged": list(recipe.model.merge_adapters),
        "new_tokens": recipe.model.new_tokens,
        "new_special_tokens": recipe.model.new_special_tokens,
        "vocab": start.spec.vocab,
        "new_layers": start.blocks,
    }
    is_there = job.all("start: record", _read_record(dest) == record)
    damage = find_damage_collectively(dest, job, required=True) if is_there else {}
    if damage:
        log(f"what the run starts from is damaged ({damage_error(dest, damage, '').what}) and is written again")
    if damage or not is_there:
        log(f"writing what the run starts from to {dest}")
        with (
            publish_directory(dest, "config.json", job) as folder,
            raise_collectively(job, "start: files"),
            disk_errors(dest),
        ):
            if job.is_main_process:
                write_start(start, recipe, folder, record)
                tokenizer.save_pretrained(str(folder))
                write_json(folder / RECORD, record)
                write_digests(folder)
    written = spec_for_stage(load_spec(dest, start.spec.dtype)[0], recipe)
    if (group_layers(written, start.blocks) if start.blocks else written) != start.spec:
        raise UserError(
            "an adapter that is folded in makes another model of its base (its head is not the embedding any more)",
            where=str(dest),
            fix="fold it in first: meshtune export --merge, and give the result as model.path",
        )
    return dest


def resumed_adapter(run: Run, base: BaseRecord) -> str:
    """Returns the hash of the adapter that a run continues from, for its record.

    Raises: UserError for an adapter of another base, unless the recipe accepts any.
    """
    source = run.method.resumes
    assert source is not None
    if not run.recipe.model.any_base:
        check_continued(source, run.spec, base)
    return f" with adapter {content_hash(source)}"


def _read_record(dest: pathlib.Path) -> dict[str, object] | None:
    """Reads the record of what the model in `dest` was made from; None if it is missing or damaged."""
    file = dest / RECORD
    try:
        return read_json(file)
    except UserError:
        return None


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
