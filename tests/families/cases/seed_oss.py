"""Seed-OSS: biases on queries, keys and values; on all projections in a second case."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case("seed_oss", "seed_oss", {"head_dim": 12}),
    Case("seed_oss_biases", "seed_oss", {"head_dim": 8, "attention_out_bias": True, "mlp_bias": True}, variant=True),
)
