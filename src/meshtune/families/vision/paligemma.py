"""The tower and the projector of PaliGemma (https://arxiv.org/abs/2407.07726) and PaliGemma 2: SigLIP's encoder and one
linear layer; all tokens of a prompt, pictures and words, see each other both ways in the decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.tensors import TensorMap
from meshtune.families.vision.encoder import patches_of
from meshtune.families.vision.gemma3 import PROJECTOR, SIGLIP, siglip_spec, siglip_tensors
from meshtune.model.spec import ModelSpec
from meshtune.model.vision import VisionSpec


def vision_spec(config: Mapping[str, Any], where: str, text: ModelSpec) -> VisionSpec:
    """PaliGemmaConfig -> VisionSpec."""
    model_fields = ConfigFields(dict(config), where)
    if (width := model_fields.integer("projection_dim", 2048)) != text.embed:
        raise model_fields.error(
            "projection_dim", f"features are {width} wide, and embeddings of the text model {text.embed}"
        )
    fields = ConfigFields(SIGLIP | dict(config["vision_config"]), f"{where}, vision_config")
    # Of published configs, which the model does not read there.
    fields.harmless("num_image_tokens", "projection_dim", "projector_hidden_act", "vocab_size")
    return dataclasses.replace(siglip_spec(fields, patches_of(fields)), mutual="prefix")


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of PaliGemmaModel's vision_tower and multi_modal_projector."""
    return siglip_tensors(spec, {"projector/out": f"{PROJECTOR}.linear"})
