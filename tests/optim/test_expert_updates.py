"""Updates of a real mixture of experts: each expert's matrices go where torch's Muon, GaLore's authors' code and
bitsandbytes put them, and updates in the backward pass, with weights and states on the host, are those of a plain step.
"""

from __future__ import annotations

import bitsandbytes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from galore_torch import GaLoreAdamW
from optimizer_problems import CONSTANT
from test_adam_kin import nearest  # noqa: F401
from test_low_rank_optimizers import fixed_signs  # noqa: F401

from families.cases import BY_NAME
from meshtune.adapters.config import FullConfig
from meshtune.adapters.method import abstract, prepare
from meshtune.arrays.tree import flatten, merge
from meshtune.families import model_spec
from meshtune.mesh import placement
from meshtune.mesh.placement import offload_arrays
from meshtune.model.attention import AttentionSpec
from meshtune.model.compute import Compute
from meshtune.model.experts import ExpertsSpec, RouterSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec
from meshtune.model.spec import ModelSpec, Stack, init_params
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import abstract_state, init_state

RATE, UPDATES, LAYERS, EXPERTS = 1e-2, 3, 2, 4


def qwen3_moe(width: int) -> ModelSpec:
    """Two layers of four experts [width, width], two of them for each token."""
    norm = NormSpec(1e-5)
    experts = ExpertsSpec(RouterSpec(EXPERTS, 2), width, LAYERS)
    layer = LayerSpec(AttentionSpec(2, 1, 8, rope=RopeSpec(1e4, 8)), experts, norm)
    return ModelSpec("qwen3_moe", 40, width, (Stack((layer,), LAYERS),), norm, max_length=64, init_std=0.05)


def deepseek_v3(width: int) -> ModelSpec:
    """The same experts, in two groups, behind a dense layer; a shared one, correction biases and latent attention."""
    case = BY_NAME["deepseek_v3"].changed(
        vocab_size=40,
        hidden_size=width,
        num_hidden_layers=1 + LAYERS,
        moe_intermediate_size=width,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        initializer_range=0.05,
    )
    return model_spec(case.torch_config().to_dict())


