"""Descriptions of each model_type for people: `meshtune families` and docs/families.md are written from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from meshtune.families.tensors import TensorMap
from meshtune.model.spec import ModelSpec

Group = Literal["dense", "mixture of experts", "hybrid", "latent attention"]
Maturity = Literal["published weights", "random weights"]
GROUPS: tuple[Group, ...] = ("dense", "mixture of experts", "hybrid", "latent attention")
# Sources of `Family.overflow`, read in 2026.
OVERFLOWS_IN_VLLM = "vLLM refuses float16 for it as numerically unstable (config/model.py)"
OVERFLOWS_IN_UNSLOTH = "Unsloth trains it in float32 in place of float16, where it gave NaN (FORCE_FLOAT32)"
# The limits of families with queries, keys and values in one tensor.
FUSED_ROWS: Mapping[str, str] = {
    "vera": "not on fused queries, keys and values, whose rows have another order in memory"
}


@dataclasses.dataclass(frozen=True)
class Family:
    """Describes one model_type.

    `special` says in one line what differs from Llama; `models` are ids of published models on the Hugging Face hub.
    `template` names the chat template that ships with Meshtune and writes the family's format, for models whose
    tokenizer has none. `limits` maps a refused mesh axis ("cp") or method ("expand") to the reason.
    `mixture` says that a model of another group than mixtures has experts as well.
    `maturity` says on which weights it was compared with transformers. `overflow` says why its activations are beyond
    float16's range, with the source, where they are known to be.
    """

    title: str
    special: str
    models: tuple[str, ...]
    group: Group = "dense"
    template: str | None = None
    limits: Mapping[str, str] = dataclasses.field(default_factory=dict)
    maturity: Maturity = "random weights"
    overflow: str | None = None
    mixture: bool = False

    @property
    def experts(self) -> bool:
        """Whether there are experts, which a mesh splits over ep."""
        return self.mixture or self.group == "mixture of experts"

    @property
    def refusals(self) -> Mapping[str, str]:
        """The limits of the family, and those that all families with experts have."""
        return {"expand": "new layers with experts are not implemented", **self.limits} if self.experts else self.limits


class FamilyModule(Protocol):
    """The module of one or more model types."""

    DESCRIPTIONS: Mapping[str, Family]

    def model_spec(self, config: dict[str, Any], where: str) -> ModelSpec:
        """The spec of a config. Raises UserError, naming the file `where`, for whatever is not implemented."""
        ...

    def tensors(self, spec: ModelSpec) -> list[TensorMap]:
        """The table of tensors, in the order in which models are written."""
        ...
