"""Gemma 4 12B (https://ai.google.dev/gemma/docs), which has no tower: the pixels of a large patch are projected with
norms before and after, get a position, and are an embedding of the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields
from meshtune.families.tensors import Shape, Stored, TensorMap, View, one_to_one
from meshtune.families.vision.encoder import patches_by_channel
from meshtune.model.norm import NormSpec
from meshtune.model.spec import VISION, ModelSpec
from meshtune.model.vision import PatchPositions, ProjectorSpec, VisionSpec

EMBEDDER = "model.embed_vision"
MUTUAL = {"use_bidirectional_attention": "vision"}  # of Gemma4UnifiedTextConfig


def vision_spec(config: Mapping[str, Any], where: str, text: ModelSpec) -> VisionSpec:
    """Gemma4UnifiedConfig -> VisionSpec. The tokens of a picture see each other in layers with a window, as in
    google-deepmind/gemma and in transformers' generate with a static cache; its forward without a mask lets them in all
    layers (issue 46711 of transformers)."""
    fields = ConfigFields(dict(config["vision_config"]), f"{where}, vision_config")
    text_fields = ConfigFields(MUTUAL | dict(config["text_config"]), f"{where}, text_config")
    width, side = fields.integer("mm_embed_dim", 3840), fields.integer("patch_size", 16)
    side *= fields.integer("pooling_kernel_size", 3)
    for field, value in (("output_proj_dims", width), ("model_patch_size", side)):
        if (size := fields.integer(field, value)) != value:
            raise fields.error(field, f"{field} is {size}, and other fields make it {value}")
    entries, norm = fields.integer("mm_posemb_size", 1120), NormSpec(1e-5, "layer")
    spec = VisionSpec(
        "gemma4_unified",
        width,
        (),
        side,
        ProjectorSpec(norm=NormSpec(fields.number("rms_norm_eps", 1e-6), "rms_plain"), bias=False),
        positions=PatchPositions("summed", entries, entries),
        pixel_norm=norm,
        patch_norm=norm,
        first_norm=norm,
        mutual="windows" if text_fields.get("use_bidirectional_attention") else None,
    )
    fields.harmless("initializer_range", "num_soft_tokens")  # which the picture processor says
    fields.finish("Gemma4UnifiedVisionModel")
    return spec


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of Gemma4UnifiedModel's embed_vision. Files have the positions of a column and of a row."""
    assert spec.vision is not None
    first, table = f"{EMBEDDER}.patch_ln1", f"{EMBEDDER}.pos_embedding"

    def by_axis(shape: Shape) -> View:
        return View.identity((shape[0] // 2, 2, shape[1])).transpose(1, 0, 2).merge(*shape)

    outside: dict[str, str | Stored] = {
        "vision/pixel_norm": first,
        "vision/pixel_norm/weight": patches_by_channel(first, spec.vision),
        "vision/pixel_norm/bias": patches_by_channel(first, spec.vision, "bias"),
        "vision/patches": f"{EMBEDDER}.patch_dense",
        "vision/patches/weight": patches_by_channel(f"{EMBEDDER}.patch_dense", spec.vision),
        "vision/patch_norm": f"{EMBEDDER}.patch_ln2",
        "vision/positions": Stored(table, table, by_axis),
        "vision/first_norm": f"{EMBEDDER}.pos_norm",
        "projector/out": f"{EMBEDDER}.multimodal_embedder.embedding_projection",
    }
    return one_to_one(spec, {}, outside, f"{EMBEDDER}.layers", VISION)
