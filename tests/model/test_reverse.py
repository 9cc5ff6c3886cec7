"""The explicit backward pass over layers against jax.grad of the same model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtune.arrays.tree import flatten, merge
from meshtune.model.compute import Compute
from meshtune.model.decoder import enter
from meshtune.model.decoder import forward as model_forward
from meshtune.model.inputs import Inputs
from meshtune.model.reverse import backward, forward, layer_functions, row_of, with_row
from meshtune.model.spec import Stack, init_params
from meshtune.model.stacks import no_sums
from model_specs import llama_layer, llama_spec

PLAIN = llama_layer(24, 4, 2, 4)
WINDOW = dataclasses.replace(PLAIN, mixer=dataclasses.replace(PLAIN.mixer, window=3))
# Two kinds of layers by turns, twice.
SPEC = dataclasses.replace(llama_spec(32, 16, PLAIN, 1, init_std=0.3), stacks=(Stack((PLAIN, WINDOW), 2),))
(STACK,) = SPEC.stacks
KEYS = ["0.0", "0.1"]
COMPUTE = Compute(attention="direct")
PLACES = jnp.tile(jnp.arange(7), (2, 1))
INPUTS = Inputs(jax.random.randint(jax.random.key(2), (2, 7), 0, 32), PLACES, jnp.ones((2, 7), jnp.int32))
COTANGENT = jax.random.normal(jax.random.key(3), (2, 7, 16))


@pytest.fixture(scope="module")
def params():
    return init_params(SPEC, jax.random.key(0))


@pytest.fixture(scope="module")
def jax_gradients(params):
    """(gradient of the layers, gradient of the embeddings' result) by jax.grad of the whole decoder."""

    def total(layers, x):
        inputs = dataclasses.replace(INPUTS, embeds=x)
        return jnp.sum(pre_norm(SPEC, params | {"layers": layers}, inputs) * COTANGENT)

    x = params["embed"]["weight"][INPUTS.tokens]
    return jax.jit(jax.grad(total, argnums=(0, 1)))(params["layers"], x)


def pre_norm(spec, params, inputs):
    """The residual stream that leaves the layers, without the final norm."""
    rows, x, side = enter(params, spec, COMPUTE, inputs)
    layer = layer_functions(spec, COMPUTE)(0)
    for row in range(STACK.repeats):
        for place, key in enumerate(KEYS):
            node = jax.tree.map(lambda leaf, row=row: leaf[row], params["layers"][key])
            x, *_ = layer(x, node, place, jnp.int32(row), rows, side)
    return x


def explicit(params, selected=None, lowest=0):
    """(the stream after the layers, the cotangent of their input, gradients by layer, zero where none was computed)."""
    rows, x, side = enter(params, SPEC, COMPUTE, INPUTS)
    layer, nodes = layer_functions(SPEC, COMPUTE)(0), [params["layers"][key] for key in KEYS]
    out, _, layer_inputs, side = forward(layer, STACK, nodes, x, rows, side, no_sums(SPEC.stacks), COMPUTE)

    def node(_, place, row):
        return row_of(nodes[place], row), {}

    def visit(gradients, place, row, _, gradient):
        return gradients | {KEYS[place]: with_row(gradients[KEYS[place]], gradient, row)}

    zeros = jax.tree.map(jnp.zeros_like, params["layers"])
    cotangents = COTANGENT, jax.tree.map(jnp.zeros_like, side), jax.tree.map(jnp.zeros_like, no_sums(SPEC.stacks))
    (d_x, _, _), gradients = backward(
        layer, STACK, node, layer_inputs, cotangents, rows, side, visit, zeros,
        merged=merge, selected=selected, lowest=lowest,
    )  # fmt: skip
    return out, d_x, gradients


def close(actual, expected_gradients):
    # float32, the same products in another order.
    np.testing.assert_allclose(actual, expected_gradients, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_jax(params, jax_gradients):
    gradients, d_x = jax_gradients
    out, found_x, found_gradients = jax.jit(explicit)(params)
    close(out, pre_norm(SPEC, params, INPUTS))
    close(found_x, d_x)
    for path, leaf in flatten(found_gradients).items():
        close(leaf, flatten(gradients)[path])
        assert float(jnp.abs(leaf).max()) > 1e-3


def test_the_stream_is_the_decoders(params):
    out, *_ = jax.jit(explicit)(params)
    hidden = model_forward(params, SPEC, COMPUTE, INPUTS).hidden
    close(SPEC.norm(out, params["norm"]), hidden)


def test_only_selected_layers_get_gradients_and_none_below_the_lowest(params, jax_gradients):
    """Only the second layer of row 1; row 0 is not computed again, so the cotangent is that of row 1's input."""

    def select(place, row):
        return (place == 1) & (row == 1)

    _, d_x, found_gradients = jax.jit(lambda params: explicit(params, select, 1))(params)
    expected_gradients = {
        path: jnp.zeros_like(leaf).at[1].set(leaf[1]) if path.startswith("0.1/") else jnp.zeros_like(leaf)
        for path, leaf in flatten(jax_gradients[0]).items()
    }
    for path, leaf in expected_gradients.items():
        close(flatten(found_gradients)[path], leaf)
    assert float(jnp.abs(d_x - jax_gradients[1]).max()) > 1e-2
