"""Arcee: squared ReLU without a gate; with biases and YaRN in a second case."""

from __future__ import annotations

from families.case import Case

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 20.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
}

CASES = (
    Case("arcee", "arcee", {"head_dim": 12}),
    Case("arcee_biases", "arcee", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}, variant=True),
)
