"""The cases of tests/families by name: small random models of transformers, and the same weights as our tree."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import torch
import transformers

import meshtune.quickstart
from families import case
from families.case import SMALL
from families.cases import BY_NAME
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.families import model_spec, tensors
from meshtune.model.spec import ModelSpec, abstract_params

__all__ = [
    "SMALL",
    "check_gradient",
    "same_weights",
    "save_model_for_runs",
    "tensor_names",
    "torch_model",
    "write_texts_for_runs",
]


def torch_model(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A random float32 model; biases and norms are random too, so that none can be dropped unseen."""
    return case.torch_model(BY_NAME[name], seed)


def tensor_names(spec: ModelSpec) -> dict[str, list[str]]:
    """Path of a leaf -> the Hugging Face tensors it is made of, in the order of its rows."""
    names: dict[str, list[str]] = {}
    for entry in sorted(tensors(spec), key=lambda entry: entry.index):
        names.setdefault(entry.path, []).append(entry.name)
    return names


def same_weights(model: transformers.PreTrainedModel) -> tuple[ModelSpec, Tree]:
    """Our spec and tree of the weights of a model whose state has the names of its files."""
    spec = model_spec(model.config.to_dict())
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    leaves = {path: np.empty(array.shape, np.float32) for path, array in flatten(abstract_params(spec)).items()}
    for entry in tensors(spec):
        leaves[entry.path][entry.index] = entry.view.read(state[entry.name])
    return spec, unflatten({path: jnp.asarray(array) for path, array in leaves.items()})


def check_gradient(gradient: Tree, model: transformers.PreTrainedModel) -> None:
    """Asserts that a gradient is that of a model after its backward pass, every leaf within 2e-5 of its norm."""
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    try:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.copy_(parameter.grad)
        expected = flatten(same_weights(model)[1])
    finally:
        model.load_state_dict(weights, strict=False)
    for path, values in flatten(gradient).items():
        norm = np.linalg.norm(expected[path])
        assert norm > 0, path
        assert np.linalg.norm(values - expected[path]) <= 2e-5 * norm, path


def save_model_for_runs(folder: pathlib.Path, dtype: torch.dtype = torch.float32) -> pathlib.Path:
    """Writes a random Llama of 520 tokens, with the tokenizer and chat template of the quickstart."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 520, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512}
    config = transformers.AutoConfig.for_model("llama", **SMALL | sizes | {"num_hidden_layers": 2})
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pathlib.Path(meshtune.quickstart.__file__).parent / "model" / name, folder)
    return folder


def write_texts_for_runs(file: pathlib.Path) -> pathlib.Path:
    """Writes 60 texts of one sentence."""
    lines = [f"Once upon a time there was number {n}, and it went to the park {n % 7} times." for n in range(60)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return file
