"""How large inputs are, against what transformers' linear layers are seen to be given."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from meshtune.adapters.inputs import input_sizes
from meshtune.adapters.targets import modules
from meshtune.arrays.tree import flatten
from meshtune.model.compute import Compute
from meshtune.model.spec import abstract_params
from tiny_models import same_weights, torch_model

TEXTS = [[5, 9, 22, 7, 8, 30, 41], [3, 4, 90], [11, 12, 13, 14, 15]]


def pack_texts(texts: list[list[int]], length: int) -> dict[str, jnp.ndarray]:
    """One row [1, length] of all texts and padding."""
    row = {name: np.zeros((1, length), np.int32) for name in ("tokens", "positions", "segment_ids")}
    at = 0
    for number, text in enumerate(texts, 1):
        part = slice(at, at + len(text))
        row["tokens"][0, part], row["positions"][0, part], row["segment_ids"][0, part] = (
            text,
            range(len(text)),
            number,
        )
        at += len(text)
    return {name: jnp.asarray(array) for name, array in row.items()}


@pytest.mark.parametrize("name", ["llama3", "qwen3_bias_window"])
def test_sizes_are_those_of_what_torch_layers_are_given(name: str):
    """Root mean squares over all tokens of three texts, packed with padding into two rows; float32, 1e-4."""
    model = torch_model(name)
    spec, params = same_weights(model)
    inputs: dict[str, list[np.ndarray]] = {}
    for path, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and path != "lm_head":
            layer.register_forward_pre_hook(
                lambda _, arguments, path=path: inputs.setdefault(path, []).append(arguments[0][0].numpy())
            )
    with torch.no_grad():
        for text in TEXTS:
            model(torch.tensor([text]))
    forms = flatten(abstract_params(spec))
    named = {hf: module for hf, module in modules(spec).items() if hf in inputs}
    nodes = {module.node: forms[f"{module.node}/weight"] for module in named.values()}
    batches = [pack_texts(TEXTS[:2], 16), pack_texts(TEXTS[2:], 8)]
    sizes = input_sizes(nodes, params, spec, Compute(remat="selective", mlp_chunk=4), batches)
    assert sizes.keys() == nodes.keys()
    assert len(named) == len(inputs) == 7 * spec.layers
    for hf, module in named.items():
        theirs = np.sqrt(np.mean(np.square(np.concatenate(inputs[hf]).astype(np.float64)), axis=0))
        np.testing.assert_allclose(np.asarray(sizes[module.node])[module.row], theirs, rtol=1e-4, err_msg=hf)
