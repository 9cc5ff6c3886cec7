"""The method section of a recipe: the core's own options, one class a method."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from meshtune.adapters.config import ExpandConfig, FreezeConfig, FullConfig, LoraOptions
from meshtune.config.section import refuse_truth_values

METHODS = (LoraOptions, FullConfig, FreezeConfig, ExpandConfig)
MethodSection = Annotated[
    Annotated[LoraOptions, refuse_truth_values(LoraOptions)]
    | Annotated[FullConfig, refuse_truth_values(FullConfig)]
    | Annotated[FreezeConfig, refuse_truth_values(FreezeConfig)]
    | Annotated[ExpandConfig, refuse_truth_values(ExpandConfig)],
    Field(discriminator="kind"),
]
