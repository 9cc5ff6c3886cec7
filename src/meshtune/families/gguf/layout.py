"""Lays out a model as a GGUF file has it: its metadata, and for every part of a parameter the tensor that it lies in,
as views of it. The names of architectures and of tensors are those of the package gguf, which maps a checkpoint's
names to them.

The names of architectures and of tensors are those of the package gguf, which maps a checkpoint's names to them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from jaxtyping import Float

from meshtune.arrays.tree import flatten, layer_site, stack_path
from meshtune.errors import UserError
from meshtune.families import tensors
from meshtune.families.gguf.architecture import (
    Architecture,
    attention,
    attentions,
    experts,
    layer_heads,
    layer_windows,
    rope_of,
    routing_metadata,
    routing_refusal,
)
from meshtune.families.gguf.registry import ARCHITECTURES
from meshtune.families.gguf.rope import rope_metadata, rope_tensors
from meshtune.families.recurrent import grouped_rows
from meshtune.families.tensors import Shape, View
from meshtune.model.attention import AttentionSpec
from meshtune.model.block import ENTER, LEAVE, Mixer
from meshtune.model.delta_net import DeltaNetSpec
from meshtune.model.experts import ExpertsSpec
from meshtune.model.latent_attention import LatentAttentionSpec
from meshtune.model.layer import LayerSpec
from meshtune.model.mamba2 import Mamba2Spec
from meshtune.model.mlp import MlpSpec
from meshtune.model.spec import ModelSpec, abstract_params

PACKED_QKV, PACKED_GATE_UP = "attn/qkv", ("mlp/gate_up", "mlp/shared/gate_up")


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """A tensor of an array: `view` of it is what `source` takes of the array. `stem` is its name, where that is not the
    usual one of the array."""

    view: View
    source: View | None = None
    stem: str = ""
    exponential: bool = False


def arrange(
    node: str, leaf: str, shape: Shape, mixer: Mixer | None, architecture: Architecture
) -> tuple[Arrangement, ...]:
    """The tensors that one layer of a leaf of this shape is written as."""
    if isinstance(mixer, AttentionSpec) and node.startswith("attn/"):
        return (Arrangement(_attention(node, shape, mixer, architecture)),)
    if isinstance(mixer, LatentAttentionSpec) and node == "attn/kv_heads":
        return _latent_heads(shape, mixer)
    if isinstance(mixer, DeltaNetSpec) and node.startswith("delta"):
        return _delta(node, leaf, shape, mixer, tiled=architecture.tiled_values)
    if isinstance(mixer, Mamba2Spec) and node.startswith("mamba"):
        return (_mamba(node, leaf, shape, mixer),)
    if node == "conv/in":
        thirds = View.identity(shape).split(3, shape[0] // 3, *shape[1:])
        return (Arrangement(thirds.transpose(1, 0, *range(2, 1 + len(shape))).merge(*shape)),)
    if node in PACKED_GATE_UP:
        return _gate_up(node, shape, architecture)
    return (Arrangement(View.identity(shape)),)


def _attention(node: str, shape: Shape, mixer: AttentionSpec, architecture: Architecture) -> View:
    rows = View.identity(shape)
    if node in ("attn/q", "attn/k") and architecture.permuted:  # of layers without a rotary embedding too
        heads = mixer.heads if node == "attn/q" else mixer.kv_heads
        pairs = (heads, mixer.head_dim // 2, 2)
        columns = tuple(range(3, 2 + len(shape)))
        return rows.split(*pairs, *shape[1:]).transpose(0, 2, 1, *columns).merge(*shape)
    if node == PACKED_QKV:
        return _qkv(shape, mixer.kv_heads, mixer.heads // mixer.kv_heads, mixer.head_dim)
    return rows


def _qkv(shape: Shape, kv_heads: int, group: int, head_dim: int) -> View:
    """Rows of all queries, of all keys and of all values, as the queries, the keys and the values of each key-value
    head."""
    queries, total = kv_heads * group, kv_heads * (group + 2)
    order: list[int] = []
    for head in range(kv_heads):
        order += [*range(head * group, (head + 1) * group), queries + head, queries + kv_heads + head]
    return View.identity(shape).split(total, head_dim, *shape[1:]).permute(*order).merge(*shape)


def _gate_up(node: str, shape: Shape, architecture: Architecture) -> tuple[Arrangement, ...]:
    """Rows of the gate and of up in turn, as two tensors, or as one that has all of the gate first."""
    half, columns = shape[0] // 2, shape[1:]
    if not architecture.parted_gate_up:
        halves = View.identity(shape).split(2, half, *columns)
        return (Arrangement(halves.transpose(1, 0, *range(2, 1 + len(shape))).merge(*shape)),)
    ending = "_shexp" if "shared" in node else ""
    pairs = View.identity(shape).split(half, 2, *columns)
    return tuple(
        Arrangement(
            View.identity((half, *columns)), pairs.slice(1, part, part + 1).merge(half, *columns), f"ffn_{name}{ending}"
        )
        for part, name in enumerate(("gate", "up"))
    )


def _latent_heads(shape: Shape, mixer: LatentAttentionSpec) -> tuple[Arrangement, ...]:
    """The projections of latents to keys, which is transposed, and to values, head by head."""
    heads, width, latent = mixer.heads, mixer.head_dim + mixer.value_dim, shape[1]
    by_head = View.identity(shape).split(heads, width, latent)
    keys = View.identity((heads, latent, mixer.head_dim)).transpose(0, 2, 1)
    values = View.identity((heads, mixer.value_dim, latent))
    return (
        Arrangement(keys, by_head.slice(1, 0, mixer.head_dim), "attn_k_b"),
        Arrangement(values, by_head.slice(1, mixer.head_dim, width), "attn_v_b"),
    )


def _delta(node: str, leaf: str, shape: Shape, mixer: DeltaNetSpec, tiled: bool) -> tuple[Arrangement, ...]:
    """Rows of all queries, keys and values. `tiled` says that value heads have another order: the first of every
    key head, the second of every key head, and so on."""
    groups, heads, columns = mixer.key_heads, mixer.value_heads, shape[1:]
    per_group = heads // groups
    place = [h % per_group * groups + h // per_group if tiled else h for h in range(heads)]
    if node in ("delta/qkv", "delta/filter"):
        return (Arrangement(_delta_rows(shape, mixer, place)),)
    if node == "delta/qkvz":
        wide, values = 2 * mixer.key_dim, per_group * mixer.value_dim
        by_group = View.identity(shape).split(groups, wide + 2 * values, *columns)
        rows = (groups * (wide + values), *columns)
        first = by_group.slice(1, 0, wide + values).merge(*rows)
        last = by_group.slice(1, wide + values, wide + 2 * values).merge(mixer.values, *columns)
        gate = _by_head((mixer.values, *columns), place, mixer.value_dim)
        return Arrangement(_delta_rows(rows, mixer, place), first, "attn_qkv"), Arrangement(gate, last, "attn_gate")
    if node == "delta/z":
        return (Arrangement(_by_head(shape, place, mixer.value_dim)),)
    if node in ("delta/a", "delta/b") or leaf in ("A_log", "dt_bias"):
        return (Arrangement(_by_head(shape, place, 1), exponential=leaf == "A_log"),)
    if node == "delta/out" and tiled:
        in_file = View.identity(shape).split(shape[0], per_group, groups, mixer.value_dim)
        return (Arrangement(in_file.transpose(0, 2, 1, 3).merge(*shape)),)
    return (Arrangement(View.identity(shape)),)


def _by_head(shape: Shape, place: Sequence[int], width: int) -> View:
    return View.identity(shape).split(len(place), width, *shape[1:]).permute(*place).merge(*shape)


def _delta_rows(shape: Shape, mixer: DeltaNetSpec, place: Sequence[int]) -> View:
    unit = math.gcd(mixer.key_dim, mixer.value_dim)
    key, value = mixer.key_dim // unit, mixer.value_dim // unit
    groups, per_group = mixer.key_heads, mixer.value_heads // mixer.key_heads
    order: list[int] = []
    for group in range(groups):
        order += [section * groups * key + group * key + row for section in (0, 1) for row in range(key)]
        for head in range(group * per_group, (group + 1) * per_group):
            order += [2 * groups * key + place[head] * value + row for row in range(value)]
    return View.identity(shape).split(len(order), unit, *shape[1:]).permute(*order).merge(*shape)


def _mamba(node: str, leaf: str, shape: Shape, mixer: Mamba2Spec) -> Arrangement:
    if node in ("mamba/in", "mamba/filter"):
        sections = mixer.sections if node == "mamba/in" else mixer.sections[1:4]
        return Arrangement(grouped_rows(shape, sections, mixer.groups))
    if leaf in ("A_log", "D"):
        return Arrangement(View.identity((*shape, 1)).merge(*shape), exponential=leaf == "A_log")
    if node == "mamba/norm":
        return Arrangement(View.identity((mixer.groups, shape[0] // mixer.groups)).merge(*shape))
    return Arrangement(View.identity(shape))


CONVERTER = (
    "leave out --gguf and name a folder in --to: it is written as safetensors, for transformers, vLLM and SGLang, and "
    "llama.cpp's own convert_hf_to_gguf.py converts such a folder where llama.cpp knows the model"
)
HEAD = "output.weight"
TABLE = "per_layer/table"
LIMITED = ("streams/predict", "streams/correct")  # whose numbers count up to the coefficients' limit
# Node outside the layers that has one array for each number from 1 on -> the tensor that they are stacked in.
STACKED = {ENTER: "altup_proj", LEAVE: "altup_unembd_proj"}
# Nodes and leaves of a layer whose tensors are not those that a checkpoint's names are mapped to.
NAMES = {
    "mlp/down": "ffn_down",
    "mlp/experts/gate": "ffn_gate_exps",
    "mlp/experts/up": "ffn_up_exps",
    "mlp/experts/down": "ffn_down_exps",
    "mlp/router/correction": "exp_probs_b.bias",
    "mlp/router/scales/scale": "ffn_gate_inp.scale",
    "mlp/router/scales/per_expert_scale": "ffn_down_exps.scale",
    "delta/dt_bias": "ssm_dt.bias",
    "mamba/dt_bias": "ssm_dt.bias",
}


@dataclasses.dataclass(frozen=True)
class GgufPart:
    """`params[path][index]`, or what `source` takes of it, is `view` of the tensor `name`, less `offset`.

    Where an array is written as several tensors, each has a `source`; a tensor of several arrays has a part for each,
    with views that make it up. With `exponential` the tensor holds -exp of the numbers, and numbers beyond `limit` are
    written as it. `padding` rows follow in the tensor that are equal to its first, and are not read back.
    """

    name: str
    path: str
    index: tuple[int, ...]
    view: View
    offset: float = 0.0
    source: View | None = None
    exponential: bool = False
    padding: int = 0
    limit: float | None = None

    def __post_init__(self):
        assert self.view.is_identity or not self.padding, "rows are those of an array as it is"

    @property
    def is_plain(self) -> bool:
        """Whether the tensor holds a rearrangement of the whole array, with an offset."""
        return self.source is None and not self.exponential and self.limit is None

    @property
    def tensor_shape(self) -> Shape:
        """The shape of the whole tensor."""
        return (self.view.tensor[0] + self.padding, *self.view.tensor[1:])

    @property
    def array_shape(self) -> Shape:
        """The shape of `params[path][index]`."""
        return self.view.shape if self.source is None else self.source.tensor

    def to_tensor(self, array: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        """The tensor of a whole array, in float32, without padding."""
        tensor = np.empty(self.view.tensor, np.float32)
        self.into_tensor(array, tensor)
        return tensor

    def into_tensor(self, array: Float[np.ndarray, "..."], tensor: Float[np.ndarray, "..."]) -> None:
        """Writes a whole array to its place in the tensor."""
        part = array if self.source is None else self.source.read(array)
        part = -np.exp(part) if self.exponential else part
        part = part if self.limit is None else np.clip(part, -self.limit, self.limit)
        self.view.write(part + np.float32(self.offset), tensor)

    def into_array(self, tensor: Float[np.ndarray, "..."], array: Float[np.ndarray, "..."]) -> None:
        """Writes what a tensor holds to its place in the array."""
        part = self.view.read(tensor - np.float32(self.offset))
        part = np.log(-part) if self.exponential else part
        (self.source or View.identity(part.shape)).write(np.ascontiguousarray(part), array)


@dataclasses.dataclass(frozen=True)
class GgufLayout:
    """A model as llama.cpp has it: metadata without the tokenizer's, the parts of parameters in the order in which they
    are written, and tensors that are computed from the spec."""

    architecture: Architecture
    metadata: Mapping[str, Any]
    parts: tuple[GgufPart, ...]
    computed: Mapping[str, np.ndarray]

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every tensor that parameters are written as."""
        return {part.name: part.tensor_shape for part in self.parts}


