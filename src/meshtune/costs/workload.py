"""The inputs of the cost models: what each layer costs, the arrays of a run, and one way to shard and execute it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp

from meshtune.adapters.method import PreparedModel
from meshtune.adapters.training_method import Method
from meshtune.arrays.batch import row_patches
from meshtune.arrays.spec import LAYERS, ArraySpec
from meshtune.arrays.tree import flatten, merge, named_leaves
from meshtune.config.recipe import Recipe
from meshtune.costs.hardware import Target
from meshtune.lazy import LazyFunction
from meshtune.mesh.config import MeshConfig
from meshtune.mesh.layout import Layout, abstract_mesh
from meshtune.model.block import HEADROOM, Activation, Block, Cost
from meshtune.model.compute import ExchangeName, OffloadName, RematName
from meshtune.model.gather import layout_for
from meshtune.model.spec import VISION, ModelSpec, abstract_params
from meshtune.objectives.answers import CRITIC
from meshtune.optim.build import OptimizerConfig, make_optimizer

if TYPE_CHECKING:
    from meshtune.model.layer_extras import AltUpSpec

choose_exchange = LazyFunction("meshtune.model.dispatch:choose_exchange")
# The roles of weights by which tokens are multiplied in layers. Vectors and filters are too small to count.
MATRICES = ("matrix", "router")


@dataclasses.dataclass(frozen=True)
class BlockCost:
    """The cost of a block in one layer, and the elements of its weights.

    `dense` elements multiply every token. Of those of `experts`, every token is multiplied by the share
    `active_experts`. The paths of its parameters begin with `prefix`.
    """

    cost: Cost
    prefix: str
    dense: int
    experts: int

    @property
    def active_experts(self) -> float:
        return (self.cost.weights - self.dense) / self.experts if self.experts else 1.0

    def local_weights(self, tp: int, ep: int) -> float:
        """Elements of its weights on one device when they are gathered over all mesh axes but tp and ep."""
        return (self.dense + self.experts / ep) / tp

    def exchange(self, ep: int, requested: ExchangeName) -> str | None:
        """How tokens reach their experts over ep; None where they stay where they are."""
        return choose_exchange(requested, ep, self.cost.chosen).exchange if ep > 1 and self.cost.dispatched else None

    def routed_rows(self, ep: int, requested: ExchangeName) -> float:
        """Rows of a routed array on one device, for each that its own tokens fill: there is room for all that could be
        sent by a gather, and for somewhat more than an even share in a round of an all-to-all."""
        rows = {None: 1.0, "gather": float(ep), "all_to_all": HEADROOM}
        return rows[self.exchange(ep, requested)]

    def widest(self, tp: int, routed_rows: float = 1.0) -> float:
        """The width on one device of the widest array that exists for one chunk of a row at a time."""
        arrays = [a for a in self.cost.activations if not a.whole_rows]
        return max((_width(a, tp, routed_rows) for a in arrays), default=0.0)

    def whole_rows(self, tp: int) -> float:
        """The summed width on one device of the arrays that exist for whole rows: keys and values."""
        return sum(a.width / min(tp, a.units) for a in self.cost.activations if a.whole_rows)

    def saved_bytes(self, tp: int, itemsize: int, routed_rows: float = 1.0) -> float:
        """Bytes per token, on one device, of the arrays that the remat policy `selective` saves."""
        arrays = [a for a in self.cost.activations if a.kept]
        return sum(_width(a, tp, routed_rows) * (a.itemsize or itemsize) for a in arrays)

    def product_width(self, tp: int) -> float:
        """Elements per token that its matrix products read or write, without the block's input and output."""
        return sum(a.products * a.width / min(tp, a.units) for a in self.cost.activations)

    def elementwise_width(self, tp: int, routed_rows: float = 1.0) -> float:
        """Elements per token that the operations between its matrix products read or write."""
        return sum(a.elementwise * _width(a, tp, routed_rows) for a in self.cost.activations)


def _width(array: Activation, tp: int, routed_rows: float) -> float:
    """Elements of an array per token on one device."""
    return array.width / min(tp, array.units) * (routed_rows if array.routed else 1.0)


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """A position of a stack: `repeats` layers of a mixer and a feed-forward network, either of which may be absent, and
    the parts `beside` them.

    The paths of its parameters begin with `prefix`.
    """

    prefix: str
    repeats: int
    mixer: BlockCost | None
    ffn: BlockCost | None
    beside: tuple[BlockCost, ...] = ()

    @property
    def blocks(self) -> tuple[BlockCost, ...]:
        return (*(block for block in (self.mixer, self.ffn) if block is not None), *self.beside)

    @property
    def active_weights(self) -> int:
        """Multiplications of one token by the weights of one layer, forward."""
        return sum(block.cost.weights for block in self.blocks)


