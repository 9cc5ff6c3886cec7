<<<<<<< HEAD
"""dots.llm1: a dense layer first, windows in the last layers."""
=======
"""dots.llm1: a dense layer before sparse ones, windows in the upper layers, weights that are not normalised."""
>>>>>>> 9a142e9 (OLMoE, GLM-4.5, dots.llm1, MiniMax-M2 and gpt-oss)

from __future__ import annotations

from families.case import Case

<<<<<<< HEAD
=======
MESHES = ({"fsdp": 2, "tp": 2}, {"ep": 2, "tp": 2}, {"fsdp": 2, "cp": 2})

>>>>>>> 9a142e9 (OLMoE, GLM-4.5, dots.llm1, MiniMax-M2 and gpt-oss)
CASES = (
    Case(
        "dots1",
        "dots1",
        {
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
<<<<<<< HEAD
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
=======
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "sliding_window": 7,
            "max_window_layers": 2,
        },
        meshes=MESHES,
>>>>>>> 9a142e9 (OLMoE, GLM-4.5, dots.llm1, MiniMax-M2 and gpt-oss)
    ),
)
