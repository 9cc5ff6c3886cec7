"""LoftQ: its turns are those of peft's loftq_init, whose own code runs on GPUs alone."""

from __future__ import annotations

import bitsandbytes.functional as bnb
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from twins import base

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.loftq import LoftQ
from meshtune.adapters.method import abstract, prepare
from meshtune.errors import UserError
from meshtune.model.spec import ArraySpec
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight


def in_turns(weight: torch.Tensor, rank: int, turns: int) -> tuple[np.ndarray, np.ndarray]:
    """(the base, B A) of peft.utils.loftq_utils.loftq_init with 4 bits, step by step on the CPU."""
    rest = weight.clone()
    for turn in range(turns):
        codes, state = bnb.quantize_4bit(rest, quant_type="nf4", compress_statistics=False)
        numbers = bnb.dequantize_4bit(codes, state).to(torch.float32)
        u, s, v = torch.linalg.svd(weight - numbers, full_matrices=False)
        left, right = u @ torch.sqrt(torch.diag(s)[:, :rank]), torch.sqrt(torch.diag(s)[:rank]) @ v
        if turn + 1 < turns:
            rest = weight - left @ right
    return numbers.numpy(), (left @ right).numpy()


@pytest.mark.parametrize("turns", [1, 4])
def test_turns_are_pefts(turns: int):
    """The same codes but for shares within rounding of a bound; B A to 1e-4 of its largest entry."""
    weights = torch.randn(2, 48, 128, generator=torch.Generator().manual_seed(0))
    config = LoraConfig(rank=8, alpha=8.0, adapter="loftq", loftq_iterations=turns, svd_iterations=None)
    spec = ArraySpec((2, 48, 128), "float32", ("layers", "ffn", "embed"))
    quantised = QuantisedWeight.quantise(jnp.asarray(weights.numpy()), QuantizeConfig("nf4", 64, double=False))
    keys = jax.random.split(jax.random.key(0), 2)
    started = LoftQ.start(LoftQ.abstract(spec, config), config, keys, quantised, jnp.asarray(weights.numpy()))
    for row, weight in enumerate(weights):
        numbers, product = in_turns(weight, 8, turns)
        ours = np.asarray(started.weight.dequantise("float32"))[row]
        assert (np.abs(ours - numbers) > 1e-5).mean() < 0.002
        made = np.asarray(started.adapter.delta())[row]
        assert np.abs(made - product).max() < (1e-4 if turns == 1 else 0.02) * np.abs(product).max()


@pytest.mark.parametrize("format", ["nf4", "int4", "int8"])
def test_every_turn_brings_the_base_nearer(format: str):
    """With scales quantised too, and whatever alpha: what is added is scale * B A."""
    weight = jax.random.normal(jax.random.key(1), (1, 64, 128))
    spec, keys = ArraySpec((1, 64, 128), "float32", ("layers", "ffn", "embed")), jax.random.split(jax.random.key(0), 1)
    quantised = QuantisedWeight.quantise(weight, QuantizeConfig(format, 32))
    off = [float(jnp.linalg.norm(weight - quantised.dequantise("float32")))]
    for turns in (1, 5):
        config = LoraConfig(rank=8, alpha=32.0, rslora=True, adapter="loftq", loftq_iterations=turns)
        started = LoftQ.start(LoftQ.abstract(spec, config), config, keys, quantised, weight)
        off.append(float(jnp.linalg.norm(weight - started.adapter.merge(started.weight.dequantise("float32")))))
    assert off[0] > 1.05 * off[1]
    assert off[1] > (1.0 if format == "int8" else 1.02) * off[2]


def test_a_base_that_is_not_quantised_is_refused():
    with pytest.raises(UserError, match=r"(?s)not quantised.*quantize: nf4"):
        prepare(LoraConfig(rank=4, adapter="loftq", targets=("q_proj",)), *base("llama3"), jax.random.key(0))
    with pytest.raises(UserError, match=r"(?s)lm_head is not quantised.*train_modules"):
        abstract(LoraConfig(rank=4, adapter="loftq", targets=("lm_head",)), base("llama3")[0])
