"""Gemma 1: wide heads, one head of keys and values."""

from __future__ import annotations

from families.case import Case

CASES = (Case("gemma", "gemma", {"head_dim": 12, "num_key_value_heads": 1, "initializer_range": 0.1}),)
