"""The sharding rules, for every family and every method."""

from __future__ import annotations

import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from families.cases import CASES
from meshtune.adapters.config import FullConfig, LoraConfig
from meshtune.adapters.method import abstract
from meshtune.arrays.tree import named_leaves
from meshtune.errors import UserError
from meshtune.families import model_spec
from meshtune.mesh.config import AXES, MeshConfig
from meshtune.mesh.layout import Layout
from meshtune.model.gather import check_batch, layout_for
from meshtune.model.spec import ModelSpec

LLAMA_405B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def simulated_mesh(**sizes: int) -> Mesh:
    """A mesh of any size over a single device: layouts depend on sizes only."""
    shape = tuple(MeshConfig(**sizes).sizes.values())
    devices = np.empty(int(np.prod(shape)), object)
    devices[:] = [jax.devices()[0]] * len(devices)
    return Mesh(devices.reshape(shape), AXES)


def specs(spec: ModelSpec, mesh: Mesh, method=None) -> dict[str, PartitionSpec]:
    layout, _ = layout_for(mesh, spec)
    arrays = abstract(method or LoraConfig(), spec)
    return {
        name: layout.of(array).spec for tree in (arrays.frozen, arrays.trainable) for name, array in named_leaves(tree)
    }


def test_weights_and_adapters_of_405b_are_sharded_by_the_rules():
    by_name = specs(model_spec(LLAMA_405B, "bfloat16"), simulated_mesh(fsdp=4, tp=2))
    P = PartitionSpec
    assert by_name["layers/0.0/attn/q/weight"] == P(None, ("tp", "fsdp")), "gathered along the leading dimension"
    assert by_name["layers/0.0/mlp/gate/weight"] == P(None, ("tp", "fsdp"))
    assert by_name["layers/0.0/attn/o/weight"] == P(None, "fsdp", "tp")
    assert by_name["layers/0.0/mlp/down/weight"] == P(None, "fsdp", "tp")
    assert by_name["embed/weight"] == P("tp", "fsdp")
    assert by_name["layers/0.0/attn/q/adapter/a"] == P(None, "tp", "fsdp"), "A [rank, in] over (fsdp, tp)"
    assert by_name["layers/0.0/attn/q/adapter/b"] == P(None, "fsdp", "tp"), "B [out, rank] over (tp, fsdp)"
    assert by_name["norm/weight"] == P()


def test_during_computation_weights_are_sharded_over_tp_only():
    spec = model_spec(LLAMA_405B, "bfloat16")
    layout, _ = layout_for(simulated_mesh(fsdp=4, tp=2), spec)
    for site, axes in (("attn/q", (None, "tp", None)), ("mlp/down", (None, None, "tp"))):
        array = abstract(LoraConfig(), spec).frozen["layers"]["0.0"][site.split("/")[0]][site.split("/")[1]]["weight"]
        in_use = layout.in_use(array.axes, array.shape).spec
        assert tuple(in_use) + (None,) * (3 - len(in_use)) == axes, site


# Whose sizes fsdp=8 divides.
DIVISIBLE = [case for case in CASES if case.model_type in ("llama", "mistral", "qwen2", "qwen3", "gemma2")]


@pytest.mark.parametrize("case", DIVISIBLE, ids=lambda case: case.name)
@pytest.mark.parametrize("method", [LoraConfig(), FullConfig()])
def test_fsdp_replicates_nothing_larger_than_a_norm(case, method):
    spec = model_spec(case.torch_config().to_dict(), "float32")
    layout, _ = layout_for(simulated_mesh(fsdp=8), spec)
    arrays = abstract(method, spec)
    for tree in (arrays.frozen, arrays.trainable):
        for path, array in named_leaves(tree):
            split = layout.of(array).spec != PartitionSpec()
            vectors = array.size // (array.shape[0] if array.axes[0] == "layers" else 1)
            widths = [activation.width for block in spec.blocks for activation in block.cost(spec.embed).activations]
            assert split or vectors <= max(spec.embed, *widths), f"{path} is replicated"


def test_each_of_8_devices_holds_an_eighth_of_405b():
    started = time.monotonic()
    spec = model_spec(LLAMA_405B, "bfloat16")
    layout, _ = layout_for(simulated_mesh(fsdp=8), spec)
    leaves = jax.tree.leaves(abstract(LoraConfig(), spec).frozen)
    local_bytes = sum(int(np.prod(layout.of(leaf).shard_shape(leaf.shape))) * 2 for leaf in leaves)
    total_bytes = sum(leaf.nbytes for leaf in leaves)
    assert abs(total_bytes / 2 - 405.85e9) < 0.1e9
    assert local_bytes < total_bytes / 8 * 1.001
    assert time.monotonic() - started < 2


