"""LoRA+: the B of an adapter learns faster than its A (https://arxiv.org/abs/2402.12354)."""

from __future__ import annotations

from collections.abc import Mapping

from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.optim.config import OptimizerConfig


def rate_factors(config: OptimizerConfig, parameters: Mapping[str, ArraySpec]) -> dict[str, float]:
    """The factor of the learning rate for each parameter, by path.

    With `lora_plus_ratio` it is that ratio for the B of adapters and for vectors trained with them, as in peft's
    create_loraplus_optimizer; with `lora_plus_embedding_rate` the trained part of an embedding has that rate.
    Raises UserError where no adapter has a B.
    """
    ratio, embedding = config.lora_plus_ratio, config.lora_plus_embedding_rate
    if ratio is None:
        return dict.fromkeys(parameters, 1.0)
    if not any(_is_up_projection(array) for array in parameters.values()):
        raise UserError(
            "lora_plus_ratio is the ratio of the learning rates of an adapter's two matrices, and no adapter here has "
            "two",
            where="optimizer.lora_plus_ratio, method",
            fix="use it with method: lora, or leave it out",
        )

    def factor(array: ArraySpec) -> float:
        if array.role == "table" and embedding is not None:
            return embedding / config.learning_rate
        return ratio if _is_up_projection(array) or array.role == "vector" else 1.0

    return {path: factor(array) for path, array in parameters.items()}


def _is_up_projection(array: ArraySpec) -> bool:
    """Whether it is the B [.., out, rank] of an adapter."""
    return array.role != "vector" and array.axes[-1:] == ("rank",)
