"""Features of the flash-attention kernels only: tiles per chip, blocks past the end of a row, and kernels under remat.

Their values and gradients are in test_attention.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.attention_cases import assert_equals_torch, by_triton, case, request_for_gpu
from kernels.attention_oracle import normal, pack_rows, same_tokens, torch_gradients
from meshtune.kernels.attention import LOG_SUM_EXP, OUTPUT, AttentionInputs, triton, triton_kernels
from meshtune.kernels.attention.triton_kernels import Tile, Tiles


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["sm_80", "sm_90a", "sm_100a", "sm_86", "gfx942", "gfx950"])
def test_the_tiles_of_each_chip_equal_torch(chip):
    """In bfloat16, at a length that has full and partial blocks.

    Weights and their gradients are rounded to 8 bits before they are multiplied: 2^-8 of a sum's largest terms.
    """
    T = 200
    q, k, v, g = normal(3, (2, T, 2, 64), (2, T, 1, 64), (2, T, 1, 64), (2, T, 2, 64))
    q, k, v, g = (np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in (q, k, v, g))
    tokens = same_tokens(*pack_rows([[150, 41], [200]], T))
    options = {"scale": 0.125, "window": None, "softcap": None}
    results = by_triton(q, k, v, g, tokens, options, chip=chip)
    expected = torch_gradients(*(x.astype(np.float64) for x in (q, k, v, g)), tokens, **options)
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y, atol=2**-7 * np.abs(y).max(), rtol=2**-7)


def test_blocks_past_the_end_of_a_row_write_nothing(monkeypatch):
    """Rows of 40 tokens are padded to 64 for blocks of 32, so that blocks of 8 and 16 exist entirely past their end."""
    tiles = Tiles(Tile(16, 32, 4, 1), Tile(8, 16, 4, 1), Tile(8, 8, 4, 1))
    monkeypatch.setattr(triton_kernels, "tiles_of", lambda request: tiles)
    q, k, v, g = normal(6, (2, 40, 2, 16), (2, 40, 1, 16), (2, 40, 1, 16), (2, 40, 2, 16))
    arrays = q, k, v, g, same_tokens(*pack_rows([[40], [25, 15]], 40)), {"scale": 0.3, "window": None, "softcap": None}
    assert_equals_torch(by_triton(*arrays), *arrays)


def test_the_backward_pass_need_not_run_the_forward_kernel_again():
    """With the two names saved, a rematerialised program runs three kernels and not four."""
    q, k, v, g, tokens, options = case("packed")
    request = request_for_gpu(q, k, options)

    def kernels(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        attend = jax.checkpoint(lambda *qkv: triton.run(AttentionInputs(*qkv, **tokens), request), policy=policy)
        return used_kernels(jax.make_jaxpr(lambda *qkv: jax.vjp(attend, *qkv)[1](g))(q, k, v).jaxpr)

    assert kernels(OUTPUT, LOG_SUM_EXP) == 3
    assert kernels() == 4


def used_kernels(jaxpr):
    """The number of kernels whose results are used: XLA removes the others."""
    used = {id(x) for eqn in jaxpr.eqns for x in eqn.invars} | {id(x) for x in jaxpr.outvars}
    calls = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call"]
    nested = [
        eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name != "pallas_call" and "jaxpr" in eqn.params
    ]
    return sum(any(id(x) in used for x in eqn.outvars) for eqn in calls) + sum(
        used_kernels(getattr(inner, "jaxpr", inner)) for inner in nested
    )
