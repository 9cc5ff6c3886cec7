"""The encoder of CLIP (https://arxiv.org/abs/2103.00020) and SigLIP (https://arxiv.org/abs/2303.15343), which towers of
many models are, and how the tensors of towers are stored."""

from __future__ import annotations

from meshtune.families.config_fields import ConfigFields, read_activation
from meshtune.families.tensors import Shape, Stored, View
from meshtune.model.attention import AttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeAxes, RopeSpec
from meshtune.model.vision import VisionSpec

MODULES: dict[str, str | Stored] = {
    "attn_norm": "layer_norm1",
    "mlp_norm": "layer_norm2",
    "attn/q": "self_attn.q_proj",
    "attn/k": "self_attn.k_proj",
    "attn/v": "self_attn.v_proj",
    "attn/o": "self_attn.out_proj",
    "mlp/up": "mlp.fc1",
    "mlp/down": "mlp.fc2",
}


def encoder_layer(fields: ConfigFields, activation: str, eps: float) -> LayerSpec:
    """A layer of the encoder, with the defaults of its activation and of layer_norm_eps."""
    width = fields.integer("hidden_size")
    heads, head_dim = heads_of(fields, "num_attention_heads", width)
    attention = AttentionSpec(heads, heads, head_dim, qkv_bias=True, out_bias=True, causal=False)
    gelu = read_activation(fields, default=activation)
    mlp = MlpSpec(fields.integer("intermediate_size"), gelu, bias=True, gated=False)
    return LayerSpec(attention, mlp, NormSpec(fields.number("layer_norm_eps", eps), "layer"))


def heads_of(fields: ConfigFields, field: str, width: int) -> tuple[int, int]:
    """(heads, numbers in each) of attention over `width` numbers."""
    heads = fields.integer(field)
    if width % heads:
        raise fields.error(field, f"a width of {width} does not divide by {heads} heads")
    return heads, width // heads


def rope_of_places(fields: ConfigFields, head_dim: int, field: str, axes: RopeAxes, theta: float = 1e4) -> RopeSpec:
    """The embedding that turns one half of the pairs by the row of a patch, the other by its column; `field` says how
    many numbers a head has."""
    if head_dim % 4:
        raise fields.error(field, f"the {head_dim} numbers of a head do not divide into pairs of two positions")
    block = {"rope_theta": fields.number("rope_theta", theta)} | fields.get("rope_parameters", {})
    if block.get("rope_type", "axial") not in ("axial", "default"):  # "default" in files of before transformers 5.23
        raise fields.error("rope_parameters", f"rope_parameters {block!r} are not implemented for a tower")
    return RopeSpec(float(block["rope_theta"]), head_dim, sections=(head_dim // 4,) * 2, axes=axes)


def side_of(fields: ConfigFields, field: str) -> int:
    """The side of a square in pixels: a number, or a pair of equal ones."""
    value = fields.get(field)
    sides = [value, value] if isinstance(value, int) else value
    if not isinstance(sides, list | tuple) or len(sides) != 2 or not all(type(n) is int and n > 0 for n in sides):
        raise fields.error(field, f"{field} is {value!r}, not a size in pixels or a pair of them")
    if sides[0] != sides[1]:
        raise fields.error(field, f"{field} is {value!r}: sides that differ are not implemented")
    return sides[0]


def patches_of(fields: ConfigFields, merge: int = 1) -> tuple[int, int]:
    """(the side of a patch in pixels, that of a tile in patches), where merge x merge patches become a feature."""
    side, tile = side_of(fields, "patch_size"), side_of(fields, "image_size")
    count = tile // side
    if not count or count % merge:
        raise fields.error(
            "image_size",
            f"a tile of {tile} x {tile} pixels has {count} x {count} patches of {side} x {side}, which do not divide "
            f"into features of {merge} x {merge}",
        )
    return side, count


def leading(name: str, count: int = 0) -> Stored:
    """A tensor that no module holds by itself, with `count` dimensions of one element before those of the array."""

    def view(shape: Shape) -> View:
        return View.identity((*(1,) * count, *shape)).merge(*shape)

    return Stored(name, name, view)


def patches_by_channel(module: str, vision: VisionSpec, leaf: str = "weight") -> Stored:
    """A parameter over patches, its last dimension, whose pixels come row by row with all channels of each."""

    def view(shape: Shape) -> View:
        before = len(shape) - 1
        pixels = View.identity(shape).split(*shape[:-1], vision.side, vision.side, vision.channels)
        return pixels.transpose(*range(before), before + 2, before, before + 1).merge(*shape)

    return Stored(f"{module}.{leaf}", module, view)


def convolution(module: str, vision: VisionSpec) -> Stored:
    """The weight of a convolution over patches, [D, channels, (frames,) side, side], as one of a linear layer."""
    frames = () if vision.frames == 1 else (vision.frames,)
    inside = (vision.channels, *frames, vision.side, vision.side)
    return Stored(f"{module}.weight", module, lambda shape: View.identity((shape[0], *inside)).merge(*shape))
