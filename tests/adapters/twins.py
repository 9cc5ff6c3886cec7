"""The same tokens through a model of transformers (with or without peft) and through its twin here."""

from __future__ import annotations

import functools
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import torch

from meshtune.adapters.method import PreparedModel
from meshtune.arrays.tree import Tree, merge
from meshtune.model import decoder
from meshtune.model.compute import Compute
from meshtune.model.inputs import Inputs
from meshtune.model.spec import ModelSpec
from tiny_models import same_weights, torch_model

TOKENS = np.random.default_rng(0).integers(0, 97, (2, 12)).astype(np.int32)
COMPUTE = Compute(attention="direct")


@functools.partial(jax.jit, static_argnums=(1, 2))
def forward(params: Tree, spec: ModelSpec, compute: Compute, tokens: Any, rng: Any = None) -> jax.Array:
    """float32 logits [B, T, V] of ordinary rows."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    inputs = Inputs(tokens, positions, jnp.ones_like(positions))
    hidden = decoder.forward(params, spec, compute, inputs, rng=rng).hidden
    return decoder.logits(params, spec, hidden)


def our_logits(params: Tree, spec: ModelSpec, compute: Compute = COMPUTE, rng: Any = None) -> np.ndarray:
    """Those of TOKENS."""
    return np.asarray(forward(params, spec, compute, jnp.asarray(TOKENS), rng))


def trained_logits(prepared: PreparedModel) -> np.ndarray:
    """Those of a prepared model."""
    return our_logits(merge(prepared.trainable, prepared.frozen), prepared.spec)


def torch_logits(model: Any) -> np.ndarray:
    """Those of a torch model."""
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS.astype(np.int64))).logits.float().numpy()


def move_weights(trainable: Tree, seed: int = 7) -> Tree:
    """Trainables as if training had moved them."""
    leaves, structure = jax.tree.flatten(trainable)
    rng = np.random.default_rng(seed)
    return structure.unflatten([x + 0.1 * rng.standard_normal(x.shape).astype(np.float32) for x in leaves])


def base(name: str) -> tuple[ModelSpec, Tree]:
    """Our twin of `torch_model(name)`."""
    return same_weights(torch_model(name))


def in_peft(model: Any, where: pathlib.Path) -> Any:
    """The adapter in peft. Missing or unexpected tensors, which peft only warns of, are failures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*(missing|unexpected|Unexpected|not found).*")
        return peft.PeftModel.from_pretrained(model, str(where)).eval()
