"""Mixtral, with a sliding window."""

from __future__ import annotations

from families.case import Case

CASES = (Case("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}),)
