"""Loads a model onto meshes of 8 simulated devices: `python sharded_load_cases.py MODEL RESULT.json [REFERENCE]`.

For each mesh it says whether every leaf is, bit for bit, that of one device; whether it lies as the layout says; and
what was read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

MESHES: dict[str, dict[str, int]] = {
    "dp=8": {"dp": 8},
    "fsdp=8": {"fsdp": 8},
    "tp=8": {"tp": 8},
    "fsdp=4 tp=2": {"fsdp": 4, "tp": 2},
    "fsdp=2 cp=2 tp=2": {"fsdp": 2, "cp": 2, "tp": 2},
}
METHODS = ("full", "lora", "freeze")


def bits(array: Any) -> Any:
    import numpy as np

    return np.asarray(array).view(np.uint8)


def compare(directory: pathlib.Path) -> dict[str, Any]:
    import jax
    import numpy as np

    from meshtune.mesh.axes import MeshConfig, make_mesh
    from meshtune.mesh.fit import layout_for
    from meshtune.model.spec import abstract_params
    from meshtune.model.tree import flatten
    from meshtune.weights.load import load_params, load_spec
    from meshtune.weights.load_report import LoadReport

    spec, _ = load_spec(directory)
    abstract = flatten(abstract_params(spec))
    expected = {path: bits(leaf) for path, leaf in flatten(load_params(directory, spec)).items()}
    results: dict[str, Any] = {}
    for name, sizes in MESHES.items():
        layout, _ = layout_for(make_mesh(MeshConfig(**sizes), jax.devices()), spec)
        reports: list[LoadReport] = []
        leaves = flatten(load_params(directory, spec, layout=layout, report=reports.append))
        results[name] = {
            "other": [path for path, leaf in leaves.items() if not np.array_equal(bits(leaf), expected[path])],
            "misplaced": [path for path, leaf in leaves.items() if leaf.sharding != layout.of(abstract[path])],
            "leaves": len(leaves),
            "model": sum(leaf.nbytes for leaf in leaves.values()),
            "placed": [
                sum(
                    shard.data.nbytes
                    for leaf in leaves.values()
                    for shard in leaf.addressable_shards
                    if shard.device == d
                )
                for d in jax.devices()
            ],
            "report": dataclasses.asdict(reports[0]),
            "line": reports[0].line,
        }
    return results


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    model, result = map(pathlib.Path, sys.argv[1:3])
    result.write_text(json.dumps(compare(model)))
