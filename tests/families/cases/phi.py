"""Phi 1 to 2: half of each head rotated; normalised queries and keys and another share in a second case."""

from __future__ import annotations

from families.case import Case

SHARE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}

CASES = (
    Case("phi", "phi", {"layer_norm_eps": 1e-4}),
    Case(
        "phi_qk_norms", "phi", {"qk_layernorm": True, "num_key_value_heads": 4, "rope_parameters": SHARE}, variant=True
    ),
)
