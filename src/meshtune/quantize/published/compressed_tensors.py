"""compressed-tensors: the config of llm-compressor's checkpoints (https://github.com/vllm-project/compressed-tensors).

Its packed integers and its fp8 are read; which of them a config group is, its `format` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshtune.errors import UserError
from meshtune.quantize.published.float_quantized import FloatQuantized, read_floats
from meshtune.quantize.published.integers import FULL_PRECISION, only
from meshtune.quantize.published.pack_quantized import PackQuantized, read_group
from meshtune.quantize.published.scheme import check_known, skip_list

KNOWN = """config_groups format quantization_status ignore global_compression_ratio version kv_cache_scheme
sparsity_config transform_config run_compressed dequantize use_optimized_inference""".split()


def read(fields: dict[str, Any], where: str) -> PackQuantized | FloatQuantized:
    """The scheme of a quantization_config. Raises UserError for formats, and several groups that differ."""
    check_known(fields, KNOWN, where)
    only("quantization_status", fields.get("quantization_status") or "compressed", ("compressed", "frozen"), where)
    for field in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        if fields.get(field):
            only(field, fields[field], ("null",), where)
    ignore = skip_list(fields, where, "ignore")
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise UserError(f"config_groups is {groups!r}, not a mapping of groups", where=where, fix=FULL_PRECISION)
    schemes: list[PackQuantized | FloatQuantized] = []
    for name, group in groups.items():
        place = f"{where}, config_groups.{name}"
        format = group.get("format") or fields.get("format")
        only("format", format, ("pack-quantized", "float-quantized"), place)
        for activations in ("input_activations", "output_activations"):
            if group.get(activations) and format != "float-quantized":  # inputs are not rounded, as with fp8
                raise UserError(
                    f"{activations} are quantised too, which is not implemented", where=place, fix=FULL_PRECISION
                )
        schemes.append((read_group if format == "pack-quantized" else read_floats)(group, ignore, place))
    alike = [dataclasses.replace(scheme, targets=()) for scheme in schemes]
    if not schemes or any(scheme != alike[0] for scheme in alike):
        raise UserError(
            "its config_groups differ in bits, group sizes or symmetry" if schemes else "it has no config_groups",
            where=where,
            fix=f"use a checkpoint with one group, or {FULL_PRECISION}",
        )
    return dataclasses.replace(alike[0], targets=tuple(target for scheme in schemes for target in scheme.targets))
