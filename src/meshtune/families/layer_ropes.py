"""Rotary embeddings that differ between the kinds of layers of a model (`layer_types`), in every form of config."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields, normalised_rope, read_rope
from meshtune.model.rope import RopeSpec


def read_ropes(
    fields: ConfigFields,
    head_dim: int | Mapping[str, int],
    thetas: Mapping[str, tuple[str, float | None]],
    scaled: Collection[str] | None = None,
    *,
    rotated: float | None = None,
    interleaved: bool = False,
) -> dict[str, RopeSpec]:
    """The RopeSpec of every layer type; a type whose block is null has no rotary embedding and is left out.

    `thetas` maps every layer type of the family to the field that holds its base frequency in configs from before
    transformers 5 and to its default (None: it must be given). transformers 5 writes one block for each layer type into
    rope_parameters. Of older configs `rope_scaling` holds only for the layer types in `scaled`, None: for all; where
    it holds for some, transformers 5 gives a type without a block its default, and ignores a block that is not keyed by
    layer type, which is refused here. `head_dim` may differ between layer types; `rotated` and `interleaved` are those
    of `read_rope`.
    """
    blocks = _blocks(fields, list(thetas), scaled)
    ropes: dict[str, RopeSpec] = {}
    for kind, (theta_field, default) in thetas.items():
        block = blocks[kind]
        if block is None:
            continue
        theta = fields.get(theta_field)
        if theta is None and block.get("rope_theta") is None:
            theta = default
        part = fields.with_values(
            f"{kind} layers", rope_parameters=block, rope_scaling=None, rope_theta=theta, rope_local_base_freq=None
        )
        size = head_dim if isinstance(head_dim, int) else head_dim[kind]
        ropes[kind] = read_rope(part, size, rotated=rotated, interleaved=interleaved)
    return ropes


def _blocks(
    fields: ConfigFields, kinds: list[str], scaled: Collection[str] | None
) -> Mapping[str, Mapping[str, Any] | None]:
    """The rope block of each layer type, {} for the default, None for none."""
    nested, scaling = fields.get("rope_parameters"), fields.get("rope_scaling")
    for name, block in (("rope_parameters", nested), ("rope_scaling", scaling)):
        if block is not None and not isinstance(block, Mapping):
            raise fields.error(name, f"{name} must be a mapping, found {block!r}")
    if not nested:
        return {kind: (scaling or {}) if scaled is None or kind in scaled else {} for kind in kinds}
    if nested.keys().isdisjoint(kinds):
        if scaled is None:
            return dict.fromkeys(kinds, _agreeing_block(fields, nested, scaling))
        raise fields.error(
            "rope_parameters",
            f"rope_parameters {dict(nested)!r} does not say which layers it is for",
            f"key it by layer type: {', '.join(kinds)}",
        )
    if unknown := sorted(nested.keys() - set(kinds)):
        raise fields.error(
            "rope_parameters", f"rope_parameters.{unknown[0]} is no layer type of this family", f"known: {kinds}"
        )
    if scaled is None and (missing := [kind for kind in kinds if kind not in nested]):
        raise fields.error("rope_parameters", f"rope_parameters has no block for {missing[0]} layers")
    for kind, block in nested.items():
        if block is not None and not isinstance(block, Mapping):
            raise fields.error("rope_parameters", f"rope_parameters.{kind} must be a mapping, found {block!r}")
    absent = None if scaled is None else {}
    blocks = {kind: absent if nested.get(kind) is None else nested[kind] for kind in kinds}
    for kind in kinds if scaled is None else scaled:
        if (block := blocks[kind]) is not None:
            _agreeing_block(fields, block, scaling)
    return blocks


def _agreeing_block(
    fields: ConfigFields, block: Mapping[str, Any], scaling: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """A block of rope_parameters, if rope_scaling does not contradict it."""
    if scaling:
        old, new = normalised_rope(scaling), normalised_rope(block)
        if any(new.get(key) != value for key, value in old.items()):
            raise fields.error(
                "rope_scaling",
                f"rope_parameters has {dict(block)!r} and rope_scaling is {dict(scaling)!r}: only one of them can hold",
                "keep the block that is meant under rope_parameters and remove rope_scaling",
            )
    return block
