"""One layer of the decoder: on whole rows, or a chunk of each row's tokens at a time.

With chunks the keys and values of whole rows are made first; all else a layer makes of a token (its query, what it
attends to, the feed-forward layer) exists for one chunk at a time, forward and backward. A long row then costs its
residual stream, that stream's gradient, and keys and values with theirs, whatever the number of query heads.
"""

from __future__ import annotations

import functools

import jax
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree
from meshtune.mesh.layout import Layout, constrain
from meshtune.model.attention import Rows, attend, keys_values, queries, queries_keys_values
from meshtune.model.chunks import over_chunks
from meshtune.model.compute import Compute
from meshtune.model.linear import site_key
from meshtune.model.mlp import mlp
from meshtune.model.norm import rms_norm
from meshtune.model.spec import LayerSpec, ModelSpec

Hidden = Float[Array, "B T D"]


def one_layer(
    x: Hidden, node: Tree, spec: ModelSpec, layer: LayerSpec, compute: Compute, rows: Rows, key: Array | None
) -> Hidden:
    """The hidden state after a single layer, whose unstacked parameters are `node`; `key` turns dropout on."""
    if compute.attention_chunk is not None and compute.attention_chunk < x.shape[1]:
        return _by_chunks(x, node, spec, layer, compute, rows, key)
    h = rms_norm(x, node["attn_norm"]["weight"], spec.norm_eps)
    q, k, v = queries_keys_values(h, node["attn"], spec, rows, site_key(key, "attn"))
    x = x + attend(q, k, v, node["attn"], spec, layer, compute, rows, None, site_key(key, "attn"))
    return _fed(laid_out(x, compute.layout), node, spec, compute, site_key(key, "mlp"))


def laid_out(x: Hidden, layout: Layout | None) -> Hidden:
    """The residual stream where the layout has it."""
    return constrain(x, layout, "batch", "length", "embed")


def fold(rng: Array | None, number: Array | None) -> Array | None:
    """The source of dropout of layer or chunk `number`."""
    return rng if rng is None or number is None else jax.random.fold_in(rng, number)


def _fed(x: Hidden, node: Tree, spec: ModelSpec, compute: Compute, key: Array | None) -> Hidden:
    """With the feed-forward layer's result, made by chunks of compute.mlp_chunk tokens."""
    mine = {name: node[name] for name in ("mlp_norm", "mlp")}
    feed = functools.partial(_feed, spec=spec, layout=compute.layout)
    return over_chunks(feed, (mine, key), x, {}, chunk=compute.mlp_chunk, ways=_ways(compute))


def _feed(
    shared: tuple[Tree, Array | None],
    x: Hidden,
    _: Tree,
    number: Array | None,
    *,
    spec: ModelSpec,
    layout: Layout | None,
) -> Hidden:
    node, key = shared
    h = rms_norm(x, node["mlp_norm"]["weight"], spec.norm_eps)
    return laid_out(x + mlp(h, node["mlp"], spec, fold(key, number)), layout)


def _by_chunks(
    x: Hidden, node: Tree, spec: ModelSpec, layer: LayerSpec, compute: Compute, rows: Rows, key: Array | None
) -> Hidden:
    tokens = {name: getattr(rows, name) for name in ("cos", "sin", "positions", "segment_ids")}
    size = {"chunk": compute.attention_chunk, "ways": _ways(compute)}
    options = {"spec": spec, "compute": compute}
    # Where one projection makes all three, either half of the work makes it: with its share of the gradient.
    both = {n: a for n, a in node["attn"].items() if n == "qkv"}
    mine = {"attn_norm": node["attn_norm"], "attn": both | {n: a for n, a in node["attn"].items() if n[0] in "kv"}}
    keys = (mine, site_key(key, "attn"))
    k, v = over_chunks(functools.partial(_remember, **options), keys, x, tokens, **size)
    mine = node | {"attn": {n: a for n, a in node["attn"].items() if n[0] in "qo"}}  # qkv, too
    shared = (mine, key, k, v, rows.positions, rows.segment_ids)
    return over_chunks(functools.partial(_look_back, layer=layer, **options), shared, x, tokens, **size)


def _remember(shared, x: Hidden, tokens: Tree, number: Array | None, *, spec: ModelSpec, compute: Compute):
    """Keys and values of a chunk."""
    node, key = shared
    h = rms_norm(x, node["attn_norm"]["weight"], spec.norm_eps)
    return keys_values(h, node["attn"], spec, Rows(**tokens), fold(key, number))


def _look_back(
    shared, x: Hidden, tokens: Tree, number: Array | None, *, spec: ModelSpec, layer: LayerSpec, compute: Compute
) -> Hidden:
    """A chunk after the layer, from whole rows' keys and values."""
    node, key, k, v, *past = shared
    rows, key = Rows(**tokens), fold(key, number)
    h = rms_norm(x, node["attn_norm"]["weight"], spec.norm_eps)
    q = queries(h, node["attn"], spec, rows, site_key(key, "attn"))
    past = (past[0], past[1])
    x = x + attend(q, k, v, node["attn"], spec, layer, compute, rows, past, site_key(key, "attn"))
    return _fed(laid_out(x, compute.layout), node, spec, compute, site_key(key, "mlp"))


def _ways(compute: Compute) -> int:
    """The devices that hold a row's parts in turn."""
    return 1 if compute.layout is None else compute.layout.size("cp")
