"""The quantisation of a base model, read by recipes and by the core alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

from meshtune.errors import UserError, nearest
from meshtune.options import option, required

FormatName = Literal["nf4", "int8", "fp8", "int4"]  # the keys of meshtune.quantize.formats.FORMATS
PublishedFormatName = Literal["e4m3", "mxfp4", "uint4", "uint8", "bnb_nf4", "bnb_fp4", "llm_int8"]
StoredFormatName = FormatName | PublishedFormatName  # the keys of meshtune.quantize.formats.STORED
BlockSize = Literal[8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
BLOCK_SIZES: tuple[BlockSize, ...] = get_args(BlockSize)
UNQUANTISED = "none"  # the format in `modules` of a module that is not quantised


@dataclasses.dataclass(frozen=True)
class QuantizeConfig:
    """The frozen base in few bits, for method lora: every linear layer of the decoder; embeddings, norms and the head
    stay. `quantize: nf4` is short for `quantize: {format: nf4}`.

    With `double` the scales are quantised too, to 8 bits (https://arxiv.org/abs/2305.14314). `modules` maps Hugging
    Face module names (k_proj, mlp) to formats, UNQUANTISED to exclude a module; the last match applies. With the
    format UNQUANTISED, codes in which a checkpoint is published are read as their dequantised numbers.
    Raises UserError for a block size that is not a power of two in BLOCK_SIZES.
    """

    format: FormatName | Literal["none"] = required(
        "nf4: 4 bits, spaced as weights are; int4: 4 bits, evenly spaced; int8 and fp8 (e4m3): 8 bits; none: not "
        "quantised, also where the checkpoint is published in codes."
    )
    block_size: BlockSize = option(
        64, "Consecutive values in a row of a weight that share a scale; must divide every row."
    )
    double: bool = option(True, "Quantise the scales too, to 8 bits: 0.4 bits fewer a weight with blocks of 64.")
    modules: Mapping[str, FormatName | Literal["none"]] = dataclasses.field(
        default_factory=dict,
        hash=False,
        metadata={
            "description": "Formats of single modules, such as {k_proj: int8, v_proj: int8}; none leaves them as they "
            "are."
        },
    )

    requantise: bool = option(
        False, "Quantise a checkpoint that is published quantised once more, from the numbers that its codes stand for."
    )

    def __post_init__(self):
        if self.block_size not in BLOCK_SIZES:
            raise UserError(
                f"a block of {self.block_size} numbers is not possible",
                where="quantize.block_size",
                fix=f"give a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}, such as 64",
            )

    @property
    def quantises(self) -> bool:
        """Whether any module is quantised."""
        return any(format != UNQUANTISED for format in (self.format, *self.modules.values()))

    def within(self, format: str) -> QuantizeConfig:
        """The same block size and scales, with one format for all modules."""
        return dataclasses.replace(self, format=format, modules={})

    def __str__(self) -> str:
        if not self.quantises:
            return UNQUANTISED
        modules = "".join(
            f", {name} {'whole' if format == UNQUANTISED else format}" for name, format in self.modules.items()
        )
        return f"{self.format}{modules}, blocks of {self.block_size}" + (
            ", scales quantised too" if self.double else ""
        )


def check_format(name: str, known: tuple[str, ...], where: str = "quantize.format") -> None:
    """Raises UserError for a format that is not known, with the nearest that is."""
    if name not in known:
        raise UserError(
            f"there is no quantised format '{name}'",
            where=where,
            fix=f"{nearest(name, known)}formats: {', '.join(known)}",
        )
