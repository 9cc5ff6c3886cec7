"""Parameters on a mesh: which meshes divide a model, and how a layer gathers its parameters."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import PyTree

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.errors import UserError
from meshtune.kernels.cross_entropy import LossSharding
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import Layout
from meshtune.model.block import Divisor
from meshtune.model.compute import Compute
from meshtune.model.layer import LayerSpec
from meshtune.model.spec import VISION, ModelSpec, abstract_params
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
    if shared is None:
        return node
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
    return node if compute.layout is None else gather_params(node, kind.params(embed), compute)


def gather_params(node: Tree, params: Tree, compute: Compute) -> Tree:
    """Parameters as they are computed with on a mesh; `params` are their ArraySpecs, without an axis of layers."""
    return node if compute.layout is None else _gather(node, params, compute.layout, compute.dtype)


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


@dataclasses.dataclass(frozen=True)
class Unsplit:
    """A property of a layout that the banner shows: the mesh axis, and the explanation."""

    axis: str
    text: str


def layout_for(mesh: Mesh | AbstractMesh, spec: ModelSpec) -> tuple[Layout, list[Unsplit]]:
    """The layout of a model on a mesh, and notes on it for the banner.

    Key and value heads, and channels of recurrent mixers, that tp does not divide are replicated over tp.
    Raises: UserError for any other dimension that does not divide, naming the sizes that work, and for an axis along
    which nothing in the model can be sharded.
    """
    size = dict(mesh.shape)
    divisors = [divisor for block in spec.blocks for divisor in block.divisors()]
    divisors.append(Divisor("tp", "vocabulary", spec.vocab))
    divisors += () if spec.side is None else spec.side.divisors()
    if spec.vision is not None:
        divisors += _tower_divisors(size["cp"], spec)
    check_experts(size["ep"], spec)
    replicated, notes = set[str](), []
    for axis, name, count, replicate_axis, reason in dict.fromkeys(divisors):
        if count % size[axis] == 0:
            continue
        if reason:
            raise UserError(
                f"{axis}={size[axis]} cannot split this {spec.family} model's {name}: {reason}",
                where=f"mesh.{axis}",
                fix=f"leave mesh.{axis} out, and give its devices to fsdp or tp",
            )
        if replicate_axis is None:
            required = [divisor.size for divisor in divisors if divisor.axis == axis and divisor.replicate_axis is None]
            raise _uneven(axis, size[axis], name, count, math.gcd(*required))
        replicated.add(replicate_axis)
        computed = "the heads that its own queries need" if replicate_axis == "kv_heads" else "all of them"
        notes.append(
            Unsplit(
                axis,
                f"the {count} {name} do not divide by {axis}={size[axis]}: their projections are replicated "
                f"on all {size[axis]} devices, and each computes {computed}",
            )
        )
    sharded = size["fsdp"] * size["cp"] * size["ep"]
    if spec.embed % sharded:
        axis = " x ".join(["fsdp", *(axis for axis in ("cp", "ep") if size[axis] > 1)])
        raise _uneven(axis, sharded, "embedding width", spec.embed, spec.embed)
    return Layout(mesh, frozenset(replicated)), notes


def _tower_divisors(cp: int, spec: ModelSpec) -> list[Divisor]:
    """The divisors of a tower, named as such. Raises: UserError where rows with pictures would be split over cp."""
    if cp > 1:
        raise UserError(
            f"cp={cp} splits rows over devices, and rows with pictures are not split yet",
            where="mesh.cp, vision",
            fix="leave mesh.cp out, and give its devices to fsdp or tp",
        )
    blocks = dict.fromkeys(b for s in spec.roots[VISION] for kind in s.pattern for b in kind.blocks)
    divisors = (divisor for block in blocks for divisor in block.divisors())
    return [divisor._replace(name=f"vision tower's {divisor.name}") for divisor in divisors]


def check_experts(ep: int, spec: ModelSpec) -> None:
    """Raises: UserError if mesh.ep is not 1 for a model without experts.

    Checked before the mesh is compared with the devices: the advice to start more of them would be wrong.
    """
    if ep != 1 and not any(divisor.axis == "ep" for block in spec.blocks for divisor in block.divisors()):
        raise UserError(
            f"ep={ep} shards experts, and this {spec.family} model is dense: it has none",
            where="mesh.ep",
            fix="leave mesh.ep out, and give its devices to mesh.fsdp or mesh.tp",
        )


def check_batch(config: MeshConfig, rows: int, length: int) -> None:
    """Raises: UserError if the mesh does not divide micro-batches of `rows` rows of `length` positions (0: any)."""
    shards = config.dp * config.fsdp * config.ep
    axes = "dp x fsdp" if config.ep == 1 else "dp x fsdp x ep"
    if rows % shards:
        raise UserError(
            f"a micro-batch of {rows} row{'' if rows == 1 else 's'} cannot be split over {axes} = {shards}",
            where="train.batch_size, train.micro_batch",
            fix=f"use a multiple of {shards} rows, such as {-(-rows // shards) * shards}, or give devices to tp or cp",
        )
    if config.cp > 1 and length % (2 * config.cp):
        per = 2 * config.cp
        raise UserError(
            f"rows of {length} positions cannot be split over cp={config.cp}: every device takes two equal pieces",
            where="data.max_length, mesh.cp",
            fix=f"use a multiple of {per}, such as {-(-length // per) * per}, or another cp",
        )


def _uneven(axis: str, size: int, name: str, count: int, divisible: int) -> UserError:
    works = [n for n in range(1, min(divisible, 4096) + 1) if divisible % n == 0]
    shown = [str(n) for n in works if n <= 4 * size][-8:]
    return UserError(
        f"{axis}={size} does not divide the model's {name} of {count}",
        where=f"mesh.{axis.split()[0]}",
        fix=f"sizes of {axis} that this model allows: {', '.join(shown)}",
    )
