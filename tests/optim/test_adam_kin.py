"""AdamW in 8 bits, Adam-mini and Muon follow bitsandbytes, the authors' package and torch.optim, layer by layer."""

import bitsandbytes
import bitsandbytes.functional
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from adam_mini import Adam_mini
from optimizer_problems import CONSTANT, SPEC, assert_close, problem, run_ours, run_torch_named, run_with_state, tree_of

from meshtune.arrays.spec import ArraySpec
from meshtune.optim.adamw8bit import block, decode_moments, encode_moments
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.optim.muon import orthogonal
from meshtune.quantize.scales import dynamic_map, nearest_codes

RATE = 1e-2
GATE, Q, K, DOWN = (f"layers/0.0/{name}/weight" for name in ("mlp/gate", "attn/q", "attn/k", "mlp/down"))
NORM, BIAS = "layers/0.0/attn_norm/weight", "layers/0.0/attn/q/bias"
HF = {GATE: "mlp.gate_proj", Q: "self_attn.q_proj", K: "self_attn.k_proj", DOWN: "mlp.down_proj"}

LARGE = {GATE: (2, 10, 512), Q: (2, 8, 8), "head/weight": (20, 256), "embed/weight": (20, 256)}


@pytest.fixture
def nearest(monkeypatch):
    """bitsandbytes' update for CPUs with the nearest of the 256 values, as its other backends choose it: its own
    choice there, from a table, is the second nearest for one number in thirty."""

    def quantise(numbers, values, largest_out, codes_out, blocksize):
        blocks = numbers.reshape(-1, blocksize)
        largest = blocks.abs().max(dim=1).values
        shares = (blocks / largest[:, None]).nan_to_num().contiguous()
        codes_out.copy_(torch.searchsorted((values[:-1] + values[1:]) / 2, shares).reshape(numbers.shape))
        largest_out.copy_(largest)

    monkeypatch.setattr(bitsandbytes.backends.cpu.ops, "_quant_blockwise_fp32_direct", quantise)


