"""LoRA: a low-rank product beside a frozen weight (https://arxiv.org/abs/2106.09685), with its PEFT fields."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.kind import AdapterDefaults, InitializedAdapter, Original, Weight, check_rank, no_options
from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.kernels.attention.backend import matmul_precision
from meshtune.model.linear import NARROW, matmul

READ = frozenset(
    {"r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"}
)
# Starts that leave the base as it is; the others (olora, corda, loftq, lora_ga, ...) change its weights.
HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


def lora_fields(config: LoraConfig) -> dict[str, object]:
    """Those of a config, rank_pattern and alpha_pattern apart."""
    return {
        "r": config.rank,
        "lora_alpha": plain(config.alpha),
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "init_lora_weights": True,
    }


def lora_options(fields: Mapping[str, object], where: str) -> dict[str, object]:
    """Reads the options. Raises UserError for a start that changed weights which are not in the adapter."""
    start = fields.get("init_lora_weights", True)
    if start not in HARMLESS_STARTS:
        raise UserError(
            f"init_lora_weights is {start!r}: this start changes the base's weights, which are not in the adapter",
            where=f"{where}, field init_lora_weights",
            fix="save it with peft's path_initial_model_for_weight_conversion, which makes it a plain LoRA",
        )
    return read_scaling(fields, where)


def read_scaling(fields: Mapping[str, Any], where: str) -> dict[str, object]:
    """Rank, alpha, dropout and scaling. Raises UserError where rank or alpha is missing."""
    if "r" not in fields or "lora_alpha" not in fields:
        raise UserError("r or lora_alpha is missing", where=where, fix="this is not a complete adapter_config.json")
    return {
        "rank": fields["r"],
        "alpha": float(fields["lora_alpha"]),
        "dropout": float(fields.get("lora_dropout") or 0.0),
        "rslora": bool(fields.get("use_rslora", False)),
    }


def plain(number: float) -> int | float:
    """A whole number without its point."""
    return int(number) if float(number).is_integer() else float(number)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def widen(z: Float[Array, "*B r"], b: Float[Array, "o r"], out: DTypeLike) -> Float[Array, "*B o"]:
    """z B^T in `out`, whose gradient with respect to B never transposes the wide cotangent.

    XLA would compute that gradient as (cotangent^T z), writing out the transposed [out, tokens] cotangent first. Here
    it is (z^T cotangent)^T, summed in float32, and only the [R, out] result is transposed.
    """
    return matmul(z, b, out)


def _widen_forward(z: Array, b: Array, out: DTypeLike) -> tuple[Array, tuple[Array, Array]]:
    return matmul(z, b, out), (z, b)


def _widen_backward(out: DTypeLike, saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    z, b = saved
    cotangent = cotangent.astype(z.dtype)
    tokens = tuple(range(z.ndim - 1))
    precision = matmul_precision(z.dtype)
    narrow = jax.lax.dot_general(
        z, cotangent, ((tokens, tokens), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    # Without the barrier XLA folds the transposition back into the product.
    d_b = jax.lax.optimization_barrier(narrow).T.astype(b.dtype)
    return matmul(cotangent, b.T), d_b


widen.defvjp(_widen_forward, _widen_backward)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoRA(AdapterDefaults):
    """y = x W^T + scale * (dropout(x) A^T) B^T. A is [R, in], B is [out, R]; stacked layers lead both.

    A `fixed` LoRA is subtracted: the product that training started from, which the weight still contains.
    """

    a: Any
    b: Any
    scale: float = dataclasses.field(metadata={"static": True})
    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})

    PEFT_TENSORS: ClassVar[dict[str, str]] = {"a": "lora_A.weight", "b": "lora_B.weight"}
    PEFT_READ: ClassVar[frozenset[str]] = READ
    check = staticmethod(no_options)
    check_weight = staticmethod(check_rank)
    fields = staticmethod(lora_fields)
    options = staticmethod(lora_options)

    @classmethod
    def abstract(cls, weight: ArraySpec, config: LoraConfig, dtype: str = "float32") -> LoRA:
        """The adapter of a weight [.., out, in], with ArraySpecs for arrays."""
        rank = config.rank
        *lead, out, into = weight.shape
        *lead_axes, out_axis, in_axis = weight.axes
        a = ArraySpec((*lead, rank, into), dtype, (*lead_axes, "rank", in_axis), "normal", role=weight.role)
        b = ArraySpec((*lead, out, rank), dtype, (*lead_axes, out_axis, "rank"), "zeros", role=weight.role)
        return cls(a, b, config.scale(), config.dropout)

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    @staticmethod
    def start(
        adapter: LoRA, config: LoraConfig, keys: Key[Array, "..."], weight: Weight, original: Original | None = None
    ) -> InitializedAdapter:
        """A is uniform in +-1/sqrt(in), as in PEFT, B is zero; the weight is unchanged."""
        return InitializedAdapter(adapter.drawn(keys), weight)

    def drawn(self, keys: Key[Array, "..."]) -> LoRA:
        """An abstract adapter with its initial numbers."""
        a = _uniform(keys, self.a.shape[keys.ndim :], self.a.dtype)
        return dataclasses.replace(self, a=a, b=jnp.zeros(self.b.shape, self.b.dtype))

    def apply(
        self,
        x: Float[Array, "*B i"],
        weight: Weight,
        key: Array | None = None,
        out: DTypeLike | None = None,
        fixed: LoRA | None = None,
    ) -> Float[Array, "*B o"]:
        """The adapted linear layer without its bias, in `out` or x's dtype. `key` turns dropout on."""
        y = matmul(x, weight, out)
        y = jnp.add(y, self.product(drop_out(x, self.dropout, key), y.dtype))
        return y if fixed is None else y - fixed.product(x, y.dtype)

    def apply_grouped(
        self,
        x: Float[Array, "R i"],
        weight: Weight,
        product: Callable[[Array, Weight], Array],
        fixed: LoRA | None = None,
    ) -> Float[Array, "R o"]:
        """The adapted product of rows sorted by expert: `product(rows, weight [E, o, i])`. Nothing is dropped."""
        y = product(x, weight)
        for adapter, sign in ((self, 1), (fixed, -1)):
            if adapter is not None:
                narrow: Array = checkpoint_name(product(x, adapter.a) * (sign * adapter.scale), NARROW)
                y = y + product(narrow, adapter.b)
        return y

    def product(self, x: Float[Array, "*B i"], out: DTypeLike) -> Float[Array, "*B o"]:
        """scale * (x A^T) B^T."""
        # The narrow product is scaled: R numbers per token instead of `out`.
        narrow: Array = checkpoint_name(matmul(x, self.a) * self.scale, NARROW)
        return widen(narrow, self.b, out)

    def in_use(self, gathered: Callable[..., Array], axes: tuple[str, ...]) -> LoRA:
        """The adapter laid out for computing by `gathered(array, *axes)`; `axes` are the weight's, (.., out, in)."""
        *lead, out, into = axes
        a, b = gathered(self.a, *lead, "rank", into), gathered(self.b, *lead, out, "rank")
        return dataclasses.replace(self, a=a, b=b)

    def merge(self, weight: Float[Array, "*L o i"], fixed: LoRA | None = None) -> Float[Array, "*L o i"]:
        """W + scale * B A, computed in float32, in the weight's dtype."""
        total = weight.astype(jnp.float32) + self.delta()
        return (total if fixed is None else total - fixed.delta()).astype(weight.dtype)

    def delta(self) -> Float[Array, "*L o i"]:
        """scale * B A in float32."""
        a, b = self.a.astype(jnp.float32), self.b.astype(jnp.float32)
        return self.scale * jnp.einsum("...or,...ri->...oi", b, a, precision=jax.lax.Precision.HIGHEST)


def drop_out(x: Float[Array, "*B i"], rate: float, key: Array | None) -> Float[Array, "*B i"]:
    """Dropout of x at `rate`; x itself without a key."""
    if key is None or rate == 0:
        return x
    mask = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(mask, x / (1 - rate), jnp.zeros((), x.dtype))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _uniform(keys: Array, shape: tuple[int, ...], dtype: str) -> Array:
    bound = 1 / math.sqrt(shape[-1])

    def draw(key: Array) -> Array:
        return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)

    return jax.vmap(draw)(keys) if keys.ndim else draw(keys)
