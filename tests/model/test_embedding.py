"""Rows of the embedding table against torch, on one device and where the table is split over vocabulary and width.

Meshes are of four simulated devices, in a process of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from compiling import FASTER
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import Layout, make_mesh
from meshtune.model.inputs import embed_tokens

# The columns of the table are split over fsdp, its rows over tp; of the tokens the rows over fsdp, the length over cp.
MESHES = [{"fsdp": 4}, {"fsdp": 2, "tp": 2}, {"tp": 4}, {"cp": 2, "tp": 2}, {"dp": 2, "fsdp": 2}]
RNG = np.random.default_rng(0)
TABLE = RNG.standard_normal((24, 8)).astype(np.float32)
TOKENS = RNG.integers(0, 24, (4, 6)).astype(np.int32)
COTANGENT = RNG.standard_normal((4, 6, 8)).astype(np.float32)


def of_torch():
    """(the rows, the gradient of the table)."""
    table = torch.tensor(TABLE, requires_grad=True)
    rows = torch.nn.functional.embedding(torch.tensor(TOKENS).long(), table)
    (rows * torch.tensor(COTANGENT)).sum().backward()
    assert table.grad is not None
    return rows.detach().numpy(), table.grad.numpy()


def ours(axes):
    layout, table, tokens = None, jnp.asarray(TABLE), jnp.asarray(TOKENS)
    if axes is not None:
        layout = Layout(make_mesh(MeshConfig(**axes), jax.devices()[:4]))
        placed = layout.spec(("vocab", "embed"), table.shape), layout.spec(("batch", "length"), tokens.shape)
        table, tokens = (
            jax.device_put(array, jax.sharding.NamedSharding(layout.mesh, spec))
            for array, spec in zip((table, tokens), placed, strict=True)
        )

    def total(table):
        rows = embed_tokens(table, tokens, layout)
        return jnp.sum(rows * COTANGENT), rows

    gradient, rows = jax.jit(jax.grad(total, has_aux=True))(table)
    return np.asarray(rows), np.asarray(gradient)


def test_rows_are_those_of_torch():
    for actual, expected in zip(ours(None), of_torch(), strict=True):
        # Rows are copied; a gradient adds up to six numbers in another order.
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def on_meshes():
    env = os.environ | {
        "XLA_FLAGS": f"{FASTER} --xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=env, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_table_that_is_split_gives_the_rows_of_the_whole(on_meshes, axes):
    """Bit for bit: a row is on one device, and the others add zeros. The gradient to the order of its sums."""
    rows, gradient = (np.asarray(array, np.float32) for array in on_meshes[str(axes)])
    expected_rows, expected = of_torch()
    np.testing.assert_array_equal(rows, expected_rows)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)


if __name__ == "__main__":
    print(json.dumps({str(axes): [array.tolist() for array in ours(axes)] for axes in MESHES}))