def layer_costs(spec: ModelSpec, parameters: Mapping[str, ArraySpec], root: str = "") -> tuple[LayerCost, ...]:
    """The cost of every position of the stacks below a root. `parameters` are the model's arrays by path."""
    embed = spec.embed if spec.vision is None or root == "" else spec.vision.width

    def block_cost(block: Block | AltUpSpec, layer: str, repeats: int) -> BlockCost:
        prefix = f"{layer}{block.name}/"
        arrays = [array for path, array in parameters.items() if path.startswith(prefix)]
        dense = sum(array.size for array in arrays if array.role in MATRICES) // repeats
        experts = sum(array.size for array in arrays if array.role == "experts") // repeats
        return BlockCost(block.cost(embed), prefix, dense, experts)

    costs = []
    for key, repeats, layer, _ in spec.positions(root):
        prefix = f"{root}/{LAYERS}/{key}/".removeprefix("/")
        mixer, ffn, *beside = (
            None if block is None else block_cost(block, prefix, repeats)
            for block in (layer.mixer, layer.ffn, *(() if layer.extras is None else layer.extras.parts))
        )
        costs.append(LayerCost(prefix, repeats, mixer, ffn, tuple(block for block in beside if block is not None)))
    return tuple(costs)


@dataclasses.dataclass(frozen=True)
class TowerCost:
    """The layers of a tower that reads pictures, the width of its stream, and whether a gradient passes through it."""

    layers: tuple[LayerCost, ...]
    width: int
    trained: bool

    @property
    def depth(self) -> int:
        """The number of its layers."""
        return sum(layer.repeats for layer in self.layers)

    def widest(self, tp: int) -> float:
        """The width on one device of its widest array, with keys and values; of a tower without layers its stream's."""
        blocks = (block for layer in self.layers for block in layer.blocks)
        return max((block.widest(tp) + block.whole_rows(tp) for block in blocks), default=float(self.width))


