"""Phi-3.5-MoE: layer norms, biases, LongRoPE, and the sparse mixer, which gives each of two experts a weight by itself
(https://arxiv.org/abs/2409.12136)."""

from __future__ import annotations

from typing import Any

from meshtune.families import mixtral
from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.experts import expert_modules, experts_spec
from meshtune.families.family import Family
from meshtune.families.llama import MODULES, OUTSIDE, attention_spec, decoder_spec, head_sizes
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec
from meshtune.model.spec import ModelSpec

MAGNITUDES = ("short_mscale", "long_mscale")  # factors on cos and sin
# PhimoeConfig's, where they are not those of the other families.
DEFAULTS = {"num_key_value_heads": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "router_jitter_noise": 0.01}

DESCRIPTIONS = {
    "phimoe": Family(
        title="Phi-3.5-MoE",
        special="16 experts, of which 2 compute a token, chosen as in evaluation: no noise, no sampling; layer norms, "
        "biases; LongRoPE, beyond the original context with the short factors, as transformers computes it",
        models=("microsoft/Phi-3.5-MoE-instruct",),
        group="mixture of experts",
    )
}


def model_spec(config: dict[str, Any], where: str) -> ModelSpec:
    """PhimoeConfig -> ModelSpec. Noise on what routers read is not applied."""
    fields = ConfigFields(DEFAULTS | config, where)
    if noise := fields.get("input_jitter_noise"):
        fields.notes.append(f"input_jitter_noise = {noise} of the model's config is not applied")
    fields.get("auto_map")
    fields.only("num_experts_per_tok", 2)  # whatever it says, transformers chooses two
    bias, norm = bool(fields.get("attention_bias", False)), NormSpec(fields.number("rms_norm_eps"), "layer")
    attention = attention_spec(
        fields, rope=_rope(fields, config), qkv_bias=bias, out_bias=bias, window=fields.get("sliding_window")
    )
    router = {"scoring": "sparse_mixer", "jitter": float(fields.get("router_jitter_noise"))}
    layer = LayerSpec(attention, experts_spec(fields, width="intermediate_size", router=router), norm)
    head_bias = bool(fields.get("lm_head_bias", False))
    if head_bias and fields.get("tie_word_embeddings"):
        raise fields.error("tie_word_embeddings", "a head with a bias that is tied to the embedding is not implemented")
    layers = [layer] * fields.integer("num_hidden_layers")
    return decoder_spec(fields, "phimoe", ("PhimoeForCausalLM", "PhiMoEForCausalLM"), layers, head_bias=head_bias)


def _rope(fields: ConfigFields, config: dict[str, Any]) -> RopeSpec:
    """LongRoPE, as transformers 5 computes it: with the short factors at every length."""
    blocks = {name: block for name in ("rope_parameters", "rope_scaling") if (block := config.get(name))}
    magnitudes: set[Any] = set()
    for name, block in blocks.items():
        if not isinstance(block, dict) or block.get("rope_type", block.get("type")) in (None, "default"):
            continue
        magnitudes |= {block.get(field) for field in MAGNITUDES}
        if len(magnitudes) != 1 or not isinstance(next(iter(magnitudes)), int | float):
            raise fields.error(
                name, f"{name} has {MAGNITUDES[0]} and {MAGNITUDES[1]} {magnitudes}: one number for both is implemented"
            )
        blocks[name] = {key: value for key, value in block.items() if key not in MAGNITUDES}
        if "short_factor" in block:
            blocks[name] |= {"long_factor": block["short_factor"], "attention_factor": magnitudes.copy().pop()}
    rope = read_rope(fields.with_values("rotary embedding", **blocks), head_sizes(fields)[2], theta=1e6)
    if rope.kind not in ("default", "longrope"):
        raise fields.error(next(iter(blocks)), f"rope type '{rope.kind}' is not implemented for this family")
    if rope.kind == "longrope":
        fields.notes.append(
            f"beyond {rope.original_length:,} tokens LongRoPE has its short factors, as in transformers 5; the code "
            "published with the model takes the long ones"
        )
    return rope


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors; experts by themselves or fused."""
    experts = expert_modules(spec, block="block_sparse_moe", names=mixtral.NAMES)
    if spec.fused_experts:
        experts["mlp/router"] = "mlp.router"
    return one_to_one(spec, {**MODULES, **experts}, OUTSIDE)
