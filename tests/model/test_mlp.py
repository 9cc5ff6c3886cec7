"""The dense feed-forward network against torch, and its packed form."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from meshtune.arrays.tree import flatten, unflatten
from meshtune.model.block import Context
from meshtune.model.compute import Compute
from meshtune.model.inputs import Inputs, sequence_info
from meshtune.model.mlp import ACTIVATIONS, XIELU, MlpSpec

EMBED = 16
INPUTS = Inputs(jnp.zeros((2, 7), jnp.int32), jnp.tile(jnp.arange(7), (2, 1)), jnp.ones((2, 7), jnp.int32))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, XIELU])
@pytest.mark.parametrize("gated", [True, False])
def test_a_feed_forward_network_is_that_of_torch(activation, gated):
    spec = MlpSpec(24, activation, bias=True, gated=gated)
    torch.manual_seed(0)
    names = {"gelu_tanh": "gelu_pytorch_tanh"}  # transformers' names that are not ours
    act = ACT2FN[names.get(activation, activation)]
    node = {name: torch.randn(leaf.shape) * 0.3 for name, leaf in flatten(spec.params(EMBED)).items()}

    def linear(x, name):
        return x @ node[f"{name}/weight"].T + node[f"{name}/bias"]

    x = torch.randn(2, 7, EMBED)
    if activation == XIELU:
        act.float().load_state_dict(
            {name: node[f"xielu/{name}"].reshape(array.shape) for name, array in act.state_dict().items()}
        )
    wide = act(linear(x, "gate")) * linear(x, "up") if gated else act(linear(x, "up"))
    ours = unflatten({name: jnp.asarray(array.numpy()) for name, array in node.items()})
    context = Context(Compute(), sequence_info(INPUTS, ()), {})
    actual = spec.apply(jnp.asarray(x.numpy()), ours, context).y
    np.testing.assert_allclose(actual, linear(wide, "down").detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_packed_gate_is_that_of_two_projections():
    """Row 2 i of the fused weight is the gate's row i, row 2 i + 1 is up's."""
    plain, packed = MlpSpec(24, bias=True), MlpSpec(24, bias=True, packed=True)
    rng = np.random.default_rng(0)
    leaves = {path: rng.standard_normal(leaf.shape) for path, leaf in flatten(plain.params(EMBED)).items()}
    fused = {path: leaves[path] for path in leaves if path.startswith("down")} | {
        f"gate_up/{name}": np.stack([leaves[f"gate/{name}"], leaves[f"up/{name}"]], 1).reshape(48, *leaf.shape[1:])
        for name, leaf in (("weight", leaves["gate/weight"]), ("bias", leaves["gate/bias"]))
    }
    x, context = jnp.asarray(rng.standard_normal((2, 7, EMBED))), Context(Compute(), sequence_info(INPUTS, ()), {})
    expected = plain.apply(x, unflatten({k: jnp.asarray(v) for k, v in leaves.items()}), context).y
    actual = packed.apply(x, unflatten({k: jnp.asarray(v) for k, v in fused.items()}), context).y
    # float32 products that are summed in another order; the largest result is 229.
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)
