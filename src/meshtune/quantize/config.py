"""How a base is quantised, as plain data."""

from __future__ import annotations

import dataclasses

from meshtune.errors import UserError, nearest

BLOCK_SIZES = tuple(2**n for n in range(3, 13))


@dataclasses.dataclass(frozen=True)
class QuantizeConfig:
    """`format` is a key of `meshtune.quantize.FORMATS`; `block_size` neighbours along a row of a weight share a scale.

    `double`: the scales are quantised too, to 8 bits (https://arxiv.org/abs/2305.14314).
    Raises UserError for a block size that cannot be.
    """

    format: str
    block_size: int = 64
    double: bool = True

    def __post_init__(self):
        if self.block_size not in BLOCK_SIZES:
            raise UserError(
                f"a block of {self.block_size} numbers is not possible",
                where="quantize.block_size",
                fix=f"give a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}, such as 64",
            )

    def __str__(self) -> str:
        return f"{self.format}, blocks of {self.block_size}" + (", scales quantised too" if self.double else "")


def check_format(name: str, known: tuple[str, ...]) -> None:
    """Raises UserError for a format that is not known, with the nearest that is."""
    if name not in known:
        raise UserError(
            f"there is no quantised format '{name}'",
            where="quantize.format",
            fix=f"{nearest(name, known)}formats: {', '.join(known)}",
        )
