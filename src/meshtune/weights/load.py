"""Hugging Face directory in, parameter tree out: tensor by tensor, straight to its place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.errors import UserError
from meshtune.families import model_spec, tensors
from meshtune.families.quantised import quantised_leaves
from meshtune.families.tensors import TensorMap
from meshtune.mesh.layout import Layout
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.quantize.config import QuantizeConfig
from meshtune.weights.check import SCORE, check
from meshtune.weights.load_report import LoadReport, Watch, bytes_in_use, bytes_placed
from meshtune.weights.read_into import Progress, read_into
from meshtune.weights.read_plan import Device
from meshtune.weights.relay import Relay, relay
from meshtune.weights.safetensors_files import TensorInfo, headers, read_json
from meshtune.weights.shards import Shards
from meshtune.weights.tensor_reader import TensorReader

MODEL_DTYPES = ("float32", "bfloat16", "float16")
STORED_AS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


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


def load_params(
    directory: Path,
    spec: ModelSpec,
    *,
    layout: Layout | None = None,
    quantize: QuantizeConfig | None = None,
    broadcast: bool = False,
    group: int | None = None,
    waiting: Collection[str] = (),
    plain: Collection[str] = (),
    progress: Progress | None = None,
    report: Callable[[LoadReport], None] | None = None,
) -> Tree:
    """The parameters of a model directory as `abstract_params(spec)` describes them, where `layout` says they lie; on
    the default device without one.

    The slices that each device holds are allocated once, there, and filled in place, in the order of the files, cast
    to the spec's dtype on the way. A process reads only what its own devices hold, each number once, opening each
    file once. Host memory beyond the arrays themselves: a few blocks of at most BLOCK_BYTES.

    With `quantize` linear layers come as QuantisedWeights, made block by block from the numbers as they are stored: no
    weight of them is ever whole, or wide, in memory. Their scales, where these are quantised too, pass through the host
    matrix by matrix; every process must then call this.

    What `plain` names (by path) is not quantised.

    Arrays that `waiting` names (by path, and field of a QuantisedWeight) come in the host's memory that devices read,
    and are on no device at any time; the host holds the largest of them twice for a moment.

    `broadcast` has one process of every group of `group` neighbouring ones (None: all are one group) read what its
    group needs and pass it on; the others open nothing. Every process must then call this.
    `progress(done, total)` is called in bytes of file, `report` once at the end with what it took on this process.
    A scored model's score that the directory lacks is left out (see `with_score`).
    Raises UserError if config and weights disagree, or a block does not divide a row, before anything is allocated.
    """
    directory = Path(directory)
    arrays = flatten(abstract_params(spec))
    arrays |= quantised_leaves({path: array for path, array in arrays.items() if path not in plain}, quantize, spec)
    devices: list[Device] = [None]
    passing: Relay | None = None
    if layout is not None:
        every: list[jax.Device] = np.asarray(layout.mesh.devices).flatten().tolist()
        if broadcast:
            passing, every = relay(every, group)
        else:
            every = [device for device in every if device.process_index == jax.process_index()]
        devices = [*every]
    with Watch() as watch, TensorReader() as reader:
        found = _checked(directory, spec, passing)
        table = [entry for entry in tensors(spec) if entry.name in found]
        paths = {entry.path for entry in table}
        shards = Shards({path: array for path, array in arrays.items() if path in paths}, layout, devices, waiting)
        read_into(shards, table, found, reader, passing, progress)
        leaves = shards.assembled()
    if report:
        here = [device for device in devices if device is not None] or jax.local_devices()[:1]
        here = [device for device in here if device.process_index == jax.process_index()]
        report(
            LoadReport(
                process=jax.process_index(),
                host_before=watch.before,
                host_peak=watch.peak,
                host_after=watch.after,
                read=reader.bytes,
                files=reader.files,
                seconds=watch.seconds,
                placed=bytes_placed(jax.tree.leaves(leaves)),
                in_use=bytes_in_use(here),
            )
        )
    return unflatten(leaves)


def load_weight(directory: Path, spec: ModelSpec, path: str, layout: Layout | None = None) -> jax.Array:
    """One array of `load_params`, alone and never quantised, on the devices that `layout` says."""
    directory, devices = Path(directory), [None]
    if layout is not None:
        devices = [one for one in np.asarray(layout.mesh.devices).flat if one.process_index == jax.process_index()]
    with TensorReader() as reader:
        shards = Shards({path: flatten(abstract_params(spec))[path]}, layout, devices)
        read_into(shards, _table_of(path, tensors(spec)), headers(directory), reader)
        return shards.assembled()[path]


def _table_of(path: str, table: Iterable[TensorMap]) -> list[TensorMap]:
    return [entry for entry in table if entry.path == path]


def with_score(params: Tree, spec: ModelSpec, layout: Layout | None = None) -> Tree:
    """The parameters of a scored model, with a score of zeros where they have none.

    From zero every answer has the reward 0, and a pair begins at ln 2 as DPO's does; random weights would give rewards
    of the size of 1 that training had first to undo.
    """
    if not spec.scored or "score" in params:
        return params
    array = flatten(abstract_params(spec))[SCORE]
    zeros = functools.partial(jnp.zeros, array.shape, array.dtype)
    made = jax.jit(zeros, out_shardings=None if layout is None else layout.of(array))()
    return params | {"score": {"weight": made}}


def _checked(directory: Path, spec: ModelSpec, passing: Relay | None) -> dict[str, TensorInfo]:
    """The tensors of a directory that fits the spec. Only a group's reader looks; what it finds, others hear."""
    if passing is None or passing.reads:
        try:
            found = headers(directory)
            check(directory, spec, found)
        except UserError as error:
            if passing is not None:
                passing.tell({"error": [error.what, error.where, error.fix]})
            raise
        if passing is not None:
            passing.tell({"found": [[n, t.shape, t.dtype, str(t.file), t.start, t.nbytes] for n, t in found.items()]})
        return found
    heard = passing.tell(None)
    if "error" in heard:
        what, where, fix = heard["error"]
        raise UserError(what, where=where, fix=fix)
    return {
        name: TensorInfo(tuple(shape), dtype, Path(file), start, nbytes)
        for name, shape, dtype, file, start, nbytes in heard["found"]
    }
