"""A layer computed by chunks of a row is the layer: the same loss to the bit, the same gradients, in less memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import prepare
from meshtune.arrays.tree import flatten, merge
from meshtune.model.chunks import over_chunks
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward
from meshtune.model.inputs import Inputs
from meshtune.objectives.sft import sft_objective
from tiny_models import same_weights, torch_model

ROWS, LENGTH = 2, 61
PLAIN = Compute(loss_chunk=16)
# A gradient of keys, values, or weights is a sum over a row's tokens; chunks add it up in another order, in float32.
# The greatest difference seen is 2e-6 of a leaf's greatest number; a chunk lost or counted twice is above 1e-2.
CLOSE = 1e-5


@pytest.fixture(scope="module")
def batch():
    """Two packed rows: three documents and padding, and one document."""
    rng = np.random.default_rng(0)
    segments = np.stack([np.repeat([1, 2, 3, 0], [20, 9, 25, 7]), np.ones(LENGTH, int)])
    positions = np.stack([np.concatenate([np.arange(n) for n in (20, 9, 25, 7)]), np.arange(LENGTH)])
    weights = rng.choice([0.0, 1.0, 0.5], (ROWS, LENGTH)) * (segments > 0)
    tokens, targets = rng.integers(1, 97, (2, ROWS, LENGTH))
    numbers = {"tokens": tokens, "targets": targets, "positions": positions, "segment_ids": segments}
    columns = {name: jnp.asarray(array, jnp.int32) for name, array in numbers.items()}
    return columns | {"weights": jnp.asarray(weights, jnp.float32)}


@pytest.fixture(scope="module", params=["lora", pytest.param("full", marks=pytest.mark.slow)])
def case(request):
    """(spec, trained tree, frozen tree) of a model with biases, norms of heads, and a window."""
    spec, params = same_weights(torch_model("qwen3_bias_window"))
    if request.param == "full":
        return spec, params, {}
    prepared = prepare(LoraConfig(rank=4), spec, params, jax.random.key(0))
    # B starts at zero, and then A has no gradient that could be compared.
    trainable = jax.tree.map(
        lambda leaf: leaf + 0.05 * jnp.sin(jnp.arange(leaf.size)).reshape(leaf.shape), prepared.trainable
    )
    return prepared.spec, trainable, prepared.frozen


def loss_and_gradients(case, compute, batch):
    spec, trainable, frozen = case

    def loss(trainable):
        return sft_objective(merge(trainable, frozen), spec, compute, batch, None).loss

    value, gradients = jax.jit(jax.value_and_grad(loss))(trainable)
    return float(value), {path: np.asarray(leaf) for path, leaf in flatten_all(gradients).items()}


def flatten_all(tree):
    return {
        f"{path}{jax.tree_util.keystr(key)}": leaf
        for path, node in flatten(tree).items()
        for key, leaf in jax.tree_util.tree_flatten_with_path(node)[0]
    }


@pytest.fixture(scope="module")
def of_whole_rows(case, batch):
    return loss_and_gradients(case, PLAIN, batch)


QUICK = [{"mlp_chunk": 16}, {"attention_chunk": 20, "mlp_chunk": 7, "remat": "full", "offload": ("residual",)}]
SLOW = [
    {"mlp_chunk": 1, "remat": "selective"},
    {"attention_chunk": 16},
    {"attention_chunk": 30, "remat": "selective", "offload": ("residual",)},
    {"attention_chunk": 16, "mlp_chunk": 5, "scan": False, "attention": "blockwise"},
]


@pytest.mark.parametrize(
    "change", [*QUICK, *(pytest.param(change, marks=pytest.mark.slow) for change in SLOW)], ids=str
)
def test_chunks_of_a_row_give_what_the_row_gives(case, batch, of_whole_rows, change):
    loss, gradients = loss_and_gradients(case, dataclasses.replace(PLAIN, **change), batch)
    assert loss == pytest.approx(of_whole_rows[0], rel=1e-6)
    assert gradients.keys() == of_whole_rows[1].keys()
    for path, expected in of_whole_rows[1].items():
        np.testing.assert_allclose(gradients[path], expected, rtol=0, atol=CLOSE * np.abs(expected).max(), err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "selective"])
def test_a_residual_stream_on_the_host_changes_no_bit(case, batch, remat):
    on_device, on_host = (
        loss_and_gradients(case, dataclasses.replace(PLAIN, remat=remat, offload=offload), batch)
        for offload in ((), ("residual",))
    )
    assert on_device[0] == on_host[0]
    for path, expected in on_device[1].items():
        np.testing.assert_array_equal(on_host[1][path], expected, err_msg=path)


def temporaries(change, batch):
    spec, params = same_weights(torch_model("llama3"))
    compute = Compute(loss_chunk=16, remat="full", attention="blockwise", **change)
    long = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, 4096), x.dtype), batch)

    def loss(params, batch):
        return sft_objective(params, spec, compute, batch, None).loss

    return jax.jit(jax.grad(loss)).lower(params, long).compile().memory_analysis().temp_size_in_bytes


def test_a_row_by_chunks_takes_less_memory(batch):
    """This model's feed-forward layer is 56 wide, its queries 32: of the whole row some 2.5 MiB in all."""
    assert temporaries({"mlp_chunk": 256, "attention_chunk": 256}, batch) < 0.75 * temporaries({}, batch)