def gguf_layout(spec: ModelSpec) -> GgufLayout:
    """Describes how a model is written. Raises UserError for one that llama.cpp does not compute, and says why."""
    if spec.family not in ARCHITECTURES:
        raise UserError(
            f"models of type '{spec.family}' are not written as GGUF: Meshtune writes only those that are deployed to "
            "llama.cpp most (`meshtune families --markdown` names them)",
            where="--gguf",
            fix=CONVERTER,
        )
    architecture, rope = ARCHITECTURES[spec.family], rope_of(spec)
    try:
        if reason := _refusal(spec, architecture):
            raise ValueError(reason)
        fields = _usual_metadata(spec, architecture)
        if rope is not None:
            fields |= rope_metadata(rope, architecture.latent, architecture.rounded_yarn)
        fields |= architecture.write(spec)
        parts = _parts(spec, architecture)
    except ValueError as error:
        raise UserError(
            f"llama.cpp's '{architecture.name}' does not compute this {spec.family} model: {error}",
            where="--gguf",
            fix=CONVERTER,
        ) from error
    metadata = {f"{architecture.name}.{key}": value for key, value in fields.items() if value is not None}
    computed = {name: np.broadcast_to(np.float32(0), shape) for name, shape in architecture.unused(spec).items()}
    computed |= {} if rope is None else rope_tensors(rope)
    return GgufLayout(architecture, metadata, tuple(parts), computed)


