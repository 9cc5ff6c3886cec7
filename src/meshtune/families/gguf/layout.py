"""What a GGUF file of a model holds: metadata, and for every part of a parameter the tensor it lies in, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.families.gguf.architecture import (
    LAYER,
    LEAVES,
    OUTSIDE,
    Architecture,
    attention,
    experts,
    windows,
)
from meshtune.families.gguf.registry import ABSENT, ARCHITECTURES
from meshtune.families.gguf.rope import rope_metadata, rope_tensors
from meshtune.families.gguf.routing import routing_metadata, routing_refusal
from meshtune.families.tensors import View
from meshtune.model.attention import AttentionSpec
from meshtune.model.experts import ExpertsSpec
from meshtune.model.mlp import MlpSpec
from meshtune.model.spec import ModelSpec, abstract_params

PACKED_QKV, PACKED_GATE_UP = "attn/qkv", "mlp/gate_up"


@dataclasses.dataclass(frozen=True)
class GgufPart:
    """`params[path][index]` is `view` of the tensor `name`, less `offset`."""

    name: str
    path: str
    index: tuple[int, ...]
    view: View
    offset: float = 0.0


@dataclasses.dataclass(frozen=True)
class GgufLayout:
    """A model as llama.cpp has it: metadata without the tokenizer's, the parts of parameters in the order in which they
    are written, and tensors that are computed from the spec."""

    architecture: Architecture
    metadata: Mapping[str, Any]
    parts: tuple[GgufPart, ...]
    computed: Mapping[str, np.ndarray]


def gguf_layout(spec: ModelSpec) -> GgufLayout:
    """How a model is written. Raises UserError for one that llama.cpp does not compute, and says why."""
    architecture = _architecture(spec)
    rope = attention(spec).rope
    try:
        if reason := _refusal(spec, architecture):
            raise ValueError(reason)
        fields = usual_metadata(spec, architecture) | ({} if rope is None else rope_metadata(rope))
        fields |= architecture.write(spec)
        parts = _parts(spec, architecture)
    except ValueError as error:
        raise UserError(
            f"llama.cpp's '{architecture.name}' does not compute this {spec.family} model: {error}",
            where="--gguf",
            fix="export it as safetensors, for transformers, vLLM or SGLang",
        ) from error
    metadata = {f"{architecture.name}.{key}": value for key, value in fields.items()}
    return GgufLayout(architecture, metadata, tuple(parts), {} if rope is None else rope_tensors(rope))


def _architecture(spec: ModelSpec) -> Architecture:
    if spec.family in ARCHITECTURES:
        return ARCHITECTURES[spec.family]
    absent = "llama.cpp has no such architecture" if spec.family in ABSENT else "Meshtune does not write it as GGUF"
    raise UserError(
        f"a model of type '{spec.family}' cannot be written as GGUF: {absent}",
        where="--gguf",
        fix=f"export it as safetensors; as GGUF are written: {', '.join(sorted(ARCHITECTURES))}",
    )


def _refusal(spec: ModelSpec, architecture: Architecture) -> str | None:
    """What a model has that the architecture has not; None where there is nothing."""
    if spec.scored:
        return "it is a reward model"
    block = experts(spec)
    if block is not None and architecture.routed:
        if reason := routing_refusal(spec, block):
            return reason
    elif block is not None:
        if block.router.normalize != architecture.normalized:
            return f"norm_topk_prob is {block.router.normalize}"
        if any(layer.ffn is not None and layer.ffn != block for layer in spec.layer_kinds):
            return "layers without experts between those that have them"
    mixers = [kind.mixer for kind in spec.layer_kinds if isinstance(kind.mixer, AttentionSpec)]
    if architecture.name != "olmo" and any(mixer.clip is not None for mixer in mixers):
        return "queries, keys and values are clipped (clip_qkv)"
    if not architecture.own_scale and any(mixer.scale not in (None, mixer.head_dim**-0.5) for mixer in mixers):
        return "scores are scaled by another number than the root of a head's width"
    if not architecture.several_ropes and len(spec.ropes) > 1:
        return "layers with different rotary embeddings"
    networks = {block.activation for block in spec.blocks if isinstance(block, MlpSpec | ExpertsSpec)}
    if networks - {architecture.activation}:
        return f"an activation '{', '.join(sorted(networks))}' (hidden_act)"
    if spec.head_bias != ("head" in architecture.biases):
        return "its head has a bias" if spec.head_bias else "its head has no bias"
    return architecture.refusal(spec)


def usual_metadata(spec: ModelSpec, architecture: Architecture) -> dict[str, Any]:
    """The keys that most architectures have, without the architecture's name before them."""
    mixer, block = attention(spec), experts(spec)
    width = next((ffn.width for ffn in spec.blocks if isinstance(ffn, MlpSpec)), None)
    context = spec.max_length
    shortest = [window for window in windows(spec) if window is not None]
    if shortest and not architecture.windows:
        context = min(context, *shortest)
    if mixer.rope is not None and mixer.rope.kind == "dynamic":
        context = min(context, mixer.rope.original_length)  # up to which nothing is scaled
    fields: dict[str, Any] = {
        "context_length": context,
        "embedding_length": spec.embed,
        "block_count": spec.layers,
        "feed_forward_length": width if width is not None else (block.width if block else 0),
        "attention.head_count": mixer.heads,
        "attention.head_count_kv": mixer.kv_heads,
        "attention.key_length": mixer.head_dim,
        "attention.value_length": mixer.head_dim,
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


def _parts(spec: ModelSpec, architecture: Architecture) -> list[GgufPart]:
    numbers = {key: (layer, rows) for key, _, layer, rows in spec.positions()}
    names = {**architecture.names, **architecture.named(spec)}
    ordered: list[tuple[float, GgufPart]] = []
    place = -1.0
    for path, array in flatten(abstract_params(spec)).items():
        node, _, leaf = path.rpartition("/")
        if not array.is_stacked:
            if node not in OUTSIDE:
                raise ValueError(f"it has {path}")
            offset = 1.0 if node == "norm" and leaf == "weight" and spec.norm.has_offset else 0.0
            part = GgufPart(f"{OUTSIDE[node]}.{leaf}", path, (), View.identity(array.shape), offset)
            ordered.append((place, part))
            continue
        place = float(spec.layers)
        _, key, inner = node.split("/", 2)
        layer, rows = numbers[key]
        if (tensor := LEAVES.get(f"{inner}/{leaf}")) is not None:
            view = View.identity(array.shape[1:])
            ordered += [(float(n), GgufPart(f"blk.{n}.{tensor}", path, (r,), view)) for r, n in enumerate(rows)]
            continue
        if inner not in LAYER or (leaf == "bias" and not inner.endswith("_norm") and inner not in architecture.biases):
            raise ValueError(f"it has {inner}/{leaf}")
        stem = names.get(inner, LAYER[inner])
        mixer = layer.mixer
        view = _view(inner, leaf, array.shape[1:], mixer if isinstance(mixer, AttentionSpec) else None, architecture)
        offset = 1.0 if leaf == "weight" and inner.endswith("_norm") and spec.norm.has_offset else 0.0
        for row, number in enumerate(rows):
            ordered.append((float(number), GgufPart(f"blk.{number}.{stem}.{leaf}", path, (row,), view, offset)))
    return [part for _, part in sorted(ordered, key=lambda entry: entry[0])]


def _view(
    node: str, leaf: str, shape: tuple[int, ...], mixer: AttentionSpec | None, architecture: Architecture
) -> View:
    """The part of the tensor that one layer of a leaf of this shape is."""
    whole = View.identity(shape)
    if node in ("attn/q", "attn/k") and architecture.permuted and mixer is not None and mixer.rope is not None:
        heads = mixer.heads if node == "attn/q" else mixer.kv_heads
        pairs = (heads, mixer.head_dim // 2, 2)
        rest = tuple(range(3, 2 + len(shape)))
        return whole.split(*pairs, *shape[1:]).transpose(0, 2, 1, *rest).merge(*shape)
    if node == PACKED_QKV:
        assert mixer is not None
        group = mixer.heads // mixer.kv_heads
        return _qkv(shape, mixer.kv_heads, group, mixer.head_dim)
    if node == PACKED_GATE_UP:
        rest = tuple(range(2, 1 + len(shape)))
        return whole.split(2, shape[0] // 2, *shape[1:]).transpose(1, 0, *rest).merge(*shape)
    return whole


def _qkv(shape: tuple[int, ...], kv_heads: int, group: int, head_dim: int) -> View:
    """Rows of all queries, of all keys and of all values, as the queries, the keys and the values of each key-value
    head."""
    queries, total = kv_heads * group, kv_heads * (group + 2)
    order: list[int] = []
    for head in range(kv_heads):
        order += [*range(head * group, (head + 1) * group), queries + head, queries + kv_heads + head]
    return View.identity(shape).split(total, head_dim, *shape[1:]).permute(*order).merge(*shape)
