"""LoRA+: the B of an adapter learns faster than its A (https://arxiv.org/abs/2402.12354)."""

from __future__ import annotations

from collections.abc import Mapping

from meshtune.arrays.spec import ArraySpec
from meshtune.errors import UserError
from meshtune.optim.config import OptimizerConfig


def rate_factors(config: OptimizerConfig, parameters: Mapping[str, ArraySpec]) -> dict[str, float]:
    """What the learning rate is multiplied by, for each of some parameters (one layer's, by path).

    With `lora_plus_ratio` the B of adapters, and vectors trained beside them, have that many times the rate, as in
    peft's create_loraplus_optimizer; with `lora_plus_embedding_rate` what is trained of embeddings has that rate.
    Raises UserError where there are no adapters with a B.
    """
    ratio, embedding = config.lora_plus_ratio, config.lora_plus_embedding_rate
    if ratio is None:
        return dict.fromkeys(parameters, 1.0)
    if not any(_widens(path) for path in parameters):
        raise UserError(
            "lora_plus_ratio is of the rates of an adapter's two matrices, and no adapter here has these",
            where="optimizer.lora_plus_ratio, method",
            fix="use it with method: lora, or leave it out",
        )

    def factor(path: str, array: ArraySpec) -> float:
        if path.startswith("embed/") and embedding is not None:
            return embedding / config.learning_rate
        return ratio if _widens(path) or len(array.shape) == 1 else 1.0

    return {path: factor(path, array) for path, array in parameters.items()}


def _widens(path: str) -> bool:
    return path.endswith("/adapter/b")
