"""Steps that use up each layer's gradient at once, or want one layer's alone: the same updates, and less memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_step import documents, micro, pack

from meshtune.adapters.config import FreezeConfig, FullConfig
from meshtune.adapters.method import abstract, prepare
from meshtune.arrays.tree import flatten
from meshtune.mesh import placement
from meshtune.mesh.placement import offload_arrays
from meshtune.model.compute import Compute
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.train.step import host_state as update
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import abstract_state, init_state
from tiny_models import same_weights, torch_model

CONSTANT = "constant"
COMPUTE = Compute(loss_chunk=8, remat="full")


@pytest.fixture(scope="module")
def tiny():
    return same_weights(torch_model("qwen3_bias_window"))


@pytest.fixture(scope="module")
def batches():
    return [micro(pack([[d] for d in documents(4, seed)], 16), 1) for seed in range(3)]


def run(tiny, batches, config, method=None, steps=3, compute=COMPUTE, offload=(), **options):
    """(metrics of every update, trained leaves, state) after updates by `config`; `offload` waits on the host."""
    spec, params = tiny
    prepared = prepare(method or FullConfig(), spec, jax.tree.map(jnp.copy, params), jax.random.key(0))
    arrays = abstract(method or FullConfig(), spec)
    optimizer, _ = make_optimizer(config, 10, arrays.trainable, arrays.spec)
    compute = dataclasses.replace(compute, offload=offload)
    step = make_train_step(sft_objective, prepared.spec, compute, optimizer, **options)
    trained, like = prepared.trainable, None
    if offload:
        like = abstract_state(arrays.trainable, optimizer, None, offload)
        trained = offload_arrays(trained, like.trainable)
    state, history = init_state(trained, optimizer, like), []
    for number in range(steps):
        state, metrics = step(state, prepared.frozen, batches[number % len(batches)], jnp.int32(0))
        history.append(jax.tree.map(float, {name: metrics[name] for name in ("loss", "grad_norm", "finite")}))
    return history, flatten(state.trainable), state


# The same sums in another order; Adam's first updates turn differences in small gradients into some of their size.
@pytest.mark.parametrize(
    ("name", "method", "atol", "offload"),
    [
        pytest.param("sgd", FullConfig(), 2e-6, (), marks=pytest.mark.slow),
        ("adamw", FullConfig(), 2e-5, ("weights", "optimizer", "residual")),
        pytest.param("adamw", FreezeConfig(last_layers=2), 2e-5, (), marks=pytest.mark.slow),
        pytest.param("adamw8bit", FullConfig(), 2e-5, ("optimizer",), marks=pytest.mark.slow),
        pytest.param("galore", FullConfig(), 2e-5, ("weights",), marks=pytest.mark.slow),
    ],
)
def test_a_fused_update_equals_one_with_all_gradients_at_hand(tiny, batches, name, method, atol, offload, monkeypatch):
    monkeypatch.setattr(placement, "MIN_OFFLOAD_BYTES", 1)
    monkeypatch.setattr(update, "PIECE", 4 * 64 * 40)  # some rows of the embedding at a time
    config = OptimizerConfig(name, 1e-2, CONSTANT, weight_decay=0.1, rank=4, eps=1e-4)
    usual = run(tiny, batches, config, method)
    fused = run(tiny, batches, dataclasses.replace(config, in_backward=True), method, offload=offload)
    memories = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(fused[2].trainable)}
    assert memories == ({"pinned_host"} if "weights" in offload else {"device"})
    for expected, actual in zip(usual[0], fused[0], strict=True):
        assert expected == pytest.approx(actual, rel=1e-4)
    for path, leaf in usual[1].items():
        np.testing.assert_allclose(fused[1][path], leaf, rtol=0, atol=atol, err_msg=path)
    assert jax.tree.structure(usual[2]) == jax.tree.structure(fused[2])


def test_badam_gets_the_active_layers_gradient_clipped_and_accumulated(tiny, batches):
    """Three layers in turn, by hand from the gradients of all: AdamW's first update of each, from its own norm."""
    from meshtune.arrays.tree import merge

    config = OptimizerConfig("badam", 1e-2, CONSTANT, switch_every=1, eps=1e-4)
    spec, params = tiny
    batch = {name: value.reshape(2, -1, value.shape[-1]) for name, value in batches[0].items()}
    walked = run(tiny, [batch], config, steps=3, max_grad_norm=0.05)
    places = [
        (key, row)
        for number in range(3)
        for key, _, _, rows in spec.positions()
        for row, n in enumerate(rows)
        if n == number
    ]
    expected = jax.tree.map(jnp.copy, params)
    joined = jax.tree.map(lambda *x: jnp.concatenate(x), *[jax.tree.map(lambda v, n=n: v[n], batch) for n in range(2)])

    @jax.jit
    def slopes(params):
        def loss(params):
            scored = sft_objective(merge(params, {}), spec, COMPUTE, joined, None)
            return scored.loss / scored.weight

        return jax.grad(loss)(params)

    for (key, row), metrics in zip(places, walked[0], strict=True):
        active = {path: leaf[row] for path, leaf in flatten(slopes(expected)["layers"][key]).items()}
        norm = float(np.sqrt(sum(float((leaf**2).sum()) for leaf in active.values())))
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
        for path, leaf in active.items():
            node = expected["layers"][key]
            *parents, last = path.split("/")
            for parent in parents:
                node = node[parent]
            clipped = leaf * min(1.0, 0.05 / norm)
            node[last] = node[last].at[row].add(-1e-2 * clipped / (jnp.abs(clipped) + 1e-4))
    for path, leaf in flatten(expected).items():
        np.testing.assert_allclose(walked[1][path], leaf, rtol=0, atol=2e-5, err_msg=path)


