"""Hunyuan A13B: Hunyuan's attention, routed experts with a shared one (https://arxiv.org/abs/2411.02265)."""

from __future__ import annotations

from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.experts import expert_modules, experts_spec, shared_modules, with_shared
from meshtune.families.family import Family
from meshtune.families.hunyuan import NORMS, hunyuan_attention, read_variants
from meshtune.families.llama import MODULES, OUTSIDE, decoder_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import ModelSpec

# Fields that published configs give for every layer, and that must be the same in all.
BY_LAYER = ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size")
LEFTOVERS = (
    "moe_drop_tokens",
    "moe_random_routing_dropped_token",
    "capacity_factor",
    "use_mixed_mlp_moe",
    "moe_layer_num_skipped",
)

DESCRIPTIONS = {
    "hunyuan_v1_moe": Family(
        title="Hunyuan A13B",
        special="queries and keys are normalised after they are rotated; 64 experts, of which 8 compute a token, and a "
        "shared one",
        models=("tencent/Hunyuan-A13B-Instruct",),
        group="mixture of experts",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """HunYuanMoEV1Config -> ModelSpec."""
    config = config | {name: _of_all_layers(config[name], name, where) for name in BY_LAYER if name in config}
    fields = ConfigFields(config, where)
    read_variants(fields, config)
    fields.harmless(*LEFTOVERS)
    fields.only("moe_intermediate_size", fields.integer("intermediate_size"))
    fields.only("num_shared_expert", 1)
    router = {"normalize": True, "float32": True}
    experts = with_shared(experts_spec(fields, width="intermediate_size", top_k="moe_topk", router=router), 1)
    norm = NormSpec(fields.number("rms_norm_eps", 1e-5))
    layers = [LayerSpec(hunyuan_attention(fields, norm), experts, norm)] * fields.integer("num_hidden_layers")
    return decoder_spec(fields, "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", layers)


def _of_all_layers(value: Any, name: str, where: str) -> Any:
    """The one value of a list with an entry for each layer. Raises UserError where layers differ."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise ConfigFields({}, where).error(name, f"{name} = {value!r}: layers that differ in it are not implemented")
    return value[0]


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; routed experts by themselves or fused."""
    modules = {**MODULES, **NORMS, **shared_modules("shared_mlp"), **expert_modules(spec), "mlp/router": "mlp.gate.wg"}
    return one_to_one(spec, modules, OUTSIDE)
