"""How llama.cpp arranges the arrays of a layer: each as one tensor or several, and views of these."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from meshtune.families.gguf.architecture import Architecture
from meshtune.families.recurrent import grouped_rows
from meshtune.families.tensors import Shape, View
from meshtune.model.attention import AttentionSpec
from meshtune.model.block import Mixer
from meshtune.model.delta_net import DeltaNetSpec
from meshtune.model.latent_attention import LatentAttentionSpec
from meshtune.model.mamba2 import Mamba2Spec

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
