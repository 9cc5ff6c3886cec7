"""Small random models of transformers with a tokenizer, and their weights as a recipe quantises them."""

from __future__ import annotations

import pathlib
import shutil

import torch
import transformers

import meshtune.quickstart
from meshtune.arrays.tree import flatten
from meshtune.families import tensors
from meshtune.quantize.config import QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight
from meshtune.weights.load import load_params, load_spec
from tiny_models import SMALL

TOKENIZER = pathlib.Path(meshtune.quickstart.__file__).parent / "model"
MIXTURES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [1]},
}


def save_model(folder: pathlib.Path, family: str, dtype: torch.dtype, **sizes: object) -> pathlib.Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 520, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | sizes
    config = transformers.AutoConfig.for_model(family, **SMALL | sizes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return folder


def quantised_weights(model: pathlib.Path, config: QuantizeConfig) -> dict[str, QuantisedWeight]:
    """Ours, by the names in files."""
    spec, _ = load_spec(model)
    leaves = flatten(load_params(model, spec, quantize=config))
    return {
        entry.name: QuantisedWeight(
            leaf.codes[entry.index],
            leaf.scales[entry.index],
            None if leaf.nested is None else leaf.nested[entry.index],
            None if leaf.offset is None else leaf.offset[entry.index],
            leaf.format,
            leaf.block_size,
            leaf.dtype,
        )
        for entry in tensors(spec)
        if isinstance(leaf := leaves[entry.path], QuantisedWeight)
    }
