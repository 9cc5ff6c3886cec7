"""Granite MoE with a shared expert."""

from __future__ import annotations

from families.case import Case
from families.cases.granitemoe import CONFIG, PEFT

CASES = (Case("granitemoeshared", "granitemoeshared", {**CONFIG, "shared_intermediate_size": 40}, peft=PEFT),)
