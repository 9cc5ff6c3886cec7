"""One process that loads a model: `python load_member.py ORDER.json PROCESS`.

ORDER: model, mesh {axis: size}, processes, port, and optionally broadcast, replicas, group, quantize (a format),
digests (say what every device holds). It prints one line of JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import resource
import sys
from typing import Any

import jax
import numpy as np

from meshtune.arrays.tree import named_leaves
from meshtune.errors import UserError
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import make_mesh
from meshtune.model.gather import layout_for
from meshtune.quantize.config import QuantizeConfig
from meshtune.weights.load import LoadReport, load_params, load_spec, resident


def high_water() -> int:
    """The most this process has held, as the kernel counts it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load(order: dict[str, Any]) -> dict[str, Any]:
    directory = pathlib.Path(order["model"])
    spec, _ = load_spec(directory)
    layout, _ = layout_for(make_mesh(MeshConfig(**order["mesh"]), jax.devices()), spec)
    reports: list[LoadReport] = []
    jax.numpy.zeros(3).block_until_ready()
    before = resident()
    params = load_params(
        directory,
        spec,
        layout=layout,
        quantize=QuantizeConfig(order["quantize"]) if "quantize" in order else None,
        broadcast=order.get("broadcast", False),
        replicas=order.get("replicas", False),
        group=order.get("group"),
        report=reports.append,
    )
    leaves = dict(named_leaves(params))
    facts: dict[str, Any] = {
        "before": before,
        "peak": high_water(),
        "local": sum(s.data.nbytes for leaf in leaves.values() for s in leaf.addressable_shards),
        "distinct": sum(
            shard.data.nbytes
            for leaf in leaves.values()
            for shard in {str(s.index): s for s in leaf.addressable_shards}.values()
        ),
        "report": dataclasses.asdict(reports[0]),
        "line": reports[0].line,
    }
    if order.get("digests"):
        facts["digests"] = {
            f"{path} {[part.indices(n)[:2] for part, n in zip(shard.index, leaf.shape, strict=True)]}": hashlib.sha256(
                np.asarray(shard.data).tobytes()
            ).hexdigest()
            for path, leaf in leaves.items()
            for shard in leaf.addressable_shards
        }
    return facts


def main() -> None:
    order = json.loads(sys.argv[1])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", order.get("devices", 1))
    if order["processes"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{order['port']}", order["processes"], int(sys.argv[2]))
    try:
        print(json.dumps(load(order)), flush=True)
    except UserError as error:
        print(json.dumps({"error": error.what}), flush=True)


if __name__ == "__main__":
    main()
