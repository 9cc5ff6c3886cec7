"""Which type each tensor of a file has: the mixtures that llama.cpp calls Q4_K_M, Q5_K_M and so on."""

from __future__ import annotations

import dataclasses
import re

from meshtune.errors import UserError, nearest
from meshtune.quantize.gguf import TYPES

# Name -> (its number in general.file_type, the type of most tensors).
FILE_TYPES: dict[str, tuple[int, str]] = {
    "F32": (0, "F32"),
    "F16": (1, "F16"),
    "Q4_0": (2, "Q4_0"),
    "Q8_0": (7, "Q8_0"),
    "Q4_K_M": (15, "Q4_K"),
    "Q5_K_M": (17, "Q5_K"),
    "Q6_K": (18, "Q6_K"),
    "BF16": (32, "BF16"),
}
FLOATS = ("F32", "F16", "BF16")
# What is used in place of a type whose blocks do not divide a row.
INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
WIDE = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv", "altup", "laurel", "per_layer_model_proj")


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The choice of types for one model: `file_type` is a name of FILE_TYPES, `tied` a model without an output matrix,
    `layers` and `experts` its numbers of both."""

    file_type: str
    layers: int
    tied: bool
    experts: int = 0

    def type_of(self, name: str, shape: tuple[int, ...]) -> str:
        """The type of a tensor. Vectors, norms and routers are always F32."""
        default = FILE_TYPES[self.file_type][1]
        if (
            len(shape) < 2
            or not name.endswith("weight")
            or name.endswith("_norm.weight")
            or any(w in name for w in WIDE)
        ):
            return "F32"
        if default in FLOATS:
            return default
        return self._fitting(self._preferred_type(name, shape, default), shape)

    def _preferred_type(self, name: str, shape: tuple[int, ...], default: str) -> str:
        if name == "output.weight" or (self.tied and name == "token_embd.weight"):
            if shape[-1] % TYPES[default].block:
                return "Q8_0"
            return default if default == "Q8_0" else "Q6_K"
        layer = int(match[1]) if (match := re.match(r"blk\.(\d+)\.", name)) else 0
        takes_more = self._more_bits(layer) and self.file_type in ("Q4_K_M", "Q5_K_M")
        if self.experts == 8 and ("attn_v." in name or "attn_k." in name):
            return "Q8_0"
        if "attn_v." in name or "ffn_down" in name:
            return "Q6_K" if takes_more else default
        if "attn_qkv." in name:
            # Counted among the values' matrices, and so by layer too.
            return "Q6_K" if takes_more else default
        if "attn_output." in name and self.experts == 8 and self.file_type == "Q4_K_M":
            return "Q5_K"
        return default

    def _more_bits(self, layer: int) -> bool:
        eighth = self.layers // 8
        return layer < eighth or layer >= 7 * self.layers // 8 or (layer - eighth) % 3 == 2

    def _fitting(self, kind: str, shape: tuple[int, ...]) -> str:
        if shape[-1] % TYPES[kind].block:
            kind = INSTEAD.get(kind, "F16")
        return kind if shape[-1] % TYPES[kind].block == 0 else "F16"


def check_file_type(name: str) -> str:
    """The name of a mixture, whatever its case. Raises UserError for another."""
    if name.upper() not in FILE_TYPES:
        raise UserError(
            f"there is no GGUF type '{name}' to write",
            where="--gguf",
            fix=f"{nearest(name.upper(), FILE_TYPES)}one of {', '.join(FILE_TYPES)}",
        )
    return name.upper()
