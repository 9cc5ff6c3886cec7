"""The critic of PPO: a second model in the same tree of parameters, which gives every token a value.

It is the trained part of the policy once more, with a head of one score: a copy of the weights where they are trained
themselves, other adapters on the same frozen base where adapters are. It is in `trainable` under one key, so that
gradients, optimizer, checkpoints and plans have it; results do not.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.adapters.method import PreparedModel
from meshtune.arrays.tree import Tree, flatten, map_leaves, unflatten
from meshtune.mesh.layout import Layout
from meshtune.model.compute import Compute
from meshtune.model.decoder import forward
from meshtune.model.inputs import inputs_of
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.objectives.answers import CRITIC, Batch, without_critic
from meshtune.objectives.rm import scores


def abstract_critic(model: PreparedModel, dtype: str) -> PreparedModel:
    """An abstract model with the critic's ArraySpecs among its trainable ones; its score has `dtype`."""
    scored = abstract_params(dataclasses.replace(model.spec, scored=True, tied=False))
    score = map_leaves(lambda leaf: dataclasses.replace(leaf, dtype=dtype), scored["score"])
    critic = _body(model.trainable) | {"score": score}
    return dataclasses.replace(model, trainable={**model.trainable, CRITIC: critic})


def start_critic(model: PreparedModel, abstract: Tree, layout: Layout | None) -> PreparedModel:
    """The model with the critic's initial values: a copy of the policy's, and a score that gives every token 0.

    `abstract` are the ArraySpecs of the critic. Collective on a mesh.
    """

    def start(trainable: Tree) -> Tree:
        score = map_leaves(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract["score"])
        return jax.tree.map(jnp.copy, _body(trainable)) | {"score": score}

    shardings = None if layout is None else jax.tree.map(layout.of, abstract)
    critic = jax.jit(start, out_shardings=shardings)(model.trainable)
    return dataclasses.replace(model, trainable={**model.trainable, CRITIC: critic})


def critic_values(
    params: Tree, spec: ModelSpec, compute: Compute, batch: Batch, rng: Array | None
) -> Float[Array, "B T"]:
    """The critic's float32 value at every token: the reward that it expects after it."""
    critic = unflatten(flatten(_body(without_critic(params))) | flatten(params[CRITIC]))
    hidden, _, _ = forward(critic, spec, compute, inputs_of(batch), rng=rng)
    return scores(critic, hidden)


def _body(params: Tree) -> Tree:
    """The parameters below the output head."""
    return {name: node for name, node in params.items() if name != "head"}
