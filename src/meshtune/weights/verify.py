"""An export is done when the written files, read again, equal the trained model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from meshtune.arrays.tree import Leaves, Tree, flatten, stack_path, unflatten
from meshtune.errors import UserError
from meshtune.families import tensors as table_of
from meshtune.families.balancing import without_balancing
from meshtune.families.tensors import TensorMap
from meshtune.mesh.layout import Layout
from meshtune.mesh.placement import place_batch
from meshtune.mesh.processes import SINGLE_PROCESS, Job, raise_collectively
from meshtune.model.block import LEAVE, Context, layer_side, with_stored
from meshtune.model.compute import Compute
from meshtune.model.decoder import enter, head_logits, head_params
from meshtune.model.gather import to_device, with_shared
from meshtune.model.inputs import SequenceInfo, inputs_of
from meshtune.model.layer import LayerSpec, layer
from meshtune.model.spec import ModelSpec, Stack
from meshtune.weights.check import check
from meshtune.weights.load import load_spec
from meshtune.weights.packed import model_tensors
from meshtune.weights.passed_through import first_changed
from meshtune.weights.safetensors_files import StoredTensor, TensorInfo, tensors_of
from meshtune.weights.tensor_reader import TensorReader
from meshtune.weights.writer import first_difference, read_box

COMPUTE = Compute(dtype="float32", attention="direct")
PROBE_SHAPE = (2, 48)

# Largest allowed root mean square of the difference, relative to that of the logits. Rounding the weights once moves
# logits by about the dtype's relative rounding error (2^-25, 2^-12, 2^-9 on average) times the square root of twice the
# number of layers: 4e-7, 4e-3, 3e-2 at 126 layers; a lost, transposed or misplaced tensor moves them by more.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


class ExportError(UserError):
    """The written files differ from the trained model."""


class RoundingError(UserError):
    """The written files are the trained model, rounded to a dtype in which it computes something else."""


@dataclasses.dataclass(frozen=True)
class Verified:
    """Results of the comparison: tensors, bit for bit, and logits; the difference is relative, as TOLERANCE states
    it."""

    tensors: int
    difference: float
    tolerance: float


def probe_pictures(spec: ModelSpec, shape: tuple[int, int] = PROBE_SHAPE) -> dict[str, np.ndarray]:
    """The arrays of pictures for rows of this shape, of a model that sees: a picture of random patches in each row,
    whose features take the place of the first tokens."""
    if (vision := spec.vision) is None:
        return {}
    rows, merge = shape[0], vision.merge
    side = 4 * merge if vision.tile is None else math.isqrt(vision.tile)
    places = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), axis=-1)
    places = places.reshape(side // merge, merge, side // merge, merge, 2).transpose(0, 2, 1, 3, 4).reshape(-1, 2)
    grid = np.concatenate([places, np.full_like(places, side)], axis=1).astype(np.int32)
    patches = np.random.default_rng(1).normal(size=(rows, side**2, vision.pixels)).astype(np.float32)
    index = np.zeros(shape, np.int32)
    count = min(side**2 // merge**2, shape[1] // 2)
    index[:, :count] = np.arange(1, count + 1)
    index[:, count] = -1 if vision.newline else 0
    return {
        "patches": patches,
        "patch_segments": np.ones((rows, side**2), np.int32),
        "patch_grid": np.broadcast_to(grid, (rows, *grid.shape)),
        "visual": index,
    }


def probe(spec: ModelSpec) -> tuple[jax.Array, jax.Array, jax.Array]:
    """tokens, positions, segment_ids [2, 48] of the fixed batch that exports are verified with."""
    tokens = np.random.default_rng(0).integers(0, spec.vocab, PROBE_SHAPE)
    positions = np.broadcast_to(np.arange(PROBE_SHAPE[1]), PROBE_SHAPE)
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32), jnp.ones(PROBE_SHAPE, jnp.int32)


def probe_logits(params: Tree, spec: ModelSpec, layout: Layout | None = None) -> Float[np.ndarray, "B T V"]:
    """float32 logits of the probe, adapters included. Taken before merging, they are those of the trained model.

    `params` lie as `layout` says; all processes of its mesh call this, and each gets all logits.
    """
    layers = (
        (kind, with_shared(_row(params["layers"][key], row), params.get("shared")))
        for _, key, row, kind in _by_layer(spec)
    )
    return _logits(spec, layout, lambda: {name: params[name] for name in spec.before}, layers, lambda: params)


@jax.jit
def _row(stacked: Tree, row: int) -> Tree:
    return to_device(jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, row, keepdims=False), stacked))


def _logits(
    spec: ModelSpec,
    layout: Layout | None,
    embedding: Callable[[], Tree],
    layers: Iterable[tuple[LayerSpec, Tree]],
    ends: Callable[[], Tree],
) -> Float[np.ndarray, "B T V"]:
    """Logits of the probe from parameters that are handed over part by part: one layer at a time is in float32."""
    # The number of layers is no part of what is compiled: one program for each kind of layer.
    spec = dataclasses.replace(spec, stacks=tuple(Stack((kind,), 1) for kind in spec.layer_kinds), dtype="float32")
    compute = COMPUTE if layout is None else dataclasses.replace(COMPUTE, attention="auto", layout=layout)
    names = ("tokens", "positions", "segment_ids")
    batch = dict(zip(names, map(np.asarray, probe(spec)), strict=True)) | probe_pictures(spec)
    batch = place_batch(batch, layout)
    rows, x, side = _enter(embedding(), batch, spec, compute)
    for index, (kind, node) in enumerate(layers):
        x, stored = _step(x, node, rows, side, np.int32(index), kind, compute)
        side = with_stored(side, stored)
        x.block_until_ready()
    params = ends()
    head = {name: leaf for name, leaf in params.items() if name in ("embed", "head", "score")}
    top = to_device({name: leaf for name, leaf in params.items() if name in ("norm", LEAVE)})
    return np.asarray(_finish(x, top, head_params(head, spec), spec, compute).addressable_data(0))


@functools.partial(jax.jit, static_argnames=("spec", "compute"))
def _enter(params: Tree, batch: Tree, spec: ModelSpec, compute: Compute) -> tuple[SequenceInfo, jax.Array, Tree]:
    return enter(params, spec, compute, inputs_of(batch))


@functools.partial(jax.jit, static_argnames=("kind", "compute"))
def _step(
    x: jax.Array, node: Tree, rows: SequenceInfo, side: Tree, index: jax.Array, kind: LayerSpec, compute: Compute
) -> tuple[jax.Array, Tree]:
    output = layer(x, node, kind, Context(compute, rows, layer_side(side, index), index))
    return output.y, dict(output.stored)


@functools.partial(jax.jit, static_argnames=("spec", "compute"))
def _finish(x: jax.Array, top: Tree, head: Tree, spec: ModelSpec, compute: Compute) -> jax.Array:
    x = x if spec.streams is None else spec.streams.leave(x, top[LEAVE], compute.layout)
    logits = head_logits(head, spec.norm(x, top.get("norm", {})), spec)
    return logits if compute.layout is None else jax.lax.with_sharding_constraint(logits, compute.layout.replicated)


def verify_export(
    params: Tree,
    spec: ModelSpec,
    dest: Path,
    *,
    dtype: str,
    expected: Float[np.ndarray, "B T V"] | None = None,
    layout: Layout | None = None,
    job: Job = SINGLE_PROCESS,
    passed: Sequence[StoredTensor] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Verified:
    """Compares a written model directory with the parameters it was written from.

    Every tensor must equal, bit for bit, the parameter cast to `dtype`; the directory's own config must give the same
    spec; tensors that were `passed` through must equal those they were copied from; and the logits of the probe,
    computed from nothing but the files, must agree with `expected` (default: those of `params`) to the dtype's
    tolerance. One layer is in memory at a time; `progress(done, total)` counts the bytes compared. With several
    processes each compares the files that another one wrote. Raises ExportError.
    """
    with raise_collectively(job, "verify: config"):
        written, _ = load_spec(dest, dtype, vision=spec.vision is not None)
        if (changed := _spec_difference(without_balancing(spec), without_balancing(written))) is not None:
            raise ExportError(f"the written config.json describes another model: {changed}", where=str(dest))
        infos = model_tensors(dest, written.published)
        check(dest, written, infos)
    with raise_collectively(job, "verify: tensors"):
        compared = _compare_tensors(flatten(params), spec, infos, dtype, job, progress) + len(passed)
        if job.is_main_process and (changed := first_changed(passed, infos)) is not None:
            raise ExportError(f"tensor '{changed}' differs from that in the source", where=str(dest))
    if expected is None:
        expected = probe_logits(params, spec, layout)
    got = written_logits(dest, layout, vision=spec.vision is not None)
    with raise_collectively(job, "verify: logits"):
        difference = relative_difference(expected, got)
        if difference <= TOLERANCE[dtype]:
            return Verified(compared, difference, TOLERANCE[dtype])
    unrounded = probe_logits(
        params, spec, layout
    )  # its tensors are equal: was it merging that went wrong, or rounding?
    by_rounding = relative_difference(expected, unrounded) <= TOLERANCE["float32"] and dtype != "float32"
    with raise_collectively(job, "verify: rounding"):
        raise _logits_error(difference, dest, dtype, by_rounding)


def _spec_difference(spec: ModelSpec, written: ModelSpec) -> str | None:
    """The first field in which two specs differ, but for the dtype and how layers are stacked; None if they agree."""
    layers = [[entry[3] for entry in _by_layer(model)] for model in (spec, written)]
    if len(layers[0]) != len(layers[1]):
        return f"it has {len(layers[1])} layers, trained were {len(layers[0])}"
    for number, (trained, theirs) in enumerate(zip(*layers, strict=True)):
        if (difference := _field_difference(trained, theirs)) is not None:
            return f"in layer {number}, {difference}"
        alike = dataclasses.replace(spec, stacks=written.stacks, dtype=written.dtype, published=written.published)
    return _field_difference(alike, written)


def _field_difference(trained: Any, written: Any) -> str | None:
    """The innermost field in which two dataclasses of one kind differ."""
    for field in dataclasses.fields(trained):
        ours, theirs = getattr(trained, field.name), getattr(written, field.name)
        if ours != theirs:
            nested = dataclasses.is_dataclass(ours) and type(ours) is type(theirs)
            inner = _field_difference(ours, theirs) if nested else None
            return f"{field.name} is {theirs}, trained was {ours}" if inner is None else inner
    return None


def _by_layer(spec: ModelSpec) -> list[tuple[int, str, int, LayerSpec]]:
    """(number, key in params["layers"], row of that stack, layer spec) of every layer, in order."""
    layers = [
        (number, key, row, layer) for key, _, layer, numbers in spec.positions() for row, number in enumerate(numbers)
    ]
    return sorted(layers, key=lambda entry: entry[0])


def _compare_tensors(
    flat: Leaves,
    spec: ModelSpec,
    infos: dict[str, TensorInfo],
    dtype: str,
    job: Job,
    progress: Callable[[int, int], None] | None,
) -> int:
    files = {file: number for number, file in enumerate(sorted({info.file for info in infos.values()}))}
    local = {name for name, info in infos.items() if (files[info.file] + 1) % job.process_count == job.process_index}
    tensors = tensors_of(table_of(spec), flat, dtype)
    if (different := first_difference(tensors, infos, local, progress)) is not None:
        tensor, start, trained, stored = different
        message = _tensor_message(tensor.name, start, trained, stored)
        raise ExportError(message, where=str(infos[tensor.name].file))
    return len(tensors)


def _tensor_message(name: str, start: int, trained: np.ndarray, stored: np.ndarray) -> str:
    message = f"tensor '{name}' differs from what was trained"
    if trained.dtype != stored.dtype:
        return f"{message}: written as {stored.dtype}, expected {trained.dtype}"
    unequal = np.argwhere(trained.view("u1") != stored.view("u1"))
    row = start + int(unequal[0][0])
    distance = np.abs(trained.astype(np.float32) - stored.astype(np.float32)).max()
    return f"{message}: first at row {row}, by up to {distance:.3g}"


def written_logits(
    directory: Path, layout: Layout | None = None, *, vision: bool = False
) -> Float[np.ndarray, "B T V"]:
    """float32 logits of the probe from a model directory's files, one layer at a time, each laid out on the mesh; with
    `vision` of a probe with pictures."""
    spec, _ = load_spec(directory, vision=vision)
    infos, table = model_tensors(directory, spec.published), table_of(spec)
    in_layer: dict[tuple[str, int], list[TensorMap]] = {}
    before: list[TensorMap] = []
    after: list[TensorMap] = []
    for entry in table:
        place = stack_path(entry.path)
        if place is not None and place.root == "":
            in_layer.setdefault((place.key, entry.index[0]), []).append(entry)
        else:
            (before if entry.path.partition("/")[0] in spec.before else after).append(entry)
    embedding = _read(before, infos, layout)

    def layers() -> Iterator[tuple[LayerSpec, Tree]]:
        for _, key, row, kind in _by_layer(spec):
            yield kind, _read(in_layer[key, row], infos, layout)["layers"][key]

    def ends() -> Tree:
        return embedding | _read(after, infos, layout) if spec.tied else _read(after, infos, layout)

    return _logits(spec, layout, lambda: embedding, layers(), ends)


def _read(table: list[TensorMap], infos: dict[str, TensorInfo], layout: Layout | None) -> Tree:
    """Some tensors as a tree, in the file's dtype: of a layer of the decoder without the axis of layers, those of a
    tower with all of its layers."""
    leaves: dict[str, list[TensorMap]] = {}
    for entry in table:
        leaves.setdefault(entry.path, []).append(entry)
    with TensorReader() as reader:
        return unflatten({path: _place_leaf(reader, entries, infos, layout) for path, entries in leaves.items()})


def _place_leaf(
    reader: TensorReader, entries: list[TensorMap], infos: dict[str, TensorInfo], layout: Layout | None
) -> jax.Array:
    place = stack_path(entries[0].path)
    if place is None or place.root == "":
        return _place_layer(reader, entries, infos, layout)
    rows = [[entry for entry in entries if entry.index[0] == row] for row in range(entries[0].array.shape[0])]
    return jnp.stack([_place_layer(reader, row, infos, layout) for row in rows])


def _place_layer(
    reader: TensorReader, entries: list[TensorMap], infos: dict[str, TensorInfo], layout: Layout | None
) -> jax.Array:
    """One layer's part of a leaf, or a leaf outside the layers: of one tensor, or of one for each further index."""
    array, lead = entries[0].array, int(entries[0].array.is_stacked)
    shape, axes = array.shape[lead:], array.axes[lead:]
    by_index = {entry.index[lead:]: entry for entry in entries}
    depth = len(entries[0].index) - lead

    def part(index: tuple[slice, ...]) -> np.ndarray:
        box = tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))
        parts = [
            read_box(reader, infos[entry.name], entry.view, box[depth:])
            for entry in (by_index[i] for i in itertools.product(*(range(*edges) for edges in box[:depth])))
        ]
        return np.stack(parts).reshape([stop - start for start, stop in box]) if depth else parts[0]

    if layout is None:
        return jax.device_put(part(tuple(slice(None) for _ in shape)))
    return jax.make_array_from_callback(shape, layout.sharding(axes, shape), lambda index: part(index or ()))


