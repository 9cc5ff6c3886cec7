"""The cases of tests/families by name: small random models of transformers, and the same weights as our tree."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import transformers

from families import case
from families.case import SMALL
from families.cases import BY_NAME
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.families import model_spec, tensors
from meshtune.model.spec import ModelSpec, abstract_params

__all__ = ["SMALL", "same_weights", "tensor_names", "torch_model"]


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
