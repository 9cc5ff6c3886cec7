"""Every knob of memory takes off an accelerator what it says, as that accelerator's compiler counts it."""

from __future__ import annotations

import functools

import pytest

from deviceless import compiled_for

pytestmark = pytest.mark.deviceless
MIB = 2**20
WIDTH, FFN, LAYERS, LENGTH = 1024, 4096, 12, 16384
STREAM = 2 * LENGTH * WIDTH  # bytes of a bfloat16 residual stream

STEP = """
from meshtune.adapters.config import FullConfig, LoraConfig
from meshtune.adapters.method import abstract
from meshtune.families import model_spec
from meshtune.mesh.placement import is_offloaded, offload_frozen
from meshtune.model.compute import Compute
from meshtune.objectives.sft import sft_objective
from meshtune.optim.build import OptimizerConfig, make_optimizer
from meshtune.train.step.build import make_train_step
from meshtune.train.step.state import abstract_state

import dataclasses
from meshtune.model.spec import Stack

spec = model_spec({
    "model_type": "llama", "vocab_size": 512, "hidden_size": width, "intermediate_size": ffn,
    "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
    "max_position_embeddings": length, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
}, "bfloat16")
layer = spec.stacks[0].pattern[0]
spec = dataclasses.replace(spec, stacks=(Stack((layer,) * group, layers // group),))
arrays = abstract(FullConfig() if full else LoraConfig(rank=8), spec)
optimizer, _ = make_optimizer(OptimizerConfig(), 10, arrays.trainable, arrays.spec)
knobs = knobs | {"offload": tuple(knobs.get("offload", ()))}
compute = Compute("bfloat16", "full", loss_chunk=512, platform=target.device.platform, chip=target.device.arch, **knobs)

def place(leaf):
    return leaf if is_offloaded(leaf.sharding) else array(leaf.shape, leaf.dtype)

f = make_train_step(sft_objective, arrays.spec, compute, optimizer)
state = jax.tree.map(place, abstract_state(arrays.trainable, optimizer, None, compute.offload))
frozen = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays.frozen)
frozen = offload_frozen(frozen, arrays.frozen, compute.offload)
batch = {key: array((1, 1, length), "int32") for key in ("tokens", "targets", "positions", "segment_ids")}
batch["weights"] = array((1, 1, length))
args = (state, jax.tree.map(place, frozen), batch, array((), "int32"))
result = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(frozen["layers"])) if frozen else 0
"""


@functools.cache
def step(target, full=False, length=LENGTH, group=1, **knobs):
    numbers = {"group": group, "width": WIDTH, "ffn": FFN, "layers": LAYERS, "length": length}
    return compiled_for(target, STEP, knobs=knobs, full=full, **numbers)


@pytest.mark.parametrize("target", ["H100", "MI300X"])
def test_a_residual_stream_on_the_host_leaves_the_device(target):
    plain, offloaded = step(target), step(target, offload=("residual",))
    assert offloaded["host_temp_bytes"] >= LAYERS * STREAM
    assert plain["temp_bytes"] - offloaded["temp_bytes"] > 0.8 * (LAYERS - 2) * STREAM


TOGETHER = "XLA for NVIDIA computes the layers again together where their streams come from the host"


@pytest.mark.parametrize(
    ("target", "offload"),
    [
        ("H100", ()),
        pytest.param("H100", ("residual",), marks=pytest.mark.xfail(strict=True, reason=TOGETHER)),
        ("MI300X", ("residual",)),
    ],
)
def test_layers_of_a_pattern_are_computed_again_one_by_one(target, offload):
    """A scan goes over groups of 6 layers, as Gemma 3's: together, their intermediates take five times as much."""
    single, six = (step(target, group=group, offload=offload) for group in (1, 6))
    assert six["temp_bytes"] < 1.4 * single["temp_bytes"]


@pytest.mark.parametrize("target", ["H100", "MI300X"])
def test_chunks_leave_a_few_streams(target):
    """Of the feed-forward layer's several arrays, four times as wide as the stream, nothing whole remains."""
    options = {"offload": ("residual",)}
    plain, mlp = step(target, **options), step(target, mlp_chunk=1024, **options)
    both = step(target, mlp_chunk=1024, attention_chunk=1024, **options)
    assert mlp["temp_bytes"] < 0.6 * plain["temp_bytes"]
    assert both["temp_bytes"] < 0.8 * mlp["temp_bytes"]
    assert both["temp_bytes"] < 9 * STREAM  # half of it chunks, gradients of adapters and weights under way


@pytest.mark.parametrize("target", ["H100", "MI300X"])
def test_weights_on_the_host_come_layer_by_layer(target):
    plain, offloaded = step(target), step(target, offload=("weights",))
    # All of the layers but their norms, which are too small to be sent.
    assert (
        plain["argument_bytes"] - offloaded["argument_bytes"]
        == offloaded["host_argument_bytes"]
        > 0.99 * plain["result"]
    )
    # Two layers' weights at once: one is computed with while the next is on its way.
    assert offloaded["temp_bytes"] - plain["temp_bytes"] < 3 * plain["result"] / LAYERS


@pytest.mark.parametrize("target", ["H100", "MI300X"])
def test_optimizer_state_on_the_host_comes_layer_by_layer(target):
    plain, offloaded = (
        step(target, full=True, length=1024),
        step(target, full=True, length=1024, offload=("optimizer",)),
    )
    moments = plain["argument_bytes"] - offloaded["argument_bytes"]
    assert moments == offloaded["host_argument_bytes"] == offloaded["host_output_bytes"] > 500 * MIB
    # The new state is written over the old, on the host too; a device holds that of a layer, and the embedding's.
    assert offloaded["host_temp_bytes"] == 0
    assert offloaded["temp_bytes"] - plain["temp_bytes"] < 0.1 * moments