@pytest.mark.slow
def test_a_feed_forward_layer_by_chunks_takes_less_memory(batch):
    assert temporaries({"mlp_chunk": 256}, batch) < 0.95 * temporaries({}, batch)


@pytest.mark.parametrize(("length", "chunk", "ranks"), [(12, 4, 1), (13, 4, 1), (13, 12, 1), (12, 6, 2), (16, 5, 4)])
@pytest.mark.parametrize("narrow", [False, True])
def test_a_function_over_chunks_is_the_function(length, chunk, ranks, narrow):
    """Also where chunks do not divide a row, and where results have another shape than x: results, sums over tokens,
    and the gradients of shared arrays, of x and of the arrays next to it."""
    keys = jax.random.split(jax.random.key(length + chunk), 4)
    x, side = (jax.random.normal(key, (3, length, 6)) for key in keys[:2])
    shared = {"w": jax.random.normal(keys[2], (4 if narrow else 6, 6)), "fixed": jnp.float32(2.0)}
    tokens = {"scale": jax.random.normal(keys[3], (3, length))}

    def function(shared, x, beside, tokens, number):
        scale = tokens["scale"][..., None]
        result = jnp.tanh((x + beside["side"]) @ shared["w"].T) * scale * shared["fixed"]
        return result, {"squares": jnp.sum((result * scale) ** 2)}

    def total(w, x, side, chunk):
        result, sums = over_chunks(function, shared | {"w": w}, x, {"side": side}, tokens, chunk=chunk, ranks=ranks)
        weights = jnp.cos(jnp.arange(result.size).reshape(result.shape))
        return (result * weights).sum() + 0.3 * sums["squares"], (result, sums)

    gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True), static_argnums=3)
    expected_gradients, expected = gradient(shared["w"], x, side, None)
    gradients, results = gradient(shared["w"], x, side, chunk)
    # float32, sums of a few dozen numbers in another order; where tanh is near one, its derivative has fewer digits.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), results, expected)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=CLOSE * float(jnp.abs(theirs).max()))


def test_what_is_not_trained_has_no_gradient_computed():
    """Of two shared matrices one is differentiated: the other's gradient would be another product in the program."""

    def function(shared, x, beside, tokens, number):
        return x + jnp.tanh(x @ shared["a"]) @ shared["b"], {}

    def products(argument):
        def loss(a, b, x):
            return over_chunks(function, {"a": a, "b": b}, x, {}, {}, chunk=4)[0].sum()

        text = jax.jit(jax.grad(loss, argnums=argument)).lower(*arrays).as_text()
        return text.count("stablehlo.dot_general")

    arrays = (jnp.ones((8, 8)), jnp.ones((8, 8)), jnp.ones((1, 16, 8)))
    # Forward twice two; backward two for x, and one for each matrix that is trained.
    assert products((2,)) + 1 == products((0, 2)) == products((1, 2))
    assert products((0, 1, 2)) == products((0, 2)) + 1


def test_dropout_draws_anew_for_every_chunk():
    spec, params = same_weights(torch_model("llama3"))
    prepared = prepare(LoraConfig(rank=4, dropout=0.5), spec, params, jax.random.key(0))
    trainable = jax.tree.map(lambda leaf: leaf + 0.05, prepared.trainable)
    tokens = jnp.full((1, 32), 5, jnp.int32)
    row = Inputs(tokens, jnp.zeros_like(tokens), jnp.arange(1, 33)[None])
    compute = Compute(attention_chunk=8, mlp_chunk=4)
    hidden = jax.jit(forward, static_argnums=(1, 2))(
        merge(trainable, prepared.frozen), prepared.spec, compute, row, rng=jax.random.key(1)
    ).hidden
    # Every token is a document of its own and the same; only what is dropped tells them apart.
    assert len(np.unique(np.asarray(hidden[0, :, 0]))) == 32
