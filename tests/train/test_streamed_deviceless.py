"""Full tuning from the host's memory, as accelerators' compilers see it: no buffer of the model's size on the device or
allocated again on the host, and copies under way while products are computed."""

from __future__ import annotations

import functools
import re

import pytest

from deviceless import compiled_for

pytestmark = pytest.mark.deviceless
LAYERS = 24

STEP = """
from meshtune.adapters.config import FullConfig
from meshtune.adapters.method import abstract
from meshtune.families import model_spec
from meshtune.mesh.placement import is_offloaded
from meshtune.model.compute import Compute
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import abstract_state

spec = model_spec({
    "model_type": "llama", "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}, "bfloat16")
arrays = abstract(FullConfig(), spec, "float32")
optimizer, _ = make_optimizer(OptimizerConfig("adamw", in_backward=True), 10, arrays.trainable, arrays.spec)
compute = Compute(
    "bfloat16", "full", loss_chunk=256, platform=target.device.platform, chip=target.device.arch,
    attention="blockwise", offload=("weights", "optimizer"),
)

def place(leaf):
    return leaf if is_offloaded(leaf.sharding) else array(leaf.shape, leaf.dtype)

f = make_train_step(sft_objective, arrays.spec, compute, optimizer)
state = jax.tree.map(place, abstract_state(arrays.trainable, optimizer, None, compute.offload))
batch = {key: array((1, 1, 1024), "int32") for key in ("tokens", "targets", "positions", "segment_ids")}
batch["weights"] = array((1, 1, 1024))
args = (state, {}, batch, array((), "int32"))
result = sum(leaf.size * 4 for leaf in jax.tree.leaves(state))
"""


@functools.cache
def step(target):
    return compiled_for(target, STEP, layers=LAYERS, text=target == "RTX4080")


@pytest.mark.parametrize("target", ["RTX4080", "gfx906-16"])
def test_nothing_of_the_models_size_is_on_the_device(target):
    """Weights and moments are arguments in the host's memory and updated there, in their place."""
    facts = step(target)
    assert facts["argument_bytes"] < 2**20
    assert facts["host_argument_bytes"] == facts["host_output_bytes"] > 0.99 * facts["result"]
    assert facts["host_temp_bytes"] == 0
    # Of 24 layers' weights and moments those of three or four at once (computed with, coming, going, new), a layer's
    # gradients, and the stream; the weights alone are a third of `result`.
    assert facts["temp_bytes"] < facts["result"] / 4


def test_copies_are_under_way_while_products_are_computed():
    """In the forward pass the next layer's weights come, in the backward pass updated ones go: on a card whose
    compiler waits for each copy at once unless it is told otherwise."""
    hidden_copies = [hidden(lines) for lines in computations(step("RTX4080")["text"])]
    assert sum(products > 2 for products, _ in hidden_copies if products) >= 2
    assert {"dynamic-slice", "dynamic-update-slice"} <= {
        kind for products, kinds in hidden_copies if products for kind in kinds
    }


def computations(text):
    """The lines of every computation of a program."""
    return [block.splitlines() for block in re.split(r"\n}\n", text)]


def hidden(lines):
    """(matrix products between the start and the end of some copy of a row, the kinds of those copies)."""
    starts, largest, kinds = {}, 0, set()
    products = 0
    for line in lines:
        name = re.match(r"\s+(?:ROOT )?%(\S+) = ", line)
        if name is None:
            continue
        kind = re.match(r"(dynamic-slice|dynamic-update-slice)-(start|done)", name[1])
        if kind is None:
            products += "gemm" in name[1] or "cublas" in line
        elif kind[2] == "start":
            starts[name[1]] = products
        elif (start := re.search(r"-done\(%([^)]+)\)", line)) and products - starts.get(start[1], products) > 2:
            largest = max(largest, products - starts[start[1]])
            kinds.add(kind[1])
    return largest, kinds
