"""The gradient of grouped products' matrices on TPUs: megablox, which comes with JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm
from jaxtyping import Array, Float, Int

# Rows, and rows and columns of a tile of the result.
TILE = (128, 128, 512)


def weight_grad(
    cotangent: Float[Array, "N o"], x: Float[Array, "N i"], sizes: Int[Array, "E"], *, interpret: bool = False
) -> Float[Array, "E o i"]:
    """cotangent^T x of the rows of each group, in float32."""
    missing = -x.shape[0] % TILE[0]
    cotangent, x = (jnp.pad(rows, ((0, missing), (0, 0))) for rows in (cotangent, x))
    with jax.default_matmul_precision("highest" if x.dtype == jnp.float32 else "default"):
        return tgmm(cotangent.T, x, sizes.astype(jnp.int32), jnp.float32, TILE, interpret=interpret)
