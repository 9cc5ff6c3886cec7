"""Hugging Face directory in, parameter tree out: tensor by tensor, straight to its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshtune.errors import UserError
from meshtune.families import model_spec
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.model.tree import Tree, flatten, unflatten
from meshtune.weights.check import check
from meshtune.weights.safetensors_files import DTYPES, TensorInfo, TensorReader, headers, read_json
from meshtune.weights.slots import Slot, allocate, blocks, index, place, slots

MODEL_DTYPES = ("float32", "bfloat16", "float16")
STORED_AS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Progress = Callable[[int, int], None]


def load_config(directory: Path) -> dict[str, Any]:
    """config.json. Raises UserError if it is absent, or malformed at some line."""
    file = directory / "config.json"
    if not file.is_file():
        found = sorted(path.name for path in directory.iterdir())[:5]
        raise UserError(
            "no config.json, so this is not a Hugging Face model directory",
            where=str(directory),
            fix=f"give the folder that holds config.json and *.safetensors; here are: {', '.join(found) or 'no files'}",
        )
    return read_json(file)


def load_spec(directory: Path, dtype: str | None = None) -> tuple[ModelSpec, dict[str, Any]]:
    """(spec, config) of a model directory.

    `dtype` is what the weights are to be kept in; default: the config's own, else what most of the stored bytes are.
    Raises UserError for a bad config or an unsupported model.
    """
    directory = Path(directory)
    config = load_config(directory)
    return model_spec(config, dtype or stored_dtype(directory, config), where=str(directory / "config.json")), config


def stored_dtype(directory: Path, config: dict[str, Any]) -> str:
    """The dtype a checkpoint is kept in: float32, bfloat16 or float16."""
    named = config.get("dtype") or config.get("torch_dtype")
    if named is not None:
        if named not in MODEL_DTYPES:
            raise UserError(
                f"dtype {named!r} is not supported",
                where=f"{directory / 'config.json'}, field {'dtype' if config.get('dtype') else 'torch_dtype'}",
                fix=f"one of {', '.join(MODEL_DTYPES)}",
            )
        return named
    weights = headers(directory).values()
    totals: dict[str, int] = {}
    for info in weights:
        dtype = STORED_AS.get(info.dtype, "bfloat16")
        totals[dtype] = totals.get(dtype, 0) + info.nbytes
    return max(totals, key=lambda dtype: totals[dtype])


def load_params(directory: Path, spec: ModelSpec, *, progress: Progress | None = None) -> Tree:
    """The parameters of a model directory as `abstract_params(spec)` describes them, on the default device.

    Stacked arrays are allocated once where they will live and filled in place, in the order of the files, each tensor
    cast to the spec's dtype on the way. Host memory beyond the arrays themselves: two blocks of at most BLOCK_BYTES.
    `progress(done, total)` is called in bytes of file. Raises UserError if config and weights disagree, before
    anything is allocated.
    """
    found = headers(Path(directory))
    check(Path(directory), spec, found)
    flat = allocate(flatten(abstract_params(spec)))
    fill(flat, slots(spec), found, progress)
    return unflatten(flat)


def fill(
    flat: dict[str, jax.Array], wanted: list[Slot], found: dict[str, TensorInfo], progress: Progress | None = None
) -> None:
    """Writes the tensors of some slots into the leaves they belong to, in place; `flat` maps path to leaf."""
    wanted = sorted(wanted, key=lambda slot: (str(found[slot.name].file), found[slot.name].start))
    total, done = sum(found[slot.name].nbytes for slot in wanted), 0
    for slot, start, block in _read_ahead(wanted, found):
        size = block.nbytes
        if block.dtype == np.float64:  # JAX keeps no float64 unless asked to
            block = block.astype(np.float32)
        flat[slot.path] = place(flat[slot.path], jax.device_put(block), index(slot, start))
        del block
        # One block in flight: an asynchronous queue of them would hold them all.
        flat[slot.path].block_until_ready()
        done += size
        if progress:
            progress(done, total)


def _read_ahead(wanted: list[Slot], found: dict[str, TensorInfo]) -> Iterator[tuple[Slot, int, np.ndarray]]:
    """(slot, first row, rows) of every block, the next one being read while this one is used."""
    ranges = (
        (slot, start, stop)
        for slot in wanted
        for start, stop in blocks(slot.shape, DTYPES[found[slot.name].dtype].itemsize)
    )
    with TensorReader() as reader, ThreadPoolExecutor(1) as thread:
        pending: tuple[Slot, int, Future[np.ndarray]] | None = None
        for slot, start, stop in ranges:
            following = (slot, start, thread.submit(reader.rows, found[slot.name], start, stop))
            if pending is not None:
                yield pending[0], pending[1], pending[2].result()
            pending = following
        if pending is not None:
            yield pending[0], pending[1], pending[2].result()
