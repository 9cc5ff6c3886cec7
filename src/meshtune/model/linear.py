"""Linear layers: weights are [out, in], adapters sit beside the weight they adapt."""

from __future__ import annotations

import dataclasses
import math
import zlib
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree
from meshtune.kernels.attention.backend import matmul_precision
from meshtune.kernels.chips import Chip
from meshtune.kernels.grouped import cast, grouped_matmul
from meshtune.mesh.layout import Layout
from meshtune.quantize.weight import QuantisedWeight

TILE = 64  # outputs of a tile: the width at which YNNPACK multiplies, measured in benchmarks/cpu_serving
TILES = 48  # of one product, for each of which the rows are copied


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TiledWeight:
    """The weight of a linear layer in tiles [in, TILE], zeros behind the last of its `out` outputs.

    A product with few rows is bounded by how fast the weight is read, and a tile is read from one end to the other,
    where a matrix [in, out] is read in short pieces of each of its rows. Rows are divided by `one` before they are
    copied for each tile: XLA would otherwise compute their source again in every copy, while it computes an
    expensive operation, as a division, once.
    """

    parts: tuple[Float[Array, "n i t"], ...]
    one: Float[Array, ""]
    out: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, weight: Float[Array, "o i"]) -> TiledWeight:
        """A tiled copy of a weight."""
        out, into = weight.shape
        padded = jnp.pad(weight, ((0, -out % TILE), (0, 0)))
        tiles = padded.reshape(-1, TILE, into).swapaxes(1, 2)
        return cls(tuple(jnp.copy(tiles[n : n + TILES]) for n in range(0, len(tiles), TILES)), jnp.ones(()), out)

    @property
    def matrix(self) -> Float[Array, "o i"]:
        """The weight as it was."""
        tiles = jnp.concatenate(self.parts)
        return tiles.swapaxes(1, 2).reshape(-1, tiles.shape[1])[: self.out]

    def product(self, x: Float[Array, "*B i"], out: DTypeLike, precision: lax.Precision | None) -> Float[Array, "*B o"]:
        """x times the transposed weight, accumulated and given in `out`."""
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) / self.one.astype(x.dtype)

        def times(tiles: Array) -> Array:
            copies = jnp.broadcast_to(rows, (tiles.shape[0], *rows.shape))
            batched = (((2,), (1,)), ((0,), (0,)))
            y = lax.dot_general(copies, tiles.astype(x.dtype), batched, precision=precision, preferred_element_type=out)
            return y.swapaxes(0, 1).reshape(rows.shape[0], -1)

        y = jnp.concatenate([times(tiles) for tiles in self.parts], axis=1)[:, : self.out]
        return y.reshape(*x.shape[:-1], self.out)


# Names a rematerialisation policy may keep: the result of a linear layer, its adapter and bias included, and the narrow
# product inside an adapter.
PRODUCT, NARROW = "linear_product", "adapter_narrow"
LinearWeight = Array | QuantisedWeight | TiledWeight  # [out, in]


class Groups(NamedTuple):
    """Rows sorted by expert: the rows of each expert, and each row's expert (E for rows of none, which come last)."""

    sizes: Int[Array, "E"]
    of_row: Int[Array, "R"]

    def of_rows(self, numbers: Float[Array, "E *o"]) -> Float[Array, "R *o"]:
        """The numbers of each row's expert; zeros for rows of none."""
        return jnp.concatenate([numbers, jnp.zeros_like(numbers[:1])])[self.of_row]


LIMITS = ("input_min", "input_max", "output_min", "output_max")  # of a clipped linear layer


def linear_params(
    out: tuple[int, str], into: tuple[int, str], bias: bool, head_rows: int = 1, clipped: bool = False
) -> Tree:
    """The parameters of a linear layer: weight [out, in] and perhaps bias [out]; sizes with their logical axes. Of a
    `clipped` one also the LIMITS [1] of the numbers that it reads and gives."""
    shape, axes = (out[0], into[0]), (out[1], into[1])
    weight = {"weight": ArraySpec(shape, "float32", axes, role="matrix", head_rows=head_rows)}
    if clipped:
        weight |= dict.fromkeys(LIMITS, ArraySpec((1,), "float32", ("whole",), "ones", role="buffer"))
    return weight | {"bias": ArraySpec(out[:1], "float32", out[1:], "zeros", role="vector")} if bias else weight


def with_gathered_columns(node: Tree, layout: Layout | None) -> Tree:
    """The parameters of a linear layer outside the layers of a model, with the columns of its weight gathered; codes
    are left to the compiler."""
    weight = node["weight"]
    if layout is None or isinstance(weight, QuantisedWeight):
        return node
    sharding = layout.in_use(("whole", "embed"), weight.shape)
    return node | {"weight": lax.with_sharding_constraint(weight, sharding)}


def matmul(x: Float[Array, "*B i"], weight: LinearWeight, out: DTypeLike | None = None) -> Float[Array, "*B o"]:
    """x times the transposed weight: factors in x's dtype, accumulated and given in `out` (default: x's dtype)."""
    if isinstance(weight, QuantisedWeight):
        return _quantised_product(x, weight, jnp.dtype(x.dtype), jnp.dtype(out or x.dtype))
    if isinstance(weight, TiledWeight):
        return weight.product(x, out or x.dtype, matmul_precision(x.dtype))
    if out is not None and jnp.dtype(out) != x.dtype:
        return _wide_product(x, weight, jnp.dtype(out))
    return _product(x, weight.astype(x.dtype), x.dtype)


