"""Checkpoints in the layouts in which quantised models are published, written from small random models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Quantise = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor] | None]


def rewritten(source: Path, folder: Path, quantise: Quantise, config: Mapping[str, Any]) -> Path:
    """Copies a checkpoint with every tensor replaced by the tensors of `quantise(name, tensor)` (None: unchanged);
    the config has `config` as its quantization_config."""
    shutil.copytree(source, folder)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored |= quantise(name, tensor) or {name: tensor}
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": dict(config)}))
    return folder


def block_fp8(block: tuple[int, int]) -> tuple[Quantise, dict[str, Any]]:
    """DeepSeek V3's: every linear layer but the head and the routers."""

    def quantise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        linear = name.endswith("proj.weight") or name.endswith(("_a_proj_with_mqa.weight", "_b_proj.weight"))
        if not linear or tensor.ndim != 2:
            return None
        grid = [-(-size // width) for size, width in zip(tensor.shape, block, strict=True)]
        scales = torch.zeros(grid)
        codes = torch.zeros(tensor.shape, dtype=torch.float8_e4m3fn)
        for row in range(grid[0]):
            for column in range(grid[1]):
                at = tuple(slice(i * width, (i + 1) * width) for i, width in zip((row, column), block, strict=True))
                scales[row, column] = tensor[at].abs().max() / 448
                codes[at] = (tensor[at] / scales[row, column]).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale_inv": scales}

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return quantise, config


def from_block_fp8(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The float32 numbers of codes and scales."""
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]


def mxfp4() -> tuple[Quantise, dict[str, Any]]:
    """gpt-oss': the matrices of the experts, in blocks and scales."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    def quantise(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return None
        blocks = tensor.float().transpose(1, 2).unflatten(-1, (-1, 32))
        exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
        shares = blocks / torch.exp2(exponents)[..., None]
        codes = (shares.abs()[..., None] - values).abs().argmin(-1) + 8 * (shares < 0)
        packed = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
        return {f"{name}_blocks": packed, f"{name}_scales": (exponents + 127).to(torch.uint8)}

    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return quantise, {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