def test_a_gradient_that_is_not_finite_stops_a_fused_update(tiny, batches):
    """Nothing is updated once a gradient is not finite: here the loss's own, before any layer's."""
    bad = batches[0] | {"weights": batches[0]["weights"].at[0, 0, 2].set(jnp.inf)}
    history, leaves, state = run(tiny, [bad], OptimizerConfig("sgd", 1e-2, CONSTANT, in_backward=True), steps=1)
    assert history[0]["finite"] == 0
    for path, leaf in flatten(tiny[1]).items():
        np.testing.assert_array_equal(leaves[path], leaf)
    assert int(state.step) == int(state.opt_state["count"]) == 0


def deep():
    """24 layers of 0.8 MB each, and hardly anything else."""
    from meshtune.families import model_spec

    return model_spec(
        {
            "model_type": "llama", "vocab_size": 16, "hidden_size": 128, "intermediate_size": 384,
            "num_hidden_layers": 24, "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
        }
    )  # fmt: skip


def temporaries(config, spec):
    """(bytes of all gradients in float32, the compiled step's temporaries, whether it updates its state in place)."""
    from meshtune.train.step.state import abstract_state

    arrays = abstract(FullConfig(), spec)
    optimizer, _ = make_optimizer(config, 10, arrays.trainable, arrays.spec)
    step = make_train_step(sft_objective, arrays.spec, COMPUTE, optimizer)
    batch = {
        name: jax.ShapeDtypeStruct((1, 1, 16), jnp.int32) for name in ("tokens", "targets", "positions", "segment_ids")
    }
    batch["weights"] = jax.ShapeDtypeStruct((1, 1, 16), jnp.float32)
    state = abstract_state(arrays.trainable, optimizer)
    facts = step.lower(state, {}, batch, jax.ShapeDtypeStruct((), jnp.int32)).compile().memory_analysis()
    gradient_bytes = sum(array.nbytes for array in flatten(arrays.trainable).values())
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return gradient_bytes, facts.temp_size_in_bytes, facts.alias_size_in_bytes >= state_bytes


@pytest.mark.parametrize("name", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "badam"))])
def test_no_whole_gradient_exists_in_the_compiled_program(name):
    """All temporaries together take less than a fifth of what all gradients would (a layer is a 24th, and there are its
    gradient and its parameters and state, new and old), and the ordinary step's more."""
    spec = deep()
    walked = OptimizerConfig(name, 1e-2, CONSTANT, in_backward=name != "badam")
    gradient_bytes, needed, in_place = temporaries(walked, spec)
    assert needed < gradient_bytes / 5
    assert in_place
    if name == "sgd":
        assert temporaries(OptimizerConfig("sgd", 1e-2, CONSTANT), spec)[1] > gradient_bytes
