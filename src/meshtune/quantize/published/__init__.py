"""Weights that are published quantised: what `quantization_config` of a config.json says of a checkpoint's files.

A new method is one module with `read(fields, where)`, which gives a `scheme.Scheme`, and one line in METHODS.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from meshtune.errors import UserError, nearest
from meshtune.quantize.published.scheme import Scheme

FIELD = "quantization_config"
TEXT = "text_config"
# quant_method -> the module that reads it, imported when a config asks for it.
METHODS: dict[str, str] = {
    "awq": "awq",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
    "fp8": "block_fp8",
    "gptq": "gptq",
    "mxfp4": "mxfp4",
}


def read_scheme(config: Mapping[str, Any], where: str) -> tuple[Scheme | None, dict[str, Any]]:
    """(how the weights of a config.json are quantised in its files, or None; the config without that field).

    The field may be that of a composite's text_config. Raises UserError for a method that is not read, and for options
    of a method that are not implemented.
    """
    plain, fields, place = without_scheme(config), config.get(FIELD), FIELD
    if fields is None and isinstance(inner := config.get(TEXT), Mapping):
        fields, place = inner.get(FIELD), f"{TEXT}.{FIELD}"
    if fields is None:
        return None, plain
    where = f"{where}, field {place}"
    if not isinstance(fields, Mapping):
        raise UserError(f"{FIELD} is {fields!r}, not a mapping", where=where)
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise UserError(
            f"quant_method {method!r} is not read: weights that are already quantised must be in a known format",
            where=where,
            fix=f"{nearest(str(method), METHODS)}give the full-precision checkpoint, or one quantised by "
            f"{', '.join(METHODS)}",
        )
    module = importlib.import_module(f"{__name__}.{METHODS[method]}")
    try:
        return module.read(dict(fields), where), plain
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"the fields of {FIELD} do not fit together ({type(error).__name__}: {error})",
            where=where,
            fix="give the config.json that was published with the model",
        ) from error


def without_scheme(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the same model with weights that are not quantised in its files."""
    plain = {name: value for name, value in config.items() if name != FIELD}
    if isinstance(inner := plain.get(TEXT), Mapping) and FIELD in inner:
        plain[TEXT] = {name: value for name, value in inner.items() if name != FIELD}
    return plain
