"""Rotary embeddings in GGUF: keys for plain, linear and YaRN scaling, tensors of factors for Llama 3's and LongRoPE."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from meshtune.families.gguf.architecture import Metadata
from meshtune.model.rope import LONGROPE_FACTORS, RopeSpec, llama3, longrope_magnitude

FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ORIGINAL = "rope.scaling.original_context_length"
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
NEVER = 1e30  # divides the frequencies of pairs that are not rotated
DEFAULT_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}


def rope_metadata(rope: RopeSpec, latent: bool = False, rounded: bool = False) -> dict[str, Any]:
    """The keys of a rotary embedding; `latent` that of latent attention, whose scores YaRN scales, and `rounded` where
    llama.cpp may round YaRN's bounds. Raises ValueError, with the reason, for one that llama.cpp does not compute."""
    fields: dict[str, Any] = {"rope.dimension_count": rope.dim, "rope.freq_base": rope.theta}
    numbers: dict[str, Any] = dict(rope.parameters)
    if rope.kind == "linear":
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": numbers["factor"]}
    elif rope.kind == "yarn":
        fields |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": numbers["factor"],
            ORIGINAL: rope.original_length,
        }
        if not numbers.get("truncate", 1.0) and not rounded:
            raise ValueError("YaRN without truncated bounds (truncate false)")
        usual = 1 if latent else 1 + 0.1 * math.log(max(numbers["factor"], 1.0))
        if latent and numbers.get("mscale_all_dim"):
            fields[LOG_MULTIPLIER] = 0.1 * numbers["mscale_all_dim"]
        if (magnitude := _yarn_magnitude(numbers)) is not None and not math.isclose(magnitude, usual, rel_tol=1e-6):
            raise ValueError("YaRN with an attention factor of its own (attention_factor, mscale)")
        for name, default in DEFAULT_BETAS.items():
            if numbers.get(name) not in (None, default):
                fields[f"rope.scaling.yarn_{name}"] = numbers[name]
    elif rope.kind == "longrope":
        magnitude = longrope_magnitude(numbers, rope.original_length, rope.max_length)
        fields |= {
            "rope.scaling.type": "longrope",
            ORIGINAL: rope.original_length,
            "rope.scaling.attn_factor": magnitude,
        }
    elif rope.kind not in ("default", "llama3", "dynamic", "proportional"):
        raise ValueError(f"rotary embeddings of type '{rope.kind}'")
    return fields


def _yarn_magnitude(numbers: dict[str, float]) -> float | None:
    if (factor := numbers.get("attention_factor")) is not None:
        return factor
    m, m_all = numbers.get("mscale"), numbers.get("mscale_all_dim")
    if not m or not m_all:
        return None
    log = 0.1 * math.log(max(numbers["factor"], 1.0))
    return (1 + m * log) / (1 + m_all * log)


def rope_tensors(rope: RopeSpec) -> dict[str, np.ndarray]:
    """The tensors of factors that frequencies are divided by."""
    numbers: dict[str, Any] = dict(rope.parameters)
    if rope.kind == "llama3":
        inverse = 1.0 / rope.theta ** (np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim)
        return {FREQUENCIES: (inverse / llama3(inverse, numbers, rope.original_length)).astype(np.float32)}
    if rope.kind == "proportional":
        pairs, rotated = rope.dim // 2, int(rope.dim * numbers["partial_rotary_factor"]) // 2
        return {FREQUENCIES: np.where(np.arange(pairs) < rotated, 1.0, NEVER).astype(np.float32)}
    if rope.kind == "longrope":
        short, long = (np.asarray(numbers[name], np.float32) for name in LONGROPE_FACTORS)
        return {LONG: long, SHORT: short}
    return {}


def rope_block(metadata: Metadata, tensors: dict[str, np.ndarray], dim: int) -> dict[str, Any]:
    """The rope_parameters of a config. Raises ValueError for what Meshtune does not compute."""
    block: dict[str, Any] = {"rope_theta": metadata.get("rope.freq_base", 10000.0), "rope_type": "default"}
    kind = str(metadata.get("rope.scaling.type", "none"))
    if SHORT in tensors:
        short, long = (tensors[name].astype(float).tolist() for name in (SHORT, LONG))
        block |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        block["original_max_position_embeddings"] = metadata[ORIGINAL]
        if "rope.scaling.attn_factor" in metadata:
            block["attention_factor"] = metadata["rope.scaling.attn_factor"]
    elif FREQUENCIES in tensors and tensors[FREQUENCIES].max() >= NEVER / 2:
        rotated = int((tensors[FREQUENCIES] == 1).sum())
        block |= {"rope_type": "proportional", "partial_rotary_factor": 2 * rotated / dim}
    elif FREQUENCIES in tensors:
        block |= {"rope_type": "llama3", **_llama3_numbers(tensors[FREQUENCIES], block["rope_theta"], dim)}
    elif kind == "linear" or (kind == "none" and "rope.scale_linear" in metadata):
        factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear", 1.0))
        block |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        block |= {"rope_type": "yarn", "factor": metadata["rope.scaling.factor"]}
        block["original_max_position_embeddings"] = metadata[ORIGINAL]
        for name in DEFAULT_BETAS:
            if f"rope.scaling.yarn_{name}" in metadata:
                block[name] = metadata[f"rope.scaling.yarn_{name}"]
        if LOG_MULTIPLIER in metadata:
            block |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * metadata[LOG_MULTIPLIER])
    elif kind != "none":
        raise ValueError(f"rope.scaling.type '{kind}' is not known")
    return block


def _llama3_numbers(factors: np.ndarray, theta: float, dim: int) -> dict[str, Any]:
    """The parameters of a rope_freqs tensor: `factor` is its largest number, and blended ones lie on a line whose slope
    and intercept say where it starts and ends. Raises ValueError where they do not."""
    inverse = 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if factors.shape != inverse.shape:
        raise ValueError(f"{FREQUENCIES} has {len(factors)} numbers for {len(inverse)} rotated pairs")
    largest = float(factors.max())
    blended = (factors > 1 + 1e-6) & (factors < largest * (1 - 1e-6))
    if largest <= 1 or blended.sum() < 2:
        raise ValueError(f"{FREQUENCIES} does not say which part of the frequencies is scaled")
    smooth = (1 / factors[blended].astype(np.float64) - 1 / largest) / (1 - 1 / largest)
    slope, intercept = np.polyfit(inverse[blended] / (2 * math.pi), smooth, 1)
    low = 1.0  # only ratios matter: this is the one of the published models
    width = -low / intercept
    numbers = {
        "factor": round(largest, 4),
        "low_freq_factor": low,
        "high_freq_factor": round(low + width, 3),
        "original_max_position_embeddings": round(slope * width),
    }
    again = inverse / llama3(inverse, numbers, numbers["original_max_position_embeddings"])
    if not np.allclose(again, factors, rtol=1e-4):
        raise ValueError(f"{FREQUENCIES} is not Llama 3's scaling")
    return numbers
