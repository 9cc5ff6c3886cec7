"""One process of a job that saves or restores a state spread over its devices; see test_sharded_checkpoint.py.

python sharded_checkpoint_cases.py DIRECTORY COMMAND ...     prints a line of JSON for each thing worth asserting

save MESH METHOD STEP      restore MESH METHOD STEP      restore by replica MESH METHOD STEP
chain METHOD MESH MESH ...                               mesh: fsdp=4,tp=2
die MESH PROCESS           no room MESH                  fifty MESH
"""

from __future__ import annotations

import json
import os
import pathlib
import resource
import shutil
import signal
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import psutil

from meshtune.adapters.config import FullConfig, LoraConfig
from meshtune.adapters.method import abstract
from meshtune.errors import UserError
from meshtune.families import model_spec
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import make_mesh
from meshtune.mesh.processes import Job, start
from meshtune.model.gather import layout_for
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.train.checkpoint.checkpoints import Checkpoints, Record
from meshtune.train.step.state import TrainState, abstract_state

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


def mesh_of(axes: str) -> MeshConfig:
    return MeshConfig(**{name: int(size) for name, size in (part.split("=") for part in axes.split(",") if part)})


def like(axes: str, method: str, wide: int = 1) -> TrainState:
    """The abstract state on a mesh."""
    spec = model_spec(CONFIG | {"hidden_size": 64 * wide, "intermediate_size": 128 * wide}, "float32")
    plan = abstract(LoraConfig(rank=8) if method == "lora" else FullConfig(), spec)
    config = mesh_of(axes)
    layout, _ = layout_for(make_mesh(config, jax.devices()[: config.devices]), spec)
    optimizer, _ = make_optimizer(OptimizerConfig(learning_rate=1e-2), 10, plan.trainable)
    return abstract_state(plan.trainable, optimizer, layout)


def expected_leaf(place: int, leaf: jax.ShapeDtypeStruct, step: int) -> np.ndarray:
    """Returns leaf number `place` after `step` updates, as every process can compute it."""
    if leaf.ndim == 0:
        return np.asarray(step + place, leaf.dtype)
    array = np.random.default_rng([place, step]).normal(size=leaf.shape).astype(leaf.dtype)
    array[..., 0] = -0.0  # which a sum with zeros would change
    return array


def fill_state(state: TrainState, step: int) -> TrainState:
    leaves, tree = jax.tree.flatten(state)

    def make(place: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        array = expected_leaf(place, leaf, step)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: array[index])

    return jax.tree.unflatten(tree, [make(place, leaf) for place, leaf in enumerate(leaves)])


def check(restored: TrainState, abstract: TrainState, step: int) -> int:
    """Compares every shard that is here bit for bit; how many there are."""
    count = 0
    for place, (leaf, target) in enumerate(zip(jax.tree.leaves(restored), jax.tree.leaves(abstract), strict=True)):
        assert leaf.sharding.is_equivalent_to(target.sharding, leaf.ndim), (leaf.sharding, target.sharding)
        array = expected_leaf(place, target, step)
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(array[shard.index]).tobytes(), place
            count += 1
    return count


def record_of(step: int) -> Record:
    return Record(step, 3, {"train": {"steps": 9}}, "base", "sha256:0", "d")


def main(job: Job, directory: pathlib.Path, command: str, *arguments: str) -> None:
    if command == "save":
        mesh, method, step = arguments[0], arguments[1], int(arguments[2])
        with Checkpoints(directory, keep=2, job=job) as checkpoints:
            checkpoints.save(fill_state(like(mesh, method), step), record_of(step))
        say(saved=step, steps=checkpoints.steps())
    elif command in ("restore", "restore wide"):
        mesh, method, step = arguments[0], arguments[1], int(arguments[2])
        with Checkpoints(directory, keep=2, job=job) as checkpoints:
            abstract = like(mesh, method, wide=8 if "wide" in command else 1)
            assert checkpoints.record(step) == record_of(step)
            say(checked=check(checkpoints.restore(step, abstract), abstract, step), latest=checkpoints.latest())
    elif command == "restore by replica":
        mesh, method, step = arguments[0], arguments[1], int(arguments[2])
        with Checkpoints(directory, keep=2, job=job, by_replica=True) as checkpoints:
            abstract, reads = like(mesh, method), []
            restore = ocp.PyTreeCheckpointHandler.restore
            ocp.PyTreeCheckpointHandler.restore = lambda *args, **options: reads.append(1) or restore(*args, **options)
            say(checked=check(checkpoints.restore(step, abstract), abstract, step), reads=len(reads))
            try:
                checkpoints.restore(step, like(mesh, "full"))
            except UserError as error:
                say(refused=error.what)
    elif command == "chain":
        for number, mesh in enumerate(arguments[1:], 1):
            with Checkpoints(directory, keep=2, job=job) as checkpoints:
                abstract = like(mesh, arguments[0])
                if number > 1:
                    state = checkpoints.restore(number - 1, abstract)
                    say(mesh=mesh, checked=check(state, abstract, number - 1))
                checkpoints.save(fill_state(abstract, number), record_of(number))
    elif command == "die":
        with Checkpoints(directory, keep=2, job=job) as checkpoints:
            abstract = like(arguments[0], "full", wide=8)
            checkpoints.save(fill_state(abstract, 1), record_of(1))
            checkpoints.wait()
            state = fill_state(abstract, 2)
            job.barrier("filled")
            checkpoints.save(state, record_of(2))
            if job.process_index == int(arguments[1]):
                os.kill(os.getpid(), signal.SIGKILL)
            checkpoints.wait()
            say(saved=2)
    elif command == "no room":
        with Checkpoints(directory, keep=2, job=job) as checkpoints:
            abstract = like(arguments[0], "full")
            checkpoints.save(fill_state(abstract, 1), record_of(1))
            checkpoints.wait()
            if job.process_index == 1:
                real = shutil.disk_usage
                shutil.disk_usage = lambda path: real(path)._replace(free=1000)  # type: ignore[assignment]
            try:
                checkpoints.save(fill_state(abstract, 2), record_of(2))
            except UserError as error:
                say(refused=error.what)
            shutil.disk_usage = real if job.process_index == 1 else shutil.disk_usage
            job.barrier("refused")
            state = fill_state(like(arguments[0], "full", wide=8), 3)
            if job.process_index == 1:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            checkpoints.save(state, record_of(3))  # what process 1 has no room for is found while it is written
            for _ in range(600):
                checkpoints.check()
                time.sleep(0.1)
    elif command == "fifty":
        state, used = fill_state(like(arguments[0], "full", wide=6), 1), []
        say(bytes=sum(shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards))
        with Checkpoints(directory, keep=2, job=job) as checkpoints:
            for number in range(50):
                checkpoints.save(state, record_of(number))
                used.append(psutil.Process().memory_info().rss)
        say(used=used)


if __name__ == "__main__":
    with start() as job:
        main(job, pathlib.Path(sys.argv[1].format(process=job.process_index)), *sys.argv[2:])
