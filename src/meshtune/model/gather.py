"""Parameters as a layer computes with them: fetched from the host's memory where they are kept there, and gathered over
the mesh axes that split them at rest; only tp (and ep, for experts) still splits them."""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.kernels.loss_sharding import LossSharding
from meshtune.mesh.layout import Layout
from meshtune.model.compute import Compute
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.quantize.weight import QuantisedWeight

# What a rematerialisation policy must never keep: it would be the whole model on every device.
GATHERED = "gathered_parameter"


def loss_sharding(head: Tree, spec: ModelSpec, layout: Layout | None, shape: tuple[int, ...]) -> LossSharding | None:
    """How the loss of rows of `shape` [B, T] is computed on a mesh; `head` is what `decoder.head_params` gives."""
    if layout is None:
        return None
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


def to_device(tree: PyTree, after: jax.Array | None = None) -> PyTree:
    """The arrays on the device: those kept in the host's memory are fetched, and not before `after` is computed.

    Without it the compiler would move a fetch that is the same for every micro-batch out of their loop, and the array
    would be on the device all along.
    """

    def fetched(x: jax.Array) -> jax.Array:
        if not is_offloaded(x):
            return x
        if after is not None:
            x, _ = jax.lax.optimization_barrier((x, jax.lax.stop_gradient(after)))
        return jax.device_put(x, jax.memory.Space.Device)

    return jax.tree.map(fetched, tree)


def _fetch(x: jax.Array) -> jax.Array:
    if not is_offloaded(x):
        return x
    return checkpoint_name(jax.device_put(x, jax.memory.Space.Device), GATHERED)


def with_shared(node: Tree, shared: PyTree) -> Tree:
    """A node, each adapter in it with its cut of what all adapters share (params["shared"], or None) as `fixed`."""
    if shared is None:
        return node
    flat = flatten(node)
    for path in [path for path in flat if path.endswith("adapter")]:
        owner = path.removesuffix("adapter")
        flat[f"{owner}fixed"] = shared.cut(flat[f"{owner}weight"].shape)
    return unflatten(flat)


def gather_layer_params(node: Tree, spec: ModelSpec, key: str, compute: Compute, shared: PyTree = None) -> Tree:
    """One layer's parameters (`node`, without the axis of stacked layers), those of params["layers"][key].

    `shared` holds the arrays that adapters of all layers have in common.

    Left to itself, XLA may move activations between devices rather than gather a weight: for the gradient of a thin
    adapter it would exchange cotangents of full width. With explicit constraints, weights are gathered layer by layer,
    and gradients, computed from each device's own rows, are summed and split again. A matrix is rounded to
    compute.dtype before it is gathered, so that its gradient is split before it is widened: XLA then uses a
    reduce-scatter in place of an all-reduce, which it does not find across the conversion.
    """
    node = with_shared(jax.tree.map(_fetch, node), shared)
    if (layout := compute.layout) is None:
        return node
    flat = flatten(node)
    arrays: dict[str, ArraySpec] = flatten(abstract_params(spec)["layers"][key])

    def gathered(x: jax.Array, *axes: str, unit: int = 1) -> jax.Array:
        sharding = layout.in_use(axes, (*x.shape[:-1], x.shape[-1] // unit))
        return checkpoint_name(jax.lax.with_sharding_constraint(x, sharding), GATHERED)

    def leaf(path: str, x: PyTree) -> PyTree:
        owner, _, last = path.rpartition("/")
        if last in ("adapter", "fixed"):
            return x.in_use(gathered, arrays[f"{owner}/weight"].axes[1:])
        axes = arrays[path].axes[1:]
        if isinstance(x, QuantisedWeight):  # codes travel, not the numbers they stand for
            return x.in_use(gathered, axes)
        split = layout.of(arrays[path])
        if split.is_fully_replicated:
            return x
        if arrays[path].role in ("matrix", "experts") and f"{owner}/adapter" not in flat:
            at_rest = NamedSharding(split.mesh, PartitionSpec(*split.spec[1:]))
            x = jax.lax.with_sharding_constraint(x.astype(compute.dtype), at_rest)
        return gathered(x, *axes)

    return unflatten({path: leaf(path, x) for path, x in flat.items()})
