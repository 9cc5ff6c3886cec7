"""On GPUs unrolled layers hold no dequantised weight: the barrier in the backward pass is kept there."""

from __future__ import annotations

import pytest

from deviceless import compiled_for

GRADIENT = """
from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import abstract
from meshtune.arrays.tree import merge
from meshtune.families import model_spec
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward
from meshtune.model.inputs import Inputs
from meshtune.quantize.config import QuantizeConfig

spec = model_spec({
    "model_type": "llama", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
}, "bfloat16")
arrays = abstract(LoraConfig(rank=2), spec, quantize=QuantizeConfig("nf4") if QUANTISED else None)
chip = {"platform": target.device.platform, "chip": target.device.arch}
compute = Compute("bfloat16", "selective", 64, attention="direct", scan=False, **chip)

def loss(trainable, frozen, tokens):
    params = merge(trainable, frozen)
    return forward(params, spec, compute, Inputs(tokens, tokens, tokens)).hidden.astype(jnp.float32).sum()

f = jax.jit(jax.grad(loss))
trainable, frozen = (
    jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), tree) for tree in (arrays.trainable, arrays.frozen)
)
args = (trainable, frozen, array((1, 32), "int32"))
result = 0
"""
A_LAYER = 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512)  # bytes of its dequantised weights


@pytest.mark.deviceless
@pytest.mark.parametrize("target", ["H100", "MI300X"])
def test_memory_does_not_grow_with_unrolled_layers(target):
    """A further layer adds to the temporaries what it adds without quantisation. XLA for CPUs drops
    the barrier; for TPUs at this size padding of the codes hides what would be kept."""

    def growth(quantised: bool) -> float:
        few, many = (
            compiled_for(target, GRADIENT.replace("LAYERS", str(layers)).replace("QUANTISED", str(quantised)))
            for layers in (2, 6)
        )
        return (many["temp_bytes"] - few["temp_bytes"]) / 4

    assert growth(True) - growth(False) < 0.05 * A_LAYER
