<<<<<<< HEAD
"""MiniMax M2, with half of a head rotated."""
=======
"""MiniMax-M2: norms over all heads, half of each head rotated, corrections."""
>>>>>>> 9a142e9 (OLMoE, GLM-4.5, dots.llm1, MiniMax-M2 and gpt-oss)

from __future__ import annotations

from families.case import Case

<<<<<<< HEAD
ROPE = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
=======
MESHES = ({"fsdp": 2, "tp": 2}, {"ep": 2, "tp": 2}, {"fsdp": 2, "cp": 2})

>>>>>>> 9a142e9 (OLMoE, GLM-4.5, dots.llm1, MiniMax-M2 and gpt-oss)
CASES = (
    Case(
        "minimax_m2",
        "minimax_m2",
<<<<<<< HEAD
        {"head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "rope_parameters": ROPE},
=======
        {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8, "rotary_dim": 4},
        meshes=MESHES,
>>>>>>> 9a142e9 (OLMoE, GLM-4.5, dots.llm1, MiniMax-M2 and gpt-oss)
    ),
)