def _product(x: Array, weight: Array, out: DTypeLike) -> Array:
    over = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, over, precision=matmul_precision(x.dtype), preferred_element_type=out)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _wide_product(x: Array, weight: Array, out: jnp.dtype) -> Array:
    """`matmul` whose result is wider than its factors. The backward products have the same factors, of x's dtype, as
    under torch's autocast: JAX would make them of the wide cotangent, and so convert the whole weight to its dtype."""
    return _product(x, weight.astype(x.dtype), out)


def _widened_forward(x: Array, weight: Array, out: jnp.dtype) -> tuple[Array, tuple[Array, Array]]:
    return _wide_product(x, weight, out), (x, weight)


def _widened_backward(out: jnp.dtype, factors: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, weight = factors
    cotangent, rows = cotangent.astype(x.dtype), tuple(range(x.ndim - 1))
    d_x = _product(cotangent, weight.astype(x.dtype).T, x.dtype)
    d_weight = lax.dot_general(
        cotangent, x, ((rows, rows), ((), ())), precision=matmul_precision(x.dtype), preferred_element_type=weight.dtype
    )
    return d_x, d_weight


_wide_product.defvjp(_widened_forward, _widened_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _quantised_product(x: Array, weight: QuantisedWeight, factors: jnp.dtype, out: jnp.dtype) -> Array:
    """`matmul` with a frozen, quantised weight: what the backward pass keeps of it are its codes and scales."""
    return matmul(x, weight.dequantise(factors), out)


def _quantised_forward(
    x: Array, weight: QuantisedWeight, factors: jnp.dtype, out: jnp.dtype
) -> tuple[Array, QuantisedWeight]:
    return _quantised_product(x, weight, factors, out), weight


def _quantised_backward(
    factors: jnp.dtype, out: jnp.dtype, weight: QuantisedWeight, cotangent: Array
) -> tuple[Array, None]:
    # The barrier keeps the compiler from finding that this weight was made before, and holding it from there to here.
    cotangent, weight = lax.optimization_barrier((cotangent, weight))
    numbers = weight.dequantise(factors)
    d_x = lax.dot_general(
        cotangent.astype(factors),
        numbers,
        (((cotangent.ndim - 1,), (0,)), ((), ())),
        precision=matmul_precision(factors),
        preferred_element_type=factors,
    )
    return d_x, None


_quantised_product.defvjp(_quantised_forward, _quantised_backward)


def linear(
    x: Float[Array, "*B i"], node: Tree, key: Array | None = None, out: DTypeLike | None = None
) -> Float[Array, "*B o"]:
    """A linear layer: node holds `weight`, perhaps `bias`, perhaps an `adapter` (adapters.kind.Adapter) and its
    frozen arrays, `fixed`; perhaps LIMITS.

    `key` is the adapter's source of dropout; without one nothing is dropped.
    """
    adapter, clipped = node.get("adapter"), LIMITS[0] in node
    if clipped:
        x = jnp.clip(x, *(lax.stop_gradient(node[name]).astype(x.dtype) for name in LIMITS[:2]))
    if adapter is None:
        y = matmul(x, node["weight"], out)
    else:
        y = adapter.apply(x, node["weight"], key, out, node.get("fixed"))
    if "bias" in node:
        y = y + node["bias"].astype(y.dtype)
    if clipped:
        y = jnp.clip(y, *(lax.stop_gradient(node[name]).astype(y.dtype) for name in LIMITS[2:]))
    return checkpoint_name(y, PRODUCT)


def grouped_linear(x: Float[Array, "R i"], node: Tree, groups: Groups, chip: Chip) -> Float[Array, "R o"]:
    """`linear` of rows sorted by expert; node holds `weight` [E, o, i], perhaps `bias` [E, o] and an `adapter`."""
    product = partial(_grouped_product, groups=groups, chip=chip)
    adapter = node.get("adapter")
    y = (
        product(x, node["weight"])
        if adapter is None
        else adapter.apply_grouped(x, node["weight"], product, node.get("fixed"))
    )
    if "bias" in node:
        y = y + groups.of_rows(node["bias"].astype(y.dtype))
    return checkpoint_name(y, PRODUCT)


def _grouped_product(x: Array, weight: Array | QuantisedWeight, groups: Groups, chip: Chip) -> Array:
    read = _dequantise if isinstance(weight, QuantisedWeight) else cast
    return grouped_matmul(x, weight, groups.sizes, read=read, chip=chip)


def _dequantise(weight: QuantisedWeight, dtype: jnp.dtype) -> Array:
    return weight.dequantise(dtype)


def fold(rng: Array | None, number: Array | int | None) -> Array | None:
    """The source of dropout of the layer or chunk with this number."""
    return rng if rng is None or number is None else jax.random.fold_in(rng, number)


def site_key(key: Array | None, site: str) -> Array | None:
    """The dropout key of the linear layer called `site`, the same whatever other layers exist."""
    return None if key is None else jax.random.fold_in(key, zlib.crc32(site.encode()))
