"""Losses and gradients of stages on simulated devices, as JSON: test_stages_on_meshes runs it in its own process."""

from __future__ import annotations

import json
import math
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from units_of import loader_of, random_pairs

from families.cases import BY_NAME
from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import abstract, prepare
from meshtune.arrays.batch import TOKEN_ARRAYS
from meshtune.arrays.tree import merge
from meshtune.families import model_spec, scored_spec
from meshtune.kernels.attention import zigzag_order
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import make_mesh
from meshtune.mesh.placement import place_batch, shardings
from meshtune.model.compute import Compute
from meshtune.model.gather import layout_for
from meshtune.model.spec import abstract_params, init_params
from meshtune.objectives.answers import CRITIC, metric_means
from meshtune.objectives.critic import abstract_critic, start_critic
from meshtune.objectives.stages import STAGES

MESHES = ({"dp": 2, "cp": 2}, {"fsdp": 2, "tp": 2}, {"fsdp": 2, "tp": 2, "cp": 2})


def case(stage: str, options: dict) -> list[dict]:
    spec = model_spec(BY_NAME["llama3"].changed(vocab_size=96, num_hidden_layers=2).torch_config().to_dict())
    spec = scored_spec(spec) if STAGES[stage].has_score_head else spec
    teacher = model_spec(BY_NAME["qwen2"].changed(vocab_size=96).torch_config().to_dict())
    is_served = options.pop("served", False)
    is_taught = stage == "distill" and not is_served
    objective = STAGES[stage].make(STAGES[stage].config(**options), *[teacher] * is_taught)
    documents = random_pairs(96, 8, longest=10)
    documents = [(*d[:2], float(n // 2 % 2)) for n, d in enumerate(documents)]
    if STAGES[stage].has_score_head:
        documents = [(ids, np.arange(len(ids)) == len(ids) - 1, value) for ids, _, value in documents]
    loader = loader_of(documents, tempfile.mkdtemp(), packing=True, rows=4, max_length=32, nll="answer")
    arrays = {name: array[0] for name, array in loader.batch(0).arrays.items()}
    assert arrays["units"].sum() == 8
    if STAGES[stage].dataset_type == "prompts":  # the answers of the pairs as completions
        rng, trained = np.random.default_rng(0), arrays["weights"] > 0
        values = {name: rng.normal(size=trained.shape) for name in ("advantages", "sampled")}
        values |= {
            "old": np.log(rng.uniform(0.005, 0.02, trained.shape)),
            "policy_weights": rng.integers(0, 2, trained.shape),
        }
        values |= {name: rng.normal(size=trained.shape) for name in ("returns", "values_old")}
        values["entropy_weights"] = arrays["weights"]
        tokens = {name: np.where(trained, array, 0).astype(np.float32) for name, array in values.items()}
        arrays = {name: arrays[name] for name in TOKEN_ARRAYS} | tokens | {"units": arrays["units"].repeat(2, axis=1)}
    if stage == "distill":
        arrays = {name: arrays[name] for name in TOKEN_ARRAYS}
    if is_served:  # the target and three other tokens, of which one may be none
        ids = np.stack([arrays["targets"], *((arrays["targets"] * k + k) % 96 for k in (2, 3, 5))], axis=-1)
        repeated = np.array([[[i in row[:n] for n, i in enumerate(row)] for row in rows] for rows in ids.tolist()])
        log_probs = np.log(np.random.default_rng(1).uniform(0.01, 0.2, ids.shape)).astype(np.float32)
        arrays |= {"named_ids": np.where(repeated, -1, ids).astype(np.int32), "named_log_probs": log_probs}
    results = []
    for axes in (None, *MESHES):
        prepared = prepare(LoraConfig(rank=4), spec, init_params(spec, jax.random.key(0)), jax.random.key(1))
        arrays_ = abstract(LoraConfig(rank=4), spec)
        if STAGES[stage].has_critic:
            arrays_ = abstract_critic(arrays_, "float32")
            prepared = start_critic(prepared, arrays_.trainable[CRITIC], None)
        leaves, tree = jax.tree.flatten(prepared.trainable)
        moved = [x + 0.05 * jax.random.normal(jax.random.key(n), x.shape) for n, x in enumerate(leaves)]
        trainable, frozen = jax.tree.unflatten(tree, moved), prepared.frozen
        taught = {"teacher": init_params(teacher, jax.random.key(2))} if is_taught else {}
        layout, order = None, None
        if axes is not None:
            layout = layout_for(
                make_mesh(MeshConfig(**axes), jax.devices()[: math.prod(axes.values())]), prepared.spec
            )[0]
            trainable = jax.device_put(trainable, shardings(arrays_.trainable, layout))
            frozen = jax.device_put(frozen, shardings(arrays_.frozen, layout))
            taught = jax.device_put(taught, shardings({"teacher": abstract_params(teacher)}, layout)) if taught else {}
            order = zigzag_order(64, axes["cp"]) if "cp" in axes else None
        compute = Compute(loss_chunk=16, layout=layout)

        def loss(trainable, frozen, batch, compute=compute, spec=prepared.spec):
            score = objective(merge(trainable, frozen), spec, compute, batch, None)
            return score.loss / score.weight, metric_means(score)

        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (value, metrics), gradient = step(trainable, frozen | taught, place_batch(arrays, layout, order))
        norms = [float(jnp.linalg.norm(g)) for g in jax.tree.leaves(gradient)]
        results.append({"loss": float(value), **{n: float(m) for n, m in metrics.items()}, "norms": norms})
    return results


if __name__ == "__main__":
    json.dump({name: case(name, options) for name, options in json.loads(sys.argv[1]).items()}, sys.stdout)
