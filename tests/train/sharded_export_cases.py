"""One process of a job that exports a model trained on a mesh; see test_sharded_export.py.

python sharded_export_cases.py BASE OUTPUT MESH ...          an adapter and a model for each mesh, in OUTPUT/MESH
python sharded_export_cases.py BASE OUTPUT full MESH ...     only onto a disk that is full for the last process

The trained numbers depend on nothing but the leaf, so that every mesh and number of processes has the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
import sys
from typing import Any, ClassVar

import jax
import numpy as np

from meshtune.adapters.config import FullConfig, LoraConfig
from meshtune.adapters.method import PreparedModel, abstract, prepare
from meshtune.adapters.peft_format import BaseRecord
from meshtune.adapters.training_method import Method
from meshtune.arrays.tree import merge
from meshtune.errors import UserError
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import Layout, make_mesh
from meshtune.mesh.placement import shardings
from meshtune.mesh.processes import Job, start
from meshtune.model.gather import layout_for
from meshtune.train.result.final import export_result
from meshtune.weights import writer
from meshtune.weights.export import export_model
from meshtune.weights.load import load_params, load_spec

LORA = LoraConfig(rank=8, alpha=16.0, targets=("all-linear",), train_modules=("norm",))
BLOCK = 4096


class Tokenizer:
    """The methods that export_result calls."""

    eos_token_id = pad_token_id = bos_token_id = unk_token_id = None
    added_tokens_decoder: ClassVar[dict[int, str]] = {}

    def save_pretrained(self, path: str) -> None:
        (pathlib.Path(path) / "tokenizer.json").write_text("{}")


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def train_model(base: pathlib.Path, method: Method) -> tuple[PreparedModel, PreparedModel]:
    """(abstract, concrete on one device)"""
    spec, _ = load_spec(base)
    plan = abstract(method, spec)
    prepared = prepare(method, spec, load_params(base, spec), jax.random.key(0))
    leaves, tree = jax.tree.flatten(prepared.trainable)
    random = np.random.default_rng(7)
    moved = [leaf + 0.02 * random.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    return plan, dataclasses.replace(prepared, trainable=jax.tree.unflatten(tree, moved))


def spread_tree(tree: Any, abstract: Any, layout: Layout) -> Any:
    def place(leaf: jax.Array, sharding: Any) -> jax.Array:
        array = np.asarray(leaf)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(place, tree, shardings(abstract, layout))


def laid_out(base: pathlib.Path, method: Method, mesh: str) -> tuple[PreparedModel, Layout | None]:
    plan, prepared = train_model(base, method)
    if mesh == "one":
        return prepared, None
    config = MeshConfig(**{name: int(size) for name, size in (part.split("=") for part in mesh.split(","))})
    layout, _ = layout_for(make_mesh(config, jax.devices()[: config.devices]), prepared.spec)
    placed = dataclasses.replace(
        prepared,
        trainable=spread_tree(prepared.trainable, plan.trainable, layout),
        frozen=spread_tree(prepared.frozen, plan.frozen, layout),
    )
    return placed, layout


def main(job: Job, base: pathlib.Path, output: pathlib.Path, meshes: list[str]) -> None:
    writer.BLOCK_BYTES = BLOCK  # so that tensors travel in several blocks
    written: list[str] = []
    real = writer._Output

    def note_start(file: pathlib.Path, start: bytes) -> Any:
        written.append(file.name)
        return real(file, start)

    writer._Output = note_start  # type: ignore[misc, assignment]
    only_refuse = meshes[0] == "full"
    for mesh in meshes[only_refuse:]:
        place = output / mesh
        if only_refuse:
            place.mkdir(parents=True, exist_ok=True)
            prepared, layout = laid_out(base, FullConfig(), mesh)
            refuse(job, merge(prepared.trainable, prepared.frozen), prepared, base, place, layout)
            continue
        written.clear()
        for method in (LORA, FullConfig()):
            prepared, layout = laid_out(base, method, mesh)
            record = BaseRecord(str(base), "sha256:aa")
            path = export_result(place, prepared, method, base, record, Tokenizer(), layout=layout, job=job)  # type: ignore[arg-type]
            say(mesh=mesh, path=str(path))
        if mesh == meshes[-1]:  # each file's shape of program is compiled for itself: once is enough
            params = merge(prepared.trainable, prepared.frozen)
            done = export_model(
                params, prepared.spec, base, place / "shards", max_shard_bytes=100_000, layout=layout, job=job
            )
            say(mesh=mesh, files=len(done.files), written=written, difference=done.verified.difference)
            refuse(job, params, prepared, base, place, layout)
        if layout is not None and job.process_count == 1:
            traffic(layout, mesh)


def traffic(layout: Layout, mesh: str) -> None:
    """The largest array in the program that cuts a block out of a large stacked weight."""
    shape = (4, 1024, 512)
    sharding = layout.sharding(("layers", "ffn", "embed"), shape)
    leaf = jax.make_array_from_callback(shape, sharding, lambda index: np.zeros(shape, np.float32)[index])
    tensor = writer.Tensor.of("w", leaf, "bfloat16", (1,))
    (part,) = tensor.parts
    block = next(writer.blocks_of(part, "bfloat16"))
    split = writer._split(part)
    lowered = writer._cut.lower(leaf, np.zeros(5, np.int32), lead=1, rows=block.rows, dtype="bfloat16", split=split)
    program = lowered.compile()
    facts = program.memory_analysis()
    assert facts is not None
    moved = re.findall(
        r"= (?:f32|bf16|u16)\[([\d,]+)\]\S* (?:all-gather|all-reduce|all-to-all|collective-permute)", program.as_text()
    )
    size = block.shares * block.rows * 512 * 4
    largest = max([0, *(4 * math.prod(map(int, dims.split(","))) for dims in moved)])
    say(mesh=mesh, largest=max(largest, facts.temp_size_in_bytes // 2), block=size, moved=moved)


def refuse(
    job: Job, params: Any, prepared: PreparedModel, base: pathlib.Path, place: pathlib.Path, layout: Layout | None
):
    """A disk that is full on the last process is an error on every one, and leaves nothing."""
    real = writer.os.pwrite

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    if job.process_index == job.process_count - 1:
        writer.os.pwrite = full  # type: ignore[assignment]
    try:
        export_model(params, prepared.spec, base, place / "full", max_shard_bytes=100_000, layout=layout, job=job)
    except UserError as error:
        say(refused=error.what)
    writer.os.pwrite = real
    job.barrier("after")
    assert not any("full" in path.name for path in place.iterdir()), list(place.iterdir())


if __name__ == "__main__":
    with start() as job:
        main(job, pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:])
