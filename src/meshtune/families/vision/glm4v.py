"""The tower and the projector of GLM-4.1V to 4.6V (https://arxiv.org/abs/2507.01006): pictures of any size, rotated by
row and column, with learned positions that are stretched over the picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_activation
from meshtune.families.packed import with_rows_in_blocks
from meshtune.families.tensors import Shape, Stored, TensorMap, View, one_to_one
from meshtune.families.vision.encoder import convolution, patches_of
from meshtune.families.vision.qwen2_vl import GATED, check_output, check_sections, frames_of, rotated_attention
from meshtune.model.attention import AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import VISION, ModelSpec, stacks_of
from meshtune.model.vision import GatedProjectorSpec, PatchPositions, VisionSpec

TOWER = "model.visual"
MODULES: dict[str, str | Stored] = {
    "attn_norm": "norm1",
    "mlp_norm": "norm2",
    "attn/qkv": "attn.qkv",
    "attn/o": "attn.proj",
    **GATED,
}
MERGER = {
    "in": "proj",
    "norm": "post_projection_norm",
    "gate": "gate_proj",
    "up": "up_proj",
    "out": "down_proj",
}


def vision_spec(config: Mapping[str, Any], where: str, text: ModelSpec) -> VisionSpec:
    """Glm4vConfig or Glm46VConfig, or that of a mixture -> VisionSpec."""
    defaults = {"hidden_size": 1536, "out_hidden_size": 4096, "intermediate_size": 13696, "num_heads": 12}
    defaults |= {"image_size": 336, "patch_size": 14, "depth": 24}
    fields = ConfigFields(defaults | dict(config["vision_config"]), f"{where}, vision_config")
    width, norm = fields.integer("hidden_size"), NormSpec(fields.number("rms_norm_eps", 1e-5))
    check_output(fields, "out_hidden_size", text)
    merge, (side, table) = fields.integer("spatial_merge_size", 2), patches_of(fields)
    attention = rotated_attention(fields, width, qkv_bias=bool(fields.get("attention_bias", False)), out_bias=False)
    activation = read_activation(fields)
    layer = LayerSpec(attention, MlpSpec(text.embed, activation), norm)  # whose width is that of features
    spec = VisionSpec(
        "glm4v",
        width,
        stacks_of([layer] * fields.integer("depth")),
        side,
        GatedProjectorSpec(merge, fields.integer("intermediate_size"), NormSpec(1e-5, "layer"), activation),
        channels=fields.integer("in_channels", 3),
        frames=frames_of(fields),
        positions=PatchPositions("cubic", table, table),
        rope=attention.rope,
        patch_norm=norm,
        norm=norm,
    )
    fields.harmless("initializer_range", "hidden_dropout_prob")
    fields.finish("Glm4vVisionModel", "Glm4vMoeVisionModel")
    check_sections(config, where, text)
    return spec


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of the model's visual, whose downsample and merger are the projector."""
    assert spec.vision is not None
    mixer, merge = spec.vision.stacks[0].pattern[0].mixer, spec.vision.merge
    assert isinstance(mixer, AttentionSpec)

    def merging(shape: Shape) -> View:
        return View.identity((shape[0], shape[1] // merge**2, merge, merge)).merge(*shape)

    outside: dict[str, str | Stored] = {
        "vision/patches": f"{TOWER}.patch_embed.proj",
        "vision/patches/weight": convolution(f"{TOWER}.patch_embed.proj", spec.vision),
        "vision/positions": f"{TOWER}.embeddings.position_embedding",
        "vision/patch_norm": f"{TOWER}.post_conv_layernorm",
        "vision/norm": f"{TOWER}.post_layernorm",
        "projector/convolution": f"{TOWER}.downsample",
        "projector/convolution/weight": Stored(f"{TOWER}.downsample.weight", f"{TOWER}.downsample", merging),
    }
    outside |= {f"projector/{ours}": f"{TOWER}.merger.{theirs}" for ours, theirs in MERGER.items()}
    return with_rows_in_blocks(one_to_one(spec, MODULES, outside, f"{TOWER}.blocks", VISION), mixer)
