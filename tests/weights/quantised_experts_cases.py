"""Loads a mixture with doubly quantised experts on one device and on meshes of four simulated ones:
`python quantised_experts_cases.py MODEL`. Prints, as JSON, the leaves whose bits differ from those quantised whole."""

from __future__ import annotations

import json
import os
import sys

MESHES = ({}, {"ep": 2, "fsdp": 2}, {"ep": 2, "tp": 2}, {"fsdp": 4})


def main(directory: str) -> None:
    import jax
    import numpy as np

    from meshtune.adapters.config import LoraConfig
    from meshtune.adapters.method import abstract
    from meshtune.arrays.tree import flatten
    from meshtune.mesh.config import MeshConfig
    from meshtune.mesh.layout import make_mesh
    from meshtune.model.gather import layout_for
    from meshtune.quantize.config import QuantizeConfig
    from meshtune.quantize.weight import QuantisedWeight
    from meshtune.weights.load import load_params, load_spec

    quantize = QuantizeConfig("nf4", 8, double=True)
    plain, _ = load_spec(directory, "float32")
    full = flatten(load_params(directory, plain))
    spec = abstract(LoraConfig(rank=4, targets="all-linear"), plain, quantize=quantize).spec
    different: dict[str, list[str]] = {}
    for axes in MESHES:
        mesh = MeshConfig(**axes)
        layout = layout_for(make_mesh(mesh, jax.devices()[: mesh.devices]), spec)[0] if axes else None
        leaves = flatten(load_params(directory, spec, quantize=quantize, layout=layout))
        quantised = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, QuantisedWeight)}
        assert any("experts" in path for path in quantised)
        different[json.dumps(axes)] = [
            f"{path}/{part}"
            for path, leaf in quantised.items()
            for expected in [QuantisedWeight.quantise(full[path], quantize)]
            for part in ("codes", "scales", "nested", "offset")
            if not np.array_equal(np.asarray(getattr(leaf, part)), np.asarray(getattr(expected, part)))
        ]
    print(json.dumps(different))


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"
    main(*sys.argv[1:])
