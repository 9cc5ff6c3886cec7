"""Configs of much used models, in full and with the fields that public copies of them have: accepted unchanged, and
with as many parameters as their publishers say, where they say it of the text model alone (not of Gemma's E2B, E4B)."""

from __future__ import annotations

from typing import Any

import pytest

from meshtune.arrays.tree import flatten
from meshtune.families import model_spec
from meshtune.model.spec import abstract_params

WRITTEN = {"attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}
GEMMA_ROPES = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}


def attention_types(number: int, count: int, usual: str = "sliding_attention") -> list[str]:
    """Layer types with full attention in every `number`-th layer."""
    return [usual if (index + 1) % number else "full_attention" for index in range(count)]


def gemma4(**fields: Any) -> dict[str, Any]:
    text = {
        **WRITTEN,
        "model_type": "gemma4_text",
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "moe_intermediate_size": None,
        "num_experts": None,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": GEMMA_ROPES,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    }
    tokens = {"image_token_id": 258880, "boi_token_id": 255999, "eoi_token_id": 258882}
    top = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "dtype": "bfloat16"}
    return {**top, **tokens, "eos_token_id": [1, 106], "vision_config": {}, "text_config": text | fields}


def gemma3n(layers: int, width: int, shared: int) -> dict[str, Any]:
    text = {
        **WRITTEN,
        "model_type": "gemma3n_text",
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * (layers - 10),
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_lr_multiplier": 1.0,
        "altup_num_inputs": 4,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2048,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": [width] * layers,
        "laurel_rank": 64,
        "layer_types": attention_types(5, layers),
        "max_position_embeddings": 32768,
        "num_attention_heads": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": shared,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "torch_dtype": "bfloat16",
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
    }
    tokens = {"audio_token_id": 262273, "boa_token_id": 256000, "eoa_token_id": 262272, "image_token_id": 262145}
    counts = {"audio_soft_tokens_per_image": 188, "vision_soft_tokens_per_image": 256}
    top = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "initializer_range": 0.02}
    return {**top, **tokens, **counts, "vision_config": {}, "audio_config": {}, "text_config": text}


GEMMA4_31B = gemma4(
    attention_k_eq_v=True,
    hidden_size=5376,
    hidden_size_per_layer_input=0,
    intermediate_size=21504,
    layer_types=attention_types(6, 60),
    max_position_embeddings=262144,
    num_attention_heads=32,
    num_global_key_value_heads=4,
    num_hidden_layers=60,
    num_key_value_heads=16,
    num_kv_shared_layers=0,
    sliding_window=1024,
    use_bidirectional_attention="vision",
    use_double_wide_mlp=False,
)
GEMMA4_E2B = gemma4(
    attention_k_eq_v=False,
    hidden_size=1536,
    hidden_size_per_layer_input=256,
    intermediate_size=6144,
    layer_types=attention_types(5, 35),
    max_position_embeddings=131072,
    num_attention_heads=8,
    num_global_key_value_heads=None,
    num_hidden_layers=35,
    num_key_value_heads=1,
    num_kv_shared_layers=20,
    sliding_window=512,
    sliding_window_pattern=5,
    use_bidirectional_attention=None,
    use_double_wide_mlp=True,
)
NEMOTRON_3_NANO = {
    **WRITTEN,
    "architectures": ["NemotronHForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    },
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
GLM_45_AIR = {
    **WRITTEN,
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "decoder_sparse_step": 1,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "output_router_logits": False,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GPT_OSS_20B = {
    **WRITTEN,
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": attention_types(2, 24),
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip
QWEN35_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "language_model_only": False,
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "video_token_id": 248057,
    "vision_config": {},
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
    "text_config": {
        **WRITTEN,
        "attn_output_gate": True,
        "bos_token_id": 248044,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": attention_types(4, 64, "linear_attention"),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000.0,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    },
}


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        pytest.param(gemma3n(30, 8192, 10), 4.44, id="gemma-3n-E2B"),
        pytest.param(gemma3n(35, 16384, 15), 6.84, id="gemma-3n-E4B"),
        pytest.param(GEMMA4_E2B, 4.63, id="gemma-4-E2B"),
        pytest.param(GEMMA4_31B, 30.7, id="gemma-4-31B"),
        pytest.param(NEMOTRON_3_NANO, 31.6, id="Nemotron-3-Nano-30B-A3B"),
        pytest.param(GLM_45_AIR, 106.9, id="GLM-4.5-Air"),
        pytest.param(GPT_OSS_20B, 20.9, id="gpt-oss-20b"),
        pytest.param(QWEN35_27B, 26.9, id="Qwen3.5-27B"),
    ],
)
def test_a_published_config_has_the_parameters_of_its_model(config: dict[str, Any], billions: float):
    """Counts the text model only, in billions; the layers that a config shares or predicts further tokens with are not
    counted."""
    spec = model_spec(config)
    assert sum(array.size for array in flatten(abstract_params(spec)).values()) / 1e9 == pytest.approx(
        billions, rel=5e-3
    )
