"""ERNIE 4.5 with experts in every second layer but the first, biases and an untied head as variants."""

from __future__ import annotations

from families.case import Case

SIZES = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2}

CASES = (
    # peft cannot load adapters on the dense layers and the shared experts beside routed ones (docs/experts.md).
    Case(
        "ernie4_5_moe",
        "ernie4_5_moe",
        SIZES | {"moe_layer_start_index": 1},
        targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    Case(
        "ernie4_5_moe_interval",
        "ernie4_5_moe",
        SIZES | {"moe_layer_interval": 2, "moe_num_shared_experts": 0, "tie_word_embeddings": False, "use_bias": True},
        variant=True,
    ),
)
