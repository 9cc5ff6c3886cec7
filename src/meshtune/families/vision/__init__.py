"""Vision towers: a composite's config in, a `VisionSpec` and the table of its tensors out.

A new tower is one module with `vision_spec(config, where)` and `tensors(spec)`, and one line in TOWERS for each
composite that has it. Names in the tables are those of modules in transformers' memory.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

from meshtune.errors import UserError
from meshtune.families.tensors import TensorMap
from meshtune.model.attention import AttentionSpec
from meshtune.model.block import Mixer
from meshtune.model.spec import ModelSpec, stacks_of
from meshtune.model.vision import VisionSpec, deepstack

PUBLISHED = "give the config.json that was published with the model"
# model_type of a composite -> the module of its tower.
TOWERS: dict[str, str] = {
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "gemma4_unified": "gemma4_unified",
    "glm46v": "glm4v",
    "glm4v": "glm4v",
    "glm4v_moe": "glm4v",
    "idefics3": "idefics3",
    "internvl": "internvit",
    "lfm2_vl": "siglip2",
    "llava": "llava",
    "llava_next": "llava",
    "mistral3": "pixtral",
    "paligemma": "paligemma",
    "qwen2_5_vl": "qwen2_vl",
    "qwen2_vl": "qwen2_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "smolvlm": "idefics3",
}


class TowerModule(Protocol):
    """The module of a tower."""

    def vision_spec(self, config: Mapping[str, Any], where: str, text: ModelSpec) -> VisionSpec:
        """The spec of the tower in a composite's config, around this text model. Raises UserError for whatever is not
        implemented."""
        ...

    def tensors(self, spec: ModelSpec) -> list[TensorMap]:
        """The table of tensors of the tower and the projector."""
        ...


def _module(model_type: str) -> TowerModule:
    return cast(TowerModule, importlib.import_module(f"{__name__}.{TOWERS[model_type]}"))


def with_tower(spec: ModelSpec, config: Mapping[str, Any], where: str) -> ModelSpec:
    """The text model of a composite's config with its tower. Raises UserError where that is not implemented, and for
    fields that do not fit together."""
    try:
        vision = _vision_spec(config, where, spec)
    except UserError as error:
        raise UserError(error.what, where=error.where, fix=error.fix or PUBLISHED) from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"the fields of vision_config do not fit together ({type(error).__name__}: {error})",
            where=where,
            fix=PUBLISHED,
        ) from error
    layers = [layer for stack in spec.stacks for _ in range(stack.repeats) for layer in stack.pattern]
    for number in range(len(vision.taps)):
        layers[number] = dataclasses.replace(layers[number], adds=deepstack(number))
    if vision.mutual:
        layers = [dataclasses.replace(layer, mixer=_mutual(layer.mixer, vision)) for layer in layers]
    stacks = stacks_of(layers) if vision.taps or vision.mutual else spec.stacks
    return dataclasses.replace(spec, vision=vision, stacks=stacks)


def _mutual(mixer: Mixer | None, vision: VisionSpec) -> AttentionSpec:
    assert isinstance(mixer, AttentionSpec)
    reaches = vision.mutual != "windows" or mixer.window is not None
    return dataclasses.replace(mixer, reaches=reaches, prefix=vision.mutual == "prefix")


def _vision_spec(config: Mapping[str, Any], where: str, text: ModelSpec) -> VisionSpec:
    kind = str(config.get("model_type"))
    if kind not in TOWERS:
        raise no_tower(kind, where)
    if not isinstance(config.get("vision_config"), Mapping):
        raise UserError(
            f"vision_config of this {kind} is {config.get('vision_config')!r}, not a mapping",
            where=f"{where}, field vision_config",
            fix=PUBLISHED,
        )
    return _module(kind).vision_spec(config, where, text)


def no_tower(kind: str, where: str) -> UserError:
    """The error where pictures are to be read by a model that has no tower, or none that is implemented."""
    return UserError(
        f"a model of type '{kind}' reads no pictures here",
        where=f"{where}, field model_type; vision",
        fix=f"leave `vision` out of the recipe, or give a model of type {', '.join(TOWERS)}",
    )


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of the tensors of a composite's tower and projector, by the names of modules in memory."""
    assert spec.composite is not None
    return _module(spec.composite.model_type).tensors(spec)
