"""Random decays for the states of recurrent mixers."""

from __future__ import annotations

import torch


def decays(name: str, tensor: torch.Tensor) -> bool:
    """Some states are forgotten within a token, some last beyond a row (see families.case.Case.randomise)."""
    if name.endswith("A_log"):
        tensor.copy_(torch.empty_like(tensor).uniform_(-4, 1))
    elif name.endswith("dt_bias"):
        tensor.copy_(torch.randn_like(tensor))
    else:
        return False
    return True
