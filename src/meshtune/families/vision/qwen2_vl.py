"""The towers of Qwen2-VL (https://arxiv.org/abs/2409.12191) and Qwen2.5-VL (https://arxiv.org/abs/2502.13923): pictures
of any size, rotated by row and column; Qwen2.5-VL's sees windows in most of its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_activation
from meshtune.families.packed import with_rows_in_blocks
from meshtune.families.tensors import Stored, TensorMap, one_to_one
from meshtune.families.vision.encoder import convolution, heads_of, rope_of_places, side_of
from meshtune.model.attention import AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import VISION, ModelSpec, stacks_of
from meshtune.model.vision import ProjectorSpec, VisionSpec

TOWER = "model.visual"
MODULES: dict[str, str | Stored] = {
    "attn_norm": "norm1",
    "mlp_norm": "norm2",
    "attn/qkv": "attn.qkv",
    "attn/o": "attn.proj",
    "mlp/up": "mlp.fc1",
    "mlp/down": "mlp.fc2",
}
GATED = {name: f"mlp.{name.removeprefix('mlp/')}_proj" for name in ("mlp/gate", "mlp/up", "mlp/down")}
OUTSIDE: dict[str, str | Stored] = {
    "vision/patches": f"{TOWER}.patch_embed.proj",
    "projector/norm": f"{TOWER}.merger.ln_q",
    "projector/in": f"{TOWER}.merger.mlp.0",
    "projector/out": f"{TOWER}.merger.mlp.2",
}
# Of video alone, or of hub configs, and read by no version of transformers.
UNUSED = ("tokens_per_second", "in_chans", "spatial_patch_size", "initializer_range", "fps", "temporal_conv")


def vision_spec(config: Mapping[str, Any], where: str, text: ModelSpec) -> VisionSpec:
    """Qwen2VLConfig or Qwen2_5_VLConfig -> VisionSpec."""
    fields = ConfigFields(dict(config["vision_config"]), f"{where}, vision_config")
    is_older = config["model_type"] == "qwen2_vl"
    width = fields.integer("embed_dim" if is_older else "hidden_size")
    norm = NormSpec(1e-6, "layer" if is_older else "rms")
    if is_older:
        gelu = read_activation(fields, default="quick_gelu")
        mlp = MlpSpec(int(width * fields.number("mlp_ratio", 4.0)), gelu, bias=True, gated=False)
        check_output(fields, "hidden_size", text)
    else:
        mlp = MlpSpec(fields.integer("intermediate_size"), read_activation(fields), bias=True)
        check_output(fields, "out_hidden_size", text)
    attention, merge = rotated_attention(fields, width), fields.integer("spatial_merge_size", 2)
    count, side = fields.integer("depth", 32), side_of(fields, "patch_size")
    layer, window, layers = LayerSpec(attention, mlp, norm), None, list[LayerSpec]()
    if is_older:
        layers = [layer] * count
    else:
        pixels, full = fields.integer("window_size", 112), fields.get("fullatt_block_indexes", (7, 15, 23, 31))
        window = pixels // merge // side * merge
        if not window:
            raise fields.error("window_size", f"a window of {pixels} pixels is smaller than a feature")
        narrow = dataclasses.replace(layer, mixer=dataclasses.replace(attention, windowed=True))
        layers = [layer if number in full else narrow for number in range(count)]
    spec = VisionSpec(
        "qwen2_vl",
        width,
        stacks_of(layers),
        side,
        ProjectorSpec(merge, norm=norm, norm_first=True, hidden=width * merge**2),
        channels=fields.integer("in_channels", 3),
        frames=frames_of(fields),
        patch_bias=False,
        rope=attention.rope,
        window=window,
    )
    fields.harmless(*UNUSED)
    fields.finish("Qwen2VisionTransformerPretrainedModel", "Qwen2_5_VisionTransformerPretrainedModel")
    return spec


def rotated_attention(
    fields: ConfigFields, width: int, *, qkv_bias: bool = True, out_bias: bool = True
) -> AttentionSpec:
    """Attention with packed projections, rotated by the row of a patch in one half of the pairs, by its column in the
    other."""
    heads, head_dim = heads_of(fields, "num_heads", width)
    rope = rope_of_places(fields, head_dim, "num_heads", "axial")
    options = (heads, heads, head_dim, rope)
    return AttentionSpec(*options, qkv_bias=qkv_bias, out_bias=out_bias, packed=True, causal=False)


def check_sections(config: Mapping[str, Any], where: str, text: ModelSpec) -> None:
    """Raises UserError for a text model whose rotary embeddings do not know the place of a picture's tokens."""
    if not all(rope.sections for rope in text.ropes):
        raise ConfigFields(dict(config), where).error(
            "text_config", "the text model's rope_parameters have no mrope_section, so no place of a picture turns it"
        )


def frames_of(fields: ConfigFields) -> int:
    """The frames that a patch extends over; a picture is repeated for them."""
    frames = fields.get("temporal_patch_size", 2)
    if type(frames) is not int or frames < 1:
        raise fields.error("temporal_patch_size", f"temporal_patch_size is {frames!r}, not a positive whole number")
    return frames


def check_output(fields: ConfigFields, field: str, text: ModelSpec) -> None:
    """Raises UserError where features are not as wide as the embeddings of the text model."""
    if (width := fields.integer(field)) != text.embed:
        raise fields.error(field, f"features are {width} wide, and embeddings of the text model {text.embed}")


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of the model's visual, the merger of which is the projector."""
    assert spec.vision is not None
    layer = spec.vision.stacks[0].pattern[0]
    assert isinstance(layer.mixer, AttentionSpec)
    assert isinstance(layer.ffn, MlpSpec)
    outside = OUTSIDE | {"vision/patches/weight": convolution(f"{TOWER}.patch_embed.proj", spec.vision)}
    modules = MODULES | (GATED if layer.ffn.gated else {})
    return with_rows_in_blocks(one_to_one(spec, modules, outside, f"{TOWER}.blocks", VISION), layer.mixer)
