"""Writes data/*.safetensors: weights packed by the tools that publish them, each with the tool's own dequantisation.

    pip install gptqmodel==7.7.0 compressed-tensors==0.20.0    # into an environment of their own: both need torch
    python tests/quantize/published/write_references.py

Each file has the tensors of one weight, `expected` (the tool's numbers, as [out, in]) and, as metadata, the
quantization_config of a model with such weights.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DATA = Path(__file__).parent / "data"
OUT, IN = 64, 96


def weight(seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn((OUT, IN), generator=draw) * 0.05


def parameters(w: torch.Tensor, bits: int, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, zeros) of groups [out, groups], as GPTQ's quantizer computes them."""
    grouped, top = w.reshape(OUT, -1, IN if group == -1 else group), 2**bits - 1
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        return (2 * high / top).half().float(), torch.full_like(high, 2 ** (bits - 1))
    scales = ((high - low) / top).half().float()
    return scales, torch.round(-low / scales)


def save(name: str, tensors: dict[str, torch.Tensor], expected: torch.Tensor, config: dict[str, Any]) -> None:
    stored = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    save_file(
        stored | {"expected": expected.contiguous()}, DATA / f"{name}.safetensors", {"config": json.dumps(config)}
    )


def gptq(name: str, bits: int, group: int, symmetric: bool, layout: str, act_order: bool = False) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    w = weight(len(name))
    size = IN if group == -1 else group
    order = torch.randperm(IN, generator=torch.Generator().manual_seed(1)) if act_order else torch.arange(IN)
    groups = torch.empty(IN, dtype=torch.int32)
    groups[order] = torch.arange(IN, dtype=torch.int32) // size
    scales, zeros = parameters(w[:, order], bits, group, symmetric)
    linear = torch.nn.Linear(IN, OUT, bias=False)
    linear.weight.data = w
    module = TorchLinear(bits, group, symmetric, act_order, IN, OUT, bias=False)
    module.pack(linear, scales, zeros, groups)
    module.eval()
    expected = module._dequantize_weight_cached_248().T
    if layout == "gptq":
        convert_gptq_v2_to_v1_format_module(module, QuantizeConfig(bits=bits, group_size=group))
    parts = {part: getattr(module, part) for part in ("qweight", "qzeros", "scales", "g_idx")}
    fields = {"bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric, "checkpoint_format": layout}
    save(name, parts, expected, {"quant_method": "gptq", **fields})


def awq(name: str, group: int) -> None:
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    w = weight(len(name))
    scales, zeros = parameters(w, 4, group, False)
    linear = torch.nn.Linear(IN, OUT, bias=False)
    linear.weight.data = w
    module = AwqTorchLinear(4, group, False, False, IN, OUT, register_buffers=True)
    module.pack(linear, scales.half(), zeros)
    size = IN if group == -1 else group
    expected = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, size).T
    parts = {part: getattr(module, part) for part in ("qweight", "qzeros", "scales")}
    save(name, parts, expected, {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"})


def write_compressed(name: str, bits: int, group: int | None, symmetric: bool) -> None:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    w = weight(len(name)).bfloat16()
    strategy = "channel" if group is None else "group"
    args = QuantizationArgs(num_bits=bits, group_size=group, strategy=strategy, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    grouped = w.reshape(OUT, -1, group or IN)
    scales, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    zeros = zeros.to(torch.int8)
    state = {"weight": w, "weight_scale": scales, "weight_zero_point": zeros}
    parts = PackedQuantizationCompressor.compress(state, scheme)
    expected = PackedQuantizationCompressor.decompress(dict(parts), scheme)["weight"]
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    fields = {"format": "pack-quantized", "config_groups": groups, "ignore": ["lm_head"]}
    save(name, parts, expected, {"quant_method": "compressed-tensors", **fields})


if __name__ == "__main__":
    os.environ["GPTQMODEL_DISABLE_PACK_EXT"] = "1"
    DATA.mkdir(exist_ok=True)
    gptq("gptq_sym", 4, 32, True, "gptq")
    gptq("gptq_asym", 4, 16, False, "gptq")
    gptq("gptq_v2_act_order", 4, 32, False, "gptq_v2", act_order=True)
    gptq("gptq_8bit", 8, -1, False, "gptq")
    awq("awq", 32)
    awq("awq_rows", -1)
    write_compressed("packed_sym", 4, 32, True)
    write_compressed("packed_asym", 4, 16, False)
    write_compressed("packed_rows", 4, None, True)
    write_compressed("packed_8bit", 8, None, False)
