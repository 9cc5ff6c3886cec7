"""One process of a job that saves or restores a state spread over its devices; see test_sharded_checkpoint.py.

python sharded_checkpoint_cases.py DIRECTORY COMMAND ...     prints a line of JSON for each thing worth asserting

save MESH STEP [slowly]    restore MESH STEP    chain    fill    mesh: dp=1,fsdp=4,tp=2
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import sys
import time

import jax
import numpy as np

from meshtune.adapters.config import FullConfig, LoraConfig
from meshtune.adapters.method import abstract
from meshtune.families import model_spec
from meshtune.mesh.axes import MeshConfig, make_mesh
from meshtune.mesh.fit import layout_for
from meshtune.mesh.processes import Job, start
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.train.checkpoint import Checkpoints, Record
from meshtune.train.step import TrainState, abstract_state

CONFIG = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def mesh_of(words: str) -> MeshConfig:
    return MeshConfig(**{name: int(size) for name, size in (part.split("=") for part in words.split(",") if part)})


def like(words: str, method: str, wide: int = 1) -> TrainState:
    """The abstract state on a mesh."""
    spec = model_spec(CONFIG | {"hidden_size": 64 * wide, "intermediate_size": 128 * wide}, "float32")
    plan = abstract(LoraConfig(rank=8) if method == "lora" else FullConfig(), spec)
    config = mesh_of(words)
    layout, _ = layout_for(make_mesh(config, jax.devices()[: config.devices]), spec)
    optimizer, _ = make_optimizer(OptimizerConfig(learning_rate=1e-2), 10, plan.trainable)
    return abstract_state(plan.trainable, optimizer, layout)


def expected(place: int, leaf: jax.ShapeDtypeStruct, step: int) -> np.ndarray:
    """What leaf number `place` holds after `step` updates; every process can make it for itself."""
    if leaf.ndim == 0:
        return np.asarray(step + place, leaf.dtype)
    return np.random.default_rng([place, step]).normal(size=leaf.shape).astype(leaf.dtype)


def filled(state: TrainState, step: int) -> TrainState:
    leaves, tree = jax.tree.flatten(state)

    def make(place: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        whole = expected(place, leaf, step)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: whole[index])

    return jax.tree.unflatten(tree, [make(place, leaf) for place, leaf in enumerate(leaves)])


def check(restored: TrainState, wanted: TrainState, step: int) -> int:
    """Compares every shard that is here bit for bit; how many there are."""
    count = 0
    for place, (leaf, target) in enumerate(zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True)):
        assert leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim), (leaf.sharding, target.sharding)
        whole = expected(place, target, step)
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(whole[shard.index]).tobytes(), place
            count += 1
    return count


def record_of(step: int) -> Record:
    return Record(step, 3, {"train": {"steps": 9}}, "base", "sha256:0", "d")


def files(directory: pathlib.Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def main(job: Job, directory: pathlib.Path, command: str, *rest: str) -> None:
    if command == "save":
        mesh, method, step = rest[0], rest[1], int(rest[2])
        with Checkpoints(directory, keep=2, job=job) as checkpoints:
            checkpoints.save(filled(like(mesh, method), step), record_of(step))
        say(saved=step, steps=checkpoints.steps())
    elif command == "restore":
        mesh, method, step = rest[0], rest[1], int(rest[2])
        with Checkpoints(directory, keep=2, job=job) as checkpoints:
            wanted = like(mesh, method)
            assert checkpoints.record(step) == record_of(step)
            say(checked=check(checkpoints.restore(step, wanted), wanted, step), latest=checkpoints.latest())
    elif command == "chain":
        for number, mesh in enumerate(rest[1:], 1):
            with Checkpoints(directory, keep=2, job=job) as checkpoints:
                wanted = like(mesh, rest[0])
                if number > 1:
                    state = checkpoints.restore(number - 1, wanted)
                    say(mesh=mesh, checked=check(state, wanted, 1))
                else:
                    state = filled(wanted, 1)
                checkpoints.save(state, record_of(number))  # the same numbers travel from mesh to mesh
    elif command == "die":
        mesh, where = rest[0], rest[1]
        checkpoints = Checkpoints(directory, keep=2, job=job)
        wanted = like(mesh, "full", wide=8)
        checkpoints.save(filled(wanted, 1), record_of(1))
        checkpoints.wait()
        say(ready=os.getpid(), files=len(files(directory)))
        checkpoints.save(filled(wanted, 2), record_of(2))
        if job.process == int(where):
            os.kill(os.getpid(), 9)
        checkpoints.wait()
        say(never=True)
        time.sleep(100)


if __name__ == "__main__":
    with start() as job:
        main(job, pathlib.Path(sys.argv[1]), *sys.argv[2:])
