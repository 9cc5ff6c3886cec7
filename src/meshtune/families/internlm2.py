"""InternLM 2 and 2.5 (https://arxiv.org/abs/2403.17297), whose own code is never run: Llama's mathematics with one
projection for queries, keys and values."""

from __future__ import annotations

from meshtune.families.config_fields import ConfigFields, read_rope
from meshtune.families.family import Family
from meshtune.families.llama import attention_spec, decoder_spec, head_sizes, mlp_spec, norm_spec
from meshtune.families.tensors import TensorMap, one_to_one
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec

# The rows of wqkv are grouped by key-value head, as those of a packed projection are in memory.
MODULES = {
    "attn_norm": "attention_norm",
    "mlp_norm": "ffn_norm",
    "attn/qkv": "attention.wqkv",
    "attn/o": "attention.wo",
    "mlp/gate": "feed_forward.w1",
    "mlp/up": "feed_forward.w3",
    "mlp/down": "feed_forward.w2",
}
OUTSIDE = {"embed": "model.tok_embeddings", "norm": "model.norm", "head": "output", "score": "v_head"}

DESCRIPTIONS = {
    "internlm2": Family(
        title="InternLM 2 and 2.5",
        special="fused queries, keys and values, grouped by key-value head; read without the code they ship with",
        models=("internlm/internlm2_5-7b-chat", "internlm/internlm2-chat-20b"),
        template="chatml",
    )
}


def model_spec(config: dict[str, object], where: str) -> ModelSpec:
    """InternLM2Config -> ModelSpec. `bias` is that of the attention's projections."""
    fields = ConfigFields(config, where)
    fields.harmless("auto_map", "attn_implementation")
    bias = bool(fields.get("bias", True))
    rope = read_rope(fields, head_sizes(fields)[2], theta=10000.0)
    attention = attention_spec(fields, rope=rope, qkv_bias=bias, out_bias=bias, packed=True)
    layer = LayerSpec(attention, mlp_spec(fields), norm_spec(fields))
    return decoder_spec(fields, "internlm2", "InternLM2ForCausalLM", [layer] * fields.integer("num_hidden_layers"))


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of tensors: each is one leaf, or one layer of it."""
    return one_to_one(spec, MODULES, OUTSIDE)
