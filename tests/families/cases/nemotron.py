"""Nemotron: half of each head rotated, with and without biases."""

from __future__ import annotations

from families.case import Case

CASES = (
    Case("nemotron", "nemotron", {"norm_eps": 1e-4, "attention_bias": True, "mlp_bias": True}),
    Case("nemotron_head_dim", "nemotron", {"head_dim": 12, "partial_rotary_factor": 0.5, "rope_theta": 500.0}),
)
