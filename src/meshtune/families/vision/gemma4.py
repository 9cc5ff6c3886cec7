"""The tower and the projector of Gemma 4 (https://ai.google.dev/gemma/docs): pictures of any size, whose patches are
rotated by column and row, and averaged; in its larger models the tokens of a picture see each other both ways in layers
with a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshtune.arrays.spec import ArraySpec
from meshtune.families import gemma2, qwen3
from meshtune.families.config_fields import ConfigFields, read_activation
from meshtune.families.tensors import Shape, Stored, TensorMap, View, one_to_one, with_view
from meshtune.families.vision.encoder import leading, patches_by_channel, rope_of_places, side_of
from meshtune.model.attention import AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.linear import LIMITS
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.spec import VISION, ModelSpec, stacks_of
from meshtune.model.vision import PatchPositions, ProjectorSpec, VisionSpec

DEFAULTS = {  # of Gemma4VisionConfig, which published configs leave out
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "patch_size": 16,
}
TOWER, PROJECTOR = "model.vision_tower", "model.embed_vision"
LINEAR = {f"attn/{part}": f"self_attn.{part}_proj" for part in "qkvo"} | {
    f"mlp/{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")
}


def vision_spec(config: Mapping[str, Any], where: str, text: ModelSpec) -> VisionSpec:
    """Gemma4Config -> VisionSpec."""
    fields = ConfigFields(DEFAULTS | dict(config["vision_config"]), f"{where}, vision_config")
    text_fields = ConfigFields(dict(config["text_config"]), f"{where}, text_config")
    text_fields.only("pad_token_id", 0)  # whose row of the per-layer table tokens of pictures have
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    width, head_dim, norm = (
        fields.integer("hidden_size"),
        fields.integer("head_dim"),
        NormSpec(fields.number("rms_norm_eps", 1e-6)),
    )
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"{heads} heads do not divide over {kv_heads} key-value heads")
    fields.only("attention_bias", False)
    clipped, entries = bool(fields.get("use_clipped_linears", False)), fields.integer("position_embedding_size", 10240)
    plain = NormSpec(norm.eps, "rms_plain")
    attention = AttentionSpec(
        heads,
        kv_heads,
        head_dim,
        rope_of_places(fields, head_dim, "head_dim", "axial", 100.0),
        scale=1.0,
        qk_norm=norm,
        v_norm=plain,
        causal=False,
        clipped=clipped,
    )
    activation = read_activation(fields, "hidden_activation", gemma2.TANH)
    layer = LayerSpec(
        attention, MlpSpec(fields.integer("intermediate_size"), activation, clipped=clipped), norm, "both"
    )
    spec = VisionSpec(
        "gemma4",
        width,
        stacks_of([layer] * fields.integer("num_hidden_layers")),
        side_of(fields, "patch_size"),
        ProjectorSpec(
            fields.integer("pooling_kernel_size", 3),
            "mean",
            norm=plain,
            scale=width**0.5,
            standardize=bool(fields.get("standardize", False)),
            bias=False,
        ),
        patch_bias=False,
        positions=PatchPositions("summed", entries, entries),
        rope=attention.rope,
        mutual="windows" if text_fields.get("use_bidirectional_attention") else None,
        centred=True,
    )
    # The number of tokens of a picture, which the picture processor says, and a size of layers that this tower lacks.
    fields.harmless("default_output_length", "global_head_dim", "initializer_range", "max_position_embeddings")
    fields.finish("Gemma4VisionModel")
    return spec


def tensors(spec: ModelSpec) -> list[TensorMap]:
    """The table of Gemma4Model's vision_tower and embed_vision. Files have the numbers of a head that the column turns
    before those that the row turns; in memory the two of a pair are half a head apart."""
    assert spec.vision is not None
    attention = spec.vision.stacks[0].pattern[0].mixer
    assert isinstance(attention, AttentionSpec)
    modules: dict[str, str | Stored] = {**gemma2.NORMS, **qwen3.NORMS}
    modules |= {node: f"{name}.linear" for node, name in LINEAR.items()}
    modules |= {
        f"{node}/{limit}": Stored(f"{name}.{limit}", f"{name}.linear", lambda _: View.identity(()).split(1))
        for node, name in LINEAR.items()
        for limit in LIMITS
    }
    table = f"{TOWER}.patch_embedder.position_embedding_table"

    def of_axes(shape: Shape) -> View:
        return View.identity((2, shape[0] // 2, shape[1])).merge(*shape)

    def in_pairs(array: ArraySpec) -> View:
        rows, *columns = array.shape[1:]
        quarter = attention.head_dim // 4
        order = [first + part for first in range(0, rows // quarter, 4) for part in (2, 0, 3, 1)]
        blocks = View.identity((rows, *columns)).split(len(order), quarter, *columns)
        return blocks.permute(*order).merge(rows, *columns)

    outside: dict[str, str | Stored] = {
        "vision/patches": patches_by_channel(f"{TOWER}.patch_embedder.input_proj", spec.vision),
        "vision/positions": Stored(table, table, of_axes),
        "projector/shift": leading(f"{TOWER}.std_bias"),
        "projector/stretch": leading(f"{TOWER}.std_scale"),
        "projector/out": f"{PROJECTOR}.embedding_projection",
    }
    entries = one_to_one(spec, modules, outside, f"{TOWER}.encoder.layers", VISION)
    for leaf in ("q/weight", "k/weight", "q_norm/weight", "k_norm/weight"):
        entries = with_view(entries, f"attn/{leaf}", in_pairs)
    return entries
