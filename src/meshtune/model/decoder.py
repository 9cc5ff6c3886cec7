"""The decoder: embedding, scanned layers, final norm, head. Pure functions of a parameter tree.

Layers of a stack run under `lax.scan` over groups of its pattern, so compile time does not grow with depth.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from meshtune.arrays.tree import Tree
from meshtune.kernels.attention import LOG_SUM_EXP, OUTPUT
from meshtune.mesh.layout import Layout, constrain
from meshtune.model.attention import ROTATED, Rows, attend, queries_keys_values
from meshtune.model.compute import Compute
from meshtune.model.embedding import embedded
from meshtune.model.in_use import GATHERED, here, layer_in_use, on_host, with_shared
from meshtune.model.layer import fold, laid_out, one_layer
from meshtune.model.linear import NARROW, PRODUCT, linear
from meshtune.model.mlp import mlp
from meshtune.model.norm import rms_norm
from meshtune.model.reverse import RESIDUAL, Layer, LayersWalked
from meshtune.model.rope import angles
from meshtune.model.spec import LayerSpec, ModelSpec
from meshtune.model.token_rows import ROWS, table

Tokens = Int[Array, "B T"]
Hidden = Float[Array, "B T D"]

# The results of matrix products (with LoRA the sum, not its parts) and of attention.
KEPT = (PRODUCT, NARROW, ROTATED, OUTPUT, LOG_SUM_EXP)


def hidden_states(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    tokens: Tokens,
    positions: Tokens,
    segment_ids: Tokens,
    *,
    rng: Array | None = None,
    perturb: Callable[[Hidden], Hidden] | None = None,
) -> Hidden:
    """The normalised hidden state of every token, in compute.dtype.

    Tokens see earlier tokens of their own segment only; segment 0 is padding. `rng` turns adapters' dropout on;
    `perturb` changes the embeddings.
    """
    rows, x = enter(params, spec, compute, tokens, positions, segment_ids)
    x = x if perturb is None else perturb(x)
    if isinstance(params["layers"], dict):
        x = _through_layers(
            params,
            spec,
            compute,
            x,
            lambda x, node, layer, number: one_layer(x, node, spec, layer, compute, rows, fold(rng, number)),
        )
    else:  # gone through by hand: see model.walk; without adapters, and so without dropout
        walked: LayersWalked = params["layers"]
        x = walked.through(functools.partial(_layer, spec, compute), spec, compute, x, vars(rows))
    return rms_norm(x, here(params["norm"]["weight"]), spec.norm_eps)


def _layer(spec: ModelSpec, compute: Compute, stack: int) -> Layer:
    """The function of a layer of a stack, by its place in the pattern."""

    def layer(x: Hidden, node: Tree, place: int, row: Array, shared: Any) -> Hidden:
        node = layer_in_use(node, spec, f"{stack}.{place}", compute)
        return one_layer(x, node, spec, spec.stacks[stack].pattern[place], compute, Rows(**shared), None)

    return layer


def head_params(params: Tree, spec: ModelSpec) -> Tree:
    """The node of the output head: where it is tied, the embedding's weight and whatever adapts the head alone; of a
    scored model the node of its score. Of a head of normalised rows `scale` [V] is what each row's logit is multiplied
    by: the weight itself stays as it is, so that no second one is ever held, and its gradient goes through the scale.
    """
    if spec.scored:
        return here(params["score"])
    head = params.get("head", {})
    head = here({**params["embed"], **head} if spec.tied else head)
    head = {"weight": table(head), **{name: leaf for name, leaf in head.items() if name not in ("weight", ROWS)}}
    head = with_shared(head, params.get("shared"))
    return head | {"scale": row_scale(head["weight"])} if spec.norm_head and "scale" not in head else head


def row_scale(weight: Float[Array, "V D"]) -> Float[Array, "V"]:
    """One over the length of each row, float32: what NormHead (https://arxiv.org/abs/2309.10305) divides by.

    No length is taken to be less than 1e-12, as in torch.nn.functional.normalize.
    """
    squares = jnp.sum(jnp.square(weight.astype(jnp.float32)), axis=-1)
    # Chosen before the root: the slope of a root at zero is infinite.
    return jnp.where(squares > 1e-24, lax.rsqrt(jnp.maximum(squares, 1e-24)), 1e12)


def head_logits(head: Tree, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """float32 logits. The product is accumulated and kept in float32 whatever hidden's dtype."""
    made = linear(hidden, head, out=jnp.float32)
    return made * head["scale"] if "scale" in head else made


def logits(params: Tree, spec: ModelSpec, hidden: Hidden) -> Float[Array, "B T V"]:
    """float32 logits of every token; one score each in a scored model."""
    return head_logits(head_params(params, spec), hidden)


def scores(params: Tree, hidden: Hidden) -> Float[Array, "B T"]:
    """The float32 score that a model with a head of one score (ModelSpec.scored) gives at every token."""
    return linear(hidden, here(params["score"]), out=jnp.float32)[..., 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the past, per key of params["layers"] [L', B, S, K, h]; position and segment of each slot."""

    keys: dict[str, Array]
    values: dict[str, Array]
    positions: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"]


def init_cache(spec: ModelSpec, batch: int, length: int, dtype: str, layout: Layout | None = None) -> Cache:
    """An empty cache of `length` slots a row; empty slots belong to segment 0, which nothing sees."""

    def empty() -> dict[str, Array]:
        shape, axes = (
            (batch, length, spec.kv_heads, spec.head_dim),
            ("layers", "batch", "whole", "kv_heads", "head_dim"),
        )
        zeros = {key: jnp.zeros((repeats, *shape), dtype) for key, repeats, _, _ in spec.positions()}
        return {key: constrain(array, layout, *axes) for key, array in zeros.items()}

    slots = jnp.zeros((batch, length), jnp.int32)
    return Cache(empty(), empty(), slots, slots)


def forward_cached(
    params: Tree,
    spec: ModelSpec,
    compute: Compute,
    tokens: Tokens,
    positions: Tokens,
    segment_ids: Tokens,
    cache: Cache,
    start: Int[Array, ""],
) -> tuple[Hidden, Cache]:
    """`hidden_states` of T new tokens that also see what the cache holds; they are written to slots start..start+T."""
    rows, x = enter(params, spec, compute, tokens, positions, segment_ids)
    past = (
        lax.dynamic_update_slice(cache.positions, positions, (0, start)),
        lax.dynamic_update_slice(cache.segment_ids, segment_ids, (0, start)),
    )

    def layer(carry: tuple[Hidden, Tree, Tree], node: Tree, layer: LayerSpec, number: Array, key: str, row: Array):
        x, keys, values = carry
        h = rms_norm(x, node["attn_norm"]["weight"], spec.norm_eps)
        q, k, v = queries_keys_values(h, node["attn"], spec, rows, None)
        index = (row, 0, start, 0, 0)
        new_k = lax.dynamic_update_slice(keys[key], k[None].astype(keys[key].dtype), index)
        new_v = lax.dynamic_update_slice(values[key], v[None].astype(values[key].dtype), index)
        k = lax.dynamic_index_in_dim(new_k, row, keepdims=False).astype(q.dtype)
        v = lax.dynamic_index_in_dim(new_v, row, keepdims=False).astype(q.dtype)
        x = x + attend(q, k, v, node["attn"], spec, layer, compute, rows, past, None)
        x = x + mlp(rms_norm(x, node["mlp_norm"]["weight"], spec.norm_eps), node["mlp"], spec)
        x = laid_out(x, compute.layout)
        return x, keys | {key: new_k}, values | {key: new_v}

    x, keys, values = _through_layers(params, spec, compute, (x, cache.keys, cache.values), layer, with_rows=True)
    return rms_norm(x, here(params["norm"]["weight"]), spec.norm_eps), Cache(keys, values, *past)


def enter(
    params: Tree, spec: ModelSpec, compute: Compute, tokens: Tokens, positions: Tokens, segment_ids: Tokens
) -> tuple[Rows, Hidden]:
    """What every layer must know of the tokens, and their embeddings in compute.dtype. Reads params["embed"] alone."""
    cos, sin = (None, None) if spec.rope is None else angles(spec.rope, positions, segment_ids)
    x = embedded(table(here(params["embed"])), tokens, compute.layout).astype(compute.dtype)
    return Rows(cos, sin, positions, segment_ids), x


def _through_layers(
    params: Tree, spec: ModelSpec, compute: Compute, carry: Any, layer: Callable[..., Any], *, with_rows: bool = False
) -> Any:
    """Carries `carry` through all layers: layer(carry, node, layer spec, number[, key, row]) -> carry."""
    first, shared = 0, params.get("shared")
    for s, stack in enumerate(spec.stacks):
        width = len(stack.pattern)
        nodes = {f"{s}.{p}": params["layers"][f"{s}.{p}"] for p in range(width)}

        def group(carry: Any, x: tuple[Tree, Array], first: int = first, stack: Any = stack, s: int = s) -> Any:
            nodes, row = x
            carry = jax.tree.map(lambda leaf: checkpoint_name(leaf, RESIDUAL), carry)
            for p, layer_spec in enumerate(stack.pattern):
                number = first + row * len(stack.pattern) + p
                where = (f"{s}.{p}", row) if with_rows else ()
                node = layer_in_use(nodes[f"{s}.{p}"], spec, f"{s}.{p}", compute, shared)
                carry = layer(carry, node, layer_spec, number, *where)
            return carry, None

        group = _rematerialised(group, compute, nodes)
        if compute.scan and stack.repeats > 1:
            carry, _ = lax.scan(group, carry, (nodes, jnp.arange(stack.repeats)))
        else:
            for row in range(stack.repeats):
                carry, _ = group(carry, (jax.tree.map(lambda leaf, row=row: leaf[row], nodes), jnp.int32(row)))
        first += stack.layers
    return carry


def _rematerialised(group: Callable[..., Any], compute: Compute, nodes: Tree) -> Callable[..., Any]:
    """Full keeps only the residual stream between groups; selective also keeps what `KEPT` names, each needed one once.

    None leaves it to JAX, which keeps whatever any derivative reads: between two products several arrays as wide as
    either. Making those again from the products costs less than storing and loading them. Weights that are brought
    here for a layer, from other devices or from the host, are brought again in the backward pass.
    """
    policies = jax.checkpoint_policies
    if compute.remat == "none":
        if compute.layout is None and not any(on_host(leaf) for leaf in jax.tree.leaves(nodes)):
            return group
        policy = policies.save_anything_except_these_names(GATHERED)
    elif RESIDUAL in compute.offload:
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=KEPT if compute.remat == "selective" else (),
            names_which_can_be_offloaded=(RESIDUAL,),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        policy = policies.nothing_saveable if compute.remat == "full" else policies.save_only_these_names(*KEPT)
    return jax.checkpoint(group, policy=policy, prevent_cse=not compute.scan)
