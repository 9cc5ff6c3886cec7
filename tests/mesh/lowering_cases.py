"""Training steps of models that no test machine could hold, traced for meshes of simulated devices.

A program: `lowering_cases.py OUT.json DEVICES CASE ...`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
import sys
from typing import Any

LLAMA_70B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
LLAMA_405B = LLAMA_70B | {
    "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    mesh: dict[str, int]
    rows: int
    length: int
    method: str = "lora"

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())


CASES = {
    "405B LoRA, fsdp=8": Case("405B", {"fsdp": 8}, 8, 4096),
    "405B LoRA, fsdp=4 tp=2": Case("405B", {"fsdp": 4, "tp": 2}, 8, 4096),
    "405B LoRA, fsdp=8 tp=2": Case("405B", {"fsdp": 8, "tp": 2}, 8, 4096),
    "405B LoRA, tp=16": Case("405B", {"tp": 16}, 16, 64),
    "70B full, fsdp=8": Case("70B", {"fsdp": 8}, 8, 2048, "full"),
    "70B full, dp=2 fsdp=8": Case("70B", {"dp": 2, "fsdp": 8}, 16, 2048, "full"),
    "70B LoRA, fsdp=2 cp=4 tp=2": Case("70B", {"fsdp": 2, "cp": 4, "tp": 2}, 2, 131072),
}


def lower_step(case: Case, layers: int | None = None) -> tuple[Any, dict[str, Any]]:
    """The lowered step, and the bytes on one device of each kind of argument."""
    import jax
    import numpy as np

    from meshtune.adapters.config import FullConfig, LoraConfig
    from meshtune.adapters.method import abstract
    from meshtune.families import model_spec
    from meshtune.mesh.config import MeshConfig
    from meshtune.mesh.layout import make_mesh
    from meshtune.model.compute import Compute
    from meshtune.model.gather import layout_for
    from meshtune.objectives.sft import sft_objective
    from meshtune.optim.build import OptimizerConfig, make_optimizer
    from meshtune.train.step.build import make_train_step
    from meshtune.train.step.state import abstract_state

    config = {"70B": LLAMA_70B, "405B": LLAMA_405B}[case.model]
    spec = model_spec(config | {"num_hidden_layers": layers or config["num_hidden_layers"]}, "bfloat16")
    layout, _ = layout_for(make_mesh(MeshConfig(**case.mesh), jax.devices()[: case.devices]), spec)
    method = FullConfig() if case.method == "full" else LoraConfig(rank=8)
    arrays = abstract(method, spec, "bfloat16" if case.method == "full" else "float32")
    optimizer, _ = make_optimizer(OptimizerConfig(), 10, arrays.trainable)
    state = abstract_state(arrays.trainable, optimizer, layout)
    frozen = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=layout.of(a)), arrays.frozen)
    compute = Compute("bfloat16", "full", 64, layout=layout, attention="blockwise")
    step = make_train_step(sft_objective, arrays.spec, compute, optimizer, max_grad_norm=1.0, abstract=arrays.trainable)
    shape = (1, case.rows, case.length)
    batch_sharding = layout.sharding(("whole", "batch", "length"), shape)
    dtypes = {"weights": np.float32} | dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), np.int32)
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=batch_sharding) for name, dtype in dtypes.items()}

    def local_bytes(tree: Any) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)

    sizes = {
        "frozen": local_bytes(frozen),
        "trainable": local_bytes(state.trainable),
        "optimizer": local_bytes(state.opt_state),
    }
    step: Any = step
    return step.lower(state, frozen, batch, jax.ShapeDtypeStruct((), np.int32)), sizes


def collectives(text: str) -> dict[str, list[list[int]]]:
    """The shapes of the results of every collective operation in a compiled program."""
    shapes_by_name: dict[str, list[list[int]]] = {}
    pattern = r"= (.*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
    for result, name in re.findall(pattern, text):
        shapes = [[int(n) for n in dims.split(",") if n] for dims in re.findall(r"\[([\d,]*)\]", result)]
        shapes_by_name.setdefault(name, []).extend(shapes)
    return shapes_by_name


def main(out: str, names: list[str], compiled: bool) -> None:
    results = {}
    for name in names:
        program, sizes = lower_step(CASES[name], layers=4 if compiled else None)
        results[name] = sizes | {"text": len(program.as_text())}
        if compiled:
            results[name]["collectives"] = collectives(program.compile().as_text())
    pathlib.Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    devices = f"--xla_force_host_platform_device_count={sys.argv[2]}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    main(sys.argv[1], [name for name in sys.argv[3:] if name != "--compile"], "--compile" in sys.argv)
