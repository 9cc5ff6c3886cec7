"""K-EXAONE: a dense layer first, windows, experts in groups."""

from __future__ import annotations

from families.case import Case
from families.cases.afmoe import ATTENTION, PEFT

CASES = (
    Case(
        "exaone_moe",
        "exaone_moe",
        {
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "sliding_window": 7,
        },
        targets=("experts", *ATTENTION),
        peft=PEFT,
    ),
)
