"""The decoder: embedding, layers, final norm, head. Pure functions of a tree of parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree, map_leaves
from meshtune.errors import UserError
from meshtune.mesh.layout import Layout
from meshtune.model.block import Hidden, Measured, Sums
from meshtune.model.cache import Cache, empty
from meshtune.model.compute import Compute
from meshtune.model.embedding import embedded
from meshtune.model.gather import to_device, with_shared
from meshtune.model.inputs import Inputs, Rows, rows_of
from meshtune.model.linear import linear
from meshtune.model.reverse import LayerRunner
from meshtune.model.side import BY_LAYER, for_all
from meshtune.model.spec import ModelSpec
from meshtune.model.stacks import layer_functions, through_layers
from meshtune.model.token_rows import ROWS, table


class Forward(NamedTuple):
    """What a pass through the layers gives: normalised hidden states in compute.dtype, the next cache, and the layers'
    sums (see model.block.Output)."""

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
    rows, x, side = enter(params, spec, compute, inputs, perturb)
    if isinstance(params["layers"], dict):
        x, caches, sums = through_layers(params, spec, compute, x, rows, side, rng, cache)
    else:  # one of train.step's: without adapters, and so without dropout
        runner: LayerRunner = params["layers"]
        (x, sums), caches = runner.apply(layer_functions(spec, compute), spec, compute, x, rows, side), {}
    if cache is not None:
        cache = Cache(caches, cache.lengths + jnp.sum(inputs.segment_ids > 0, axis=1, dtype=jnp.int32))
    return Forward(spec.norm(x, to_device(params.get("norm", {}))), cache, sums)


def hidden_states(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    tokens: Array,
    positions: Array,
    segment_ids: Array,
    *,
    rng: Array | None = None,
) -> Hidden:
    """`forward` of tokens, for whoever needs the hidden states alone."""
    return forward(params, spec, compute, Inputs(tokens, positions, segment_ids), rng=rng).hidden


def enter(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    inputs: Inputs,
    perturb: Callable[[Hidden], Hidden] | None = None,
) -> tuple[Rows, Hidden, Tree]:
    """(what every layer knows of the tokens, their embeddings in compute.dtype, the side inputs of all layers).

    `perturb` changes the embeddings, and with them what side inputs are computed from. Reads the nodes of params that
    `ModelSpec.before` names, and no others.
    """
    rows = rows_of(inputs, spec.ropes)
    x = inputs.embeds
    if x is None:
        x = embedded(table(to_device(params["embed"])), inputs.tokens, compute.layout)
    x = x.astype(compute.dtype)
    if spec.embed_scale is not None:
        x = x * jnp.asarray(spec.embed_scale, x.dtype)
    if spec.learned_positions:
        x = x + embedded(table(to_device(params["positions"])), inputs.positions, compute.layout).astype(x.dtype)
    x = x if perturb is None else perturb(x)
    side = dict(inputs.side or {})
    if spec.side is not None:
        side |= spec.side.apply(to_device(params[spec.side.name]), inputs, x, compute)
    _check_side(spec, side)
    return rows, x, side


def _check_side(spec: ModelSpec, side: Tree) -> None:
    read = frozenset(name for block in spec.blocks for name in block.side_inputs())
    given = for_all(side).keys() | side.get(BY_LAYER, {}).keys()
    if given != read:
        unread, missing = sorted(given - read), sorted(read - given)
        problem = f"side input '{unread[0]}' is read by no layer" if unread else f"side input '{missing[0]}' is missing"
        raise UserError(
            f"{problem} of this {spec.family}", where="Inputs.side", fix=f"it takes: {sorted(read) or 'none'}"
        )


class LayersResult(NamedTuple):
    """What the layers add to the mean loss (None: nothing), and their metrics, each a total and its weight."""

    loss: Float[Array, ""] | None
    metrics: Mapping[str, tuple[Array, Array]]


def layers_result(spec: ModelSpec, sums: Sums) -> LayersResult:
    """The loss and the metrics of the layers, from the sums of a whole batch."""
    measured = [block for block in spec.blocks if isinstance(block, Measured)]
    metrics = {name: metric for block in measured for name, metric in block.metrics(sums).items()}
    return LayersResult(layers_loss(spec, sums), jax.lax.stop_gradient(metrics))


def layers_loss(spec: ModelSpec, sums: Sums) -> Array | None:
    """What the layers add to the mean loss, from the sums of a whole batch; None where they add nothing."""
    losses = [loss for block in spec.blocks if (loss := block.loss(sums)) is not None]
    return sum(losses[1:], losses[0]) if losses else None


def head_params(params: Tree, spec: ModelSpec) -> Tree:
    """The node of the output head: where it is tied, the embedding's weight and whatever adapts the head alone; of a
    scored model the node of its score. Of a head of normalised rows `scale` [V] is what each row's logit is multiplied
    by: the weight itself stays as it is, so that no second one is ever held, and its gradient goes through the scale.
    """
    if spec.scored:
        return to_device(params["score"])
    head = params.get("head", {})
    head = to_device({**params["embed"], **head} if spec.tied else head)
    head = {"weight": table(head), **{name: leaf for name, leaf in head.items() if name not in ("weight", ROWS)}}
    head = with_shared(head, params.get("shared"))
    return head | {"scale": row_scale(head["weight"])} if spec.norm_head and "scale" not in head else head


def row_scale(weight: Float[Array, "V D"]) -> Float[Array, "V"]:
    """One over the length of each row, float32: what NormHead (https://arxiv.org/abs/2309.10305) divides by.

    No length is taken to be less than 1e-12, as in torch.nn.functional.normalize.
    """
    squares = jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=-1)
    # Chosen before the root, whose derivative at zero is infinite.
    return jnp.where(squares > 1e-24, lax.rsqrt(jnp.maximum(squares, 1e-24)), 1e12)


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


@functools.cache
def logits_of(spec: ModelSpec) -> Callable[[Tree, Array], Array]:
    """`head_logits` of a model, always the same function for the same spec."""
    return functools.partial(head_logits, spec=dataclasses.replace(spec, stacks=()))


def logits(params: Tree, spec: ModelSpec, hidden: Hidden) -> Float[Array, "B T V"]:
    """float32 logits of every token; one score each in a scored model."""
    return head_logits(head_params(params, spec), hidden, spec)


def scores(params: Tree, hidden: Hidden) -> Float[Array, "B T"]:
    """The float32 score that a model with a head of one score (ModelSpec.scored) gives at every token."""
    return linear(hidden, to_device(params["score"]), out=jnp.float32)[..., 0]


def cache_specs(spec: ModelSpec, batch: int, slots: int, dtype: str) -> dict[str, Tree]:
    """The ArraySpecs of the caches of all layers, by key of params["layers"], for rows of up to `slots` tokens."""
    return {
        key: map_leaves(
            lambda leaf, repeats=repeats: leaf.stacked(repeats),
            {} if kind.mixer is None else kind.mixer.cache(batch, slots, dtype),
        )
        for key, repeats, kind, _ in spec.positions()
    }


def init_cache(spec: ModelSpec, batch: int, slots: int, dtype: str, layout: Layout | None = None) -> Cache:
    """An empty cache for rows of up to `slots` tokens."""
    return empty(cache_specs(spec, batch, slots, dtype), batch, layout)