def _refusal(spec: ModelSpec, architecture: Architecture) -> str | None:
    """Names what a model has that the architecture has not."""
    if spec.scored:
        return "it is a reward model"
    block = experts(spec)
    if block is not None and architecture.routed:
        if reason := routing_refusal(spec, block, architecture.latent):
            return reason
    elif block is not None and not architecture.own_routing:
        if block.router.normalize != architecture.normalized:
            return f"norm_topk_prob is {block.router.normalize}"
        if any(layer.ffn is not None and layer.ffn != block for layer in spec.layer_kinds):
            return "layers without experts between those that have them"
    mixers = attentions(spec)
    if any(mixer.clip is not None for mixer in mixers):
        return "queries, keys and values are clipped (clip_qkv)"
    if not architecture.own_scale and any(mixer.scale not in (None, mixer.head_dim**-0.5) for mixer in mixers):
        return "scores are scaled by another number than the root of a head's width"
    if not architecture.several_ropes and len(spec.ropes) > 1:
        return "layers with different rotary embeddings"
    networks = {block.activation for block in spec.blocks if isinstance(block, MlpSpec | ExpertsSpec)}
    if networks - {architecture.activation}:
        return f"an activation '{', '.join(sorted(networks))}' (hidden_act)"
    if architecture.head == "embedding" and not spec.tied:
        return "its head is not its embedding"
    if spec.head_bias != ("head" in architecture.biases):
        return "its head has a bias" if spec.head_bias else "its head has no bias"
    return architecture.refusal(spec)


