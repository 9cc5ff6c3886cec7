"""The fields of an adapter_config.json that PEFT's LoRA and its variants share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshtune.adapters.config import LoraConfig
from meshtune.errors import UserError

READ = frozenset(
    {"r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"}
)
# Starts that leave the base as it is; the others (olora, corda, loftq, lora_ga, ...) change its weights.
HARMLESS_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")


def lora_fields(config: LoraConfig) -> dict[str, object]:
    """Those of a config, rank_pattern and alpha_pattern apart."""
    return {
        "r": config.rank,
        "lora_alpha": plain(config.alpha),
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "init_lora_weights": True,
    }


def lora_options(fields: Mapping[str, object], where: str) -> dict[str, object]:
    """Reads the options. Raises UserError for a start that changed weights which are not in the adapter."""
    start = fields.get("init_lora_weights", True)
    if start not in HARMLESS_STARTS:
        raise UserError(
            f"init_lora_weights is {start!r}: this start changes the base's weights, which are not in the adapter",
            where=f"{where}, field init_lora_weights",
            fix="save it with peft's path_initial_model_for_weight_conversion, which makes it a plain LoRA",
        )
    return read_scaling(fields, where)


def read_scaling(fields: Mapping[str, Any], where: str) -> dict[str, object]:
    """Rank, alpha, dropout and scaling. Raises UserError where rank or alpha is missing."""
    if "r" not in fields or "lora_alpha" not in fields:
        raise UserError("r or lora_alpha is missing", where=where, fix="this is not a complete adapter_config.json")
    return {
        "rank": fields["r"],
        "alpha": float(fields["lora_alpha"]),
        "dropout": float(fields.get("lora_dropout") or 0.0),
        "rslora": bool(fields.get("use_rslora", False)),
    }


def plain(number: float) -> int | float:
    """A whole number without its point."""
    return int(number) if float(number).is_integer() else float(number)
