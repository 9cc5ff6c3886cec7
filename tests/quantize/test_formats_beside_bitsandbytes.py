"""nf4 is bitsandbytes' nf4; the other formats round as numpy does."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.scales import dynamic_map, twice_quantised
from meshtune.quantize.weight import QuantisedWeight

SHAPES = [(64, 128), (48, 576), (7, 64)]


def weights(shape, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=draw) * torch.rand((shape[0], 1), generator=draw)
    weight[0, :64] = 0  # a block of zeros
    weight[-1, -1] = 40.0  # and an outlier
    return weight.to(dtype)


def ours(weight, **config):
    return QuantisedWeight.quantise(jnp.asarray(weight.float().numpy()), QuantizeConfig("nf4", **config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [64, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_codes_and_scales_equal_those_of_bitsandbytes(shape, block, dtype):
    weight = weights(shape, dtype)
    packed, state = bnb.quantize_4bit(weight, blocksize=block, quant_type="nf4")
    quantised = ours(weight, block_size=block, double=False)
    np.testing.assert_array_equal(np.asarray(quantised.codes).reshape(-1), packed.numpy().reshape(-1))
    np.testing.assert_array_equal(np.asarray(quantised.scales).reshape(-1), state.absmax.numpy())
    # The same product of a table's value and a scale, rounded once.
    back = quantised.dequantise(str(dtype).removeprefix("torch.")).astype(jnp.float32)
    np.testing.assert_array_equal(np.asarray(back), bnb.dequantize_4bit(packed, state).float())


@pytest.mark.parametrize("shape", SHAPES)
def test_double_quantised_scales_equal_those_of_bitsandbytes(shape):
    weight = weights(shape)
    packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    quantised = ours(weight)
    np.testing.assert_array_equal(np.asarray(quantised.codes).reshape(-1), packed.numpy().reshape(-1))
    # torch sums the mean in float32, in an order of its own; the rest follows from it.
    np.testing.assert_allclose(quantised.offset, state.offset, rtol=1e-6)
    np.testing.assert_allclose(quantised.nested, state.state2.absmax, rtol=1e-6)
    scales, theirs = np.asarray(quantised.scales).reshape(-1).astype(int), state.absmax.numpy().astype(int)
    # Their CPU kernel finds the nearest of 256 values in a table of 65,536 steps, so near the middle between two it may
    # take the other one; the next test compares with their path that looks at all 256.
    equal = scales == theirs
    assert (~equal).sum() <= max(1, 0.005 * equal.size)
    assert np.abs(scales - theirs).max() <= 1
    back, expected = (
        np.asarray(x).reshape(-1, 64) for x in (quantised.dequantise("float32"), bnb.dequantize_4bit(packed, state))
    )
    # The scales are sums of a mean and a part that can cancel: absolute, of the largest number.
    np.testing.assert_allclose(back[equal], expected[equal], rtol=0, atol=1e-6 * 40)


@pytest.mark.parametrize("shape", [(96, 96), (7, 33)])
def test_scales_twice_quantised_equal_bitsandbytes_given_the_mean(shape):
    absmax = weights((96, 128)).abs().numpy()[: shape[0], : shape[1]] + 0.1
    codes, largest, offset = twice_quantised(absmax)
    # As float64 they go through its generic path, which computes in float32 and searches all values.
    table = bnb.create_dynamic_map()
    centred = torch.from_numpy(absmax - offset).double()
    theirs, theirs_largest = torch.ops.bitsandbytes.quantize_blockwise(centred, table, 256)
    np.testing.assert_array_equal(codes, theirs.numpy())
    np.testing.assert_array_equal(largest, theirs_largest.numpy())
    np.testing.assert_array_equal(dynamic_map(), table.numpy())
    np.testing.assert_allclose(offset, torch.from_numpy(absmax).mean(), rtol=1e-6)


def test_int8_int4_and_fp8_round_to_the_nearest_code():
    weight = weights((48, 576)).numpy()
    blocks = weight.reshape(48, 9, 64)
    absmax = np.abs(blocks).max(-1, keepdims=True)
    share = np.divide(blocks, absmax, out=np.zeros_like(blocks), where=absmax > 0)
    expected = {
        "int8": np.round(share * 127) / 127,
        "int4": np.round(share * 7) / 7,
        "fp8": (share * 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / 448,
    }
    for name, values in expected.items():
        quantised = QuantisedWeight.quantise(jnp.asarray(weight), QuantizeConfig(name, double=False))
        np.testing.assert_allclose(
            np.asarray(quantised.dequantise("float32")),
            (values * absmax).reshape(weight.shape),
            rtol=1e-6,
            err_msg=name,
        )


@pytest.mark.parametrize(("name", "bound"), [("nf4", 0.10), ("int4", 0.12), ("int8", 0.008), ("fp8", 0.03)])
@pytest.mark.parametrize("double", [True, False])
def test_what_a_format_loses(name, bound, double):
    """Relative error of normal weights, against what the formats' papers and spacing promise."""
    weight = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)
    quantised = QuantisedWeight.quantise(jnp.asarray(weight), QuantizeConfig(name, double=double))
    lost = np.linalg.norm(np.asarray(quantised.dequantise("float32")) - weight) / np.linalg.norm(weight)
    print(name, double, lost)
    assert bound / 4 < lost < bound


def test_lookup_and_comparison_decode_alike():
    from meshtune.quantize.nf4 import _by_comparing, _by_lookup

    codes = jnp.arange(256, dtype=jnp.uint8)[None]
    np.testing.assert_array_equal(_by_lookup(codes), _by_comparing(codes))
