"""Mixtral 8x7B and 8x22B: Mistral with eight experts in every layer (https://arxiv.org/abs/2401.04088)."""

from __future__ import annotations

from meshtune.families.config_fields import ConfigFields
from meshtune.families.experts import expert_modules, experts_spec
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, norm_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

NAMES = {"gate": "w1", "up": "w3", "down": "w2"}

DESCRIPTIONS = {
    "mixtral": Family(
        title="Mixtral",
        special="8 experts, of which 2 compute a token",
        models=("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x22B-Instruct-v0.1"),
        group="mixture of experts",
        template="mistral",
    )
}


def model_spec(config: dict[str, object], where: str) -> ModelSpec:
    """MixtralConfig -> ModelSpec."""
    fields = ConfigFields(config, where)
    attention = attention_spec(fields, window=fields.get("sliding_window"))
    experts = experts_spec(fields, width="intermediate_size", router={"normalize": True})
    layer = LayerSpec(attention, experts, norm_spec(fields))
    return decoder_spec(fields, "mixtral", "MixtralForCausalLM", [layer] * fields.integer("num_hidden_layers"))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; experts by themselves or fused."""
    experts = expert_modules(spec, block="block_sparse_moe", names=NAMES)
    return one_to_one(spec, {**MODULES, **experts}, OUTSIDE)
