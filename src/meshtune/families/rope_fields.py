"""Reading the rotary embedding of a Hugging Face config, in every form that is around."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from meshtune.errors import nearest
from meshtune.families.config_fields import ConfigFields
from meshtune.model.rope import RopeKind, RopeSpec
from meshtune.model.rope_scaling import LONGROPE_FACTORS

ROPE_NUMBERS: dict[RopeKind, tuple[set[str], set[str]]] = {  # kind -> (required, optional)
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": ({"factor"}, {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "longrope": (set(LONGROPE_FACTORS), {"attention_factor", "factor"}),
    "proportional": (set(), {"factor", "partial_rotary_factor"}),
    "ntk": ({"alpha"}, {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),
}
POSITIVE = {"alpha", "factor", "original_max_position_embeddings", "rope_theta", *LONGROPE_FACTORS}
ALWAYS = {"rope_type", "type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"}


def _rope_block(fields: ConfigFields) -> tuple[str, dict[str, Any]]:
    """(the field's name, its value): rope_parameters, or rope_scaling of older configs; both only where they agree.

    transformers 5 lets rope_scaling win where a config has both, so that to ignore either changes the logits.
    """
    blocks = {name: fields.get(name) for name in ("rope_parameters", "rope_scaling")}
    blocks = {name: block for name, block in blocks.items() if block is not None}
    for name, block in blocks.items():
        if not isinstance(block, dict):
            raise fields.error(name, f"{name} must be a mapping, found {block!r}")
        if block.get("type", block.get("rope_type")) != block.get("rope_type", block.get("type")):
            raise fields.error(name, f"{name} has rope_type {block['rope_type']!r} and type {block['type']!r}")
    if len(blocks) == 2:
        new, old = (normalised_rope(block) for block in blocks.values())
        differing = sorted(key for key in old if old[key] != new.get(key))
        if differing or new.keys() - old.keys() - {"rope_theta"}:
            raise fields.error(
                "rope_scaling",
                f"rope_parameters is {blocks['rope_parameters']!r} and rope_scaling is {blocks['rope_scaling']!r}: "
                "only one of them can hold",
                "put the block that is meant, with its rope_theta, under rope_parameters and remove rope_scaling",
            )
    return next(iter(blocks.items())) if blocks else ("rope_scaling", {})


def normalised_rope(block: Mapping[str, Any]) -> dict[str, Any]:
    """A rope block with its kind under one name, without keys that are null."""
    kind = block.get("rope_type", block.get("type", "default"))
    return {"rope_type": kind} | {k: v for k, v in block.items() if k not in ("type", "rope_type") and v is not None}


def read_rope(
    fields: ConfigFields,
    head_dim: int,
    *,
    theta: float | None = None,
    rotated: float | None = None,
    interleaved: bool = False,
) -> RopeSpec:
    """rope_parameters (transformers 5), or rope_theta and rope_scaling (before), as a RopeSpec.

    `theta` is the family's base where the config has none. `rotated` is the share of a head that is rotated where the
    config does not say; None for a family that has no such field, and rotates whole heads.
    """
    source, block = _rope_block(fields)
    kind = _rope_kind(fields, source, block)
    required, optional = ROPE_NUMBERS[kind]
    for key, value in block.items():
        if key not in required | optional | ALWAYS and value is not None:
            raise fields.error(source, f"{source}.{key} = {value!r} is not known for rope type '{kind}'")
    if missing := sorted(k for k in required if block.get(k) is None):
        raise fields.error(source, f"rope type '{kind}' needs {', '.join(missing)}")
    if theta is None or fields.get("rope_theta") is not None or block.get("rope_theta") is not None:
        theta = _rope_theta(fields, source, block)
    longest = fields.integer("max_position_embeddings")
    original, outside = block.get("original_max_position_embeddings"), fields.get("original_max_position_embeddings")
    for length in (original, outside):
        if length is not None:
            _check_number(fields, source, "original_max_position_embeddings", length)
    if kind in ("llama3", "yarn", "longrope"):  # without scaling it has no part in anything
        original = outside or original
    width = head_dim if rotated is None else int(head_dim * _rotated_share(fields, source, block, rotated))
    if width % 2 or not width:
        raise fields.error(source, f"{width} of a head's {head_dim} numbers are rotated; rotary embedding needs pairs")
    if rotated is None and kind != "proportional" and block.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise fields.error(source, "partial_rotary_factor other than 1 is not implemented for this family")
    return RopeSpec(
        theta=theta,
        dim=width,
        kind=kind,
        parameters=_rope_parameters(fields, source, block, required | optional, width),
        original_length=int(original or longest),
        max_length=longest,
        interleaved=interleaved,
    )


def _check_number(fields: ConfigFields, source: str, name: str, value: Any) -> None:
    """Raises UserError for what is no finite number, or none above zero where the name is POSITIVE."""
    least = 0 if name in POSITIVE else -sys.float_info.max
    if not isinstance(value, int | float) or not least <= value <= sys.float_info.max or (not value and not least):
        raise fields.error(source, f"{name} is {value!r}, not a number" + " above zero" * (not least))


def _rope_kind(fields: ConfigFields, source: str, block: dict[str, Any]) -> RopeKind:
    kind = block.get("rope_type", block.get("type", "default"))
    if kind == "su" or (kind in ("yarn", "longrope") and "short_factor" in block):
        return "longrope"  # older names of Phi-3's
    if kind == "dynamic" and block.get("alpha"):
        return "ntk"  # Hunyuan's: whatever the length
    if not isinstance(kind, str) or kind not in ROPE_NUMBERS or kind == "ntk":
        known = ", ".join(name for name in ROPE_NUMBERS if name != "ntk")
        raise fields.error(
            source, f"rope type {kind!r} is not implemented", f"{nearest(str(kind), ROPE_NUMBERS)}known: {known}"
        )
    return kind


def _rope_theta(fields: ConfigFields, source: str, block: dict[str, Any]) -> float:
    theta = fields.get("rope_theta")
    if theta is not None and block.get("rope_theta", theta) != theta:
        raise fields.error(
            "rope_theta",
            f"rope_theta is {theta!r}, and {block['rope_theta']!r} in {source}",
            f"keep the one the model was trained with, in {source}",
        )
    theta = block.get("rope_theta", theta)
    if theta is not None:
        _check_number(fields, source, "rope_theta", theta)
    if theta is None:
        raise fields.error(
            "rope_theta", "rope_theta is missing", "add it; the family's published value is in its model card"
        )
    return float(theta)


def _rotated_share(fields: ConfigFields, source: str, block: dict[str, Any], default: float) -> float:
    """The share of a head that is rotated: of the block, or of the config itself."""
    outside = {name: fields.get(name) for name in ("partial_rotary_factor", "rotary_pct")}
    outside = {name: value for name, value in outside.items() if value is not None}
    inside = block.get("partial_rotary_factor")
    for name, value in outside.items():
        if inside is not None and value != inside:
            raise fields.error(name, f"{name} is {value!r}, and partial_rotary_factor is {inside!r} in {source}")
    share = inside if inside is not None else next(iter(outside.values()), default)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise fields.error(source, f"the share of a head that is rotated is {share!r}, not a number from 0 to 1")
    return float(share)


def _rope_parameters(
    fields: ConfigFields, source: str, block: dict[str, Any], names: set[str], width: int
) -> tuple[tuple[str, float | tuple[float, ...]], ...]:
    numbers: dict[str, float | tuple[float, ...]] = {}
    for name in sorted(names):
        value = block.get(name)
        if value is None:
            continue
        if name not in LONGROPE_FACTORS:
            _check_number(fields, source, name, value)
            numbers[name] = float(value)
            continue
        if not isinstance(value, list) or len(value) != width // 2:
            raise fields.error(source, f"{source}.{name} must list {width // 2} numbers, one for each rotated pair")
        for number in value:
            _check_number(fields, source, name, number)
        numbers[name] = tuple(map(float, value))
    return tuple(numbers.items())