def _usual_metadata(spec: ModelSpec, architecture: Architecture) -> dict[str, Any]:
    """The keys that most architectures have, without the architecture's name before them."""
    block = experts(spec)
    width = next((ffn.width for ffn in spec.blocks if isinstance(ffn, MlpSpec)), None)
    fields: dict[str, Any] = {
        "context_length": _context(spec, architecture),
        "embedding_length": spec.embed,
        "block_count": spec.layers,
        "feed_forward_length": width if width is not None else (block.width if block else 0),
        **_heads(spec, architecture),
        "vocab_size": spec.vocab,
    }
    kind = "layer_norm_epsilon" if spec.norm.kind.startswith("layer") else "layer_norm_rms_epsilon"
    fields[f"attention.{kind}"] = spec.norm.eps
    if block is not None:
        fields |= {"expert_count": block.router.experts, "expert_used_count": block.router.top_k}
        fields["expert_feed_forward_length"] = block.width
        if architecture.routed:
            fields |= routing_metadata(spec, block)
    if any(layer.placement == "parallel_shared" for layer in spec.layer_kinds):
        fields["use_parallel_residual"] = True
    return fields


def _context(spec: ModelSpec, architecture: Architecture) -> int:
    context, rope = spec.max_length, rope_of(spec)
    shortest = [window for window in layer_windows(spec) if window is not None]
    if shortest and not architecture.windows:
        context = min(context, *shortest)
    if rope is not None and rope.kind == "dynamic":
        context = min(context, rope.original_length)  # up to which nothing is scaled
    return context


def _heads(spec: ModelSpec, architecture: Architecture) -> dict[str, Any]:
    """The numbers of heads; where layers without attention are marked by none, the keys' of every layer."""
    if not attentions(spec):
        return {"attention.head_count": 0}
    mixer = attention(spec)
    return {
        "attention.head_count": mixer.heads,
        "attention.head_count_kv": layer_heads(spec) if architecture.marked_layers else mixer.kv_heads,
        "attention.key_length": mixer.head_dim,
        "attention.value_length": mixer.head_dim,
    }


