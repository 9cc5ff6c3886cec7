"""Steps that use up each layer's gradient at once, or want one layer's alone: the same updates, and less memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step import documents, micro, pack

from meshtune.adapters.config import FreezeConfig, FullConfig
from meshtune.adapters.method import prepare
from meshtune.model.compute import Compute
from meshtune.model.tree import flatten
from meshtune.objectives import OBJECTIVES
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.optim.schedules import ScheduleConfig
from meshtune.train.step import init_state, make_train_step
from tiny_models import same_weights, torch_model

CONSTANT = ScheduleConfig("constant")
COMPUTE = Compute(loss_chunk=8, remat="full")


@pytest.fixture(scope="module")
def tiny():
    return same_weights(torch_model("qwen3_bias_window"))


@pytest.fixture(scope="module")
def batches():
    return [micro(pack([[d] for d in documents(4, seed)], 16), 1) for seed in range(3)]


def run(tiny, batches, config, method=None, steps=3, compute=COMPUTE, **options):
    """(metrics of every update, trained leaves, state) after updates by `config`."""
    spec, params = tiny
    made = prepare(method or FullConfig(), spec, jax.tree.map(jnp.copy, params), jax.random.key(0))
    optimizer, _ = make_optimizer(config, 10, made.trainable, made.spec)
    step = make_train_step(OBJECTIVES["sft"], made.spec, compute, optimizer, **options)
    state, seen = init_state(made.trainable, optimizer), []
    for number in range(steps):
        state, metrics = step(state, made.frozen, batches[number % len(batches)], jnp.int32(0))
        seen.append(jax.tree.map(float, {name: metrics[name] for name in ("loss", "grad_norm", "finite")}))
    return seen, flatten(state.trainable), state


# The same sums in another order; Adam's first updates turn differences in small gradients into some of their size.
@pytest.mark.parametrize(
    ("name", "method", "atol"),
    [
        ("sgd", FullConfig(), 2e-6),
        ("adamw", FreezeConfig(last_layers=2), 2e-5),
        ("adamw8bit", FullConfig(), 2e-5),
        ("galore", FullConfig(), 2e-5),
    ],
)
def test_a_fused_update_equals_one_with_all_gradients_at_hand(tiny, batches, name, method, atol):
    config = OptimizerConfig(name, 1e-2, CONSTANT, weight_decay=0.1, rank=4, eps=1e-4)
    usual = run(tiny, batches, config, method)
    fused = run(tiny, batches, dataclasses.replace(config, fused=True), method)
    for one, other in zip(usual[0], fused[0], strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    for path, leaf in usual[1].items():
        np.testing.assert_allclose(fused[1][path], leaf, rtol=0, atol=atol, err_msg=path)
    assert jax.tree.structure(usual[2]) == jax.tree.structure(fused[2])
