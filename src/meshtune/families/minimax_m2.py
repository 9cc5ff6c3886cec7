"""MiniMax M2: a sigmoid router with a correction, rotary embeddings of part of a head, and all queries, and all keys,
normalised together."""

from __future__ import annotations

from typing import Any

from meshtune.families import mixtral, qwen3
from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.experts import expert_modules, experts_spec
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, norm_spec
from meshtune.families.tensors import Stored, TensorMap, View, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

DESCRIPTIONS = {
    "minimax_m2": Family(
        title="MiniMax M2",
        special="256 experts, of which 8 compute a token; sigmoid router with a correction",
        models=("MiniMaxAI/MiniMax-M2",),
        group="mixture of experts",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """MiniMaxM2Config -> ModelSpec. `rotary_dim` is an older way to say how much of a head is rotated."""
    fields = ConfigFields({"head_dim": 128} | config, where)
    head_dim = fields.integer("head_dim")
    share = fields.integer("rotary_dim", head_dim) / head_dim
    norm = norm_spec(fields)
    attention = attention_spec(
        fields,
        rope=read_rope(fields, head_dim, theta=5e6, rotated=share),
        qk_norm=norm,
        qk_norm_over="vector",
    )
    router = {"scoring": "sigmoid", "normalize": True, "correction": True}
    layer = LayerSpec(attention, experts_spec(fields, width="intermediate_size", router=router), norm)
    return decoder_spec(fields, "minimax_m2", "MiniMaxM2ForCausalLM", [layer] * fields.integer("num_hidden_layers"))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; experts by themselves or fused."""
    block = "mlp" if spec.fused_experts else "block_sparse_moe"
    correction = Stored(f"{block}.e_score_correction_bias", f"{block}.gate", View.identity)
    experts = expert_modules(spec, block="block_sparse_moe", names=mixtral.NAMES)
    return one_to_one(spec, {**MODULES, **qwen3.NORMS, **experts, "mlp/router/correction": correction}, OUTSIDE)
