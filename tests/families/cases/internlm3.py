"""InternLM 3, which is a Llama to transformers: a dynamic rotary embedding, and biases."""

from __future__ import annotations

from families.case import Case

DYNAMIC = {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 10000.0}

CASES = (Case("internlm3", "internlm3", {"head_dim": 12, "qkv_bias": True, "bias": True, "rope_parameters": DYNAMIC}),)