def planned_patches(recipe: Recipe, spec: ModelSpec, length: int) -> int:
    """The patches of a row: room for vision.max_patches, or for as many as three quarters of its tokens stand for."""
    assert recipe.vision is not None, "a recipe without pictures"
    assert spec.vision is not None, "a model that reads no pictures"
    limit = recipe.vision.max_patches or max(1, length * 3 // 4) * spec.vision.merge**2
    return row_patches(limit, spec.vision.tile, spec.vision.merge)


# Frozen weights, weights trained in full, adapters, gradients of both, and the optimizer's state.
ROLES = ("frozen", "full", "adapter", "gradient", "optimizer")


@dataclasses.dataclass(frozen=True)
class PersistentArray:
    """An array that lives across steps: its role (one of ROLES), shape, bytes per element and logical axes.

    `units` is the shape in units that a mesh may split (see model.spec.ArraySpec).
    """

    role: str
    path: str
    shape: tuple[int, ...]
    itemsize: float
    axes: tuple[str, ...]
    units: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_stacked(self) -> bool:
        """Whether it holds an array of every layer of a stack."""
        return self.axes[:1] == (LAYERS,)

    def local_bytes(self, layout: Layout) -> float:
        """Bytes on one device."""
        shards = math.prod(
            layout.size(*((part,) if isinstance(part, str) else part))
            for part in layout.spec(self.axes, self.units)
            if part is not None
        )
        return self.size * self.itemsize / shards


@dataclasses.dataclass(frozen=True)
class Workload:
    """The mesh-independent part of a plan: the model as the method splits it, dtypes, and all persistent arrays.

    `parameters` are the model's by path, before quantisation, and `layers` their costs by position in the stacks,
    `tower` those of a tower that reads pictures;
    `local_sizes` caches bytes per device by mesh.
    """

    recipe: Recipe
    method: Method
    precision: Precision
    arrays: PreparedModel
    persistent: tuple[PersistentArray, ...]
    parameters: dict[str, ArraySpec]
    layers: tuple[LayerCost, ...]
    tower: TowerCost | None = None
    local_sizes: dict[tuple[MeshConfig, frozenset[str]], dict[str, float]] = dataclasses.field(
        default_factory=dict, repr=False
    )

    @property
    def spec(self) -> ModelSpec:
        return self.arrays.spec

    @property
    def models(self) -> int:
        """The models whose layers every token of an update goes through, forward and backward: 2 with a critic."""
        return 1 + (CRITIC in self.arrays.trainable)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a workload: `accumulation` micro-batches of `rows` rows (over all devices) of `length` tokens.

    `remat`, `loss_chunk` (tokens of a row), `mlp_chunk`, `attention_chunk`, `offload` and `shared_prompts` are as in
    model.compute.
    """

    workload: Workload
    target: Target
    mesh: MeshConfig
    layout: Layout
    rows: int
    length: int
    accumulation: int
    remat: RematName
    loss_chunk: int
    mlp_chunk: int | None
    attention_chunk: int | None
    offload: tuple[OffloadName, ...]
    shared_prompts: bool = False

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one device."""
        return self.local_rows * self.length / self.mesh.cp

    @property
    def patches(self) -> float:
        """Patches of pictures of one micro-batch on one device."""
        workload = self.workload
        return (
            0
            if workload.tower is None
            else self.local_rows * planned_patches(workload.recipe, workload.spec, self.length)
        )

    @property
    def local_rows(self) -> float:
        """Rows of one micro-batch on one device, each split over cp."""
        return self.rows / (self.mesh.dp * self.mesh.fsdp * self.mesh.ep)

    def routed_rows(self, block: BlockCost) -> float:
        """Rows of the arrays of a block's experts on one device, for each that its own tokens fill."""
        return block.routed_rows(self.mesh.ep, self.workload.recipe.compute.expert_exchange)

    @property
    def weight_shards(self) -> int:
        """Devices that a dense weight is split over and gathered from, without tp."""
        return self.mesh.fsdp * self.mesh.cp * self.mesh.ep

    @property
    def activation_itemsize(self) -> int:
        """Bytes per element of an activation."""
        return jnp.dtype(self.workload.precision.compute).itemsize

    @property
    def loss_chunks(self) -> int:
        """Chunks into which a device splits the logits of its part of a row, rounded up."""
        return -(-self.length // (self.mesh.cp * max(1, self.loss_chunk)))

    @property
    def streams_trained_weights(self) -> bool:
        """Whether trained weights live in host memory and are fetched layer by layer."""
        return "weights" in self.offload and self.workload.recipe.optimizer.in_backward

    @property
    def update_gradient_bytes(self) -> float:
        """Bytes on one device of all float32 gradients that an update computes, whether or not they exist at once."""
        if not self.workload.recipe.optimizer.in_backward:
            return self.local_bytes("gradient")
        itemsize = jnp.dtype(self.workload.precision.trainable).itemsize
        return self.local_bytes("full", "adapter") * 4 / itemsize

    def local_bytes(self, *roles: str) -> float:
        """Bytes on one device of the persistent arrays with these roles; "stacked" are the layers' frozen weights,
        "tables" the frozen embedding and head."""
        key = (self.mesh, self.layout.tp_replicated)
        sizes = self.workload.local_sizes.get(key)
        if sizes is None:
            names: list[str] = [*ROLES, "stacked", "tables"]
            sizes = dict.fromkeys(names, 0.0)
            for array in self.workload.persistent:
                size = array.local_bytes(self.layout)
                sizes[array.role] += size
                if array.role == "frozen" and array.is_stacked:
                    sizes["stacked"] += size
                elif array.role == "frozen" and "vocab" in array.axes:
                    sizes["tables"] += size
            self.workload.local_sizes[key] = sizes
        return sum(sizes[role] for role in roles)


def workload_on(
    arrays: PreparedModel, recipe: Recipe, method: Method, precision: Precision, optimizer: OptimizerConfig
) -> Workload:
    """Counts the arrays of a run with abstract weights; the recipe's own model and method are not read."""
    parameters = flatten(abstract_params(arrays.spec))
    persistent = (*_weights(arrays, parameters), *_training_state(recipe, optimizer, arrays))
    layers = layer_costs(arrays.spec, parameters)
    tower = None
    if arrays.spec.vision is not None:
        trained = any(path.startswith(f"{VISION}/") for path, _ in named_leaves(arrays.trainable))
        tower = TowerCost(layer_costs(arrays.spec, parameters, VISION), arrays.spec.vision.width, trained)
    return Workload(recipe, method, precision, arrays, persistent, parameters, layers, tower)


def layout_on(mesh: MeshConfig, spec: ModelSpec) -> Layout:
    """The layout of a model on a mesh. Raises: UserError for a mesh that the model does not allow."""
    return layout_for(abstract_mesh(mesh), spec)[0]


def _weights(arrays: PreparedModel, parameters: dict[str, ArraySpec]) -> list[PersistentArray]:
    others = merge(arrays.frozen, arrays.buffers)
    frozen = [_persistent("frozen", path, leaf) for path, leaf in named_leaves(others)]
    trained = [
        _persistent("full" if path.removeprefix(f"{CRITIC}/") in parameters else "adapter", path, leaf)
        for path, leaf in named_leaves(arrays.trainable)
    ]
    return [*frozen, *trained]


def _training_state(recipe: Recipe, config: OptimizerConfig, arrays: PreparedModel) -> list[PersistentArray]:
    """The gradients that exist at once, and the optimizer's state."""
    optimizer, _ = make_optimizer(config, recipe.train.steps or 1, arrays.trainable, arrays.spec)
    gradients = [_persistent("gradient", path, leaf) for path, leaf in optimizer.gradients(arrays.trainable).items()]
    state = [_persistent("optimizer", path, leaf) for path, leaf in named_leaves(optimizer.specs(arrays.trainable))]
    return [*gradients, *state]


def _persistent(role: str, path: str, array: ArraySpec) -> PersistentArray:
    return PersistentArray(role, path, array.shape, bytes_per_element(array.dtype), array.axes, array.units)


def bytes_per_element(dtype: str) -> float:
    """Bytes of one element of a dtype; 0.5 for 4-bit types."""
    return 0.5 if dtype in ("int4", "uint4", "float4_e2m1fn") else float(jnp.dtype(dtype).itemsize)
