"""The decoder: embedding, layers, final norm, head. Pure functions of a tree of parameters.

NormHead (https://arxiv.org/abs/2309.10305): an output head whose rows are divided by their length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree
from meshtune.lazy import LazyFunction
from meshtune.model.block import ENTER, LEAVE, Hidden, Sums, check_side
from meshtune.model.cache import Cache
from meshtune.model.compute import Compute
from meshtune.model.gather import to_device, with_shared
from meshtune.model.inputs import ROWS, Inputs, SequenceInfo, embed_tokens, sequence_info, table
from meshtune.model.linear import linear
from meshtune.model.reverse import LayerRunner, layer_functions
from meshtune.model.spec import ModelSpec
from meshtune.model.stacks import through_layers

place_pictures = LazyFunction("meshtune.model.vision:place_pictures")


def row_scale(weight: Float[Array, "V D"]) -> Float[Array, "V"]:
    """One over the length of each row, float32.

    No length is taken to be less than 1e-12, as in torch.nn.functional.normalize.
    """
    squares = jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=-1)
    # Chosen before the root, whose derivative at zero is infinite.
    return jnp.where(squares > 1e-24, lax.rsqrt(jnp.maximum(squares, 1e-24)), 1e12)


class Forward(NamedTuple):
    """The result of a pass through the layers: normalised hidden states in compute.dtype, the next cache, and the sums
    of the layers (see model.block.Output)."""

    hidden: Hidden
    cache: Cache | None
    sums: Sums


def forward(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    inputs: Inputs,
    *,
    cache: Cache | None = None,
    rng: Array | None = None,
    perturb: Callable[[Hidden], Hidden] | None = None,
) -> Forward:
    """The hidden state of every token, ready for the head.

    With a `cache` the tokens also see what it holds, and are added to it; their positions go on from there. `rng` turns
    adapters' dropout on; `perturb` changes the embeddings.
    """
    rows, x, side = enter(params, spec, compute, inputs, perturb, rng)
    layers: Tree | LayerRunner = params["layers"]
    if isinstance(layers, dict):
        shared = params.get("shared")
        x, caches, sums = through_layers(
            layers, spec.stacks, spec.embed, compute, x, rows, side, shared=shared, rng=rng, cache=cache
        )
    else:  # one of train.step's: without adapters, and so without dropout
        (x, sums), caches = layers.apply(layer_functions(spec, compute), spec, compute, x, rows, side), {}
    if cache is not None:
        cache = Cache(caches, cache.lengths + jnp.sum(inputs.segment_ids > 0, axis=1, dtype=jnp.int32))
    x = x if spec.streams is None else spec.streams.leave(x, to_device(params[LEAVE]), compute.layout)
    return Forward(spec.norm(x, to_device(params.get("norm", {}))), cache, sums)


def enter(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    inputs: Inputs,
    perturb: Callable[[Hidden], Hidden] | None = None,
    rng: Array | None = None,
) -> tuple[SequenceInfo, Hidden, Tree]:
    """(what every layer knows of the tokens, what enters the first one in compute.dtype: their embeddings, or several
    streams of them; the side inputs of all layers).

    `perturb` changes the embeddings, and with them what side inputs are computed from; `rng` turns the dropout of a
    tower's adapters on. Reads the nodes of params that `ModelSpec.before` names, and no others.
    """
    rows, visual = sequence_info(inputs, spec.ropes), inputs.visual
    if visual is not None:  # whose tokens may be beyond the tables
        inputs = dataclasses.replace(inputs, tokens=jnp.where(visual.index == 0, inputs.tokens, 0))
    x = inputs.embeds
    if x is None:
        x = embed_tokens(table(to_device(params["embed"], inputs.tokens)), inputs.tokens, compute.layout)
    x = x.astype(compute.dtype)
    if spec.embed_scale is not None:
        x = x * jnp.asarray(spec.embed_scale, x.dtype)
    if spec.learned_positions:
        x = _add_positions(x, params, compute, inputs)
    x, side = x if perturb is None else perturb(x), inputs.side or {}
    if side or visual is not None or spec.side is not None or any(block.side_inputs for block in spec.blocks):
        x, side = _side_inputs(x, params, spec, compute, inputs, rng)
    return rows, x if spec.streams is None else spec.streams.enter(x, to_device(params[ENTER]), compute.layout), side


def _add_positions(x: Hidden, params: Tree, compute: Compute, inputs: Inputs) -> Hidden:
    """Adds the embeddings of positions."""
    positions = table(to_device(params["positions"], inputs.positions))
    return x + embed_tokens(positions, inputs.positions, compute.layout).astype(x.dtype)


def _side_inputs(
    x: Hidden, params: Tree, spec: ModelSpec, compute: Compute, inputs: Inputs, rng: Array | None
) -> tuple[Hidden, Tree]:
    """(the embeddings with pictures in their places, the side inputs of all layers)."""
    side, read = dict(inputs.side or {}), frozenset(name for block in spec.blocks for name in block.side_inputs)
    if inputs.visual is not None:
        x, tapped = place_pictures(params, spec, compute, inputs.visual, x, rng)
        side |= tapped
        read |= side.keys() & {kind.adds for kind in spec.layer_kinds}
    if spec.side is not None:
        side |= spec.side.apply(to_device(params[spec.side.name]), inputs, x, compute)
    if side or read:
        check_side(side, read, spec.family)
    return x, side


def head_params(params: Tree, spec: ModelSpec, after: Array | None = None) -> Tree:
    """The node of the output head: where it is tied, the embedding's weight and any adapter of just the head; of a
    scored model the node of its score. Of a head of normalised rows `scale` [V] multiplies each row's
    logit: the weight stays unchanged, and its gradient goes through the scale. Fetched after the hidden states
    `after`."""
    if spec.scored:
        return to_device(params["score"])
    head = params.get("head", {})
    head = to_device({**params["embed"], **head} if spec.tied else head, after)
    head = {"weight": table(head), **{name: leaf for name, leaf in head.items() if name not in ("weight", ROWS)}}
    if (shared := params.get("shared")) is not None:
        head = with_shared(head, shared)
    return head | {"scale": row_scale(head["weight"])} if spec.norm_head and "scale" not in head else head


def head_logits(head: Tree, hidden: Float[Array, "*B D"], spec: ModelSpec) -> Float[Array, "*B V"]:
    """float32 logits. The product is accumulated and kept in float32 whatever hidden's dtype."""
    logits = linear(hidden, head, out=jnp.float32)
    if "scale" in head:
        logits = logits * head["scale"]
    if spec.logit_scale is not None:
        logits = logits * spec.logit_scale
    if spec.logit_softcap is not None:
        logits = spec.logit_softcap * jnp.tanh(logits / spec.logit_softcap)
    return logits


def logits(params: Tree, spec: ModelSpec, hidden: Hidden) -> Float[Array, "B T V"]:
    """float32 logits of every token; one score each in a scored model."""
    return head_logits(head_params(params, spec, hidden), hidden, spec)
