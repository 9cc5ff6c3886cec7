"""One train step: how a batch is split never changes the result, and frozen leaves are never differentiated."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from meshtune.arrays.tree import flatten, split
from meshtune.model.compute import Compute
from meshtune.objectives.sft import sft_objective
from meshtune.optim.optax_global import from_optax_global
from meshtune.train.step.build import make_eval_step, make_train_step
from meshtune.train.step.state import init_state
from tiny_models import same_weights, torch_model


def sgd(rate):
    """optax's own, so that nothing but the step is under test."""
    return from_optax_global(optax.sgd(rate), lambda count: jnp.float32(rate))


SGD = sgd(1.0)
MAX_NORM = 0.05


@pytest.fixture(scope="module")
def tiny():
    return same_weights(torch_model("qwen3_bias_window"))


def documents(count: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Random documents of unequal length with unequal weights."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 14, count)
    return [(rng.integers(1, 97, n + 1), rng.choice([0.0, 1.0, 1.0, 0.5], n)) for n in lengths]


def pack(rows: list[list[tuple[np.ndarray, np.ndarray]]], length: int) -> dict[str, np.ndarray]:
    """[rows, length] arrays with the documents of each row side by side."""
    batch = {k: np.zeros((len(rows), length), np.int32) for k in ("tokens", "targets", "positions", "segment_ids")}
    batch["weights"] = np.zeros((len(rows), length), np.float32)
    for r, row in enumerate(rows):
        at = 0
        for s, (ids, weights) in enumerate(row, start=1):
            n = len(weights)
            span = np.s_[r, at : at + n]
            batch["tokens"][span], batch["targets"][span] = ids[:-1], ids[1:]
            batch["positions"][span], batch["segment_ids"][span], batch["weights"][span] = np.arange(n), s, weights
            at += n
    return batch


def micro(batch: dict[str, np.ndarray], count: int) -> dict[str, jax.Array]:
    return {k: jnp.asarray(v.reshape(count, -1, v.shape[-1])) for k, v in batch.items()}


@functools.cache
def step_of(spec):
    """The update of all tests here, so that batches of equal shapes share a program."""
    return make_train_step(sft_objective, spec, Compute(loss_chunk=8), SGD, max_grad_norm=MAX_NORM)


def run(tiny, batch):
    """(loss, trained leaves, metrics) of an update of all weights by plain SGD."""
    spec, params = tiny
    state, metrics = step_of(spec)(init_state(jax.tree.map(jnp.copy, params), SGD), {}, batch, jnp.int32(0))
    return float(metrics["loss"]), flatten(state.trainable), metrics


def assert_same(expected, actual, tolerance=1e-5):
    """Leaves agree to `tolerance` of the leaf's largest value: the same sums, in float32, in another order."""
    for path, leaf in expected.items():
        bound = tolerance * float(jnp.abs(leaf).max() + 1e-3)
        np.testing.assert_allclose(actual[path], leaf, atol=bound, rtol=0, err_msg=path)


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)])
def test_micro_batches_equal_one_big_batch(tiny, count):
    """Also where one micro-batch has far fewer supervised tokens than another: no mean of means."""
    batch = pack([[d] for d in documents(8)], 16)
    batch["weights"][:3] *= np.arange(16) < 2
    big, split_up = (run(tiny, micro(batch, n)) for n in (1, count))
    assert big[0] == pytest.approx(split_up[0], rel=1e-6)
    assert_same(big[1], split_up[1])
    assert split_up[2]["finite_micro"].shape == (count,)


def test_packed_rows_equal_separate_rows(tiny):
    docs = documents(12)
    apart = micro(pack([[d] for d in docs], 16), 1)
    together = micro(pack([docs[i : i + 3] for i in range(0, 12, 3)], 48), 2)
    separate, packed = (run(tiny, batch) for batch in (apart, together))
    assert separate[0] == pytest.approx(packed[0], rel=1e-6)
    assert_same(separate[1], packed[1])


def test_loss_is_the_weighted_mean_torch_gives(tiny):
    docs = documents(5)
    model = torch_model("qwen3_bias_window")
    total, weight = 0.0, 0.0
    with torch.no_grad():
        for ids, weights in docs:
            log_probabilities = model(torch.tensor(ids[None, :-1])).logits[0].log_softmax(-1)
            total -= float((log_probabilities[range(len(weights)), ids[1:]] * torch.tensor(weights)).sum())
            weight += float(weights.sum())
    loss, _, metrics = run(tiny, micro(pack([docs], 64), 1))
    assert loss == pytest.approx(total / weight, rel=1e-5)
    assert float(metrics["weight"]) == pytest.approx(weight)


