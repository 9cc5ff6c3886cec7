"""A run as the cheap models see it: its model, its method and where everything lies, for any mesh, without tracing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from meshtune.adapters.config import Method
from meshtune.adapters.method import Prepared, abstract
from meshtune.arrays.paths import named_leaves
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import flatten
from meshtune.config.recipe import Recipe
from meshtune.mesh.axes import MeshConfig, abstract_mesh
from meshtune.mesh.layout import Layout
from meshtune.model.sharding import layout_for
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.optim.build import make_optimizer
from meshtune.plan.hardware import Target
from meshtune.setup.choices import Precision, optimizer_of, precision_of
from meshtune.setup.quantization import quantize_of
from meshtune.setup.start import start_of
from meshtune.weights.hub import CONFIG, locate
from meshtune.weights.load import load_config, stored_dtype

# Weights that are not trained, weights that are, adapters, gradients of both, the optimizer's state.
ROLES = ("frozen", "full", "adapter", "gradient", "optimizer")


@dataclasses.dataclass(frozen=True)
class Kept:
    """An array that a run keeps: its role (one of ROLES), shape, bytes a number, axes.

    `units` is the shape in what a mesh may split (see model.spec.ArraySpec).
    """

    role: str
    path: str
    shape: tuple[int, ...]
    itemsize: float
    axes: tuple[str, ...]
    units: tuple[int, ...]

    def local(self, layout: Layout) -> float:
        """Bytes on one device."""
        ways = math.prod(
            layout.size(*((part,) if isinstance(part, str) else part))
            for part in layout.spec(self.axes, self.units)
            if part is not None
        )
        return math.prod(self.shape) * self.itemsize / ways


@dataclasses.dataclass(frozen=True)
class Base:
    """What a recipe comes to whatever the mesh: the model as the method splits it, dtypes, and all that is kept.

    `parameters` are the model's by path, none of them quantised; `seen` remembers what meshes were asked about.
    """

    recipe: Recipe
    method: Method
    precision: Precision
    arrays: Prepared
    kept: tuple[Kept, ...]
    parameters: dict[str, ArraySpec]
    seen: dict[Any, dict[str, float]] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def spec(self) -> ModelSpec:
        return self.arrays.spec


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to run a base: `rows` (of all devices) of `length` tokens in each of `accumulation` micro-batches.

    `remat`, `loss_chunk` (tokens of a row), `mlp_chunk`, `attention_chunk` and `offload` are as in model.compute.
    """

    base: Base
    target: Target
    mesh: MeshConfig
    layout: Layout
    rows: int
    length: int
    accumulation: int
    remat: str
    loss_chunk: int
    mlp_chunk: int | None = None
    attention_chunk: int | None = None
    offload: tuple[str, ...] = ()

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one device."""
        return self.rows * self.length / (self.mesh.dp * self.mesh.fsdp * self.mesh.cp)

    @property
    def narrow(self) -> int:
        """Bytes of an activation's number."""
        return jnp.dtype(self.base.precision.compute).itemsize

    @property
    def streamed(self) -> bool:
        """Whether what is trained waits in the host's memory, and comes from there layer by layer."""
        return "weights" in self.offload and self.base.recipe.optimizer.in_backward

    @property
    def summed(self) -> float:
        """Bytes on one device of all gradients that an update makes, float32, whether or not they are there at once."""
        if not self.base.recipe.optimizer.in_backward:
            return self.held("gradient")
        return self.held("full", "adapter") * 4 / jnp.dtype(self.base.precision.trainable).itemsize

    def held(self, *roles: str) -> float:
        """Bytes on one device of what is kept in these roles; "stacked" is the frozen part of the layers."""
        key = (self.mesh, self.layout.whole)
        if key not in self.base.seen:
            sizes: dict[str, float] = dict.fromkeys((*ROLES, "stacked"), 0.0)
            for one in self.base.kept:
                size = one.local(self.layout)
                sizes[one.role] += size
                if one.role == "frozen" and one.path.startswith("layers/"):
                    sizes["stacked"] += size
            self.base.seen[key] = sizes
        return sum(self.base.seen[key][role] for role in roles)


def base_of(recipe: Recipe, backend: str) -> Base:
    """The base of a recipe on a backend, from the model's config alone.

    Raises: UserError for whatever is wrong with the model or the method.
    """
    source = locate(recipe.model.path, recipe.model.revision, allow=CONFIG)
    precision, _ = precision_of(recipe, stored_dtype(source, load_config(source)), backend)
    start = start_of(recipe, source, precision.frozen)
    method = start.method
    arrays = abstract(method, start.spec, precision.trainable, quantize_of(recipe))
    parameters = flatten(abstract_params(arrays.spec))
    kept = (*_arrays(arrays, parameters), *_optimizer(recipe, precision, arrays))
    return Base(recipe, method, precision, arrays, kept, parameters)


def layout_on(mesh: MeshConfig, spec: ModelSpec) -> Layout:
    """Raises: UserError for a mesh that the model does not allow."""
    described: AbstractMesh = abstract_mesh(mesh)
    return layout_for(described, spec)[0]


def _arrays(arrays: Prepared, parameters: dict[str, ArraySpec]) -> list[Kept]:
    frozen = [_kept("frozen", path, leaf) for path, leaf in named_leaves(arrays.frozen)]
    trained = [
        _kept("full" if path in parameters else "adapter", path, leaf) for path, leaf in named_leaves(arrays.trainable)
    ]
    return [*frozen, *trained]


def _kept(role: str, path: str, array: ArraySpec) -> Kept:
    return Kept(role, path, array.shape, bytes_a_number(array.dtype), array.axes, array.units)


def bytes_a_number(dtype: Any) -> float:
    """Of a dtype, those of half a byte included."""
    return 0.5 if str(dtype) in ("int4", "uint4", "float4_e2m1fn") else float(jnp.dtype(dtype).itemsize)


def _optimizer(recipe: Recipe, precision: Precision, arrays: Prepared) -> list[Kept]:
    """The gradients that are there at once, and the optimizer's state."""
    optimizer, _ = make_optimizer(
        optimizer_of(recipe, precision), recipe.train.steps or 1, arrays.trainable, arrays.spec
    )
    gradients = [_kept("gradient", path, leaf) for path, leaf in optimizer.gradients(arrays.trainable).items()]
    state = [_kept("optimizer", path, leaf) for path, leaf in named_leaves(optimizer.specs(arrays.trainable))]
    return [*gradients, *state]
