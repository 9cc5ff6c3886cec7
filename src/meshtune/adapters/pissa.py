"""LoRA started from singular values: of the weight (PiSSA), or of its quantisation error (LoftQ).

PiSSA: LoRA initialised to the principal components of the weight (https://arxiv.org/abs/2404.02948).

The paper removes these components from the weight. Here the weight is unchanged, and their product, stored separately,
is subtracted: the result is the same, but the base is never modified, the model without its adapters is the original
one, and the adapter is at any time a plain LoRA of twice the rank.

LoftQ: LoRA on a quantised base, initialised to the quantisation error (https://arxiv.org/abs/2310.08659).

W ~ Q + scale B A: alternately, Q is W - scale B A quantised, and B A the best product of its rank for W - Q. After one
iteration Q is W quantised, as under any other adapter, and the result is a plain LoRA for that base.

Where the size of the inputs x was measured, B A is the best product for (W - Q) diag(|x|) instead, |x| being their root
mean square: it minimises the error of the layer's output, for uncorrelated inputs, rather than that of its weight
(QERA, https://arxiv.org/abs/2410.06040, its approximate form).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.kind import (
    AdapterDefaults,
    InitializedAdapter,
    Original,
    Weight,
    check_rank,
    no_options,
    not_of_quantised,
    only_of_quantised,
)
from meshtune.adapters.lora import READ, LoRA, lora_fields, lora_options, read_scaling
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.errors import UserError
from meshtune.model.gather import to_device
from meshtune.quantize.weight import QuantisedWeight

HIGHEST = jax.lax.Precision.HIGHEST
BEYOND = 8  # directions followed beside those wanted, so that the last of these are found as well as the first


def principal(
    weight: Float[Array, "o i"], rank: int, scale: float, iterations: int | None, key: Array
) -> tuple[Float[Array, "r i"], Float[Array, "o r"]]:
    """(A, B), float32, with scale * B A nearest to a weight among all products of this rank; each has half of the
    singular values.

    `iterations` of the subspace's refinement from random directions (https://arxiv.org/abs/0909.4061, algorithm 4.4);
    None: an exact decomposition, which takes minutes for each large matrix.
    """
    weight = weight.astype(jnp.float32)
    width = rank + BEYOND
    if iterations is None or width >= min(weight.shape):
        left, values, right = jnp.linalg.svd(weight, full_matrices=False)
    else:
        basis = _orthonormal(_product(weight, jax.random.normal(key, (weight.shape[1], width))))
        for _ in range(iterations):
            basis = _orthonormal(_product(weight, _orthonormal(_product(weight.T, basis))))
        left, values, right = jnp.linalg.svd(_product(basis.T, weight), full_matrices=False)
        left = _product(basis, left)
    root = jnp.sqrt(values[:rank] / scale)
    return root[:, None] * right[:rank], left[:, :rank] * root


def _product(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision=HIGHEST)


def _orthonormal(columns: Array) -> Array:
    return jnp.linalg.qr(columns)[0]


class PiSSA(AdapterDefaults):
    """Adapters that are LoRAs, each with the LoRA it started from as `fixed`."""

    PEFT_READ: ClassVar[frozenset[str]] = READ
    PEFT_TENSORS: ClassVar[dict[str, str]] = LoRA.PEFT_TENSORS
    abstract = LoRA.abstract
    check_weight = staticmethod(check_rank)
    fields = staticmethod(lora_fields)

    @staticmethod
    def check(config: LoraConfig) -> None:
        no_options(config)
        if not config.pissa_convert and config.svd_iterations is not None:
            raise UserError(
                "PEFT's own form of PiSSA holds no start: whoever loads it decomposes the base again, exactly, and "
                "this run's start is found by iterations",
                where="method.pissa_convert, method.svd_iterations",
                fix="set svd_iterations to null, or leave pissa_convert out, which writes a plain LoRA",
            )

    @staticmethod
    def fixed(weight: ArraySpec, config: LoraConfig, dtype: str = "float32") -> LoRA:
        return dataclasses.replace(LoRA.abstract(weight, config, dtype), dropout=0.0)

    @staticmethod
    def start(
        adapter: LoRA, config: LoraConfig, keys: Key[Array, "..."], weight: Weight, original: Original | None = None
    ) -> InitializedAdapter:
        """A and B are the principal components of the weight, computed in float32, matrix by matrix."""
        if isinstance(weight, QuantisedWeight):
            raise not_of_quantised()

        def start_matrix(at: tuple[Array, Array]) -> tuple[Array, Array]:
            return principal(at[0], adapter.rank, adapter.scale, config.svd_iterations, at[1])

        near = to_device(weight)
        a, b = lax.map(start_matrix, (near, keys)) if keys.ndim else start_matrix((near, keys))
        start = LoRA(a.astype(adapter.a.dtype), b.astype(adapter.b.dtype), adapter.scale)
        # A copy: every update donates the buffers of trainable arrays.
        trained = dataclasses.replace(jax.tree.map(jnp.copy, start), dropout=adapter.dropout)
        return InitializedAdapter(trained, weight, start)

    @staticmethod
    def derived(adapter: LoRA, config: LoraConfig, weight: Weight) -> LoRA:
        """The LoRA that the adapter started from: the principal components of its base."""
        keys = jax.random.split(jax.random.key(0), weight.shape[:-2])
        return PiSSA.start(adapter, config, keys, weight).fixed

    @staticmethod
    def exported(trainable: Tree, frozen: Tree, config: LoraConfig) -> tuple[Tree, LoraConfig]:
        """Plain LoRAs of twice the rank for the unchanged base, or, without `pissa_convert`, PEFT's own form."""
        return plain_lora(trainable, frozen, config) if config.pissa_convert else (trainable, config)

    @staticmethod
    def options(fields: Mapping[str, object], where: str) -> dict[str, object]:
        """An adapter in PEFT's own form was made, and will be used, with an exact decomposition."""
        return read_scaling(fields, where) | {"svd_iterations": None, "pissa_convert": False}


