"""Loads a model onto meshes of 8 simulated devices: `python sharded_load_cases.py MODEL RESULT.json [slow]`.

For each mesh it says whether every leaf is, bit for bit, that of one device; whether it lies as the layout says; and
the bytes read.
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
PREPARED = [("fsdp=2 cp=2 tp=2", "full"), ("fsdp=2 cp=2 tp=2", "lora")]
PREPARED_SLOWLY = [("fsdp=4 tp=2", "freeze"), ("tp=8", "full"), ("tp=8", "lora"), ("tp=8", "freeze")]


def bits(array: Any) -> Any:
    import numpy as np

    return np.asarray(array).view(np.uint8)


def compare(directory: pathlib.Path) -> dict[str, Any]:
    import jax
    import numpy as np

    from meshtune.arrays.tree import flatten
    from meshtune.mesh.config import MeshConfig
    from meshtune.mesh.layout import make_mesh
    from meshtune.model.gather import layout_for
    from meshtune.model.spec import abstract_params
    from meshtune.weights.load import LoadReport, load_params, load_spec

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


def compare_prepared(directory: pathlib.Path, cases: list[tuple[str, str]]) -> dict[str, Any]:
    """The same for what methods make of the model, trainable and frozen."""
    import jax
    import numpy as np

    from meshtune.adapters.config import FreezeConfig, FullConfig, LoraConfig
    from meshtune.adapters.method import abstract, prepare
    from meshtune.adapters.training_method import Method
    from meshtune.mesh.config import MeshConfig
    from meshtune.mesh.layout import make_mesh
    from meshtune.model.gather import layout_for
    from meshtune.weights.load import load_params, load_spec

    methods: dict[str, Method] = {
        "full": FullConfig(),
        "lora": LoraConfig(rank=8, targets="all-linear", train_modules=("norm",)),
        "freeze": FreezeConfig(last_layers=1),
    }
    spec, _ = load_spec(directory)
    results: dict[str, Any] = {}
    for mesh, name in cases:
        method = methods[name]
        plan = abstract(method, spec)
        layout, _ = layout_for(make_mesh(MeshConfig(**MESHES[mesh]), jax.devices()), spec)
        single = prepare(method, spec, load_params(directory, spec), jax.random.key(7))
        params = load_params(directory, plan.spec, layout=layout)
        loaded_ids = set(map(id, jax.tree.leaves(params)))
        many = prepare(method, plan.spec, params, jax.random.key(7), layout=layout)
        assert many.spec == single.spec == plan.spec
        results[f"{mesh}, {name}"] = {"leaves": 0, "other": [], "misplaced": [], "kept": 0, "emptied": params == {}}
        counts = results[f"{mesh}, {name}"]
        for tree in ("trainable", "frozen"):
            described = jax.tree_util.tree_leaves_with_path(getattr(plan, tree))
            ones, manys = jax.tree.leaves(getattr(single, tree)), jax.tree.leaves(getattr(many, tree))
            for (path, array), a, b in zip(described, ones, manys, strict=True):
                where = jax.tree_util.keystr(path)
                counts["leaves"] += 1
                counts["kept"] += id(b) in loaded_ids
                if a.dtype != array.dtype or b.dtype != array.dtype or not np.array_equal(bits(a), bits(b)):
                    counts["other"].append(where)
                if b.sharding != layout.of(array):
                    counts["misplaced"].append(where)
    return results


if __name__ == "__main__":
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    model, result = map(pathlib.Path, sys.argv[1:3])
    if sys.argv[3:] == ["slow"]:
        report = {"prepared": compare_prepared(model, PREPARED_SLOWLY)}
    else:
        report = {"loaded": compare(model), "prepared": compare_prepared(model, PREPARED)}
    result.write_text(json.dumps(report))
