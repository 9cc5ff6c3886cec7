"""Loads a Hugging Face model directory into a parameter tree, each slice straight into its device's memory, and
measures host memory, bytes and seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Leaves, Tree, flatten, unflatten
from meshtune.errors import UserError
from meshtune.families import as_stored, model_spec, tensors
from meshtune.families.composite import HEAD, is_composite, tensor_name, text_config
from meshtune.families.quantised import quantised_leaves
from meshtune.families.tensors import TensorMap
from meshtune.json_text import read_json
from meshtune.mesh.layout import Layout
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.published import read_scheme
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.check import SCORE, check
from meshtune.weights.packed import as_in_files, model_tensors, parts_to_read, with_packed
from meshtune.weights.read_plan import Device
from meshtune.weights.safetensors_files import TensorInfo, headers, samples, tensor_names
from meshtune.weights.shards import Progress, Shards, read_into
from meshtune.weights.tensor_reader import (
    BroadcastReader,
    TensorReader,
    broadcast_reader,
    neighbours,
    replica_groups,
)

STATM = Path("/proc/self/statm")
INTERVAL = 0.01  # seconds between looks at the resident memory; reading it takes some 20 microseconds


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """Of one process. Bytes and seconds; host memory is resident memory, 0 where the system has no /proc.

    `read` counts bytes of tensors that this process read from files, `placed` maps each local device to the bytes of
    parameters on it, `in_use` to what its allocator says is in use (absent on backends that do not say, such as CPU,
    where the arrays are host memory too).
    """

    process: int
    host_before: int
    host_peak: int
    host_after: int
    read: int
    files: int
    seconds: float
    placed: dict[str, int]
    in_use: dict[str, int]

    @property
    def line(self) -> str:
        """One line for a log."""
        host = " -> ".join(_mib(n) for n in (self.host_before, self.host_peak, self.host_after))
        on_devices = [_mib(self.in_use.get(name, placed)) for name, placed in self.placed.items()]
        devices = ", ".join(on_devices[:16]) + (", ..." if len(on_devices) > 16 else "")
        files = f"{self.files} file{'' if self.files == 1 else 's'}"
        return (
            f"process {self.process}: {_mib(self.read)} MiB read from {files} in {self.seconds:.1f} s; "
            f"host memory {host} MiB (before, peak, after); on each device {devices} MiB"
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.{0 if count >= 10 * 2**20 else 1}f}"


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    if not STATM.exists():
        return 0
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class MemoryProbe:
    """Samples the resident memory while it is open: `before`, `peak`, `after`, `seconds`."""

    def __enter__(self) -> MemoryProbe:
        self._began = time.monotonic()
        self.before = self.peak = self.after = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        if self.before:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self.before:
            self._thread.join()
        self.after = resident()
        self.peak = max(self.peak, self.after)
        self.seconds = time.monotonic() - self._began

    def _look(self) -> None:
        while not self._done.wait(INTERVAL):
            self.peak = max(self.peak, resident())


def bytes_in_use(devices: list[jax.Device]) -> dict[str, int]:
    """Bytes in use on devices, of those whose allocator reports them."""
    stats = {_name(device): device.memory_stats() for device in devices}
    return {name: int(entry["bytes_in_use"]) for name, entry in stats.items() if entry and "bytes_in_use" in entry}


def bytes_placed(leaves: list[jax.Array]) -> dict[str, int]:
    """Bytes of some arrays on each local device."""
    placed: dict[str, int] = {}
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            name = _name(shard.device)
            placed[name] = placed.get(name, 0) + shard.data.nbytes
    return placed


def _name(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"


MODEL_DTYPES = ("float32", "bfloat16", "float16")
STORED_AS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def load_config(directory: Path) -> dict[str, object]:
    """config.json. Raises UserError if it is absent, or malformed at some line."""
    file = directory / "config.json"
    if not file.is_file():
        files = sorted(directory.iterdir())
        models = [str(path) for path in files if path.suffix == ".gguf"]
        names = ", ".join(path.name for path in files[:5]) or "no files"
        raise UserError(
            "no config.json, so this is not a Hugging Face model directory",
            where=str(directory),
            fix=f"give the GGUF file itself: {models[0]}"
            if models
            else f"give the folder that holds config.json and *.safetensors; here are: {names}",
        )
    return read_json(file)


def load_spec(
    directory: Path, dtype: str | None = None, *, vision: bool = False
) -> tuple[ModelSpec, dict[str, object]]:
    """(spec, config) of a model directory; with `vision` of its tower too, which is else passed through.

    `dtype` is the dtype that the weights are loaded in; default: the config's, else that of most stored bytes.
    Raises UserError for a bad config or an unsupported model, and for one without a tower where `vision` asks for one.
    """
    directory = Path(directory)
    config = load_config(directory)
    return spec_of(config, directory, dtype or stored_dtype(directory, config), vision=vision), config


def spec_of(config: Mapping[str, Any], directory: Path, dtype: str, *, vision: bool = False) -> ModelSpec:
    """The spec of a config for the weights in `directory`, where there are any: their names say how a composite's text
    model is laid out, whether it has a separate head, and how experts are stored. Raises UserError for a bad config
    or an unsupported model, and for experts that are there twice.
    """
    names = tensor_names(directory) if is_composite(config) else frozenset[str]()
    spec = model_spec(dict(config), dtype, str(directory / "config.json"), names, vision)
    if spec.composite is not None and spec.tied and tensor_name(spec, HEAD) in names:
        infos, entry = (
            model_tensors(directory, spec.published),
            next(entry for entry in tensors(spec) if entry.path == "embed/weight"),
        )
        table, head = infos.get(entry.name), infos[tensor_name(spec, HEAD)]
        if table is not None and not _equal_in_samples(table, head):
            spec = dataclasses.replace(spec, tied=False)  # as transformers does, whatever the config says
    if not any(directory.glob("*.safetensors")):
        return spec
    spec = as_stored(spec, lambda: model_tensors(directory, spec.published), str(directory))
    if spec.composite is not None and spec.fused_experts:
        spec = _with_experts_as_stored(spec, model_tensors(directory, spec.published))
    return spec if spec.published is None else as_in_files(spec, model_tensors(directory, spec.published))


def _with_experts_as_stored(spec: ModelSpec, infos: Mapping[str, TensorInfo]) -> ModelSpec:
    """The spec with fused experts transposed, where only so they have the shapes of the files."""
    assert spec.composite is not None
    transposed = dataclasses.replace(spec, composite=dataclasses.replace(spec.composite, transposed_experts=True))

    def fits(spec: ModelSpec) -> bool:
        entries = (entry for entry in tensors(spec) if entry.array.role == "experts" and entry.name in infos)
        return all(infos[entry.name].shape == entry.view.tensor for entry in entries)

    return transposed if not fits(spec) and fits(transposed) else spec


def _equal_in_samples(first: TensorInfo, second: TensorInfo) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    with TensorReader() as reader:
        return all(reader.read(first, *piece) == reader.read(second, *piece) for piece in samples(first))


def stored_dtype(directory: Path, config: Mapping[str, object]) -> str:
    """The dtype of a checkpoint: float32, bfloat16 or float16."""
    text = text_config(config)
    named = next((c[field] for c in (config, text) for field in ("dtype", "torch_dtype") if c.get(field)), None)
    if named is not None:
        if named not in MODEL_DTYPES:
            raise UserError(
                f"dtype {named!r} is not supported",
                where=f"{directory / 'config.json'}, field {'dtype' if config.get('dtype') else 'torch_dtype'}",
                fix=f"one of {', '.join(MODEL_DTYPES)}",
            )
        return named
    if read_scheme(config, str(directory / "config.json"))[0] is not None:
        return "bfloat16"  # what codes stand for has none of its own
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
    replicas: bool = False,
    group: int | None = None,
    waiting: Collection[str] = (),
    plain: Collection[str] = (),
    progress: Progress | None = None,
    report: Callable[[LoadReport], None] | None = None,
) -> Tree:
    """Loads the parameters of a model directory as `abstract_params(spec)` describes them, sharded by `layout` (None:
    on the default device).

    The shards of each device are allocated once and filled in place, in the order of the files, cast to the spec's
    dtype. A process reads only what its own devices hold, each number once, opening each file once. Host memory beyond
    the arrays themselves: a few blocks of at most BLOCK_BYTES.

    With `quantize` linear layers become QuantisedWeights, quantised block by block from the stored numbers:
    no weight is ever whole, or in float32, in memory. Scales that are quantised too pass through the host matrix by
    matrix; every process must then call this. Leaves whose path is in `plain` are not quantised. Without `quantize`
    weights of a checkpoint that is published quantised become QuantisedWeights with the codes of its files, where there
    is a product with them; a config with the format "none" gives all numbers in the spec's dtype.

    Arrays named in `waiting` (by path, or path and field of a QuantisedWeight) are placed in pinned host memory and
    are never on a device; the host briefly holds the largest of them twice.

    With `broadcast` one process of each group of `group` neighbouring ones (None: one group) reads what the group needs
    and broadcasts it; the others open no file. With `replicas` the processes of the first replica under dp read what
    they hold and broadcast it to those that hold the same. Every process must then call this.
    `progress(done, total)` counts bytes of files; `report` is called once, at the end, with this process's figures.
    A reward model's score that the directory lacks is left out (see `with_score`).
    Raises UserError if config and weights disagree, or a quantisation block does not divide a row, before anything is
    allocated.
    """
    directory = Path(directory)
    arrays = flatten(abstract_params(spec))
    arrays |= quantised_leaves({path: array for path, array in arrays.items() if path not in plain}, quantize, spec)
    devices: list[Device] = [None]
    broadcaster: BroadcastReader | None = None
    if layout is not None and (broadcast or replicas):
        job_devices = np.asarray(layout.mesh.devices).flatten().tolist()
        groups = replica_groups(layout.mesh) if replicas else neighbours(job_devices, group)
        broadcaster, group_devices = broadcast_reader(job_devices, groups)
        devices = [*group_devices]
    elif layout is not None:
        devices = [*_local_devices(layout)]
    with MemoryProbe() as memory, TensorReader() as reader:
        infos = _checked_headers(directory, spec, broadcaster)
        table = [entry for entry in tensors(spec) if entry.name in infos]
        arrays = {path: arrays[path] for path in dict.fromkeys(entry.path for entry in table)}
        to_read, table, infos = _as_read(arrays, table, infos)
        shards = Shards(to_read, layout, devices, waiting)
        read_into(shards, table, infos, reader, broadcaster, progress)
        leaves = _with_codes(arrays, shards.assemble())
    if report:
        local = jax.local_devices()[:1] if layout is None else _local_devices(layout)
        report(
            LoadReport(
                process=jax.process_index(),
                host_before=memory.before,
                host_peak=memory.peak,
                host_after=memory.after,
                read=reader.bytes,
                files=reader.files,
                seconds=memory.seconds,
                placed=bytes_placed(jax.tree.leaves(leaves)),
                in_use=bytes_in_use(local),
            )
        )
    return unflatten(leaves)


def _as_read(
    arrays: Mapping[str, ArraySpec | QuantisedWeight], table: list[TensorMap], infos: dict[str, TensorInfo]
) -> tuple[dict[str, ArraySpec | QuantisedWeight], list[TensorMap], dict[str, TensorInfo]]:
    """The arrays to read into shards: of weights whose published codes are taken unchanged, codes and scales."""
    to_read, entries, tensors = dict(arrays), list[TensorMap](), dict(infos)
    for entry in table:
        leaf = arrays[entry.path]
        if not isinstance(leaf, QuantisedWeight) or not leaf.is_published:
            entries.append(entry)
            continue
        to_read.pop(entry.path, None)
        for field, part, info in parts_to_read(entry, leaf, infos[entry.name]):
            to_read[part.path], tensors[part.name] = getattr(leaf, field), info
            entries.append(part)
    return to_read, entries, tensors


def _with_codes(arrays: Mapping[str, ArraySpec | QuantisedWeight], leaves: Leaves) -> Leaves:
    """Codes and scales that were read as quantised weights."""

    def leaf(path: str, array: ArraySpec | QuantisedWeight) -> jax.Array | QuantisedWeight:
        if path in leaves:
            return leaves[path]
        assert isinstance(array, QuantisedWeight)
        fields = ("codes", "scales", "zeros")
        read = {field: leaves[f"{path}/{field}"] for field in fields if f"{path}/{field}" in leaves}
        return dataclasses.replace(array, **read)

    return {path: leaf(path, array) for path, array in arrays.items()}


def load_weight(
    directory: Path, spec: ModelSpec, path: str, layout: Layout | None = None, quantize: QuantizeConfig | None = None
) -> Any:
    """A single array of `load_params`, on the devices that `layout` says; quantised only with `quantize`."""
    directory = Path(directory)
    devices: list[Device] = [None]
    if layout is not None:
        devices = [*_local_devices(layout)]
    with TensorReader() as reader:
        wide = flatten(abstract_params(spec))[path]
        array = wide if quantize is None else quantised_leaves({path: wide}, quantize, spec)[path]
        shards = Shards({path: array}, layout, devices)
        read_into(shards, _table_of(path, tensors(spec)), model_tensors(directory, spec.published), reader)
        return shards.assemble()[path]


def _local_devices(layout: Layout) -> list[jax.Device]:
    devices: list[jax.Device] = np.asarray(layout.mesh.devices).flatten().tolist()
    return [device for device in devices if device.process_index == jax.process_index()]


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
    score = jax.jit(zeros, out_shardings=None if layout is None else layout.of(array))()
    return params | {"score": {"weight": score}}


def _checked_headers(directory: Path, spec: ModelSpec, broadcaster: BroadcastReader | None) -> dict[str, TensorInfo]:
    """The tensors of a directory, checked against the spec. With a broadcaster only the reader of a group looks at the
    files, and the others receive its result or its error."""
    if broadcaster is None or broadcaster.reads:
        try:
            stored = headers(directory)
            infos = with_packed(stored, spec.published)
            check(directory, spec, infos)
        except UserError as error:
            if broadcaster is not None:
                broadcaster.broadcast_json({"error": [error.what, error.where, error.fix]})
            raise
        if broadcaster is not None:
            entries = [[n, t.shape, t.dtype, str(t.file), t.start, t.nbytes] for n, t in stored.items()]
            broadcaster.broadcast_json({"tensors": entries})
        return infos
    received = broadcaster.broadcast_json(None)
    if "error" in received:
        message, where, fix = received["error"]
        raise UserError(message, where=where, fix=fix)
    stored = {
        name: TensorInfo(tuple(shape), dtype, Path(file), start, nbytes)
        for name, shape, dtype, file, start, nbytes in received["tensors"]
    }
    return with_packed(stored, spec.published)
