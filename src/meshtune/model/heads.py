"""Heads of queries, keys and values: taken out of one packed projection, and normalised."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree
from meshtune.model.linear import linear, site_key
from meshtune.model.norm import NormSpec

PACKED = "packed_heads"  # the logical axis of rows of queries, keys and values, head by head

Heads = Float[Array, "B T H h"]

# What a norm of queries and keys extends over: a head, all with the same weights or each with its own, or all heads.
NormOver = Literal["head", "own_head", "vector"]


def projected(
    x: Float[Array, "B T D"],
    node: Tree,
    key: Array | None,
    names: str,
    head_dim: int,
    *,
    v_of_k: bool,
    gate: Literal["input", "query"] | None,
) -> dict[str, Heads]:
    """Of queries "q", keys "k" and values "v", those in `names`, each by a projection of its own.

    With `v_of_k` values are the keys as they are projected. Beside queries comes their gate, where there is one: by a
    projection of its own, or the second half of the rows of each head's queries.
    """

    def heads_of(name: str, size: int) -> Heads:
        return linear(x, node[name], site_key(key, name)).reshape(*x.shape[:2], -1, size)

    # Queries first: in the order of these products their gradients of x are added, which decides the last bits.
    heads: dict[str, Heads] = {}
    if "q" in names and gate == "query":
        heads["q"], heads["gate"] = jnp.split(heads_of("q", 2 * head_dim), 2, axis=-1)
    elif "q" in names:
        heads["q"] = heads_of("q", head_dim)
        heads |= {"gate": heads_of("gate", head_dim)} if gate == "input" else {}
    heads |= {name: heads_of(name, head_dim) for name in names if name == "k" or (name == "v" and not v_of_k)}
    if "v" in names and v_of_k:
        heads["v"] = heads["k"]
    return heads


def unpacked(qkv: Float[Array, "B T n"], group: int, head_dim: int, names: str) -> dict[str, Heads]:
    """Of queries, keys and values, those in `names`: `qkv` has `group` queries, a key and a value a key-value head."""
    flat = (*qkv.shape[:2], -1)
    qkv = qkv.reshape(*flat, group + 2, head_dim)
    q = qkv[:, :, :, :group].reshape(*flat, head_dim)
    heads = {"q": q, "k": qkv[:, :, :, group], "v": qkv[:, :, :, group + 1]}
    return {name: heads[name] for name in names}


def head_norm_params(norm: NormSpec | None, over: NormOver, heads: tuple[int, str], head_dim: int) -> Tree:
    """The parameters of the norm of queries or keys; `heads` is their number with its logical axis."""
    if norm is None:
        return {}
    count, axis = heads
    match over:
        case "head":
            return norm.params(head_dim, "head_dim")
        case "own_head":
            return norm.params_of((count, head_dim), (axis, "head_dim"))
        case "vector":
            return norm.params(count * head_dim, axis)


def normalised(norm: NormSpec | None, over: NormOver, heads: Heads, params: Tree) -> Heads:
    """Queries, keys or values, normalised if there is a norm."""
    if norm is None:
        return heads
    if over != "vector":
        return norm(heads, params)
    return norm(heads.reshape(*heads.shape[:2], -1), params).reshape(heads.shape)


def clipped(heads: Heads, limit: float | None) -> Heads:
    """With the numbers limited to [-limit, limit]."""
    return heads if limit is None else jnp.clip(heads, -limit, limit)
