"""Writes the float32 logits of a base model with an adapter ("base": without it).

`whole_path_logits.py meshtune|peft|base BASE ADAPTER OUT.npy`
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

IDS = np.array([[1, 403, 407, 261, 378, 17, 300, 44, 500, 5, 77, 260]])


def meshtune_logits(base: str, adapter: str) -> np.ndarray:
    import meshtune

    return meshtune.load(base, adapter, dtype="float32").logits(IDS)


def torch_logits(base: str, adapter: str | None) -> np.ndarray:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model(torch.tensor(IDS)).logits.float().numpy()


if __name__ == "__main__":
    kind, base, adapter, out = sys.argv[1:]
    logits = (
        meshtune_logits(base, adapter)
        if kind == "meshtune"
        else torch_logits(base, adapter if kind == "peft" else None)
    )
    np.save(out, logits)