def test_clipping_is_torchs(tiny):
    """The update of SGD with rate 1 is the clipped gradient: its norm is max_norm * norm / (norm + 1e-6)."""
    batch = micro(pack([[d] for d in documents(8)], 16), 1)
    _, params = tiny
    _, trained, metrics = run(tiny, batch)
    moved = optax.global_norm({k: trained[k] - v for k, v in flatten(params).items()})
    assert float(metrics["grad_norm"]) > 0.1
    assert float(moved) == pytest.approx(MAX_NORM, rel=1e-3)


def test_a_batch_without_anything_to_learn_changes_nothing(tiny):
    batch = pack([[d] for d in documents(8)], 16)
    batch["weights"][:] = 0
    loss, trained, metrics = run(tiny, micro(batch, 4))
    assert loss == 0
    assert bool(metrics["finite"])
    assert_same(flatten(tiny[1]), trained, 0.0)


def test_a_non_finite_micro_batch_is_named_and_not_applied(tiny):
    _, params = tiny
    batch = micro(pack([[d] for d in documents(8)], 16), 4)
    batch["weights"] = batch["weights"].at[2, 1, 0].set(jnp.nan)
    _, trained, metrics = run(tiny, batch)
    assert not metrics["finite"]
    assert metrics["finite_micro"].tolist() == [True, True, False, True]
    for path, leaf in flatten(params).items():
        np.testing.assert_array_equal(trained[path], leaf)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"scan": False}, {"remat": "full"}, {"attention": "blockwise"}, {"loss_chunk": 3}], ids=str
)
def test_thirty_steps_do_not_depend_on_how_they_are_computed(tiny, change):
    """Trajectories of 30 SGD steps; rounding differences grow, so 1e-4 relative on every loss."""
    spec, params = tiny
    batches = [micro(pack([documents(6, seed)], 80), 1) for seed in range(5)]

    def losses(compute):
        optimizer = sgd(0.3)
        step = make_train_step(sft_objective, spec, compute, optimizer, max_grad_norm=1.0)
        state = init_state(jax.tree.map(jnp.copy, params), optimizer)
        history = []
        for n in range(30):
            state, metrics = step(state, {}, batches[n % 5], jnp.int32(0))
            history.append(float(metrics["loss"]))
        return np.array(history)

    plain = losses(Compute(attention="direct", loss_chunk=80))
    changed = losses(Compute(**({"attention": "direct", "loss_chunk": 80} | change)))
    assert plain[-1] < plain[0] * 0.9
    np.testing.assert_allclose(changed, plain, rtol=1e-4)


def test_frozen_weights_have_no_gradient_in_the_compiled_program(tiny):
    """With all weights trained the step's temporary memory holds the gradients of two big matrices; with the norms
    alone trained it must hold neither."""
    spec, params = same_weights(torch_model("llama3"))
    big = {"embed": (4093, 32), "head": (4093, 32)}
    spec = spec.__class__(**{**spec.__dict__, "vocab": 4093})
    params = params | {name: {"weight": jnp.ones(shape)} for name, shape in big.items()}
    batch = micro(pack([[d] for d in documents(4)], 16), 2)

    def temporaries(chosen):
        trainable, frozen = split(params, chosen)
        step = make_train_step(sft_objective, spec, Compute(loss_chunk=4), SGD)
        compiled = step.lower(init_state(trainable, SGD), frozen, batch, jnp.int32(0)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    weight = 4093 * 32 * 4
    norms_only = temporaries(lambda path: "norm" in path)
    everything = temporaries(lambda path: True)
    assert everything - norms_only > 2 * weight
    assert norms_only < 2 * weight


def test_evaluation_equals_the_training_loss(tiny):
    spec, params = tiny
    batch = pack([documents(5)], 64)
    evaluate = make_eval_step(sft_objective, spec, Compute(loss_chunk=8))
    score = evaluate(params, {}, {k: jnp.asarray(v) for k, v in batch.items()})
    assert float(score.loss / score.weight) == pytest.approx(run(tiny, micro(batch, 1))[0], rel=1e-6)
