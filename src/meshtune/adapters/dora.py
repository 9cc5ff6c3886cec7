"""DoRA: LoRA for the direction of every row of a weight, a number for its length (https://arxiv.org/abs/2402.09353).

As in PEFT and the authors' code the row's length ||W + scale B A|| is a constant to the gradient (section 4.3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.kind import AdapterDefaults, InitializedAdapter, Original, Weight, check_rank, no_options
from meshtune.adapters.lora import READ, LoRA, drop_out, lora_fields, lora_options
from meshtune.arrays.spec import ArraySpec
from meshtune.model.gather import to_device
from meshtune.model.linear import matmul
from meshtune.quantize.weight import QuantisedWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DoRA(AdapterDefaults):
    """y = x (magnitude * (W + scale B A) / ||W + scale B A||)^T, lengths along `in`; magnitude is [out].

    With dropout, as in PEFT: y = x W^T + d ((g - 1) W)^T + d (g scale B A)^T, where d is dropout(x) and g the magnitude
    over the length.
    """

    a: Any
    b: Any
    magnitude: Any
    scale: float = dataclasses.field(metadata={"static": True})
    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})

    PEFT_TENSORS: ClassVar[dict[str, str]] = {
        "a": "lora_A.weight",
        "b": "lora_B.weight",
        "magnitude": "lora_magnitude_vector",
    }
    PEFT_READ: ClassVar[frozenset[str]] = READ
    check = staticmethod(no_options)
    check_weight = staticmethod(check_rank)
    fields = staticmethod(lora_fields)
    options = staticmethod(lora_options)

    @classmethod
    def abstract(cls, weight: ArraySpec, config: LoraConfig, dtype: str = "float32") -> DoRA:
        """The adapter of a weight [.., out, in], with ArraySpecs for arrays."""
        lora = LoRA.abstract(weight, config, dtype)
        magnitude = ArraySpec(weight.shape[:-1], dtype, weight.axes[:-1], "ones", role="vector")
        return cls(lora.a, lora.b, magnitude, lora.scale, lora.dropout)

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    @property
    def lora(self) -> LoRA:
        """The product inside."""
        return LoRA(self.a, self.b, self.scale)

    @staticmethod
    def start(
        adapter: DoRA, config: LoraConfig, keys: Key[Array, "..."], weight: Weight, original: Original | None = None
    ) -> InitializedAdapter:
        """A and B as LoRA's; every length is that of the weight's row, so that the model is the base."""
        lora = adapter.lora.drawn(keys)
        near = to_device(weight)
        length = lax.map(_length, near) if keys.ndim else _length(near)
        start = dataclasses.replace(adapter, a=lora.a, b=lora.b, magnitude=length.astype(adapter.magnitude.dtype))
        return InitializedAdapter(start, weight)

    def apply(
        self,
        x: Float[Array, "*B i"],
        weight: Weight,
        key: Array | None = None,
        out: DTypeLike | None = None,
        fixed: None = None,
    ) -> Float[Array, "*B o"]:
        """The adapted linear layer without its bias, in `out` or x's dtype. `key` turns dropout on."""
        share = self.magnitude.astype(jnp.float32) / lax.stop_gradient(self.length(weight))
        y = matmul(x, weight, out)
        if key is None or self.dropout == 0:
            return (share * (y + self.lora.product(x, y.dtype))).astype(y.dtype)
        left = drop_out(x, self.dropout, key)
        change = share * self.lora.product(left, y.dtype) + (share - 1) * matmul(left, weight, out)
        return (y + change).astype(y.dtype)

    def length(self, weight: Weight) -> Float[Array, "o"]:
        """||W + scale B A|| of every row, float32, from products with A and B: their whole product is never made.

        |w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b.
        """
        highest = lax.Precision.HIGHEST
        wide, a, b = _wide(weight), self.a.astype(jnp.float32), self.b.astype(jnp.float32)
        crossed = jnp.einsum("oi,ri->or", wide, a, precision=highest)
        inner = jnp.einsum("or,rs->os", b, jnp.einsum("ri,si->rs", a, a, precision=highest), precision=highest)
        change = jnp.sum(b * (2 * self.scale * crossed + self.scale**2 * inner), axis=-1)
        return jnp.sqrt(jnp.sum(jnp.square(wide), axis=-1) + change)

    def in_use(self, gathered: Callable[..., Array], axes: tuple[str, ...]) -> DoRA:
        """The adapter laid out for computing by `gathered(array, *axes)`; `axes` are the weight's, (out, in)."""
        lora = self.lora.in_use(gathered, axes)
        return dataclasses.replace(self, a=lora.a, b=lora.b, magnitude=gathered(self.magnitude, axes[0]))

    def merge(self, weight: Float[Array, "*L o i"], fixed: None = None) -> Float[Array, "*L o i"]:
        """The rows of W + scale B A at their lengths, computed in float32, in the weight's dtype."""
        moved = weight.astype(jnp.float32) + self.lora.delta()
        share = self.magnitude.astype(jnp.float32) / jnp.linalg.norm(moved, axis=-1)
        return (share[..., None] * moved).astype(weight.dtype)


def _length(weight: Weight) -> Float[Array, "o"]:
    return jnp.sqrt(jnp.sum(jnp.square(_wide(weight)), axis=-1))


def _wide(weight: Weight) -> Float[Array, "o i"]:
    return weight.dequantise("float32") if isinstance(weight, QuantisedWeight) else weight.astype(jnp.float32)
