"""A training step in bfloat16 does not hold the frozen weights a second time, widened."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import abstract
from meshtune.families import model_spec
from meshtune.model.compute import Compute
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import init_state

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def memory(layers: int) -> tuple[int, int]:
    """(bytes of temporaries, bytes of frozen weights) of a step on one row of 8 tokens."""
    spec = model_spec(CONFIG | {"num_hidden_layers": layers}, "bfloat16")
    arrays = abstract(LoraConfig(rank=1), spec, "float32")
    optimizer, _ = make_optimizer(OptimizerConfig(), 10, arrays.trainable)
    trainable, frozen = (
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
        for tree in (arrays.trainable, arrays.frozen)
    )
    state = jax.eval_shape(lambda tree: init_state(tree, optimizer), trainable)
    shape = (1, 1, 8)
    names = ("tokens", "targets", "positions", "segment_ids")
    batch = {name: jax.ShapeDtypeStruct(shape, np.int32) for name in names}
    batch["weights"] = jax.ShapeDtypeStruct(shape, np.float32)
    step: Any = make_train_step(sft_objective, arrays.spec, Compute("bfloat16", "full"), optimizer)
    compiled = step.lower(state, frozen, batch, jax.ShapeDtypeStruct((), np.int32)).compile()
    frozen_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(frozen))
    return compiled.memory_analysis().temp_size_in_bytes, frozen_bytes


@pytest.mark.slow
def test_temporaries_do_not_grow_with_the_layers_of_a_frozen_model():
    """Widened all at once, six more layers need twice their bytes more; what grows is activations of 8 tokens."""
    (few, small), (many, large) = memory(2), memory(8)
    assert many - few < 0.2 * (large - small)
