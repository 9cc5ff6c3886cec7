"""Parameters as a layer computes with them: fetched from the host's memory where they are kept there, and gathered over
the mesh axes that split them at rest; only tp (and ep, for experts) still splits them."""

from __future__ import annotations

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.kernels.cross_entropy import LossSharding
from meshtune.mesh.layout import Layout
from meshtune.model.compute import Compute
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.quantize.weight import QuantisedWeight

# What a rematerialisation policy must never keep: it would be the whole model on every device.
GATHERED = "gathered_parameter"


def loss_sharding(head: Tree, spec: ModelSpec, layout: Layout, shape: tuple[int, ...]) -> LossSharding:
    """How the loss of rows of `shape` [B, T] is computed on a mesh; `head` is what `decoder.head_params` gives."""
    arrays = flatten(abstract_params(spec))
    weight = arrays["embed/weight" if spec.tied else "head/weight"]

    def spec_of(x: jax.Array, *axes: str) -> PartitionSpec:
        return layout.in_use(axes, x.shape).spec

    def leaf(name: str, x: PyTree) -> PyTree:
        if name == "scale":
            return spec_of(x, weight.axes[0])
        if name in ("adapter", "fixed"):
            return x.in_use(spec_of, weight.axes)
        return spec_of(x, *(weight.axes if name == "weight" else arrays[f"head/{name}"].axes))

    specs = jax.tree.leaves({name: leaf(name, x) for name, x in head.items()})
    vocab = "tp" if "tp" in layout.in_use(weight.axes, weight.shape).spec else None
    rows = layout.spec(("batch", "length"), shape)
    return LossSharding(layout.mesh, rows, tuple(specs), vocab)


def is_offloaded(x: jax.Array) -> bool:
    """Whether an array is kept in the host's memory, where a program on a device cannot compute with it."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def is_any_offloaded(tree: PyTree) -> bool:
    """Whether any array of a tree is kept in the host's memory."""
    return any(jax.typeof(leaf).memory_space == jax.memory.Space.Host for leaf in jax.tree.leaves(tree))


def to_device(tree: PyTree, after: jax.Array | None = None) -> PyTree:
    """The arrays on the device: those kept in the host's memory are fetched, and not before `after` is computed.

    Without it the compiler would move a fetch that is the same for every micro-batch out of their loop, and the array
    would be on the device all along.
    """
    return jax.tree.map(functools.partial(_fetch, after=after), tree) if is_any_offloaded(tree) else tree


def _fetch(x: jax.Array, after: jax.Array | None = None) -> jax.Array:
    if not is_offloaded(x):
        return x
    if after is not None:
        x, _ = jax.lax.optimization_barrier((x, jax.lax.stop_gradient(after)))
    return jax.device_put(x, jax.memory.Space.Device)


def with_shared(node: Tree, shared: PyTree) -> Tree:
    """A node, each adapter in it with its cut of what all adapters share (params["shared"], or None) as `fixed`."""
    flat = flatten(node)
    for path in [path for path in flat if path.endswith("adapter")]:
        owner = path.removesuffix("adapter")
        flat[f"{owner}fixed"] = shared.cut(flat[f"{owner}weight"].shape)
    return unflatten(flat)


def gather_layer_params(node: Tree, kind: LayerSpec, embed: int, compute: Compute, shared: PyTree = None) -> Tree:
    """One layer's parameters as the layer computes with them; `node` has no axis of stacked layers.

    `shared` holds the arrays that adapters of all layers have in common.
    """
    if is_any_offloaded(node):
        node = jax.tree.map(lambda x: checkpoint_name(_fetch(x), GATHERED) if is_offloaded(x) else x, node)
    if shared is not None:
        node = with_shared(node, shared)
    return node if compute.layout is None else _gather(node, kind.params(embed), compute.layout, compute.dtype)


def _gather(node: Tree, params: Tree, layout: Layout, dtype: str) -> Tree:
    """Gathers a layer's parameters over the mesh; `params` are its ArraySpecs.

    Left to itself, XLA may move activations between devices rather than gather a weight: for the gradient of a thin
    adapter it would exchange cotangents of full width. With explicit constraints, weights are gathered layer by layer,
    and gradients, computed from each device's own rows, are summed and split again. A matrix is rounded to `dtype`
    before it is gathered, so that its gradient is split before it is widened: XLA then uses a reduce-scatter in place
    of an all-reduce, which it does not find across the conversion.
    """
    flat = flatten(node)
    arrays: dict[str, ArraySpec] = flatten(params)

    def gathered(x: jax.Array, *axes: str, unit: int = 1) -> jax.Array:
        sharding = layout.in_use(axes, (*x.shape[:-1], x.shape[-1] // unit))
        return checkpoint_name(jax.lax.with_sharding_constraint(x, sharding), GATHERED)

    def leaf(path: str, x: PyTree) -> PyTree:
        owner, _, last = path.rpartition("/")
        if last in ("adapter", "fixed"):
            return x.in_use(gathered, arrays[f"{owner}/weight"].axes)
        axes = arrays[path].axes
        if isinstance(x, QuantisedWeight):  # codes travel, not the numbers they stand for
            return x.in_use(gathered, axes)
        at_rest = layout.of(arrays[path])
        if at_rest.is_fully_replicated:
            return x
        if arrays[path].role in ("matrix", "experts") and f"{owner}/adapter" not in flat:
            x = jax.lax.with_sharding_constraint(x.astype(dtype), at_rest)
        return gathered(x, *axes)

    return unflatten({path: leaf(path, x) for path, x in flat.items()})
