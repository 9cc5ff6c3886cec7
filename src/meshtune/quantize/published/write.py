"""Writes quantised weights in the formats of other programs: nf4 as bitsandbytes, int4 as compressed-tensors.

The codes are those of the weight, rearranged: no number is rounded again. Of compressed-tensors' scales, which are a
seventh of ours and have the model's dtype, the last bits are.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, UInt8

from meshtune.quantize.config import FormatName, QuantizeConfig
from meshtune.quantize.integers import LARGEST_INT4
from meshtune.quantize.nf4 import VALUES
from meshtune.quantize.scales import NESTED_BLOCK, dynamic_map

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The codes and scales of one weight [out, in] as `QuantisedWeight` holds them, two codes a byte. `nested` and
    `offset` are those of scales that are quantised too, else None."""

    codes: UInt8[np.ndarray, "o half"]
    scales: np.ndarray
    nested: Float[np.ndarray, "m"] | None
    offset: float
    block_size: int

    @property
    def shape(self) -> Shape:
        return self.codes.shape[0], 2 * self.codes.shape[1]


@dataclasses.dataclass(frozen=True)
class Writer:
    """How one format of recipes is written: its parts by what follows a weight's name (up to ".weight"), and the
    quantization_config of config.json for a config, a dtype, the linear modules that are left out and whether
    all experts are. `experts_note` says who does not read experts in it."""

    name: str
    source: FormatName
    parts: Callable[[Matrix, str], dict[str, np.ndarray]]
    config: Callable[[QuantizeConfig, str, Sequence[str], bool], dict[str, Any]]
    nests: bool
    experts_note: str = ""
    plain_experts_note: str = ""


def _bitsandbytes_parts(matrix: Matrix, dtype: str) -> dict[str, np.ndarray]:
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": matrix.block_size,
        "dtype": dtype,
        "shape": list(matrix.shape),
    }
    parts = {
        ".weight": np.ascontiguousarray(matrix.codes).reshape(-1, 1),
        ".weight.absmax": np.ascontiguousarray(matrix.scales).reshape(-1),
        ".weight.quant_map": VALUES,
    }
    if matrix.nested is not None:
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": matrix.offset}
        parts |= {".weight.nested_absmax": matrix.nested, ".weight.nested_quant_map": dynamic_map()}
    content = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return parts | {".weight.quant_state.bitsandbytes__nf4": content}


def _bitsandbytes_config(
    config: QuantizeConfig, dtype: str, left_out: Sequence[str], plain_experts: bool
) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": config.double,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(left_out),
    }


def _pack_quantized_parts(matrix: Matrix, dtype: str) -> dict[str, np.ndarray]:
    swapped = (matrix.codes >> 4) | (matrix.codes << 4)  # the first code of a pair is in the lower half there
    padded = np.zeros((matrix.shape[0], -(-matrix.shape[1] // 8) * 4), np.uint8)
    padded[:, : swapped.shape[1]] = swapped
    scales = matrix.scales.astype(np.float64) / LARGEST_INT4
    return {
        ".weight_packed": padded.view("<i4"),
        ".weight_scale": scales.astype(np.float32).astype(_DTYPES[dtype]),
        ".weight_shape": np.array(matrix.shape, np.int64),
    }


# vLLM and SGLang ask for a layer's experts as `<block>.experts.0.gate_proj`, whatever the files call their matrices.
EXPERT = r".*\.experts\.\d+\..*"
_DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def _pack_quantized_config(
    config: QuantizeConfig, dtype: str, left_out: Sequence[str], plain_experts: bool
) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": config.block_size,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
        "actorder": None,
        "block_structure": None,
    }
    ignored = list(left_out)
    if plain_experts:
        ignored = [name for name in ignored if not re.match(EXPERT, name)] + [f"re:{EXPERT}"]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


WRITERS: Mapping[str, Writer] = {
    "bitsandbytes": Writer(
        "bitsandbytes",
        "nf4",
        _bitsandbytes_parts,
        _bitsandbytes_config,
        nests=True,
        experts_note="transformers 5 does not read experts in nf4; transformers 4 and vLLM do",
        plain_experts_note="vLLM does not read a mixture in nf4 whose experts are not; transformers does",
    ),
    "compressed-tensors": Writer(
        "compressed-tensors",
        "int4",
        _pack_quantized_parts,
        _pack_quantized_config,
        nests=False,
        plain_experts_note="transformers 5 does not read a mixture in int4 whose experts are not; vLLM and SGLang do",
    ),
}