def relative_difference(expected: np.ndarray, got: np.ndarray) -> float:
    """The root mean square of the difference, over that of the expected array."""
    return float(np.sqrt(np.mean((expected - got) ** 2) / max(float(np.mean(expected**2)), 1e-30)))


def check_logits(logits: np.ndarray, where: str) -> None:
    """Raises UserError for logits of the probe that are not finite: there is nothing to compare an export with."""
    if not np.isfinite(logits).all():
        raise UserError(
            "the model's logits are not finite, so that what is written of it cannot be verified",
            where=where,
            fix="its training diverged, or the model is damaged: export an earlier state (RUN@best, RUN@STEP), or "
            "train again with a lower rate",
        )


def _logits_error(difference: float, dest: Path, dtype: str, by_rounding: bool) -> UserError:
    if by_rounding:
        return RoundingError(
            f"rounding the weights to {dtype} moves this model's logits by {difference:.2e} (relative), and "
            f"{TOLERANCE[dtype]:.0e} is allowed: it would be another model",
            where=str(dest),
            fix="write it with --dtype float32",
        )
    return ExportError(
        f"the logits of the written model differ from those of what was trained by {difference:.2e} (relative), "
        f"and {dtype} allows {TOLERANCE[dtype]:.0e}",
        where=str(dest),
    )
