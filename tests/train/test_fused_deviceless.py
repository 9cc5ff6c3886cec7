"""On accelerators too, a fused step holds no whole gradient and updates parameters and state in their place."""

from __future__ import annotations

import pytest

from deviceless import compiled_for

STEP = """
import dataclasses
from meshtune.adapters.config import FullConfig
from meshtune.adapters.method import abstract
from meshtune.families import model_spec
from meshtune.model.compute import Compute
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import abstract_state

spec = model_spec({
    "model_type": "llama", "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
}, "bfloat16")
arrays = abstract(FullConfig(), spec, "bfloat16")
config = OptimizerConfig("adamw", state_dtype="bfloat16", in_backward=True)
optimizer, _ = make_optimizer(config, 10, arrays.trainable, arrays.spec)
chip = {"platform": target.device.platform, "chip": target.device.arch}
compute = Compute("bfloat16", "full", 64, attention="blockwise", **chip)
f = make_train_step(sft_objective, arrays.spec, compute, optimizer)
state = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), abstract_state(arrays.trainable, optimizer))
batch = {key: array((1, 1, 256), "int32") for key in ("tokens", "targets", "positions", "segment_ids")}
batch["weights"] = array((1, 1, 256))
args = (state, {}, batch, array((), "int32"))
result = sum(leaf.size * 4 for leaf in jax.tree.leaves(state.trainable))
"""


@pytest.mark.deviceless
@pytest.mark.parametrize("target", ["H100", "MI300X", "TPUv5p"])
def test_a_fused_step_holds_no_whole_gradient(target):
    """24 layers; the gradients of all, float32, would take `result` bytes; one layer's and its update take a sixth."""
    facts = compiled_for(target, STEP)
    assert facts["temp_bytes"] < facts["result"] / 5
    assert facts["alias_bytes"] > 0.99 * facts["output_bytes"]