def plain_lora(trainable: Tree, frozen: Tree, config: LoraConfig) -> tuple[Tree, LoraConfig]:
    """PiSSA's adapters as LoRAs of twice the rank on the unchanged base, as PEFT's conversion makes them:
    B A - B0 A0 = [B, -B0] [A; A0]."""
    flat, fixed = flatten(trainable), flatten(frozen)
    for path, leaf in flat.items():
        node, _, last = path.rpartition("/")
        if last == "adapter":
            start = fixed[f"{node}/fixed"]
            a = jnp.concatenate([leaf.a, start.a], axis=-2)
            flat[path] = dataclasses.replace(leaf, a=a, b=jnp.concatenate([leaf.b, -start.b], axis=-1))
    alpha = config.alpha * (math.sqrt(2) if config.rslora else 2)
    plain = LoraConfig(
        rank=2 * config.rank,
        alpha=alpha,
        dropout=config.dropout,
        targets=config.targets,
        rslora=config.rslora,
        train_modules=config.train_modules,
    )
    return unflatten(flat), plain


class LoftQ(AdapterDefaults):
    """A kind whose adapters are LoRAs."""

    PEFT_READ: ClassVar[frozenset[str]] = READ
    PEFT_TENSORS: ClassVar[dict[str, str]] = LoRA.PEFT_TENSORS
    ORIGINAL: ClassVar[bool] = True
    abstract = LoRA.abstract
    fields = staticmethod(lora_fields)
    options = staticmethod(lora_options)
    check = staticmethod(no_options)

    @staticmethod
    def check_weight(name: str, weight: ArraySpec, config: LoraConfig) -> None:
        check_rank(name, weight, config)
        if weight.axes[0] == "vocab":
            raise only_of_quantised(name)

    @staticmethod
    def start(
        adapter: LoRA, config: LoraConfig, keys: Key[Array, "..."], weight: Weight, original: Original | None = None
    ) -> InitializedAdapter:
        """A and B approximate the quantisation error. Raises UserError for a weight that is not quantised."""
        if not isinstance(weight, QuantisedWeight) or original is None:
            raise UserError(
                "loftq begins at what quantising the base lost, and this weight is not quantised",
                where="method.adapter, quantize",
                fix="add quantize: nf4, leave lm_head out of method.targets, or use method.adapter: pissa",
            )

        def start_matrix(at: tuple[QuantisedWeight, Original, Array]) -> tuple[QuantisedWeight, Array, Array]:
            quantised, (wide, inputs), key = at
            wide = wide.astype(jnp.float32)
            a, b = _factors(wide, quantised, inputs, adapter, config, key)
            for _ in range(config.loftq_iterations - 1):
                quantised = quantised.requantise_numbers(wide - dataclasses.replace(adapter, a=a, b=b).delta())
                a, b = _factors(wide, quantised, inputs, adapter, config, key)
            return quantised, a, b

        quantised, a, b = lax.map(start_matrix, (to_device(weight), original, keys))
        start = dataclasses.replace(adapter, a=a.astype(adapter.a.dtype), b=b.astype(adapter.b.dtype))
        return InitializedAdapter(start, quantised if config.loftq_iterations > 1 else weight)


LEAST = 0.01  # added to sizes, of their mean: inputs that are never active would otherwise weigh nothing


def _factors(
    wide: Float[Array, "o i"],
    quantised: QuantisedWeight,
    inputs: Float[Array, "i"] | None,
    adapter: LoRA,
    config: LoraConfig,
    key: Array,
) -> tuple[Array, Array]:
    """(A, B) for the quantisation error, weighted by the size of the inputs; each row of A has the norm of its column
    of B."""
    lost = wide - quantised.dequantise("float32")
    if inputs is None:
        return principal(lost, adapter.rank, adapter.scale, config.svd_iterations, key)
    size = jnp.where(jnp.any(inputs > 0), inputs + LEAST * jnp.mean(inputs), 1.0)
    a, b = principal(lost * size, adapter.rank, adapter.scale, config.svd_iterations, key)
    a = a / size
    longer = jnp.sqrt(jnp.linalg.norm(b, axis=0) / jnp.maximum(jnp.linalg.norm(a, axis=1), 1e-30))
    return a * longer[:, None], b / jnp.where(longer > 0, longer, 1.0)
