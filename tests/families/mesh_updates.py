"""Updates of a model on simulated devices, as JSON: `mesh_updates.py DIRECTORY METHOD MESHES [RATE]`. The first is one
device. With a rate every update moves the correction biases of routers by it.

Runs as a separate process, since the number of devices is fixed when JAX starts. Everything that the program computes
in float32 is computed in float64 then: the order of a sum, which a mesh changes, is then of no account. In float32
three updates of an untrained recurrent model make a difference of 1e-7 in the first one into 1e-4.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

DEVICES, UPDATES, ROWS, LENGTH = 4, 3, 4, 32


def batches(vocab: int) -> list[dict[str, Any]]:
    """[1, ROWS, LENGTH] arrays of two packed documents a row."""
    import numpy as np

    rng = np.random.default_rng(3)
    lengths = (13, LENGTH - 13)
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    segments = np.repeat([1, 2], lengths).astype(np.int32)
    weights = np.ones((1, ROWS, LENGTH), np.float32)
    weights[..., lengths[0] - 1] = 0
    tokens = [rng.integers(0, vocab, (1, ROWS, LENGTH + 1)).astype(np.int32) for _ in range(UPDATES)]
    return [
        {
            "tokens": row[..., :-1],
            "targets": row[..., 1:],
            "positions": np.broadcast_to(positions, (1, ROWS, LENGTH)),
            "segment_ids": np.broadcast_to(segments, (1, ROWS, LENGTH)),
            "weights": weights,
        }
        for row in tokens
    ]


def trajectory(
    directory: pathlib.Path, method_name: str, axes: dict[str, int] | None, bias_rate: float | None = None
) -> dict[str, list[Any]]:
    """Losses and gradient norms of the updates, and the norm of each trained leaf and all buffers after them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from meshtune.adapters.config import FullConfig, LoraConfig
    from meshtune.adapters.method import abstract, prepare
    from meshtune.families.balancing import with_bias_update_rate
    from meshtune.kernels.attention import zigzag_order
    from meshtune.mesh.config import MeshConfig
    from meshtune.mesh.layout import make_mesh
    from meshtune.mesh.placement import place_batch
    from meshtune.model.compute import Compute
    from meshtune.model.gather import layout_for
    from meshtune.objectives.sft import sft_objective
    from meshtune.optim.build import OptimizerConfig, make_optimizer
    from meshtune.train.step.build import make_train_step
    from meshtune.train.step.state import abstract_state, init_state
    from meshtune.weights.load import load_params, load_spec

    method = FullConfig() if method_name == "full" else LoraConfig(rank=4, targets=json.loads(method_name))
    plain = with_bias_update_rate(load_spec(directory, "float32")[0], bias_rate)
    arrays = abstract(method, plain)
    layout, order, like = None, None, None
    # SGD's updates are the gradients themselves: a small one that is wrong in size is seen, which Adam would rescale.
    optimizer, _ = make_optimizer(OptimizerConfig("sgd", 1e-2, "constant"), 10, arrays.trainable, arrays.spec)
    if axes is not None:
        mesh = MeshConfig(**axes)
        layout, _ = layout_for(make_mesh(mesh, jax.devices()[: mesh.devices]), arrays.spec)
        like = abstract_state(arrays.trainable, optimizer, layout, buffers=arrays.buffers)
        order = zigzag_order(LENGTH, mesh.cp) if mesh.cp > 1 else None
    params = load_params(directory, arrays.spec, layout=layout)
    prepared = prepare(method, arrays.spec, params, jax.random.key(0), layout=layout)
    dtype = "float64" if jax.config.jax_enable_x64 else "float32"

    def widen(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if x.dtype == "float32" else x  # codes stay as they are

    trainable, frozen, buffers = jax.tree.map(widen, (prepared.trainable, prepared.frozen, prepared.buffers))
    compute = Compute(dtype=dtype, loss_chunk=8, layout=layout)
    trained = {"abstract": arrays.trainable, "buffers": arrays.buffers}
    step = make_train_step(sft_objective, arrays.spec, compute, optimizer, **trained)
    state, losses, norms = init_state(trainable, optimizer, like, buffers), [], []
    for batch in batches(plain.vocab):
        state, metrics = step(state, frozen, place_batch(batch, layout, order), jnp.int32(0))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    leaves = [float(np.linalg.norm(jax.device_get(leaf))) for leaf in jax.tree.leaves(state.trainable)]
    buffers = [jax.device_get(leaf).tolist() for leaf in jax.tree.leaves(state.buffers)]
    return {"loss": losses, "grad_norm": norms, "trained": leaves, "buffers": buffers}


if __name__ == "__main__":
    flags = f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
    os.environ |= {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}", "JAX_PLATFORMS": "cpu"}
    import jax
    import jax.numpy

    if "float32" not in sys.argv[4:]:  # of codes whose scales are made of bits
        jax.config.update("jax_enable_x64", True)
        jax.numpy.float32 = jax.numpy.float64
    folder, method, meshes = pathlib.Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    rate = next((float(word) for word in sys.argv[4:] if word != "float32"), None)
    print(json.dumps([trajectory(folder, method, axes, rate) for axes in (None, *meshes)]))
