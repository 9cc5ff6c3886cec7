"""OFT: a block-diagonal rotation of the input of a linear layer (https://arxiv.org/abs/2306.07280).

As in PEFT 0.18 and later, the rotation is the Cayley transform (I - Q)(I + Q)^-1 of a skew-symmetric Q, or the first
terms of its Neumann series. It is applied to the input, so that the weight is only read, quantised or not.

The array `q` has the role of its weight: to optimizers it is a matrix with a row for each block.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.kind import AdapterDefaults, InitializedAdapter, Original, Weight, no_options, without
from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.kernels.attention.backend import matmul_precision
from meshtune.model.linear import matmul

PARAMETRISED_SINCE = "0.18.0"  # the version of PEFT whose series this is


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OFT(AdapterDefaults):
    """y = (x R) W^T. `q` [n, b (b - 1) / 2] holds the numbers above the diagonal of Q in each of n blocks of b
    inputs."""

    q: Any
    block: int = dataclasses.field(metadata={"static": True})
    terms: int | None = dataclasses.field(metadata={"static": True})

    PEFT_TENSORS: ClassVar[dict[str, str]] = {"q": "oft_R.weight"}
    # module_dropout is never applied by PEFT's linear layers, eps only with coft.
    PEFT_READ: ClassVar[frozenset[str]] = frozenset(
        {
            "r",
            "oft_block_size",
            "use_cayley_neumann",
            "num_cayley_neumann_terms",
            "init_weights",
            "module_dropout",
            "eps",
        }
    )

    @staticmethod
    def check(config: LoraConfig) -> None:
        no_options(config)
        without(config, ("alpha", "rslora", "dropout"), "a rotation has no scale, and PEFT's none dropout")
        if config.oft_block_size:
            without(config, ("rank",), "its size is oft_block_size")
        if config.oft_block_size == 1:
            raise UserError("a block of one input cannot be turned", where="method.oft_block_size", fix="give 32")
        if config.oft_cayley_terms is not None and config.oft_cayley_terms < 2:
            raise UserError(
                f"{config.oft_cayley_terms} term(s) of Cayley's series are no rotation",
                where="method.oft_cayley_terms",
                fix="give at least 2, such as 5, or null for the exact transform",
            )

    @staticmethod
    def check_weight(name: str, weight: ArraySpec, config: LoraConfig) -> None:
        into = weight.shape[-1]
        if config.oft_block_size > into or into % (config.oft_block_size or config.rank):
            fitting = [size for size in range(2, min(into, 1024) + 1) if into % size == 0]
            near = min(fitting, key=lambda size: abs(size - config.oft_block_size))
            raise UserError(
                f"blocks of {config.oft_block_size or f'1/{config.rank}'} inputs do not divide those of {name}, {into}",
                where="method.oft_block_size",
                fix=f"give {near}, or leave {name.rpartition('.')[2]} out of method.targets",
            )

    @classmethod
    def abstract(cls, weight: ArraySpec, config: LoraConfig, dtype: str = "float32") -> OFT:
        """The adapter of a weight [.., out, in], with ArraySpecs for arrays. One block size, or one number of blocks
        (`rank`) where that is 0."""
        *lead, _, into = weight.shape
        block = config.oft_block_size or into // config.rank
        axes = (*weight.axes[:-2], weight.axes[-1], "whole")
        q = ArraySpec((*lead, into // block, block * (block - 1) // 2), dtype, axes, "zeros", role=weight.role)
        return cls(q, block, config.oft_cayley_terms)

    @property
    def rank(self) -> int:
        return self.q.shape[-2]

    @staticmethod
    def start(
        adapter: OFT, config: LoraConfig, keys: Key[Array, "..."], weight: Weight, original: Original | None = None
    ) -> InitializedAdapter:
        """The identity; the weight is unchanged."""
        return InitializedAdapter(dataclasses.replace(adapter, q=jnp.zeros(adapter.q.shape, adapter.q.dtype)), weight)

    def apply(
        self,
        x: Float[Array, "*B i"],
        weight: Weight,
        key: Array | None = None,
        out: DTypeLike | None = None,
        fixed: None = None,
    ) -> Float[Array, "*B o"]:
        """The adapted linear layer without its bias, in `out` or x's dtype."""
        blocks = x.reshape(*x.shape[:-1], -1, self.block)
        rotations, precision = self.rotations().astype(x.dtype), matmul_precision(x.dtype)
        turned = jnp.einsum("...nk,nkc->...nc", blocks, rotations, precision=precision)
        return matmul(turned.reshape(x.shape), weight, out)

    def rotations(self) -> Float[Array, "*L n b b"]:
        """R of every block, float32."""
        q = self.q.astype(jnp.float32)
        padded = jnp.concatenate([q, -q, jnp.zeros((*q.shape[:-1], 1), q.dtype)], axis=-1)
        skew = jnp.take(padded, jnp.asarray(_places(self.block)), axis=-1)
        product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
        eye = jnp.eye(self.block, dtype=q.dtype)
        if self.terms is None:
            return jnp.linalg.solve((eye + skew).mT, (eye - skew).mT).mT
        rotation = eye + 2 * skew
        if self.terms == 2:
            return rotation
        power = product(skew, skew)
        rotation = rotation + 2 * power
        for _ in range(3, self.terms - 1):
            power = product(power, skew)
            rotation = rotation + 2 * power
        return rotation + product(power, skew)

    def in_use(self, gathered: Callable[..., Array], axes: tuple[str, ...]) -> OFT:
        """The adapter laid out for computing by `gathered(array, *axes)`; `axes` are the weight's, (out, in)."""
        return dataclasses.replace(self, q=gathered(self.q, axes[1], "whole"))

    def merge(self, weight: Float[Array, "*L o i"], fixed: None = None) -> Float[Array, "*L o i"]:
        """W R^T, computed in float32, in the weight's dtype."""
        blocks = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, self.block)
        turned = jnp.einsum("...onc,...nkc->...onk", blocks, self.rotations(), precision=lax.Precision.HIGHEST)
        return turned.reshape(weight.shape).astype(weight.dtype)

    @staticmethod
    def fields(config: LoraConfig) -> dict[str, object]:
        """As PEFT 0.18 and later read them."""
        return {
            "r": 0 if config.oft_block_size else config.rank,
            "oft_block_size": config.oft_block_size,
            "module_dropout": 0.0,
            "init_weights": True,
            "coft": False,
            "block_share": False,
            "use_cayley_neumann": config.oft_cayley_terms is not None,
            "num_cayley_neumann_terms": config.oft_cayley_terms or 5,
            "peft_version": PARAMETRISED_SINCE,
        }

    @staticmethod
    def options(fields: Mapping[str, object], where: str) -> dict[str, object]:
        """Raises UserError for fields of the form that PEFT had before 0.18."""
        series = bool(fields.get("use_cayley_neumann", False))
        version = tuple(int(n) for n in str(fields.get("peft_version") or "0").split(".")[:2] if n.isdigit())
        if "oft_block_size" not in fields or (series and version < (0, 18)):
            raise UserError(
                "this OFT adapter is in a form that PEFT gave up in 0.18, or says not in which",
                where=f"{where}, field peft_version",
                fix="load it with the PEFT that made it and merge it, or train it again",
            )
        block, blocks = fields["oft_block_size"], fields.get("r", 0)
        terms = fields.get("num_cayley_neumann_terms", 5) if series else None
        return {"oft_block_size": block, "oft_cayley_terms": terms} | ({} if block else {"rank": blocks})


@functools.cache
def _places(block: int) -> np.ndarray:
    """Where each number of Q comes from in [above the diagonal, its negative, zero]; int32 [b, b]."""
    above = block * (block - 1) // 2
    places = np.full((block, block), 2 * above, np.int32)
    rows, columns = np.triu_indices(block, 1)
    places[rows, columns] = np.arange(above)
    places[columns, rows] = np.arange(above) + above
    return places
