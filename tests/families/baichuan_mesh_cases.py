"""Baichuan2 on 8 simulated devices against one, as JSON: test_baichuan_on_meshes runs it in its own process."""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from baichuan_in_torch import SEVEN, THIRTEEN, Baichuan
from meshtune.adapters.config import FullConfig, LoraConfig
from meshtune.adapters.method import abstract, prepare
from meshtune.adapters.peft_format import BaseRecord, load_adapter, save_adapter
from meshtune.arrays.tree import merge
from meshtune.kernels.attention import zigzag_order
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import make_mesh
from meshtune.mesh.placement import place_batch
from meshtune.model.compute import Compute
from meshtune.model.gather import layout_for
from meshtune.objectives.config import SftConfig
from meshtune.objectives.sft import make
from meshtune.quantize.config import QuantizeConfig
from meshtune.weights.export import export_model
from meshtune.weights.load import load_params, load_spec

SIZES = {"hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 64, "vocab_size": 96}
LORA = LoraConfig(rank=4, train_modules=("lm_head",))
NF4 = QuantizeConfig("nf4", 32, True)
CASES = {
    "13B": (THIRTEEN | {"num_hidden_layers": 1}, LORA, NF4, {"dp": 2, "fsdp": 2, "tp": 2}),
    "13B in a ring": (THIRTEEN, LORA, NF4, {"fsdp": 2, "tp": 2, "cp": 2}),
    "7B": (SEVEN, FullConfig(), None, {"dp": 2, "fsdp": 2, "tp": 2}),
}


def batch_of(order=None) -> dict[str, np.ndarray]:
    """Four rows of two documents each."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 96, (4, 65))
    positions = np.concatenate([np.arange(25), np.arange(39)])
    arrays = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.broadcast_to(positions, (4, 64)),
        "segment_ids": np.broadcast_to(np.repeat([1, 2], [25, 39]), (4, 64)),
    }
    weights = np.ones((4, 64), np.float32)
    weights[:, 24] = 0.0
    return {name: array.astype(np.int32) for name, array in arrays.items()} | {"weights": weights}


def move_weights(trainable):
    """As training might leave it; the same on every mesh."""
    return jax.tree.map(lambda leaf: leaf + 0.03 * jnp.cos(jnp.arange(leaf.size).reshape(leaf.shape)), trainable)


def case(name: str, folder: pathlib.Path) -> dict:
    config, method, quantize, axes = CASES[name]
    config, out = config | SIZES, folder
    folder = folder / "base"
    folder.mkdir()
    save_file(
        {n: w.detach().numpy().copy() for n, w in Baichuan(config).named_parameters()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))
    plain, _ = load_spec(folder)
    spec = abstract(method, plain, quantize=quantize).spec
    updates, loaded = [], []
    for mesh in (None, axes):
        layout = None if mesh is None else layout_for(make_mesh(MeshConfig(**mesh)), spec)[0]
        order = zigzag_order(64, mesh["cp"]) if mesh and "cp" in mesh else None
        params = load_params(folder, spec, layout=layout, quantize=quantize)
        loaded.append([np.asarray(leaf) for leaf in jax.tree.leaves(params)])
        pack = params["layers"]["0.0"]["attn"]["qkv"]["weight"]
        prepared = prepare(method, spec, params, jax.random.key(1), layout=layout)
        trainable = jax.jit(move_weights, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, prepared.trainable))(
            prepared.trainable
        )
        objective, compute = make(SftConfig()), Compute(loss_chunk=16, layout=layout)

        def loss(trainable, frozen, batch, objective=objective, compute=compute):
            score = objective(merge(trainable, frozen), spec, compute, batch, None)
            return score.loss / score.weight

        value, gradient = jax.jit(jax.value_and_grad(loss))(
            trainable, prepared.frozen, place_batch(batch_of(), layout, order)
        )
        updates.append((float(value), gradient, trainable, layout))
    (single, gradient, trainable, _), (value, mesh_gradient, on_mesh, layout) = updates
    errors = [
        float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())
        for a, b in zip(jax.tree.leaves(mesh_gradient), jax.tree.leaves(gradient), strict=True)
    ]
    result = {"losses": [single, value], "errors": errors, "loaded": all(map(np.array_equal, *loaded))}
    result["split"] = [
        list(part) if isinstance(part, tuple) else part for part in jax.tree.leaves(pack)[0].sharding.spec
    ]
    if quantize is None:
        export_model(on_mesh, spec, folder, out / "mesh", layout=layout)
        export_model(trainable, spec, folder, out / "one")
        files = [load_file(out / name / "model.safetensors") for name in ("mesh", "one")]
        result["written"] = all(np.array_equal(files[0][n], files[1][n]) for n in files[1])
        model = Baichuan(config)
        model.load_state_dict({n: torch.tensor(w) for n, w in files[0].items()})
        batch, sums = {n: torch.tensor(a).long() for n, a in batch_of().items()}, 0.0
        for document, learned in ((slice(0, 25), 24), (slice(25, 64), 39)):
            with torch.no_grad():
                logits = model(batch["tokens"][:, document])[:, :learned].flatten(0, 1)
            targets = batch["targets"][:, document][:, :learned].flatten()
            sums += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        result["losses"].append(sums / float(batch_of()["weights"].sum()))
    else:
        save_adapter(out / "mesh", on_mesh, spec, method, BaseRecord("base"))
        save_adapter(out / "one", trainable, spec, method, BaseRecord("base"))
        files = [load_file(out / n / "adapter_model.safetensors") for n in ("mesh", "one")]
        result["written"] = all(np.array_equal(files[0][n], files[1][n]) for n in files[1])
        again = load_adapter(out / "one", plain, layout).trainable
        result["read"] = all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(trainable)))
    return result


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        json.dump(case(sys.argv[1], pathlib.Path(folder)), sys.stdout)