# Nothing but the rounding of float32 differs after one update. Later a moment within rounding of the middle between two
# of the 256 values may be kept as either of them; which, is the machine's to say. Some updates of at most 1e-2 then
# differ: for one number, or for the block whose largest it is. Hence a bound of five updates for all, and a close one
# for all but one number in twenty, four blocks of 80 (here: one in a hundred; with a moment in 32 bits, one in four).
@pytest.mark.parametrize(("steps", "bound", "usual"), [(1, 1e-6, 1e-6), (50, 5e-2, 1e-4)])
@pytest.mark.usefixtures("nearest")
def test_adamw8bit_equals_bitsandbytes(steps, bound, usual):
    params, noise = problem(LARGE, steps=steps)
    config = OptimizerConfig("adamw8bit", RATE, CONSTANT, weight_decay=0.1)

    def make(tensors):
        short = [row for name in (GATE, Q, "head/weight") for row in tensors[name]]
        manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
        manager.initialize()  # it knows tensors by their id, and one of an earlier call may have had the same
        manager.register_parameters(short + tensors["embed/weight"])
        manager.override_config(tensors["embed/weight"], key_value_dict={"optim_bits": 32})
        return bitsandbytes.optim.AdamW8bit([*short, *tensors["embed/weight"]], lr=RATE, weight_decay=0.1)

    got, expected = run_ours(config, params, noise, steps), run_torch_named(make, params, noise, steps)
    assert_close(got, expected, bound)
    apart = np.concatenate([np.abs(got[name] - expected[name]).ravel() for name in LARGE])
    assert (apart > usual).mean() < 0.05


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_of_bitsandbytes_values(signed):
    values = bitsandbytes.functional.create_dynamic_map(signed).numpy()
    np.testing.assert_array_equal(dynamic_map(signed), values)
    numbers = np.random.default_rng(0).normal(size=(16, 512)).astype(np.float32)
    numbers = numbers if signed else numbers**2
    numbers[3] = 0
    codes, largest = (np.asarray(part) for part in encode_moments(jnp.asarray(numbers), signed=signed))
    blocks = numbers.reshape(16, 2, 256).astype(np.float64)
    np.testing.assert_array_equal(largest, np.abs(blocks).max(axis=-1))
    shares = np.divide(blocks, largest[..., None], out=np.zeros_like(blocks), where=largest[..., None] > 0)
    least = np.abs(shares.reshape(16, 512, 1) - values).min(axis=-1)
    chosen = np.abs(shares.reshape(16, 512) - values[codes])
    np.testing.assert_allclose(chosen, least, rtol=0, atol=1e-7)
    restored = np.asarray(decode_moments(jnp.asarray(codes), jnp.asarray(largest), signed=signed))
    np.testing.assert_allclose(restored, values[codes] * np.repeat(largest, 256, axis=1), rtol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_by_table_are_those_of_a_binary_search(signed):
    values = dynamic_map(signed)
    bounds = (values[:-1] + values[1:]) / np.float32(2)
    rng = np.random.default_rng(0)
    small = np.exp(rng.uniform(-25, 0, 100_000)).astype(np.float32)
    beside = [np.nextafter(bounds, np.float32(infinity)) for infinity in (-2, 2)]
    shares = np.concatenate([small, bounds, *beside, values, np.float32([0, -0.0, 1, 1e-45])])
    shares = np.concatenate([shares, -shares]) if signed else np.abs(shares)
    np.testing.assert_array_equal(nearest_codes(jnp.asarray(shares), signed=signed), np.searchsorted(bounds, shares))


def test_blocks_divide_rows_and_lie_as_the_parameter():
    assert [block(width) for width in (4096, 576, 1536, 13696, 100, 8191)] == [256, 192, 256, 214, 100, 1]
    spec = ArraySpec((4, 64, 576), "float32", ("layers", "ffn", "embed"), role="matrix")
    tree = tree_of(
        {GATE: spec, "layers/0.0/mlp/up/weight": ArraySpec((4, 8, 8191), "float32", spec.axes, role="matrix")}
    )
    specs = make_optimizer(OptimizerConfig("adamw8bit"), 10, tree)[0].specs(tree)["kept"]
    assert (specs[GATE]["m"].dtype, specs[GATE]["m"].shape, specs[GATE]["m"].axes) == ("uint8", spec.shape, spec.axes)
    assert (specs[GATE]["v_largest"].shape, specs[GATE]["v_largest"].axes) == ((4, 64, 3), spec.axes)
    assert set(specs["layers/0.0/mlp/up/weight"]) == {"m", "v"}  # its rows have no blocks worth it


MINI = {
    Q: (3, 8, 8), K: (3, 4, 8), GATE: (3, 16, 8), DOWN: (3, 8, 16), NORM: (3, 8), BIAS: (3, 8), "norm/weight": (8,),
    "embed/weight": (11, 8),
}  # fmt: skip


# float32 on both sides.
@pytest.mark.parametrize("steps", [1, 50])
def test_adam_mini_equals_its_authors_code(steps):
    params, noise = problem(MINI, steps=steps)
    noise[NORM][:, 1] *= 50  # layers of different size show if they share a moment
    config = OptimizerConfig("adam_mini", RATE, CONSTANT, weight_decay=0.1)

    def make(tensors):
        names = {**HF, NORM: "input_layernorm", BIAS: "self_attn.q_proj"}
        named = [
            (f"model.layers.{layer}.{names[path]}.{path.rpartition('/')[2]}", row)
            for path in tensors
            for layer, row in enumerate(tensors[path])
            if path in names
        ]
        named += [("model.norm.weight", tensors["norm/weight"][0])]
        named += [("model.embed_tokens.weight", tensors["embed/weight"][0])]
        return Adam_mini(named, lr=RATE, weight_decay=0.1, dim=8, n_heads=2, n_kv_heads=1, verbose=False)

    assert_close(run_ours(config, params, noise, steps), run_torch_named(make, params, noise, steps), atol=5e-6)


def test_adam_mini_keeps_a_second_moment_a_block():
    params, noise = problem(MINI)
    _, _, state = run_with_state(OptimizerConfig("adam_mini", RATE, CONSTANT), params, noise, 1)
    shapes = {path: moments["v"].shape for path, moments in state["kept"].items()}
    assert shapes == {
        Q: (3, 2), K: (3, 1), GATE: (3, 16), DOWN: (3, 8), NORM: (3,), BIAS: (3, 8), "norm/weight": (),
        "embed/weight": (11,),
    }  # fmt: skip
    assert SPEC.layer_kinds[0].mixer.head_dim == 4


MATRICES = {Q: (3, 12, 8), DOWN: (3, 6, 10), NORM: (3, 8), "embed/weight": (11, 6)}


# Five steps of the iteration multiply what is smallest in a matrix, and so its rounding in float32, by up to 500.
@pytest.mark.parametrize("steps", [1, 50])
@pytest.mark.parametrize("match_rms", [True, False])
def test_muon_equals_torch(monkeypatch, match_rms, steps):
    """torch iterates in bf16: here in float64, so that only the rounding of float32 is between the two."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    params, noise = problem(MATRICES, steps=steps)
    config = OptimizerConfig("muon", RATE, CONSTANT, weight_decay=0.1, match_rms=match_rms, momentum=0.9)

    class Split:
        def __init__(self, tensors):
            matrices = [*tensors[Q], *tensors[DOWN]]
            rate_rule = "match_rms_adamw" if match_rms else "original"
            muon = torch.optim.Muon(matrices, lr=RATE, weight_decay=0.1, momentum=0.9, adjust_lr_fn=rate_rule)
            vectors = [
                {"params": tensors["embed/weight"], "weight_decay": 0.1},
                {"params": tensors[NORM], "weight_decay": 0.0},
            ]
            self.parts = (muon, torch.optim.AdamW(vectors, lr=RATE))

        def step(self):
            for part in self.parts:
                part.step()

    expected = run_torch_named(Split, params, noise, steps)
    assert_close(run_ours(config, params, noise, steps), expected, atol=2e-6 * max(1, steps / 5))


def test_muon_makes_singular_values_nearly_equal():
    """Between 0.6 and 1.3, over matrices whose own span two orders of magnitude."""
    rng = np.random.default_rng(1)
    for shape in ((20, 8), (8, 20)):
        u, _, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
        matrix = (u * np.geomspace(1, 0.01, 8)) @ vt
        values = np.linalg.svd(np.asarray(orthogonal(jnp.asarray(matrix, jnp.float32)), np.float64))[1]
        assert values.min() > 0.6
        assert values.max() < 1.3
