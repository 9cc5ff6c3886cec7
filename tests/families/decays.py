"""Random decays for the states of recurrent mixers."""

from __future__ import annotations

import torch


def decays(name: str, tensor: torch.Tensor) -> bool:
    """States that are forgotten within some tokens, and that last for a row (see families.case.Case.randomise).

    Not within a token: transformers' float32 differences of running sums would lose the digits to compare with.
    """
    if name.endswith("A_log"):
        tensor.copy_(torch.empty_like(tensor).uniform_(-4, -0.5))
    elif name.endswith("dt_bias"):
        tensor.copy_(torch.randn_like(tensor))
    else:
        return False
    return True
