"""Loss and norms of all gradients of a model that sees, on one device and on eight, as JSON: `mesh_step.py MODEL DIR`,
where DIR/batch.npz holds the arrays of a batch of four rows.

Runs as a separate process, since the number of devices is fixed when JAX starts. What the program computes in float32
is computed in float64 then: the order of a sum, which a mesh changes, is then of no account.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys


def norms(model: pathlib.Path, arrays: pathlib.Path, axes: dict[str, int] | None) -> dict[str, float]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from families.vision.sights import mean_loss
    from meshtune.arrays.tree import flatten
    from meshtune.mesh.config import MeshConfig
    from meshtune.mesh.layout import make_mesh
    from meshtune.mesh.placement import place_batch
    from meshtune.model.compute import Compute
    from meshtune.model.gather import layout_for
    from meshtune.weights.load import load_params, load_spec

    spec, _ = load_spec(model, "float32", vision=True)
    layout = None if axes is None else layout_for(make_mesh(MeshConfig(**axes)), spec)[0]
    params = load_params(model, spec, layout=layout)
    params = jax.tree.map(lambda x: x.astype("float64"), params)
    batch = place_batch(dict(np.load(arrays / "batch.npz")), layout)
    compute = Compute(dtype="float64", attention="direct", layout=layout, remat="full")
    loss, gradient = jax.jit(jax.value_and_grad(mean_loss), static_argnums=(1, 3))(params, spec, batch, compute)
    gradients = {path: float(jnp.linalg.norm(leaf)) for path, leaf in flatten(gradient).items()}
    return {"loss": float(loss)} | gradients


if __name__ == "__main__":
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    import jax
    import jax.numpy

    jax.config.update("jax_enable_x64", True)
    jax.numpy.float32 = jax.numpy.float64
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    paths = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    print(json.dumps([norms(*paths, axes) for axes in (None, {"dp": 2, "fsdp": 2, "tp": 2})]))
