"""Quantisation of the frozen base, as a section of the recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from meshtune.config.section import Section

Format = Literal["nf4", "int8", "fp8", "int4"]


class QuantizeSection(Section):
    """The frozen base in few bits, for method lora: every linear layer of the decoder; embeddings, norms and the head
    stay. `quantize: nf4` is short for `quantize: {format: nf4}`.
    """

    format: Format = Field(
        description="nf4: 4 bits, spaced as weights are; int4: 4 bits, evenly spaced; int8 and fp8 (e4m3): 8 bits."
    )
    block_size: Literal[8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096] = Field(
        default=64, description="Consecutive values in a row of a weight that share a scale; must divide every row."
    )
    double: bool = Field(
        default=True, description="Quantise the scales too, to 8 bits: 0.4 bits fewer a weight with blocks of 64."
    )
    modules: dict[str, Format | Literal["none"]] = Field(
        default_factory=dict,
        description="Formats of single modules, such as {k_proj: int8, v_proj: int8}; none leaves them as they are.",
    )
