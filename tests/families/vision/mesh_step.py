"""Loss and norms of all gradients of a model that sees, on one device and on eight, as JSON: `mesh_step.py MODEL DIR`,
where DIR/batch.npz holds the arrays of a batch of four rows. First of every weight, then of adapters over nf4.

Runs as a separate process, since the number of devices is fixed when JAX starts. What the program computes in float32
is computed in float64 then: the order of a sum, which a mesh changes, is then of no account.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

MESH = {"dp": 2, "fsdp": 2, "tp": 2}


def norms(
    model: pathlib.Path, arrays: pathlib.Path, axes: dict[str, int] | None, *, adapters: bool
) -> dict[str, float]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from families.vision.sights import mean_loss, tower_targets
    from meshtune.adapters.config import FullConfig, LoraConfig
    from meshtune.adapters.method import abstract, prepare
    from meshtune.adapters.training_method import VisionTraining
    from meshtune.arrays.tree import merge
    from meshtune.mesh.config import MeshConfig
    from meshtune.mesh.layout import make_mesh
    from meshtune.mesh.placement import place_batch
    from meshtune.model.compute import Compute
    from meshtune.model.gather import layout_for
    from meshtune.quantize.config import QuantizeConfig
    from meshtune.weights.load import load_params, load_spec

    spec, _ = load_spec(model, "float32", vision=True)
    method, quantize = FullConfig(train_router=True), None
    vision = VisionTraining(("projector", "tower"), False)
    if adapters:
        method, quantize, vision = LoraConfig(rank=2, targets=tower_targets(spec)), QuantizeConfig("nf4", 8), None
    spec = abstract(method, spec, quantize=quantize, vision=vision).spec
    layout = None if axes is None else layout_for(make_mesh(MeshConfig(**axes)), spec)[0]
    params = load_params(model, spec, layout=layout, quantize=quantize)
    prepared = prepare(method, spec, params, jax.random.key(0), layout=layout, vision=vision)
    batch = place_batch(dict(np.load(arrays / "batch.npz")), layout)
    compute = Compute(dtype="float64", attention="direct", layout=layout, remat="full")

    def move(leaf: jax.Array) -> jax.Array:  # adapters start at zero
        leaf = leaf.astype("float64")
        return leaf + 0.05 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape) if adapters else leaf

    def loss(trainable: dict, frozen: dict) -> jax.Array:
        return mean_loss(merge(trainable, frozen), prepared.spec, batch, compute)

    trainable, frozen = jax.tree.map(move, prepared.trainable), prepared.frozen
    if not adapters:
        frozen = jax.tree.map(lambda leaf: leaf.astype("float64"), frozen)
    value, gradient = jax.jit(jax.value_and_grad(loss))(trainable, frozen)
    leaves = jax.tree_util.tree_leaves_with_path(gradient)
    gradients = {jax.tree_util.keystr(path): float(jnp.linalg.norm(leaf)) for path, leaf in leaves}
    return {"loss": float(value)} | gradients


if __name__ == "__main__":
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    import jax
    import jax.numpy

    jax.config.update("jax_enable_x64", True)
    jax.numpy.float32 = jax.numpy.float64
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
    paths = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    forms = {"every weight": False, "adapters over nf4": True}
    print(json.dumps({name: [norms(*paths, axes, adapters=on) for axes in (None, MESH)] for name, on in forms.items()}))
