"""Apertus: xIELU with random parameters and its usual constants; squared ReLU and biases in a second case."""

from __future__ import annotations

import torch

from families.case import Case


def randomise(name: str, tensor: torch.Tensor) -> bool:
    """alpha_p and alpha_n around zero; beta and eps stay, since transformers has them as constants of its code too."""
    if name.endswith(("act_fn.alpha_p", "act_fn.alpha_n")):
        tensor.copy_(torch.randn_like(tensor) * 0.5)
    return ".act_fn." in name


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES = (
    Case("apertus", "apertus", {"rope_parameters": LLAMA3}, randomise=randomise),
    Case(
        "apertus_relu2",
        "apertus",
        {"hidden_act": "relu2", "attention_bias": True, "rope_parameters": LLAMA3},
        variant=True,
    ),
)
