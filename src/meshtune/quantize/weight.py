"""A quantised weight: codes and scales, as a pytree that replaces the weight."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from meshtune.arrays.spec import ArraySpec
from meshtune.quantize.config import BlockSize, FormatName, QuantizeConfig, StoredFormatName, check_format
from meshtune.quantize.format import Format, shares
from meshtune.quantize.formats import FORMATS, PUBLISHED, STORED
from meshtune.quantize.published.scheme import Form
from meshtune.quantize.scales import nested_blocks, restore_scales, twice_quantised, twice_quantised_on_device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantisedWeight:
    """A weight [.., out, in] in blocks along `in`, each number stored relative to the largest magnitude of its block.

    `codes` [.., out, in / per] have the format's dtype. `scales` [.., out, in / block_size], the largest magnitude of
    each block, are float32, or uint8 where they are quantised too; `nested` [.., m] and `offset` [..], float32, then
    restore them (else both are None). Of a weight that is published quantised, codes and scales are those of its files,
    and `zeros` (of some formats), uint8 [.., out, in / block_size], are subtracted from the codes. A block never
    crosses a row, so codes and scales are sharded by the rules of the weight they replace, in whole blocks; `nested` is
    replicated, one number for 256 blocks. Leading axes (layers, experts) lead every array, so that a scan slices a
    quantised weight like any other.
    """

    codes: Any
    scales: Any
    nested: Any
    offset: Any
    format: StoredFormatName = dataclasses.field(metadata={"static": True})
    block_size: BlockSize = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    zeros: Any = None

    @classmethod
    def abstract(cls, weight: ArraySpec, config: QuantizeConfig) -> QuantisedWeight:
        """The quantised form of a weight [.., out, in], with ArraySpecs for arrays. Raises UserError for an unknown
        format."""
        check_format(config.format, tuple(FORMATS))
        name = cast(FormatName, config.format)
        format = FORMATS[name]
        *lead, out, into = weight.shape
        assert into % config.block_size == 0, (weight.shape, config)
        lead_axes, blocks = weight.axes[:-2], into // config.block_size
        unit = config.block_size // format.per
        codes = ArraySpec((*lead, out, into // format.per), format.dtype, weight.axes, unit=unit, role=weight.role)
        scales_dtype = "uint8" if config.double else "float32"
        scales = ArraySpec((*lead, out, blocks), scales_dtype, weight.axes, role=weight.role)
        nested = offset = None
        if config.double:
            nested = ArraySpec((*lead, nested_blocks(out * blocks)), "float32", (*lead_axes, "whole"))
            offset = ArraySpec(tuple(lead), "float32", lead_axes)
        return cls(codes, scales, nested, offset, name, config.block_size, weight.dtype)

    @classmethod
    def published(cls, weight: ArraySpec, form: Form) -> QuantisedWeight:
        """The codes of a weight [.., out, in] in its checkpoint's form, with ArraySpecs for arrays."""
        format = PUBLISHED[form.format]
        *lead, out, into = weight.shape
        assert into % form.block_size == 0, (weight.shape, form)
        shape, unit = (*lead, out, into // format.per), form.block_size // format.per
        codes = ArraySpec(shape, format.dtype, weight.axes, unit=unit, role=weight.role)
        blocks = (*lead, out, into // form.block_size)
        scales = ArraySpec(blocks, format.scales_dtype, weight.axes, role=weight.role)
        zeros = ArraySpec(blocks, "uint8", weight.axes, role=weight.role) if format.has_zeros else None
        return cls(codes, scales, None, None, form.format, form.block_size, weight.dtype, zeros)

    @property
    def is_published(self) -> bool:
        """Whether its codes are those of a checkpoint's files."""
        return self.format in PUBLISHED

    @classmethod
    def quantise(cls, weight: Float[Array, "*L o i"], config: QuantizeConfig) -> QuantisedWeight:
        """Quantises a weight; loading does the same block by block. Not for use inside jit."""
        check_format(config.format, tuple(FORMATS))
        codes, absmax = encode_blocks(weight, format=config.format, block_size=config.block_size)
        fixed = {"format": config.format, "block_size": config.block_size, "dtype": str(weight.dtype)}
        if not config.double:
            return cls(codes, absmax, None, None, **fixed)
        lead = absmax.shape[:-2]
        matrices = np.asarray(absmax).reshape(-1, *absmax.shape[-2:])
        scales, nested, offset = (np.stack(part) for part in zip(*map(twice_quantised, matrices), strict=True))
        return cls(
            codes,
            jnp.asarray(scales.reshape(absmax.shape)),
            jnp.asarray(nested.reshape(*lead, -1)),
            jnp.asarray(offset.reshape(lead)),
            **fixed,
        )

    def requantise_numbers(self, numbers: Float[Array, "o i"]) -> QuantisedWeight:
        """Quantises other numbers of one matrix in this weight's format. Works inside jit, unlike `quantise`: with
        doubly quantised scales, their mean is then computed on the device."""
        codes, absmax = encode_blocks(numbers, format=self.format, block_size=self.block_size)
        if self.nested is None:
            return dataclasses.replace(self, codes=codes, scales=absmax)
        scales, nested, offset = twice_quantised_on_device(absmax)
        return dataclasses.replace(self, codes=codes, scales=scales, nested=nested, offset=offset)

    @property
    def _kind(self) -> Format:
        return STORED[self.format]

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
        assert not self.is_published, f"no recipe quantises in {self.format}"
        return QuantizeConfig(cast(FormatName, self.format), self.block_size, self.nested is not None)

    def dequantise(self, dtype: DTypeLike | None = None) -> Float[Array, "*L o i"]:
        """The weight in `dtype` (default: its original dtype), computed in float32."""
        kind, shape = self._kind, self.shape
        scales = self.scales if self.nested is None else restore_scales(self.scales, self.nested, self.offset)
        scales = scales if kind.decode_scales is None else kind.decode_scales(scales)
        blocks = kind.decode(self.codes).reshape(*shape[:-1], -1, self.block_size)
        if self.zeros is not None:
            blocks = blocks - self.zeros[..., None].astype(blocks.dtype)
        return (blocks * scales[..., None]).reshape(shape).astype(dtype or self.dtype)

    def with_plain_scales(self) -> QuantisedWeight:
        """The same numbers with float32 scales: `nested` belongs to whole matrices, and not to a shard of one."""
        if self.nested is None:
            return self
        scales = restore_scales(self.scales, self.nested, self.offset)
        return dataclasses.replace(self, scales=scales, nested=None, offset=None)

    def in_use(self, gathered: Callable[..., Array], axes: tuple[str, ...]) -> QuantisedWeight:
        """The weight gathered for computing by `gathered(array, *axes, unit=...)`; `axes` are the weight's own."""
        codes = gathered(self.codes, *axes, unit=self.block_size // self._kind.per)
        zeros = None if self.zeros is None else gathered(self.zeros, *axes)
        return dataclasses.replace(self, codes=codes, scales=gathered(self.scales, *axes), zeros=zeros)


@functools.partial(jax.jit, static_argnames=("format", "block_size"))
def encode_blocks(
    numbers: Float[Array, "*L i"], *, format: StoredFormatName, block_size: int
) -> tuple[Array, Float[Array, "*L n"]]:
    """(codes [.., in / per], float32 scales [.., in / block_size]); the block size must divide the rows."""
    blocks = numbers.reshape(*numbers.shape[:-1], -1, block_size)
    absmax = jnp.abs(blocks.astype(jnp.float32)).max(axis=-1)

    def encode(blocks: Array, absmax: Array) -> Array:
        assert kind.encode is not None, f"codes of {format} come from files"
        return kind.encode(shares(blocks.astype(jnp.float32), absmax))

    kind = STORED[format]
    encode_bfloat16 = kind.encode_bfloat16
    if numbers.dtype == jnp.bfloat16 and encode_bfloat16 is not None:
        codes = jax.lax.platform_dependent(blocks, absmax, cpu=encode_bfloat16, default=encode)
    else:
        codes = encode(blocks, absmax)
    return codes.reshape(*numbers.shape[:-1], -1), absmax
