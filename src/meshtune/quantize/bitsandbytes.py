"""The formats of bitsandbytes with the codes of its files: nf4 and fp4 with a float32 scale for each block, and the
int8 rows of LLM.int8, whose scale is a row's largest magnitude divided by 127.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from meshtune.quantize.format import Format, pairs_unpacked
from meshtune.quantize.nf4 import NF4

FP4_VALUES = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
FP4_VALUES = np.concatenate([FP4_VALUES, -FP4_VALUES])
PAIRS = np.stack([np.repeat(FP4_VALUES, 16), np.tile(FP4_VALUES, 16)], axis=1)  # the two values of every byte


def _decode_fp4(codes: jax.Array) -> jax.Array:
    return jax.lax.platform_dependent(codes, tpu=_by_comparing, default=_by_lookup)


def _by_lookup(codes: jax.Array) -> jax.Array:
    return jnp.asarray(PAIRS)[codes.astype(jnp.int32)].reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _by_comparing(codes: jax.Array) -> jax.Array:
    """Uses only comparisons, for TPUs, where looking up single numbers is slow."""
    code = pairs_unpacked(codes)
    values = jnp.zeros(code.shape, jnp.float32)
    for index, value in enumerate(FP4_VALUES):
        values = jnp.where(code == index, value, values)
    return values


def _decode_int8(codes: jax.Array) -> jax.Array:
    return codes.astype(jnp.float32)


BNB_NF4 = dataclasses.replace(NF4, name="bnb_nf4", encode=None, encode_bfloat16=None)
BNB_FP4 = Format("bnb_fp4", "uint8", 2, None, _decode_fp4)
LLM_INT8 = Format("llm_int8", "int8", 1, None, _decode_int8)
