"""Optimizers follow torch's and transformers' own, step by step, on a small tree with stacked layers and adapters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from optimizer_problems import (
    CONSTANT,
    SHAPES,
    SPEC,
    abstract_of,
    assert_close,
    gradient,
    problem,
    run_ours,
    run_torch,
    run_with_state,
    tree_of,
    update_options,
)
from transformers.optimization import Adafactor

from meshtune.errors import UserError
from meshtune.optim.build import OPTIMIZERS, OptimizerConfig, OptimizerType, decay_mask, make_optimizer
from meshtune.optim.optimizer import from_optax


# Float32 on both sides; parameters of order 1 moved by up to 20 * 1e-2, so a few units in the last place a step.
@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_equals_torch(steps, decay):
    params, noise = problem()
    config = OptimizerConfig("adamw", 1e-2, CONSTANT, weight_decay=decay, beta1=0.85, beta2=0.97, eps=1e-5)

    def make(decayed, free):
        groups = [{"params": decayed, "weight_decay": decay}, {"params": free, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.85, 0.97), eps=1e-5)

    assert_close(run_ours(config, params, noise, steps), run_torch(make, params, noise, steps), atol=2e-6)


@pytest.mark.parametrize("steps", [1, 20])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_torch(steps, momentum):
    params, noise = problem()
    config = OptimizerConfig("sgd", 1e-2, CONSTANT, momentum=momentum)

    def make(decayed, free):
        return torch.optim.SGD([*decayed, *free], lr=1e-2, momentum=momentum)

    assert_close(run_ours(config, params, noise, steps), run_torch(make, params, noise, steps), atol=5e-6)


def test_sgd_decay_is_decoupled():
    """One step by hand: p - lr * (g + decay * p) without momentum, and decay never enters the momentum buffer."""
    params, noise = problem()
    config = OptimizerConfig("sgd", 0.1, CONSTANT, momentum=0.9, weight_decay=0.5)
    got = run_ours(config, params, noise, 2)
    for name in SHAPES:
        p = params[name].astype(np.float64)
        decay = 0.0 if "norm" in name or "bias" in name else 0.5
        buffer = np.zeros_like(p)
        for at in range(2):
            buffer = 0.9 * buffer + gradient(p, noise[name][at])
            p = p - 0.1 * (buffer + decay * p)
        np.testing.assert_allclose(got[name], p, rtol=0, atol=2e-6)


def test_adafactor_equals_transformers_layer_by_layer():
    """Dimensions of 128 and more, where both factor; one-dimensional parameters, which neither does."""
    shapes = {
        "layers/0.0/attn/q/weight": (2, 130, 128),
        "layers/0.0/attn_norm/weight": (2, 128),
        "embed/weight": (140, 128),
    }
    params, noise = problem(shapes)
    noise["layers/0.0/attn/q/weight"][:, 1] *= 50  # layers of different size show if they are clipped together
    steps, decay = 10, 0.1
    config = OptimizerConfig("adafactor", 1e-2, CONSTANT, weight_decay=decay)

    def make(decayed, free):
        groups = [{"params": decayed, "weight_decay": decay}, {"params": free, "weight_decay": 0.0}]
        return Adafactor(groups, lr=1e-2, scale_parameter=False, relative_step=False, warmup_init=False)

    expected = run_torch(make, params, noise, steps, per_layer=True)
    assert_close(run_ours(config, params, noise, steps), expected, atol=1e-5)


def test_adafactor_keeps_thin_parameters_whole():
    """LoRA's rank-8 matrices have full second moments: as the paper's formulas without factoring, in float64."""
    params, noise = problem({"layers/0.0/attn/q/adapter/a": (2, 8, 16)})
    got = run_ours(OptimizerConfig("adafactor", 1e-2, CONSTANT), params, noise, 5)["layers/0.0/attn/q/adapter/a"]
    for layer in range(2):
        p = params["layers/0.0/attn/q/adapter/a"][layer].astype(np.float64)
        moment = np.zeros_like(p)
        for at in range(5):
            grad = gradient(p, noise["layers/0.0/attn/q/adapter/a"][at][layer].astype(np.float64))
            keep = 1 - (at + 1.0) ** -0.8
            moment = keep * moment + (1 - keep) * (grad**2 + 1e-30)
            update = grad / np.sqrt(moment)
            p = p - 1e-2 * update / max(1.0, np.sqrt((update**2).mean()))
        np.testing.assert_allclose(got[layer], p, rtol=0, atol=2e-6)


def test_lion_equals_the_paper():
    """Algorithm 2 of arXiv 2302.06675 in float64; signs agree where the interpolation is not within rounding of 0."""
    params, noise = problem()
    got = run_ours(OptimizerConfig("lion", 1e-2, CONSTANT, weight_decay=0.1), params, noise, 20)
    for name in SHAPES:
        p, m = params[name].astype(np.float64), 0.0
        decay = 0.0 if "norm" in name or "bias" in name else 0.1
        for at in range(20):
            grad = gradient(p, noise[name][at].astype(np.float64))
            p = p - 1e-2 * (np.sign(0.9 * m + 0.1 * grad) + decay * p)
            m = 0.99 * m + 0.01 * grad
        np.testing.assert_allclose(got[name], p, rtol=0, atol=5e-6)


def test_decay_skips_norms_and_biases_but_not_adapters():
    import jax.tree_util

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Pair:
        a: int
        b: int

    tree = tree_of(dict.fromkeys(SHAPES, 0)) | {"head": {"adapter": Pair(0, 0)}}
    mask = decay_mask(OptimizerConfig().no_decay, tree)
    assert mask["layers"]["0.0"]["attn"]["q"] == {"weight": True, "bias": False}
    assert mask["layers"]["0.0"]["attn_norm"] == {"weight": False}
    assert mask["norm"] == {"weight": False}
    assert mask["embed"] == {"weight": True}
    assert mask["head"]["adapter"] == Pair(True, True)


ALL_AT_ONCE = [name for name, kind in OPTIMIZERS.items() if kind.by_block is None]


@pytest.mark.parametrize("name", ALL_AT_ONCE)
def test_moments_are_float32_for_float32_parameters_and_follow_state_dtype_for_bf16(name):
    config = OptimizerConfig(name, momentum=0.9, schedule=CONSTANT, rank=2)
    for dtype, state_dtype, expected in (
        ("float32", None, "float32"),
        ("bfloat16", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
    ):
        tree = tree_of({path: jnp.ones(shape, dtype) for path, shape in SHAPES.items()})
        optimizer, _ = make_optimizer(dataclasses.replace(config, state_dtype=state_dtype), 10, abstract_of(tree), SPEC)

        def update(tree, optimizer=optimizer):
            state = optimizer.init(tree)
            updates, after = optimizer.update(tree, state, tree, **update_options(optimizer, tree))
            return state, after, optax.apply_updates(tree, updates)

        state, after, moved = jax.eval_shape(update, tree)
        large = set(SHAPES.values())
        assert {str(x.dtype) for x in jax.tree.leaves(state) if x.shape in large} == {expected}
        assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
        assert {str(x.dtype) for x in jax.tree.leaves(moved)} == {dtype}


def test_rate_of_the_first_update_is_the_schedule_at_zero():
    tree = {"w": jnp.ones((1, 2))}
    config = OptimizerConfig("sgd", 1.0, "linear", warmup_steps=2)
    optimizer, schedule = make_optimizer(config, 10, abstract_of(tree))
    state, rates = optimizer.init(tree), []
    for _ in range(4):
        updates, state = optimizer.update(tree, state, tree)
        rates.append(float(-updates["w"][0, 0]))
    np.testing.assert_allclose(rates, [float(schedule(at)) for at in range(4)], rtol=1e-6)
    np.testing.assert_allclose(rates, [0.0, 0.5, 1.0, 0.875], rtol=1e-6)


def test_unknown_names_are_errors_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'adamw'"):
        make_optimizer(OptimizerConfig("adamv"), 10, {})
    with pytest.raises(UserError, match="did you mean 'cosine'"):
        make_optimizer(OptimizerConfig(schedule="cosin"), 10, {})


def test_a_new_optimizer_is_one_entry(monkeypatch):
    sign = from_optax(lambda context: optax.scale_by_sign())
    monkeypatch.setitem(OPTIMIZERS, "signsgd", OptimizerType(lambda config: sign))
    optimizer, _ = make_optimizer(OptimizerConfig("signsgd", 0.5, CONSTANT), 3, abstract_of({"w": jnp.ones((1, 1))}))
    tree = {"w": jnp.ones((1, 1))}
    updates, _ = optimizer.update({"w": jnp.array([[7.0]])}, optimizer.init(tree), tree)
    assert float(updates["w"][0, 0]) == -0.5


# In the fast tier those whose state is more than moments of every parameter.
MORE_STATE = ("adamw8bit", "galore", "schedule_free", "prodigy", "sophia")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in MORE_STATE else pytest.mark.slow) for name in ALL_AT_ONCE]
)
def test_going_on_from_a_state_is_bit_exact_and_the_state_is_as_its_specs_say(name):
    shapes = SHAPES | {"layers/0.0/mlp/gate/weight": (2, 64, 64)}
    params, noise = problem(shapes, steps=6)
    config = OptimizerConfig(name, 1e-2, CONSTANT, weight_decay=0.1, rank=3, update_gap=2, momentum=0.5)
    expected = run_ours(config, params, noise, 6)
    half, optimizer, state = run_with_state(config, params, noise, 3)
    state = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state)
    resumed, _, _ = run_with_state(config, half, {path: value[3:] for path, value in noise.items()}, 3, state)
    for path, value in expected.items():
        np.testing.assert_array_equal(resumed[path], value)
    specs = optimizer.specs(abstract_of(tree_of(params)))
    assert jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), state) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), specs
    )
