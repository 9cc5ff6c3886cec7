"""The kernels where the batch is split over devices: the same numbers, and nothing of a row leaves its device."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Its own process: the number of CPU devices is settled when JAX starts.
PROGRAM = """
import json, re
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshtune.kernels.attention import attention
from meshtune.kernels.cross_entropy import cross_entropy

mesh = jax.make_mesh((4,), ("dp",), axis_types=(AxisType.Auto,))
random = np.random.default_rng(0)
B, T, H, K, h, V = 8, 130, 4, 2, 8, 96
q, k, v = (random.normal(size=(B, T, n, h)).astype(np.float32) for n in (H, K, K))
head_weight = random.normal(size=(V, H * h)).astype(np.float32)
segments = np.sort(random.integers(0, 3, (B, T)), 1).astype(np.int32)
positions = np.tile(np.arange(T, dtype=np.int32), (B, 1))
targets = random.integers(0, V, (B, T)).astype(np.int32)
weights = random.integers(0, 2, (B, T)).astype(np.float32)

def loss(qkv, rows, weight):
    segments, positions, targets, weights = rows
    out = attention(*qkv, q_positions=positions, kv_positions=positions, q_segments=segments, kv_segments=segments,
                    scale=0.3, backend="BACKEND", aligned=True)
    return cross_entropy(lambda w, x: x @ w.T, weight, out.reshape(B, T, -1), targets, weights, chunk=32)[0]

step = jax.jit(jax.value_and_grad(loss))
arguments = (q, k, v), (segments, positions, targets, weights)
alone = step(*arguments, head_weight)
split = jax.device_put(arguments, NamedSharding(mesh, P("dp")))
weight = jax.device_put(head_weight, NamedSharding(mesh, P()))
text = step.lower(*split, weight).compile().as_text()
together = step(*split, weight)
moved = re.findall(r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)\\(", text)
shapes = [shape for result, _ in moved for shape in re.findall(r"\\[([\\d,]*)\\]", result)]
sizes = [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes]
print(json.dumps({
    "collectives": sorted({name for _, name in moved}), "largest": max(sizes, default=0),
    "loss": [float(alone[0]), float(together[0])],
    "apart": max(float(abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(alone[1], together[1])),
    "split": all(x.sharding.spec == P("dp") for x in together[1]),
}))
"""


@pytest.mark.parametrize("backend", ["direct", "blockwise"])
def test_rows_stay_on_their_devices(backend):
    """Only sums of scalars and the small table of blocks that anyone sees are exchanged; 1e-5 for the order of sums."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("BACKEND", backend)], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["collectives"] == ["all-reduce"]
    assert found["largest"] <= 9  # blocks of 64 tokens: a table of 3 x 3
    assert found["split"]
    assert found["apart"] < 1e-5
    assert found["loss"][1] == pytest.approx(found["loss"][0], rel=1e-6)
