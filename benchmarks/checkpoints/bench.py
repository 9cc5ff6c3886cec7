"""Seconds and bytes of checkpoints of a model of some 100M parameters, per process.

python benchmarks/checkpoints/bench.py            both jobs: 1 process x 8 simulated devices, 2 processes x 4
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time

CONFIG = {
    "model_type": "llama",
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


def member(directory: pathlib.Path) -> None:
    import jax
    import numpy as np

    from meshtune.adapters.config import FullConfig, LoraConfig
    from meshtune.adapters.method import abstract, count
    from meshtune.families import model_spec
    from meshtune.mesh.config import MeshConfig
    from meshtune.mesh.layout import make_mesh
    from meshtune.mesh.processes import start
    from meshtune.model.gather import layout_for
    from meshtune.optim.build import OptimizerConfig, make_optimizer
    from meshtune.train.checkpoint.checkpoints import Checkpoints, Record
    from meshtune.train.step.state import abstract_state

    with start() as job:
        spec = model_spec(CONFIG, "float32")
        layout, _ = layout_for(make_mesh(MeshConfig(fsdp=4, tp=2)), spec)
        for name, method in (("LoRA, rank 16", LoraConfig(rank=16)), ("full", FullConfig())):
            plan = abstract(method, spec)
            optimizer, _ = make_optimizer(OptimizerConfig(learning_rate=1e-3), 10, plan.trainable)
            like = abstract_state(plan.trainable, optimizer, layout)

            def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
                def part(index: tuple[slice, ...]) -> np.ndarray:
                    ranges = [cut.indices(n) for cut, n in zip(index, leaf.shape, strict=True)]
                    shape = tuple(stop - start for start, stop, _ in ranges)
                    random = np.random.default_rng([0, *(start for start, _, _ in ranges)])  # replicas are equal
                    return random.standard_normal(shape, np.float32).astype(leaf.dtype)

                return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

            state = jax.tree.map(fill, like)
            place = directory / name
            found: dict[str, object] = {"state": name, "process": job.process_index, "trained": count(plan).trainable}
            with Checkpoints(place, keep=1, job=job) as checkpoints:
                goes_on, on_disk = [], []
                for number in range(3):
                    job.barrier("begin")
                    began = time.perf_counter()
                    checkpoints.save(state, Record(number, 0, {}, "", "", ""))
                    goes_on.append(time.perf_counter() - began)
                    checkpoints.wait()
                    on_disk.append(time.perf_counter() - began)
                job.barrier("begin")
                began = time.perf_counter()
                back = jax.block_until_ready(checkpoints.restore(2, like))
                restore = time.perf_counter() - began
                for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
                    for ours, theirs in zip(one.addressable_shards, other.addressable_shards, strict=True):
                        assert np.asarray(ours.data).tobytes() == np.asarray(theirs.data).tobytes()
                own = place / "2/state" / f"ocdbt.process_{job.process_index}"
                found |= {
                    "seconds until training goes on": round(sorted(goes_on)[1], 3),
                    "seconds until on disk": round(sorted(on_disk)[1], 2),
                    "seconds to restore": round(restore, 2),
                    "MB written": round(sum(f.stat().st_size for f in own.rglob("*") if f.is_file()) / 1e6, 1),
                    "MB of state": round(sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e6, 1),
                }
            del back, state
            print(json.dumps(found), flush=True)


def job(processes: int, devices: int) -> list[dict[str, object]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    directory = tempfile.mkdtemp()
    common = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "MESHTUNE_COORDINATOR": f"localhost:{port}",
        "MESHTUNE_PROCESSES": str(processes),
    }
    command = [sys.executable, __file__, "--member", directory]
    started = [
        subprocess.Popen(command, env=common | {"MESHTUNE_PROCESS": str(n)}, stdout=subprocess.PIPE, text=True)
        for n in range(processes)
    ]
    said = [process.communicate()[0] for process in started]
    shutil.rmtree(directory)
    assert all(process.returncode == 0 for process in started)
    return [json.loads(line) for lines in said for line in lines.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--member")
    parser.add_argument("--processes", type=int, choices=(1, 2), help="only this job")
    asked = parser.parse_args()
    if asked.member:
        member(pathlib.Path(asked.member))
    else:
        for processes, devices in ((1, 8), (2, 4)):
            if asked.processes not in (None, processes):
                continue
            print(f"{processes} x {devices}, load average {os.getloadavg()[0]:.1f}")
            for line in sorted(job(processes, devices), key=lambda line: (str(line["state"]), line["process"])):
                print(json.dumps(line), flush=True)
