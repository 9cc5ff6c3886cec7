"""An export is done when what was written, read again from its files, is what was trained."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from meshtune.errors import UserError
from meshtune.model.attention import Rows
from meshtune.model.compute import Compute
from meshtune.model.decoder import enter, head_logits, head_params, one_layer
from meshtune.model.norm import rms_norm
from meshtune.model.spec import LayerSpec, ModelSpec
from meshtune.model.tree import Tree, flatten, unflatten
from meshtune.weights.check import check
from meshtune.weights.load import load_spec
from meshtune.weights.safetensors_files import TensorInfo, TensorReader, headers
from meshtune.weights.slots import Slot, blocks, cut, slots

COMPUTE = Compute(dtype="float32", attention="direct")
PROBE_SHAPE = (2, 48)

# Largest allowed root mean square of the difference, relative to that of the logits. Rounding the weights once moves
# logits by about the dtype's relative rounding error (2^-25, 2^-12, 2^-9 on average) times the square root of twice the
# number of layers: 4e-7, 4e-3, 3e-2 at 126 layers; a lost, transposed or misplaced tensor moves them by more.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


class ExportError(UserError):
    """What was written is not what was trained."""


@dataclasses.dataclass(frozen=True)
class Verified:
    """What was compared: tensors, bit for bit, and logits; the difference is relative, as TOLERANCE states it."""

    tensors: int
    difference: float
    tolerance: float


def probe(spec: ModelSpec) -> tuple[jax.Array, jax.Array, jax.Array]:
    """tokens, positions, segment_ids [2, 48] of the fixed batch that exports are verified with."""
    tokens = np.random.default_rng(0).integers(0, spec.vocab, PROBE_SHAPE)
    positions = np.broadcast_to(np.arange(PROBE_SHAPE[1]), PROBE_SHAPE)
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32), jnp.ones(PROBE_SHAPE, jnp.int32)


def probe_logits(params: Tree, spec: ModelSpec) -> Float[np.ndarray, "B T V"]:
    """float32 logits of the probe, adapters included. Taken before merging, they say what was trained."""
    layers = ((layer, _row(params["layers"][key], row)) for _, key, row, layer in _by_layer(spec))
    return _logits(spec, lambda: {"embed": params["embed"]}, layers, lambda: params)


@jax.jit
def _row(stacked: Tree, row: int) -> Tree:
    return jax.tree.map(lambda leaf: leaf[row], stacked)


def _logits(
    spec: ModelSpec,
    embedding: Callable[[], Tree],
    layers: Iterable[tuple[LayerSpec, Tree]],
    ends: Callable[[], Tree],
) -> Float[np.ndarray, "B T V"]:
    """Logits of the probe from parameters that are handed over part by part: one layer at a time is in float32."""
    spec = dataclasses.replace(spec, stacks=(), dtype="float32")  # no part of one layer's numbers: one compilation
    rows, x = enter(embedding(), spec, COMPUTE, *probe(spec))
    for layer, node in layers:
        x = _step(x, node, dataclasses.astuple(rows), spec, layer).block_until_ready()
    params = ends()
    head = {name: leaf for name, leaf in params.items() if name in ("embed", "head")}
    return np.asarray(_finish(x, params["norm"], head_params(head, spec), spec))


@functools.partial(jax.jit, static_argnames=("spec", "layer"))
def _step(x: jax.Array, node: Tree, rows: tuple[Any, ...], spec: ModelSpec, layer: LayerSpec) -> jax.Array:
    return one_layer(x, node, spec, layer, COMPUTE, Rows(*rows), None)


@functools.partial(jax.jit, static_argnames="spec")
def _finish(x: jax.Array, norm: Tree, head: Tree, spec: ModelSpec) -> jax.Array:
    return head_logits(head, rms_norm(x, norm["weight"], spec.norm_eps))


def verify_export(
    params: Tree, spec: ModelSpec, dest: Path, *, dtype: str, expected: Float[np.ndarray, "B T V"] | None = None
) -> Verified:
    """Compares a written model directory with the parameters it was written from.

    Every tensor must equal, bit for bit, the parameter cast to `dtype`; the directory's own config must give the same
    spec; and the logits of the probe, computed from the files alone, must agree with `expected` (default: those of
    `params`) to the dtype's tolerance. One layer is in memory at a time. Raises ExportError.
    """
    written, _ = load_spec(dest, dtype)
    if (changed := _spec_difference(spec, written)) is not None:
        raise ExportError(f"the written config.json describes another model: {changed}", where=str(dest))
    found = headers(dest)
    check(dest, written, found)
    compared = _compare_tensors(flatten(params), spec, found, dtype)
    if expected is None:
        expected = probe_logits(params, spec)
    return Verified(compared, _compare_logits(expected, written_logits(dest), dest, dtype), TOLERANCE[dtype])


def _spec_difference(spec: ModelSpec, written: ModelSpec) -> str | None:
    if [entry[3] for entry in _by_layer(spec)] != [entry[3] for entry in _by_layer(written)]:
        return "its layers differ in number or window"
    same = dataclasses.replace(spec, stacks=written.stacks, dtype=written.dtype)
    for field in dataclasses.fields(spec):
        ours, theirs = getattr(same, field.name), getattr(written, field.name)
        if ours != theirs:
            return f"{field.name} is {theirs}, trained was {ours}"
    return None


def _by_layer(spec: ModelSpec) -> list[tuple[int, str, int, LayerSpec]]:
    """(number, key in params["layers"], row of that stack, layer spec) of every layer, in order."""
    every = [
        (number, key, row, layer) for key, _, layer, numbers in spec.positions() for row, number in enumerate(numbers)
    ]
    return sorted(every, key=lambda entry: entry[0])


def _compare_tensors(flat: dict[str, Any], spec: ModelSpec, found: dict[str, TensorInfo], dtype: str) -> int:
    with TensorReader() as reader:
        for slot in slots(spec):
            info = found[slot.name]
            for start, stop in blocks(slot.shape, jnp.dtype(dtype).itemsize):
                trained = cut(flat[slot.path], slot, start, stop, dtype)
                there = reader.rows(info, start, stop)
                if trained.dtype != there.dtype or trained.tobytes() != there.tobytes():
                    raise ExportError(_tensor_message(slot, start, trained, there), where=str(info.file))
    return len(slots(spec))


def _tensor_message(slot: Slot, start: int, trained: np.ndarray, there: np.ndarray) -> str:
    what = f"tensor '{slot.name}' differs from what was trained"
    if trained.dtype != there.dtype:
        return f"{what}: written as {there.dtype}, expected {trained.dtype}"
    unequal = np.argwhere(trained.view("u1") != there.view("u1"))
    row = start + int(unequal[0][0])
    distance = np.abs(trained.astype(np.float32) - there.astype(np.float32)).max()
    return f"{what}: first at row {row}, by up to {distance:.3g}"


def written_logits(directory: Path) -> Float[np.ndarray, "B T V"]:
    """float32 logits of the probe from a model directory's files, read one layer at a time."""
    spec, _ = load_spec(directory)
    found, wanted = headers(directory), slots(spec)
    embedding = _read([slot for slot in wanted if slot.path.startswith("embed/")], found)

    def layers() -> Iterator[tuple[LayerSpec, Tree]]:
        for _, key, row, layer in _by_layer(spec):
            inside = [slot for slot in wanted if slot.path.startswith(f"layers/{key}/") and slot.row == row]
            yield layer, _read(inside, found)["layers"][key]

    def ends() -> Tree:
        rest = _read([slot for slot in wanted if slot.row is None and not slot.path.startswith("embed/")], found)
        return embedding | rest if spec.tied else rest

    return _logits(spec, lambda: embedding, layers(), ends)


def _read(wanted: list[Slot], found: dict[str, TensorInfo]) -> Tree:
    """Some tensors as a tree, in the file's dtype, each alone in its leaf: a layer's are not stacked."""
    with TensorReader() as reader:
        return unflatten({slot.path: jax.device_put(reader.tensor(found[slot.name])) for slot in wanted})


def _compare_logits(expected: np.ndarray, got: np.ndarray, dest: Path, dtype: str) -> float:
    if not np.isfinite(expected).all():
        raise ExportError("the trained model's logits are not finite", where=str(dest))
    difference = float(np.sqrt(np.mean((expected - got) ** 2) / max(float(np.mean(expected**2)), 1e-30)))
    if not difference <= TOLERANCE[dtype]:
        raise ExportError(
            f"the logits of the written model differ from those of what was trained by {difference:.2e} (relative), "
            f"and {dtype} allows {TOLERANCE[dtype]:.0e}",
            where=str(dest),
        )
    return difference
