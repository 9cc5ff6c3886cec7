"""Attention and loss on a mesh: the results are those of one device, and only sums are exchanged."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Runs in a separate process, because the number of CPU devices is fixed when JAX starts.
PROGRAM = """
import json, re
import jax
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshtune.kernels.attention import AttentionSharding, attention
from meshtune.kernels.cross_entropy import cross_entropy
from meshtune.kernels.cross_entropy import LossSharding

DP, TP = SIZES
sizes, names = ((DP, TP), ("dp", "tp")) if TP > 1 else ((DP,), ("dp",))
mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[:DP * TP])
random = np.random.default_rng(0)
B, T, H, K, h, V = 8, 130, 4, 2, 8, 96
q, k, v = (random.normal(size=(B, T, n, h)).astype(np.float32) for n in (H, K, K))
head = {"weight": random.normal(size=(V, H * h)).astype(np.float32), "bias": random.normal(size=V).astype(np.float32)}
head["weight"][5] = head["weight"][70] = head["weight"][71]  # equal logits: the first one is the prediction
head["bias"][5] = head["bias"][70] = head["bias"][71] = 2.0
segments = np.sort(random.integers(0, 3, (B, T)), 1).astype(np.int32)
positions = np.tile(np.arange(T, dtype=np.int32), (B, 1))
targets = random.integers(0, V, (B, T)).astype(np.int32)
targets[:, ::5], targets[:, 1::5] = 5, 70
weights = random.integers(0, 2, (B, T)).astype(np.float32)

def make(sharding, loss_sharding):
    def loss(qkv, head, rows):
        segments, positions, targets, weights = rows
        out = attention(*qkv, q_positions=positions, kv_positions=positions, q_segments=segments, kv_segments=segments,
                        scale=0.3, backend="BACKEND", aligned=True, sharding=sharding)
        out = out.reshape(B, T, -1)
        loss, correct = cross_entropy(lambda p, x: x @ p["weight"].T + p["bias"], head, out, targets, weights,
                                      chunk=32, sharding=loss_sharding)
        return loss, correct
    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

arguments = (q, k, v), head, (segments, positions, targets, weights)
single = make(None, None)(*arguments)
vocab = "tp" if TP > 1 else None
step = make(AttentionSharding(mesh, ("dp",), vocab), LossSharding(mesh, P("dp"), (P(vocab), P(vocab)), vocab))
put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))
sharded = put(arguments[0], P("dp")), put(head, P(vocab)), put(arguments[2], P("dp"))
text = step.lower(*sharded).compile().as_text()
multiple = step(*sharded)
collectives = re.findall(r"= (.*?) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)\\(", text)
shapes = [shape for result, _ in collectives for shape in re.findall(r"\\[([\\d,]*)\\]", result)]
pairs = zip(jax.tree.leaves(single[1]), jax.tree.leaves(multiple[1]))
print(json.dumps({
    "collectives": sorted({name for _, name in collectives}), "shapes": sorted(set(shapes)),
    "sums": [[float(result[0][0]), float(result[0][1])] for result in (single, multiple)],
    "difference": max(float(abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs),
}))
"""


def run(sizes, backend):
    program = PROGRAM.replace("BACKEND", backend).replace("SIZES", str(sizes))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    # Sums of up to 8 x 130 terms of size one in another order.
    assert results["difference"] < 2e-5
    assert results["sums"][1] == pytest.approx(results["sums"][0], rel=1e-6)
    return results


@pytest.mark.parametrize("backend", [pytest.param("direct", marks=pytest.mark.slow), "blockwise"])
def test_rows_are_not_exchanged_between_devices(backend):
    """Only the sums and the gradient of the head, which all rows share, are reduced."""
    results = run((4, 1), backend)
    assert results["collectives"] == ["all-reduce"]
    assert set(results["shapes"]) <= {"", "96", "96,32"}


def test_a_sharded_vocabulary_exchanges_sums_and_never_logits():
    results = run((2, 4), "blockwise")
    assert not [shape for shape in results["shapes"] if "96" in shape.split(",")], "a device has the whole vocabulary"
