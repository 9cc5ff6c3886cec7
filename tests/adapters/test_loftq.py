"""LoftQ: its turns are those of peft's loftq_init, whose own code runs on GPUs only."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from twins import base

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.kind import Original
from meshtune.adapters.method import abstract, prepare
from meshtune.adapters.pissa import LEAST, LoftQ
from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight


def in_turns(weight: torch.Tensor, rank: int, turns: int) -> tuple[np.ndarray, np.ndarray]:
    """(the base, B A) of peft.utils.loftq_utils.loftq_init with 4 bits, step by step on the CPU."""
    residual = weight.clone()
    for turn in range(turns):
        codes, state = bnb.quantize_4bit(residual, quant_type="nf4", compress_statistics=False)
        numbers = bnb.dequantize_4bit(codes, state).to(torch.float32)
        u, s, v = torch.linalg.svd(weight - numbers, full_matrices=False)
        left, right = u @ torch.sqrt(torch.diag(s)[:, :rank]), torch.sqrt(torch.diag(s)[:rank]) @ v
        if turn + 1 < turns:
            residual = weight - left @ right
    return numbers.numpy(), (left @ right).numpy()


@pytest.mark.parametrize("turns", [1, 4])
def test_turns_are_pefts(turns: int):
    """The same codes but for shares within rounding of a bound; B A to 1e-4 of its largest entry."""
    weights = torch.randn(2, 48, 128, generator=torch.Generator().manual_seed(0))
    config = LoraConfig(rank=8, alpha=8.0, adapter="loftq", loftq_iterations=turns, svd_iterations=None)
    spec = ArraySpec((2, 48, 128), "float32", ("layers", "ffn", "embed"))
    quantised = QuantisedWeight.quantise(jnp.asarray(weights.numpy()), QuantizeConfig("nf4", 64, double=False))
    keys = jax.random.split(jax.random.key(0), 2)
    started = LoftQ.start(LoftQ.abstract(spec, config), config, keys, quantised, Original(jnp.asarray(weights.numpy())))
    for row, weight in enumerate(weights):
        numbers, product = in_turns(weight, 8, turns)
        ours = np.asarray(started.weight.dequantise("float32"))[row]
        assert (np.abs(ours - numbers) > 1e-5).mean() < 0.002
        delta = np.asarray(started.adapter.delta())[row]
        assert np.abs(delta - product).max() < (1e-4 if turns == 1 else 0.02) * np.abs(product).max()


@pytest.mark.parametrize(
    "format", ["nf4", *(pytest.param(format, marks=pytest.mark.slow) for format in ("int4", "int8"))]
)
def test_every_turn_brings_the_base_nearer(format: str):
    """With scales quantised too, and whatever alpha: the product added is scale * B A."""
    weight = jax.random.normal(jax.random.key(1), (1, 64, 128))
    spec, keys = ArraySpec((1, 64, 128), "float32", ("layers", "ffn", "embed")), jax.random.split(jax.random.key(0), 1)
    quantised = QuantisedWeight.quantise(weight, QuantizeConfig(format, 32))
    off = [float(jnp.linalg.norm(weight - quantised.dequantise("float32")))]
    for turns in (1, 5):
        config = LoraConfig(rank=8, alpha=32.0, rslora=True, adapter="loftq", loftq_iterations=turns)
        started = LoftQ.start(LoftQ.abstract(spec, config), config, keys, quantised, Original(weight))
        off.append(float(jnp.linalg.norm(weight - started.adapter.merge(started.weight.dequantise("float32")))))
    assert off[0] > 1.05 * off[1]
    assert off[1] > (1.0 if format == "int8" else 1.02) * off[2]


@pytest.mark.parametrize("turns", [1, 3])
def test_what_is_made_up_for_is_what_large_inputs_lose(turns: int):
    """B A is the best of its rank for the loss times the inputs' sizes, by a float64 decomposition; in float32 to 1e-4
    of its largest entry. A tenth of the inputs are a hundred times the rest."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((2, 48, 128)).astype(np.float32)
    sizes = np.where(random.random((2, 128)) < 0.1, 100.0, 1.0).astype(np.float32)
    config = LoraConfig(
        rank=4, alpha=8.0, adapter="loftq", loftq_iterations=turns, loftq_calibration=1, svd_iterations=None
    )
    spec, keys = ArraySpec((2, 48, 128), "float32", ("layers", "ffn", "embed")), jax.random.split(jax.random.key(0), 2)
    quantised = QuantisedWeight.quantise(jnp.asarray(weight), QuantizeConfig("nf4", 64))
    original = Original(jnp.asarray(weight), jnp.asarray(sizes))
    started = LoftQ.start(LoftQ.abstract(spec, config), config, keys, quantised, original)
    delta, base = np.asarray(started.adapter.delta()), np.asarray(started.weight.dequantise("float32"), np.float64)
    for row in range(2):
        size = sizes[row] + LEAST * sizes[row].mean(dtype=np.float64)
        u, s, v = np.linalg.svd((weight[row] - base[row]) * size, full_matrices=False)
        best = (u[:, :4] * s[:4]) @ v[:4] / size
        assert np.abs(delta[row] - best).max() < 1e-4 * np.abs(best).max()
    a, b = np.asarray(started.adapter.a), np.asarray(started.adapter.b)
    np.testing.assert_allclose(np.linalg.norm(a, axis=2), np.linalg.norm(b, axis=1), rtol=1e-4)
    plain = LoftQ.start(LoftQ.abstract(spec, config), config, keys, quantised, Original(jnp.asarray(weight)))

    def lost(start) -> float:
        residual = weight - np.asarray(start.weight.dequantise("float32")) - np.asarray(start.adapter.delta())
        return float(np.linalg.norm(residual * sizes[:, None]))

    assert lost(started) < 0.8 * lost(plain)


def test_a_base_that_is_not_quantised_is_refused():
    with pytest.raises(UserError, match=r"(?s)not quantised.*quantize: nf4"):
        prepare(LoraConfig(rank=4, adapter="loftq", targets=("q_proj",)), *base("llama3"), jax.random.key(0))
    with pytest.raises(UserError, match=r"(?s)lm_head is not quantised.*train_modules"):
        abstract(LoraConfig(rank=4, adapter="loftq", targets=("lm_head",)), base("llama3")[0])
