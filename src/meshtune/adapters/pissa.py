"""PiSSA: LoRA initialised to the principal components of the weight (https://arxiv.org/abs/2404.02948).

The paper removes these components from the weight. Here the weight is unchanged, and their product, stored separately,
is subtracted: the result is the same, but the base is never modified, the model without its adapters is the original
one, and the adapter is at any time a plain LoRA of twice the rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Key

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.kind import AdapterDefaults, InitializedAdapter, Original, Weight
from meshtune.adapters.lora import LoRA
from meshtune.adapters.peft_lora import READ, lora_fields, read_scaling
from meshtune.adapters.principal import principal
from meshtune.adapters.refusals import check_rank, no_options, not_of_quantised
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.errors import UserError
from meshtune.model.gather import to_device
from meshtune.quantize.weight import QuantisedWeight


class PiSSA(AdapterDefaults):
    """Adapters that are LoRAs, each with the LoRA it started from as `fixed`."""

    PEFT_FIELDS: ClassVar[dict[str, object]] = {"peft_type": "LORA", "use_dora": False, "init_lora_weights": "pissa"}
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
