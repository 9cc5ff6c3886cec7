"""A quantised weight: codes and scales, as a pytree that stands where the weight stood."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.quantize import FORMATS
from meshtune.quantize.config import QuantizeConfig, check_format
from meshtune.quantize.format import Format, shares
from meshtune.quantize.scales import nested_blocks, restored, twice_quantised, twice_quantised_here


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantisedWeight:
    """A weight [.., out, in] in blocks along `in`, each number a share of the largest of its block.

    `codes` [.., out, in / per], in the format's dtype; `scales` [.., out, in / block_size]: the largest of each block,
    float32, or uint8 where they are quantised too: then `nested` [.., m] and `offset` [..], float32, restore them
    (else both are None). A block never crosses a row, so codes and scales are split over devices by the rules of the
    weight they replace, in whole blocks; `nested` is on every device, a number for 256 blocks.
    Stacked layers lead every array, so a scan slices a quantised weight as it slices any other.
    """

    codes: Any
    scales: Any
    nested: Any
    offset: Any
    format: str = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @classmethod
    def abstract(cls, weight: ArraySpec, config: QuantizeConfig) -> QuantisedWeight:
        """The form of a weight [.., out, in], with ArraySpecs for arrays. Raises UserError for an unknown format."""
        check_format(config.format, tuple(FORMATS))
        made = FORMATS[config.format]
        *lead, out, into = weight.shape
        assert into % config.block_size == 0, (weight.shape, config)
        lead_axes, each = weight.axes[:-2], into // config.block_size
        codes = ArraySpec((*lead, out, into // made.per), made.dtype, weight.axes, unit=config.block_size // made.per)
        scales = ArraySpec((*lead, out, each), "uint8" if config.double else "float32", weight.axes)
        nested = offset = None
        if config.double:
            nested = ArraySpec((*lead, nested_blocks(out * each)), "float32", (*lead_axes, "whole"))
            offset = ArraySpec(tuple(lead), "float32", lead_axes)
        return cls(codes, scales, nested, offset, config.format, config.block_size, weight.dtype)

    @classmethod
    def quantise(cls, weight: Float[Array, "*L o i"], config: QuantizeConfig) -> QuantisedWeight:
        """A weight in this form. Loading does the same block by block. Not for use inside jit."""
        check_format(config.format, tuple(FORMATS))
        codes, absmax = encoded(weight, format=config.format, block_size=config.block_size)
        fixed = {"format": config.format, "block_size": config.block_size, "dtype": str(weight.dtype)}
        if not config.double:
            return cls(codes, absmax, None, None, **fixed)
        lead = absmax.shape[:-2]
        every = np.asarray(absmax).reshape(-1, *absmax.shape[-2:])
        scales, nested, offset = (np.stack(part) for part in zip(*map(twice_quantised, every), strict=True))
        return cls(
            codes,
            jnp.asarray(scales.reshape(absmax.shape)),
            jnp.asarray(nested.reshape(*lead, -1)),
            jnp.asarray(offset.reshape(lead)),
            **fixed,
        )

    def requantised(self, numbers: Float[Array, "o i"]) -> QuantisedWeight:
        """Other numbers of one matrix in this weight's form. Unlike `quantise` also inside jit: where scales are
        quantised too, their mean is then taken by the device."""
        codes, absmax = encoded(numbers, format=self.format, block_size=self.block_size)
        if self.nested is None:
            return dataclasses.replace(self, codes=codes, scales=absmax)
        scales, nested, offset = twice_quantised_here(absmax)
        return dataclasses.replace(self, codes=codes, scales=scales, nested=nested, offset=offset)

    @property
    def _kind(self) -> Format:
        return FORMATS[self.format]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight: [.., out, in]."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * self._kind.per)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Numbers in the weight."""
        return math.prod(self.shape)

    @property
    def config(self) -> QuantizeConfig:
        return QuantizeConfig(self.format, self.block_size, self.nested is not None)

    def dequantise(self, dtype: DTypeLike | None = None) -> Float[Array, "*L o i"]:
        """The weight, its products made in float32, in `dtype` (default: the dtype it had)."""
        scales = self.scales if self.nested is None else restored(self.scales, self.nested, self.offset)
        shape = self.shape
        blocks = self._kind.decode(self.codes).reshape(*shape[:-1], -1, self.block_size)
        return (blocks * scales[..., None]).reshape(shape).astype(dtype or self.dtype)

    def in_use(self, gathered: Callable[..., Array], axes: tuple[str, ...]) -> QuantisedWeight:
        """The weight laid out for computing by `gathered(array, *axes, unit=...)`; `axes` are the weight's own."""
        codes = gathered(self.codes, *axes, unit=self.block_size // self._kind.per)
        return dataclasses.replace(self, codes=codes, scales=gathered(self.scales, *axes))


@functools.partial(jax.jit, static_argnames=("format", "block_size"))
def encoded(numbers: Float[Array, "*L i"], *, format: str, block_size: int) -> tuple[Array, Float[Array, "*L n"]]:
    """(codes [.., in / per], float32 scales [.., in / block_size]) of rows made of whole blocks."""
    blocks = numbers.astype(jnp.float32).reshape(*numbers.shape[:-1], -1, block_size)
    absmax = jnp.abs(blocks).max(axis=-1)
    codes = FORMATS[format].encode(shares(blocks, absmax))
    return codes.reshape(*numbers.shape[:-1], -1), absmax