def test_key_heads_that_tp_does_not_divide_are_replicated_with_a_note():
    spec = model_spec({**LLAMA_405B, "num_key_value_heads": 4}, "bfloat16")
    layout, notes = layout_for(simulated_mesh(tp=8), spec)
    assert layout.tp_replicated == {"kv_heads"}
    assert "the 4 key and value heads do not divide by tp=8" in notes[0].text
    by_name = specs(spec, simulated_mesh(tp=8))
    assert by_name["layers/0.0/attn/k/weight"] == PartitionSpec()
    assert by_name["layers/0.0/attn/q/weight"] == PartitionSpec(None, "tp")
    assert layout_for(simulated_mesh(tp=4), spec)[1] == []


@pytest.mark.parametrize(
    ("sizes", "where", "message"),
    [
        ({"tp": 3}, "mesh.tp", "tp=3 does not divide the model's attention heads of 128"),
        ({"fsdp": 7}, "mesh.fsdp", "embedding width of 16384"),
        ({"ep": 2}, "mesh.ep", "this llama model is dense: it has none"),
    ],
)
def test_meshes_that_do_not_divide_the_model_are_an_error(sizes, where, message):
    with pytest.raises(UserError) as caught:
        layout_for(simulated_mesh(**sizes), model_spec(LLAMA_405B, "bfloat16"))
    assert caught.value.where == where
    assert message in caught.value.what


def test_rows_and_lengths_that_do_not_divide_are_an_error_with_sizes_that_do():
    with pytest.raises(UserError, match="6 rows cannot be split over dp x fsdp = 4") as caught:
        check_batch(MeshConfig(dp=2, fsdp=2), 6, 64)
    assert "such as 8" in (caught.value.fix or "")
    with pytest.raises(UserError, match="100 positions cannot be split over cp=4") as caught:
        check_batch(MeshConfig(cp=4), 8, 100)
    assert "such as 104" in (caught.value.fix or "")
    check_batch(MeshConfig(dp=2, fsdp=2, cp=4), 8, 64)


def test_a_logical_axis_without_a_rule_is_a_key_error():
    with pytest.raises(KeyError, match="spin"):
        Layout(simulated_mesh(fsdp=8)).spec(("spin", "embed"), (8, 8))


EXPERTS = {  # logical axes and shapes of stacked weights of 8 experts
    "gate": (("layers", "experts", "ffn", "embed"), (3, 8, 64, 32)),
    "down": (("layers", "experts", "embed", "ffn"), (3, 8, 32, 64)),
}


def test_experts_are_sharded_over_ep():
    """And the weights of an expert like any weight, over the remaining axes."""
    layout, P = Layout(simulated_mesh(fsdp=2, ep=4, tp=2)), PartitionSpec
    assert layout.spec(*EXPERTS["gate"]) == P(None, "ep", ("tp", "fsdp"))
    assert layout.spec(*EXPERTS["down"]) == P(None, "ep", "fsdp", "tp")
    for axes, shape in EXPERTS.values():
        in_use = layout.in_use(axes[1:], shape[1:]).spec
        assert in_use[0] == "ep", "each device computes its own experts"
        assert [entry for entry in in_use if entry is not None] == ["ep", "tp"], "the rest of an expert is gathered"


def test_arrays_without_experts_are_sharded_over_ep_like_over_fsdp():
    """Rows and dense weights, so that nothing is computed ep times."""
    layout, P = Layout(simulated_mesh(dp=2, fsdp=2, ep=4)), PartitionSpec
    assert layout.spec(("batch", "length"), (16, 8)) == P(("dp", "fsdp", "ep"))
    assert layout.spec(("layers", "ffn", "embed"), (3, 64, 32)) == P(None, ("fsdp", "ep"))
    assert layout.spec(("vocab", "embed"), (96, 32)) == P(None, ("fsdp", "ep"))
    assert layout.in_use(("ffn", "embed"), (64, 32)).spec in (P(), P(None), P(None, None)), (
        "gathered during computation"
    )
    check_batch(MeshConfig(dp=2, fsdp=2, ep=4), 16, 8)
    with pytest.raises(UserError, match="dp x fsdp x ep = 16"):
        check_batch(MeshConfig(dp=2, fsdp=2, ep=4), 8, 8)
