"""VeRA: one random pair of projections for all layers, and two trained vectors each (https://arxiv.org/abs/2310.11454).

The projections are PEFT's for the same key, number by number, and written with the adapter, as PEFT does by default.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.kind import (
    AdapterDefaults,
    InitializedAdapter,
    Original,
    Weight,
    check_rank,
    no_options,
    without,
)
from meshtune.adapters.lora import drop_out
from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.model.attention import PACKED
from meshtune.model.linear import NARROW, matmul
from meshtune.model.short_conv import INNER


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Projections:
    """A [R, i] and B [o, R], as large as the largest adapted weight; every weight uses their first columns and rows."""

    a: Any
    b: Any
    key: int = dataclasses.field(default=0, metadata={"static": True})

    PEFT_TENSORS: ClassVar[dict[str, str]] = {"a": "base_model.vera_A", "b": "base_model.vera_B"}

    def start(self) -> Projections:
        """The concrete projections of abstract ones, in the host's memory: PEFT's for this key."""
        random = _Torch(self.key)
        a = random.kaiming(self.a.shape)
        return dataclasses.replace(self, a=a.astype(self.a.dtype), b=random.kaiming(self.b.shape).astype(self.b.dtype))

    def cut(self, shape: tuple[int, ...]) -> Projections:
        """The part that a weight of this shape [.., out, in] uses."""
        return dataclasses.replace(self, a=self.a[:, : shape[-1]], b=self.b[: shape[-2]])

    def in_use(self, gathered: Callable[..., Array], axes: tuple[str, ...]) -> Projections:
        """Laid out for computing, once cut: see Adapter.in_use."""
        return dataclasses.replace(self, a=gathered(self.a, "rank", axes[1]), b=gathered(self.b, axes[0], "rank"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VeRA(AdapterDefaults):
    """y = x W^T + b * (B (d * (A dropout(x)))): lambda_b [out] and lambda_d [R] are trained, A and B are `fixed`."""

    lambda_b: Any
    lambda_d: Any
    initial: float = dataclasses.field(metadata={"static": True})
    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})

    PEFT_TENSORS: ClassVar[dict[str, str]] = {"lambda_b": "vera_lambda_b", "lambda_d": "vera_lambda_d"}
    PEFT_READ: ClassVar[frozenset[str]] = frozenset(
        {"r", "vera_dropout", "projection_prng_key", "save_projection", "d_initial", "init_weights"}
    )
    PEFT_SHARED: ClassVar[dict[str, str]] = Projections.PEFT_TENSORS

    @staticmethod
    def check(config: LoraConfig) -> None:
        no_options(config)
        without(config, ("alpha", "rslora"), "its scale is its trained vectors")
        if config.vera_key < 0 or not math.isfinite(config.vera_d_initial):
            raise UserError(
                f"vera_key {config.vera_key} or vera_d_initial {config.vera_d_initial} cannot be",
                where="method.vera_key, method.vera_d_initial",
                fix="give a key from 0, and a number such as 0.1",
            )

    @staticmethod
    def check_weight(name: str, weight: ArraySpec, config: LoraConfig) -> None:
        check_rank(name, weight, config)
        if weight.axes[-2] in (PACKED, INNER):
            raise UserError(
                f"VeRA cannot adapt {name}: the rows of its shared projection have an order, that of the file, and "
                "those of a fused projection lie in another in memory",
                where="method.targets",
                fix=f"leave {name.rpartition('.')[2]} out of method.targets, or use adapter: lora or dora",
            )

    @classmethod
    def abstract(cls, weight: ArraySpec, config: LoraConfig, dtype: str = "float32") -> VeRA:
        """The adapter of a weight [.., out, in], with ArraySpecs for arrays."""
        b = ArraySpec(weight.shape[:-1], dtype, weight.axes[:-1], "zeros", role="vector")
        d = ArraySpec((*weight.shape[:-2], config.rank), dtype, (*weight.axes[:-2], "rank"), "ones", role="vector")
        return cls(b, d, config.vera_d_initial, config.dropout)

    @staticmethod
    def shared(weights: list[ArraySpec], config: LoraConfig, dtype: str = "float32") -> Projections:
        """Whole on every device: thin, and every layer cuts its own piece."""
        into, out = (max(weight.shape[axis] for weight in weights) for axis in (-1, -2))
        a = ArraySpec((config.rank, into), dtype, ("whole", "whole"))
        return Projections(a, ArraySpec((out, config.rank), dtype, ("whole", "whole")), config.vera_key)

    @property
    def rank(self) -> int:
        return self.lambda_d.shape[-1]

    @staticmethod
    def start(
        adapter: VeRA, config: LoraConfig, keys: Key[Array, "..."], weight: Weight, original: Original | None = None
    ) -> InitializedAdapter:
        """d is `vera_d_initial`, b zero, so that the model is the base."""
        b = jnp.zeros(adapter.lambda_b.shape, adapter.lambda_b.dtype)
        d = jnp.full(adapter.lambda_d.shape, adapter.initial, adapter.lambda_d.dtype)
        return InitializedAdapter(dataclasses.replace(adapter, lambda_b=b, lambda_d=d), weight)

    def apply(
        self,
        x: Float[Array, "*B i"],
        weight: Weight,
        key: Array | None = None,
        out: DTypeLike | None = None,
        fixed: Projections | None = None,
    ) -> Float[Array, "*B o"]:
        """The adapted linear layer without its bias, in `out` or x's dtype. `key` turns dropout on."""
        assert fixed is not None, "VeRA's projections are not in the tree"
        y = matmul(x, weight, out)
        narrow = checkpoint_name(
            matmul(drop_out(x, self.dropout, key), fixed.a) * self.lambda_d.astype(x.dtype), NARROW
        )
        return y + matmul(narrow, fixed.b, y.dtype) * self.lambda_b.astype(y.dtype)

    def in_use(self, gathered: Callable[..., Array], axes: tuple[str, ...]) -> VeRA:
        """The adapter laid out for computing by `gathered(array, *axes)`; `axes` are the weight's, (out, in)."""
        return dataclasses.replace(
            self, lambda_b=gathered(self.lambda_b, axes[0]), lambda_d=gathered(self.lambda_d, "rank")
        )

    def merge(self, weight: Float[Array, "*L o i"], fixed: Projections | None = None) -> Float[Array, "*L o i"]:
        """W + diag(b) B diag(d) A, computed in float32, in the weight's dtype."""
        assert fixed is not None, "VeRA's projections are not in the tree"
        narrow = self.lambda_d.astype(jnp.float32)[..., None] * fixed.a.astype(jnp.float32)
        product = jnp.einsum("or,...ri->...oi", fixed.b.astype(jnp.float32), narrow, precision=lax.Precision.HIGHEST)
        return (weight.astype(jnp.float32) + self.lambda_b.astype(jnp.float32)[..., None] * product).astype(
            weight.dtype
        )

    @staticmethod
    def fields(config: LoraConfig) -> dict[str, object]:
        return {
            "r": config.rank,
            "projection_prng_key": config.vera_key,
            "save_projection": True,
            "vera_dropout": config.dropout,
            "d_initial": config.vera_d_initial,
            "init_weights": True,
        }

    @staticmethod
    def options(fields: Mapping[str, Any], where: str) -> dict[str, object]:
        if "r" not in fields:
            raise UserError("r is missing", where=where, fix="this is not a complete adapter_config.json")
        return {
            "rank": fields["r"],
            "dropout": float(fields.get("vera_dropout") or 0.0),
            "vera_key": fields.get("projection_prng_key") or 0,
            "vera_d_initial": float(fields.get("d_initial", 0.1)),
        }


class _Torch:
    """The numbers that torch draws on a CPU, whose generator is the Mersenne twister seeded as numpy's legacy one."""

    def __init__(self, key: int):
        self._bits = np.random.MT19937()
        self._bits._legacy_seeding(key & 0xFFFFFFFF)

    def kaiming(self, shape: tuple[int, ...]) -> Float[np.ndarray, "m n"]:
        """kaiming_uniform_ with gain sqrt(2): uniform in +-sqrt(6 / n), float32, from 24 bits a number."""
        bound = np.float32(math.sqrt(3.0) * (math.sqrt(2.0) / math.sqrt(shape[-1])))
        shares = (self._bits.random_raw(math.prod(shape)) & 0xFFFFFF) * 2.0**-24
        # Rounded once, as the fused multiply and add of torch's loop rounds.
        return (shares * np.float64(bound - -bound) - np.float64(bound)).astype(np.float32).reshape(shape)
