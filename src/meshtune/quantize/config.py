"""How a base is quantised, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from meshtune.errors import UserError, nearest

BLOCK_SIZES = tuple(2**n for n in range(3, 13))
WHOLE = "none"  # in `modules`: not quantised


@dataclasses.dataclass(frozen=True)
class QuantizeConfig:
    """`format` is a key of `meshtune.quantize.FORMATS`; `block_size` neighbours along a row of a weight share a scale.

    `double`: the scales are quantised too, to 8 bits (https://arxiv.org/abs/2305.14314). `modules` are the formats of
    single modules by Hugging Face name (k_proj, mlp), WHOLE for those that stay as they are; of several that mean a
    module the last written counts.
    Raises UserError for a block size that cannot be.
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
        """The same blocks in one format for all."""
        return dataclasses.replace(self, format=format, modules={})

    def __str__(self) -> str:
        own = "".join(f", {name} {'whole' if format == WHOLE else format}" for name, format in self.modules.items())
        return f"{self.format}{own}, blocks of {self.block_size}" + (", scales quantised too" if self.double else "")


def check_format(name: str, known: tuple[str, ...], where: str = "quantize.format") -> None:
    """Raises UserError for a format that is not known, with the nearest that is."""
    if name not in known:
        raise UserError(
            f"there is no quantised format '{name}'",
            where=where,
            fix=f"{nearest(name, known)}formats: {', '.join(known)}",
        )
