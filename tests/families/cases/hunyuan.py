"""Hunyuan dense: a stretched base frequency and norms after rotation; biases and no stretching in a second case."""

from __future__ import annotations

from families.case import Case

ALPHA = {
    "type": "dynamic",
    "alpha": 1000.0,
    "factor": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

CASES = (
    Case("hunyuan_v1_dense", "hunyuan_v1_dense", {"head_dim": 12, "rope_scaling": ALPHA, "rope_theta": 10000.0}),
    Case("hunyuan_biases", "hunyuan_v1_dense", {"head_dim": 8, "attention_bias": True}, variant=True),
)
