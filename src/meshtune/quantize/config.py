"""The quantisation of a base model, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshtune.errors import UserError, nearest

BLOCK_SIZES = tuple(2**n for n in range(3, 13))
UNQUANTISED = "none"  # the format in `modules` of a module that is not quantised


@dataclasses.dataclass(frozen=True)
class QuantizeConfig:
    """`format` is a key of `meshtune.quantize.FORMATS`; `block_size` neighbours along a row of a weight share a scale.

    With `double` the scales are quantised too, to 8 bits (https://arxiv.org/abs/2305.14314). `modules` maps Hugging
    Face module names (k_proj, mlp) to formats, UNQUANTISED to exclude a module; the last match applies.
    Raises UserError for a block size that is not a power of two in BLOCK_SIZES.
    """

    format: str
    block_size: int = 64
    double: bool = True
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self):
        if self.block_size not in BLOCK_SIZES:
            raise UserError(
                f"a block of {self.block_size} numbers is not possible",
                where="quantize.block_size",
                fix=f"give a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}, such as 64",
            )

    def within(self, format: str) -> QuantizeConfig:
        """The same block size and scales, with one format for all modules."""
        return dataclasses.replace(self, format=format, modules={})

    def __str__(self) -> str:
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
