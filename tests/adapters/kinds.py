"""Every kind of adapter as a config here and as peft's."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import jax
import numpy as np
import peft
import torch
from twins import TOKENS

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.method import PreparedModel
from meshtune.arrays.tree import Tree

# Our options, peft's config, and how far training is taken to have moved a parameter.
KINDS: dict[str, tuple[dict[str, Any], Any, float]] = {
    "dora": (
        {"rank": 4, "alpha": 3.0, "rslora": True},
        peft.LoraConfig(r=4, lora_alpha=3, use_rslora=True, use_dora=True),
        0.1,
    ),
    "pissa": (
        {"rank": 4, "alpha": 6.0, "svd_iterations": None, "pissa_convert": False},
        peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights="pissa"),
        0.1,
    ),
    "oft": ({"oft_block_size": 8}, peft.OFTConfig(r=0, oft_block_size=8), 0.1),
    "vera": ({"rank": 8, "vera_key": 3}, peft.VeraConfig(r=8, projection_prng_key=3), 0.3),
}
EVERYWHERE = ("all-linear", "lm_head")


def config_of(kind: str, **fields: Any) -> LoraConfig:
    """The kind's config here."""
    return LoraConfig(adapter=kind, **KINDS[kind][0] | fields)


def move_model(prepared: PreparedModel, size: float, seed: int = 7) -> PreparedModel:
    """Moves every trained array, as training would."""
    leaves, structure = jax.tree.flatten(prepared.trainable)
    rng = np.random.default_rng(seed)
    trainable: Tree = structure.unflatten([x + size * rng.standard_normal(x.shape).astype(x.dtype) for x in leaves])
    return PreparedModel(prepared.spec, trainable, prepared.frozen)


def in_peft(model: Any, where: pathlib.Path, trainable: bool = False) -> Any:
    """The adapter in peft. Missing or unexpected tensors, which peft only warns of, are failures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*(missing|unexpected|Unexpected|not found|slightly changed).*")
        return peft.PeftModel.from_pretrained(model, str(where), is_trainable=trainable).eval()


def made_by_peft(model: Any, config: Any, where: pathlib.Path, size: float) -> np.ndarray:
    """The logits of an adapter that peft makes, as if it had been trained, and saves at `where`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = peft.get_peft_model(model, config)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in peft_model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * size)
            expected = peft_model.eval()(torch.from_numpy(TOKENS).long()).logits.numpy()
        peft_model.save_pretrained(str(where))
    return expected