MIXTURES = {"qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3}


def batch():
    rng, shape = np.random.default_rng(0), (1, 2, 24)
    arrays = {name: rng.integers(0, 40, shape) for name in ("tokens", "targets")}
    arrays |= {"positions": np.broadcast_to(np.arange(24), shape), "segment_ids": np.ones(shape)}
    arrays = {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}
    return arrays | {"weights": jnp.ones(shape, jnp.float32)}


def run(spec, config, offload=()):
    """The trained leaves by path before the first update and after each."""
    compute = Compute(remat="full", offload=offload)
    params = init_params(spec, jax.random.key(0))
    prepared = prepare(FullConfig(), spec, params, jax.random.key(0))
    arrays = abstract(FullConfig(), spec)
    optimizer, _ = make_optimizer(config, 10, arrays.trainable, spec)
    like, trained = None, prepared.trainable
    if offload:
        like = abstract_state(arrays.trainable, optimizer, None, offload)
        trained = offload_arrays(trained, like.trainable)
    state = init_state(trained, optimizer, like)
    step = make_train_step(sft_objective, spec, compute, optimizer)
    history = [jax.tree.map(np.array, flatten(state.trainable))]
    for _ in range(UPDATES):
        state, _ = step(state, prepared.frozen, batch(), jnp.int32(0))
        history.append(jax.tree.map(np.array, flatten(state.trainable)))
    return history, state, prepared.frozen


REFERENCES = {
    "muon": lambda matrices: torch.optim.Muon(
        matrices, lr=RATE, weight_decay=0.1, momentum=0.5, adjust_lr_fn="match_rms_adamw"
    ),
    "galore": lambda matrices: GaLoreAdamW(
        [{"params": matrices, "rank": 4, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}],
        lr=RATE,
        eps=1e-8,
        weight_decay=0.0,
        no_deprecation_warning=True,
    ),
    "adamw8bit": lambda matrices: bitsandbytes.optim.AdamW8bit(matrices, lr=RATE, weight_decay=0.1),
}
# Muon's five steps multiply the rounding of what is smallest in a matrix by up to 500, and of the gradient of an expert
# with few tokens, whose rank is low, much is small; GaLore's directions agree to rounding over the gap between singular
# values. In 8 bits a moment within rounding of the middle of two codes may be either, and some updates of 1e-2 differ.
SHARE_APART = {"muon": (1e-4, 0.0), "galore": (1e-4, 0.002), "adamw8bit": (1e-5, 0.02)}


@pytest.mark.slow
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.usefixtures("nearest", "fixed_signs")
def test_every_expert_is_updated_as_a_matrix_of_its_own(name, mixture, monkeypatch):
    """Of the model's own gradients, at our parameters before each update."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)  # torch's Muon iterates in bf16
    spec = MIXTURES[mixture](256)  # rows as long as a block of bitsandbytes
    decay = 0.0 if name == "galore" else 0.1
    config = OptimizerConfig(name, RATE, CONSTANT, weight_decay=decay, rank=4, update_gap=2, momentum=0.5)
    history, _, frozen = run(spec, config)

    @jax.jit
    def gradient(trained):
        def loss(trained):
            micro = {key: array[0] for key, array in batch().items()}
            score = sft_objective(merge(trained, frozen), spec, Compute(remat="full"), micro, None)
            return score.loss / score.weight

        return jax.grad(loss)(trained)

    tree = abstract(FullConfig(), spec).trainable
    paths = [path for path in history[0] if "/experts/" in path]
    assert len(paths) == 3
    matrices = {
        path: [torch.nn.Parameter(torch.tensor(matrix)) for matrix in history[0][path].reshape(-1, 256, 256)]
        for path in paths
    }
    assert all(len(of_path) == LAYERS * EXPERTS for of_path in matrices.values())
    reference = REFERENCES[name]([matrix for path in paths for matrix in matrices[path]])
    for before in history[:-1]:
        gradients = flatten(gradient(jax.tree.unflatten(jax.tree.structure(tree), list(before.values()))))
        for path in paths:
            parts = np.array(gradients[path]).reshape(-1, 256, 256)
            for matrix, part in zip(matrices[path], parts, strict=True):
                matrix.grad = torch.tensor(part)
        reference.step()
    limit, share = SHARE_APART[name]
    for path in paths:
        expected = np.stack([matrix.detach().numpy() for matrix in matrices[path]])
        apart = np.abs(history[-1][path].reshape(expected.shape) - expected)
        assert (apart > limit).mean() <= share, (path, float(apart.max()), float((apart > limit).mean()))
        assert np.abs(history[-1][path] - history[0][path]).max() > 1e-3


@pytest.mark.parametrize(
    ("mixture", "name", "offload"),
    [
        pytest.param("qwen3_moe", "adamw", ("weights", "optimizer", "residual"), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "muon", (), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "galore", ("weights",), marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "adamw8bit", ("weights", "optimizer"), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "adamw", ("weights", "optimizer", "residual"), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "muon", ("weights",), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "galore", (), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "adamw8bit", ("weights", "optimizer"), marks=pytest.mark.slow),
    ],
)
def test_updates_in_the_backward_pass_and_from_the_host_are_those_of_a_plain_step(mixture, name, offload, monkeypatch):
    """The same gradients in programs of their own: float32, of parameters that move by 1e-2 an update."""
    monkeypatch.setattr(placement, "MIN_OFFLOAD_BYTES", 1)
    spec = MIXTURES[mixture](64 if name == "adamw8bit" else 16)
    config = OptimizerConfig(name, RATE, CONSTANT, weight_decay=0.1, rank=4, eps=1e-4, update_gap=2)
    plain, *_ = run(spec, config)
    fused, state, _ = run(spec, OptimizerConfig(**vars(config) | {"in_backward": True}), offload=offload)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.trainable["layers"])}
    assert kinds == {"pinned_host" if "weights" in offload else "device"}
    for path, leaf in plain[-1].items():
        apart = np.abs(fused[-1][path] - leaf)
        share = 0.005 if name == "adamw8bit" else 0.0  # a moment in the middle of two codes may be either
        assert (apart > 2e-5).mean() <= share, (path, float(apart.max()))
        assert apart.max() < RATE, path
