"""Real compilers for accelerators that are not here, each in its own process."""

from __future__ import annotations

import pytest

from deviceless import compiled_for

pytestmark = pytest.mark.deviceless

MATMUL = """
m = mesh(x=len(devices))
rows = jax.sharding.NamedSharding(m, jax.sharding.PartitionSpec("x"))
whole = jax.sharding.NamedSharding(m, jax.sharding.PartitionSpec())
f = jax.jit(lambda a, b: jnp.sum(jnp.tanh(a @ b)))
args = (array((1024, 512), "bfloat16", rows), array((512, 256), "bfloat16", whole))
result = devices[0].device_kind
"""


@pytest.mark.parametrize("target", ["8xH100", "2x4xH100", "8xMI300X", "8xTPUv5p"])
def test_a_sharded_product_compiles(target):
    found = compiled_for(target, MATMUL, text=True)
    # Both arguments are bf16: an eighth of the rows, and the whole of the other.
    assert found["argument_bytes"] == 2 * (1024 * 512 // 8 + 512 * 256)
    assert "all-reduce" in found["text"]
