"""The tower of Qwen3-VL (https://arxiv.org/abs/2511.21631), Qwen3.5 and their mixtures: learned positions that are
stretched over the picture, and in Qwen3-VL features of some layers for the first layers of the decoder (DeepStack)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from meshtune.families.config_fields import ConfigFields, read_activation
from meshtune.families.packed import with_rows_in_blocks
from meshtune.families.tensors import Stored, TensorMap, one_to_one
from meshtune.families.vision.encoder import convolution, side_of
from meshtune.families.vision.qwen2_vl import check_output, check_sections, frames_of, rotated_attention
from meshtune.model.attention import AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import VISION, ModelSpec, stacks_of
from meshtune.model.vision import PatchPositions, ProjectorSpec, VisionSpec

TOWER = "model.visual"
MODULES: dict[str, str | Stored] = {
    "attn_norm": "norm1",
    "mlp_norm": "norm2",
    "attn/qkv": "attn.qkv",
    "attn/o": "attn.proj",
    "mlp/up": "mlp.linear_fc1",
    "mlp/down": "mlp.linear_fc2",
}
MERGER = {"norm": "norm", "in": "linear_fc1", "out": "linear_fc2"}


def vision_spec(config: Mapping[str, Any], where: str, text: ModelSpec) -> VisionSpec:
    """Qwen3VLConfig or Qwen3_5Config, or that of a mixture -> VisionSpec."""
    fields = ConfigFields(dict(config["vision_config"]), f"{where}, vision_config")
    width, merge = fields.integer("hidden_size"), fields.integer("spatial_merge_size", 2)
    check_output(fields, "out_hidden_size", text)
    gelu, count = read_activation(fields, default="gelu_pytorch_tanh"), fields.integer("depth", 27)
    mlp = MlpSpec(fields.integer("intermediate_size"), gelu, bias=True, gated=False)
    attention, norm = rotated_attention(fields, width), NormSpec(1e-6, "layer")
    entries, tapped = fields.integer("num_position_embeddings", 2304), fields.get("deepstack_visual_indexes", [])
    side = math.isqrt(entries)
    if side**2 != entries:
        raise fields.error("num_position_embeddings", f"num_position_embeddings is {entries}, which is no square")
    if list(tapped) != sorted(set(tapped)) or not all(0 <= n < count for n in tapped) or len(tapped) > text.layers:
        raise fields.error(
            "deepstack_visual_indexes",
            f"deepstack_visual_indexes is {tapped!r}: it must list layers of the {count} of the tower in ascending "
            f"order, at most {text.layers}, as many as the text model has",
        )
    layer = LayerSpec(attention, mlp, norm)
    layers = [dataclasses.replace(layer, tapped=number in tapped) for number in range(count)]
    merger = ProjectorSpec(merge, norm=norm, hidden=width * merge**2)
    spec = VisionSpec(
        "qwen3_vl",
        width,
        stacks_of(layers),
        side_of(fields, "patch_size"),
        dataclasses.replace(merger, norm_first=True),
        channels=fields.integer("in_channels", 3),
        frames=frames_of(fields),
        positions=PatchPositions("interpolated", side, side),
        rope=attention.rope,
        taps=(merger,) * len(tapped),
    )
    fields.harmless("initializer_range")
    fields.finish("Qwen3VLVisionModel", "Qwen3VLMoeVisionModel", "Qwen3_5VisionModel", "Qwen3_5MoeVisionModel")
    check_sections(config, where, text)
    return spec


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of the model's visual, the merger of which is the projector; those of the taps belong to the tower."""
    assert spec.vision is not None
    mixer = spec.vision.stacks[0].pattern[0].mixer
    assert isinstance(mixer, AttentionSpec)
    outside: dict[str, str | Stored] = {
        "vision/patches": f"{TOWER}.patch_embed.proj",
        "vision/patches/weight": convolution(f"{TOWER}.patch_embed.proj", spec.vision),
        "vision/positions": f"{TOWER}.pos_embed",
    }
    outside |= {f"projector/{ours}": f"{TOWER}.merger.{theirs}" for ours, theirs in MERGER.items()}
    for number in range(len(spec.vision.taps)):
        prefix = f"{TOWER}.deepstack_merger_list.{number}"
        outside |= {f"vision/taps/{number}/{ours}": f"{prefix}.{theirs}" for ours, theirs in MERGER.items()}
    return with_rows_in_blocks(one_to_one(spec, MODULES, outside, f"{TOWER}.blocks", VISION), mixer)
