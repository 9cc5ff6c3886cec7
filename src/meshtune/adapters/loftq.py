"""LoftQ: LoRA on a quantised base, initialised to the quantisation error (https://arxiv.org/abs/2310.08659).

W ~ Q + scale B A: alternately, Q is W - scale B A quantised, and B A the best product of its rank for W - Q. After one
iteration Q is W quantised, as under any other adapter, and the result is a plain LoRA for that base.

Where the size of the inputs x was measured, B A is the best product for (W - Q) diag(|x|) instead, |x| being their root
mean square: it minimises the error of the layer's output, for uncorrelated inputs, rather than that of its weight
(QERA, https://arxiv.org/abs/2410.06040, its approximate form).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.kind import AdapterDefaults, InitializedAdapter, Original, Weight
from meshtune.adapters.lora import LoRA
from meshtune.adapters.peft_lora import READ, lora_fields, lora_options
from meshtune.adapters.principal import principal
from meshtune.adapters.refusals import check_rank, no_options, only_of_quantised
from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.model.gather import to_device
from meshtune.quantize.weight import QuantisedWeight


class LoftQ(AdapterDefaults):
    """A kind whose adapters are LoRAs."""

    PEFT_FIELDS: ClassVar[dict[str, object]] = LoRA.PEFT_FIELDS
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