def _parts(spec: ModelSpec, architecture: Architecture) -> list[GgufPart]:
    """All parts: those before the layers, layer by layer, those after. Raises ValueError for an array that llama.cpp
    has no tensor for."""
    numbers = {key: (layer, rows) for key, _, layer, rows in spec.positions()}
    names = _TensorNames(spec, architecture)
    ordered: list[tuple[float, GgufPart]] = []
    place = -1.0
    for path, array in flatten(abstract_params(spec)).items():
        stacked = stack_path(path)
        if stacked is None:
            part = _outside_part(spec, names, path, array.shape)
            ordered.append((place, part))
            if path == "embed/weight" and spec.tied and architecture.head == "own":
                ordered.append((place, dataclasses.replace(part, name=HEAD)))
            continue
        place = float(spec.layers)
        layer, rows = numbers[stacked.key]
        for row, number in enumerate(rows):
            ordered += [
                (float(number), part)
                for part in _layer_parts(spec, architecture, names, path, row, number, layer, array.shape[1:])
            ]
    return [part for _, part in sorted(ordered, key=lambda entry: entry[0])]


def _layer_parts(
    spec: ModelSpec,
    architecture: Architecture,
    names: _TensorNames,
    path: str,
    row: int,
    number: int,
    layer: LayerSpec,
    shape: Shape,
) -> list[GgufPart]:
    """The parts of one array of a layer."""
    stacked = stack_path(path)
    assert stacked is not None, path
    inner = stacked.site
    node, _, leaf = inner.rpartition("/")
    if leaf == "bias" and not node.endswith("_norm") and node not in architecture.biases:
        raise ValueError(f"it has {inner}")
    offset = 1.0 if leaf == "weight" and node.endswith("_norm") and spec.norm.has_offset else 0.0
    streams = None if layer.extras is None or node not in LIMITED else layer.extras.streams
    limit = None if streams is None else streams.clip
    parts: list[GgufPart] = []
    for entry in arrange(node, leaf, shape, layer.mixer, architecture):
        name = f"blk.{number}.{entry.stem}.{leaf}" if entry.stem else names.of_layer(path, row, number)
        parts.append(GgufPart(name, path, (row,), entry.view, offset, entry.source, entry.exponential, limit=limit))
    return parts


def _outside_part(spec: ModelSpec, names: _TensorNames, path: str, shape: Shape) -> GgufPart:
    """The part of an array outside the layers."""
    node, _, leaf = path.rpartition("/")
    stack, _, number = node.rpartition("/")
    if stack in STACKED and spec.streams is not None:
        place, count = int(number) - 1, spec.streams.count - 1
        view = View.identity((count, *shape)).slice(0, place, place + 1).merge(*shape)
        return GgufPart(f"{STACKED[stack]}.{leaf}", path, (), view)
    offset = 1.0 if node == "norm" and leaf == "weight" and spec.norm.has_offset else 0.0
    # Tokens beyond the table have its first row, and llama.cpp has a row for every token.
    padding = spec.vocab - shape[0] if node == TABLE else 0
    if padding < 0:
        raise ValueError("vocab_size_per_layer_input is larger than vocab_size")
    return GgufPart(names.of(path, ()), path, (), View.identity(shape), offset, padding=padding)


class _TensorNames:
    """llama.cpp's names of a model's tensors, found by those of a checkpoint of its text model."""

    def __init__(self, spec: ModelSpec, architecture: Architecture):
        kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture.name)
        self._map = get_tensor_name_map(kind, spec.layers)
        text = dataclasses.replace(spec, composite=None)
        self._files = {(entry.path, entry.index): entry.name for entry in tensors(text)}

    def of_layer(self, path: str, row: int, number: int) -> str:
        """The name of the tensor of an array of a layer, which is a row of its stack."""
        inner = layer_site(path)
        node, _, leaf = inner.rpartition("/")
        if inner in NAMES:
            return f"blk.{number}.{NAMES[inner]}"
        return f"blk.{number}.{NAMES[node]}.{leaf}" if node in NAMES else self.of(path, (row,))

    def of(self, path: str, index: tuple[int, ...]) -> str:
        """The name of the tensor of `params[path][index]`. Raises ValueError where there is none."""
        name = self._map.get_name(self._files[path, index], (".weight", ".bias"))
        if name is None:
            raise ValueError(f"it has {layer_site(path)}")
        leaf = path.rpartition("/")[2]
        return f"{name}.weight" if leaf == "weight" and not name.endswith(".weight") else name
