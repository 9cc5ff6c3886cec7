"""Sophia against its paper in float64, and the curvature it is given against what it must be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from optimizer_problems import abstract_of

from meshtune.adapters.config import FullConfig
from meshtune.adapters.method import abstract, prepare
from meshtune.arrays.tree import merge
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward, logits
from meshtune.model.inputs import Inputs
from meshtune.objectives.curvature import curvature, sample_targets
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import init_state
from tiny_models import same_weights, torch_model

CONFIG = OptimizerConfig("sophia", 1e-2, "constant", weight_decay=0.1, beta1=0.965, gamma=0.05, curvature_every=3)


def paper(gradients, curvatures, start):
    """Algorithm 3 of https://arxiv.org/abs/2305.14342 in float64. As in optax, momentum is divided by 1 - beta1^t, and
    an update uses the curvature known before it."""
    x, m, h = start.astype(np.float64), np.zeros(start.shape), np.zeros(start.shape)
    for t, (g, c) in enumerate(zip(gradients, curvatures, strict=True)):
        m = 0.965 * m + 0.035 * g
        change = np.clip(m / (1 - 0.965 ** (t + 1)) / np.maximum(0.05 * h, 1e-8), -1, 1)
        if t % 3 == 0:
            h = 0.99 * h + 0.01 * c
        x = x - 1e-2 * (change + 0.1 * x)
    return x


def test_fifty_updates_are_those_of_the_paper():
    rng = np.random.default_rng(0)
    start = rng.standard_normal((8, 6))
    gradients, curvatures = rng.standard_normal((50, 8, 6)), 1e4 * rng.random((50, 8, 6))
    params = {"w": jnp.asarray(start, jnp.float32)}
    optimizer, _ = make_optimizer(CONFIG, 50, abstract_of(params))
    state = optimizer.init(params)
    for g, c in zip(gradients, curvatures, strict=True):
        diagonal = {"w": jnp.asarray(c, jnp.float32)}
        updates, state = optimizer.update(
            {"w": jnp.asarray(g, jnp.float32)}, state, params, curvature=lambda diagonal=diagonal: diagonal
        )
        params = jax.tree.map(jnp.add, params, updates)
    expected = paper(gradients, curvatures, start)
    np.testing.assert_allclose(params["w"], expected, rtol=0, atol=5e-6)  # float32 over fifty updates of up to 1e-2
    signs = start.astype(np.float64)
    for g in gradients:
        signs = signs - 1e-2 * (np.sign(g) + 0.1 * signs)
    assert np.abs(expected - signs).max() > 1e-2, "nothing but clipped updates would compare signs"


def rows(spec, count=4, length=24):
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, spec.vocab, (count, length)).astype(np.int32)
    return {
        "tokens": jnp.asarray(tokens),
        "targets": jnp.asarray(np.roll(tokens, -1, 1)),
        "positions": jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (count, length)),
        "segment_ids": jnp.ones((count, length), jnp.int32),
        "weights": jnp.ones((count, length), jnp.float32).at[:, -1].set(0.0),
    }


def predict_logits(params, spec, compute, batch):
    """Logits [B, T, V], all at once."""
    inputs = Inputs(batch["tokens"], batch["positions"], batch["segment_ids"])
    return logits(params, spec, forward(params, spec, compute, inputs).hidden)


def test_targets_are_drawn_from_what_the_model_predicts():
    """Of 400 draws at 96 positions the most likely token is drawn as often as it is likely: the mean over positions of
    the difference has a standard deviation below 0.5 / sqrt(400 * 96); four of these are allowed. A chunk of 7 does not
    divide the row."""
    spec, params = same_weights(torch_model("llama3"))
    batch, compute = rows(spec), Compute(loss_chunk=7)
    params["head"] = {"weight": 20 * params["head"]["weight"]}  # far from even
    logits = jax.jit(lambda params: predict_logits(params, spec, compute, batch))(params)
    best, likely = logits.argmax(-1), jax.nn.softmax(logits).max(-1)
    draw = jax.jit(lambda key: sample_targets(params, spec, compute, batch, key))
    hits = sum((draw(jax.random.key(n)) == best).astype(jnp.float32) for n in range(400)) / 400
    assert float(likely.mean()) > 3 / spec.vocab
    assert abs(float((hits - likely).mean())) < 4 * 0.5 / np.sqrt(400 * 96)
    wrong = float((jnp.roll(likely, 1, 1) - hits).__abs__().mean())
    assert float(jnp.abs(likely - hits).mean()) < 0.2 * wrong, "each position by its own prediction"


def test_the_curvature_is_the_squared_gradient_of_drawn_targets():
    spec, params = same_weights(torch_model("llama3"))
    prepared = prepare(FullConfig(), spec, params, jax.random.key(0))
    batch, compute, key = rows(spec), Compute(loss_chunk=8), jax.random.key(3)

    def all_params(learned):
        return merge(learned, prepared.frozen)

    squares = jax.jit(lambda learned: curvature(learned, all_params, prepared.spec, compute, batch, key))(
        prepared.trainable
    )
    draw_key = jax.random.fold_in(key, 0x736F7068)
    drawn = jax.jit(lambda learned: sample_targets(all_params(learned), prepared.spec, compute, batch, draw_key))(
        prepared.trainable
    )

    def mean_loss(learned):
        logits = predict_logits(all_params(learned), prepared.spec, compute, batch)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[..., None], -1)[..., 0]
        return (losses * batch["weights"]).sum() / batch["weights"].sum()

    count, slope = float(batch["weights"].sum()), jax.jit(jax.grad(mean_loss))(prepared.trainable)
    for actual, g in zip(jax.tree.leaves(squares), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(actual, count * g**2, rtol=1e-3, atol=1e-5 * float(jnp.max(count * g**2)))


def test_a_step_uses_the_curvature_of_its_first_micro_batch():
    spec, params = same_weights(torch_model("llama3"))
    prepared = prepare(FullConfig(), spec, params, jax.random.key(0))
    batch = {name: array.reshape(2, 2, -1) for name, array in rows(spec).items()}
    optimizer, _ = make_optimizer(CONFIG, 10, abstract(FullConfig(), spec).trainable)
    compute = Compute(loss_chunk=8)
    step = make_train_step(sft_objective, prepared.spec, compute, optimizer)
    first = {name: array[0] for name, array in batch.items()}
    key = jax.random.fold_in(jax.random.key(5), 0)

    @jax.jit
    def bend(learned):
        return curvature(learned, lambda learned: merge(learned, prepared.frozen), prepared.spec, compute, first, key)

    expected = bend(prepared.trainable)
    state = init_state(jax.tree.map(jnp.copy, prepared.trainable), optimizer)
    losses = []
    for _ in range(12):
        state, metrics = step(state, prepared.frozen, batch, jnp.int32(5))
        losses.append(float(metrics["loss"]))
        if len(losses) == 1:
            moments = state.opt_state[0].nu
            for actual, c in zip(jax.tree.leaves(moments), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(actual, 0.01 * c, rtol=1e-3, atol=1e-5 * float(jnp.max(0.01 * c)))
    assert losses[-1] < losses[0] - 0.3
