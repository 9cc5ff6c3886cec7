"""Weights packed as GPTQ, AWQ, compressed-tensors and bitsandbytes publish them, written from small random models.

tests/quantize/published/data proves the layouts; this module writes them for models of any family.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes.functional as bnb
import torch

from families.published_checkpoints import Quantise

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Packed = tuple[Quantise, dict[str, Any]]


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith("proj.weight") and tensor.ndim == 2


def integers(
    weight: torch.Tensor, bits: int, size: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes [out, in], zeros [out, groups], float16 scales [out, groups]) of a weight in groups of `size`."""
    grouped, top = weight.reshape(weight.shape[0], -1, size), 2**bits - 1
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    largest = torch.maximum(-low, high)
    scales = ((2 * largest if symmetric else high - low) / top).half()
    zeros = torch.full_like(low, 2 ** (bits - 1)) if symmetric else torch.round(-low / scales.float())
    codes = torch.round(grouped / scales.float()[..., None] + zeros[..., None]).clamp(0, top)
    return codes.reshape(weight.shape).to(torch.int64), zeros.to(torch.int64), scales


def pack_codes(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes [.., n] in int32 words [.., n / per], the first in the lowest bits."""
    per = 32 // bits
    grouped = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per)).unflatten(-1, (-1, per))
    grouped = grouped if order is None else grouped[..., order]
    shifts = torch.arange(0, 32, bits)
    return (grouped << shifts).sum(-1).to(torch.uint32).view(torch.int32)


def gptq(bits: int = 4, size: int = 8, symmetric: bool = True, act_order: bool = False) -> Packed:
    """AutoGPTQ's; with act-order the columns are of groups in a random order."""

    def quantise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not is_linear(name, tensor):
            return None
        into = tensor.shape[1]
        order = torch.randperm(into, generator=torch.Generator().manual_seed(0)) if act_order else torch.arange(into)
        back = torch.argsort(order)
        codes, zeros, scales = integers(tensor[:, order], bits, size, symmetric)
        module = name.removesuffix(".weight")
        return {
            f"{module}.qweight": pack_codes(codes[:, back], bits).T,
            f"{module}.qzeros": pack_codes((zeros.T - 1) % 2**bits, bits),
            f"{module}.scales": scales.T,
            f"{module}.g_idx": (back // size).to(torch.int32),
        }

    fields = {"bits": bits, "group_size": size, "sym": symmetric, "desc_act": act_order}
    return quantise, {"quant_method": "gptq", **fields}


def awq(size: int = 8) -> Packed:
    """AutoAWQ's `gemm`."""

    def quantise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not is_linear(name, tensor):
            return None
        codes, zeros, scales = integers(tensor, 4, size, False)
        module = name.removesuffix(".weight")
        return {
            f"{module}.qweight": pack_codes(codes.T, 4, AWQ_ORDER),
            f"{module}.qzeros": pack_codes(zeros.T, 4, AWQ_ORDER),
            f"{module}.scales": scales.T,
        }

    return quantise, {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}


def pack_quantized(bits: int = 4, size: int | None = 8, symmetric: bool = True) -> Packed:
    """compressed-tensors'; without a size a scale for each row."""

    def quantise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not is_linear(name, tensor):
            return None
        codes, zeros, scales = integers(tensor, bits, size or tensor.shape[1], symmetric)
        packed = {
            f"{name}_packed": pack_codes(codes, bits),
            f"{name}_scale": scales.to(torch.bfloat16),
            f"{name}_shape": torch.tensor(tensor.shape),
        }
        return packed if symmetric else packed | {f"{name}_zero_point": pack_codes(zeros.T, bits).T}

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": size}
    weights["strategy"] = "channel" if size is None else "group"
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    fields = {"format": "pack-quantized", "config_groups": groups, "ignore": ["lm_head"]}
    return quantise, {"quant_method": "compressed-tensors", **fields}


def four_bit(kind: str = "nf4", double: bool = False, size: int = 64) -> Packed:
    """bitsandbytes' NF4 or FP4."""

    def quantise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not is_linear(name, tensor):
            return None
        packed, state = bnb.quantize_4bit(
            tensor.contiguous(), blocksize=size, quant_type=kind, compress_statistics=double
        )
        return {name: packed} | {f"{name}.{key}": part for key, part in state.as_dict(packed=True).items()}

    return quantise, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}


def eight_bit() -> Packed:
    """bitsandbytes' LLM.int8."""

    def quantise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not is_linear(name, tensor):
            return None
        codes, scb, _ = bnb.int8_vectorwise_quant(tensor.half())
        module = name.removesuffix(".weight")
        return {name: codes, f"{module}.SCB": scb, f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8)}

    return quantise, {"quant_method": "bitsandbytes", "load_in_8bit": True}


PACKED: dict[str, Packed] = {
    "gptq": gptq(),
    "gptq_asym": gptq(symmetric=False),
    "gptq_act_order": gptq(act_order=True),
    "gptq_8bit": gptq(bits=8),
    "awq": awq(),
    "packed": pack_quantized(),
    "packed_asym": pack_quantized(symmetric=False),
    "packed_rows": pack_quantized(size=None),
    "packed_8bit": pack_quantized(bits=8),
    "nf4": four_bit(),
    "nf4_double": four_bit(double=True),
    "fp4": four_bit("fp4"),
    "eight_bit": eight_bit(),
}
