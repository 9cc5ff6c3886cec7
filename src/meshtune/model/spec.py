"""What a model is: hyperparameters, the pattern of its layers, and the abstract tree of its parameters.

Everything that needs to know which parameters exist (initialising, loading, sharding, adapters, export, memory
estimates) reads `abstract_params(spec)`; nothing else lists parameters.

Shape legend, used all over Meshtune: B batch, T length, D embed, H heads, K kv heads, h head_dim, F ffn, V vocab,
L layers, R rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from meshtune.arrays.spec import ArraySpec, Role
from meshtune.arrays.tree import Tree

PACKED = "packed_heads"  # the logical axis of rows of queries, keys and values, head by head


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding.

    `kind` is the HF rope type. `parameters` holds that type's own numbers (factor, low_freq_factor, ...), sorted by
    name. `original_length` is the context the base frequencies were trained for, `max_length` the model's
    max_position_embeddings.
    """

    theta: float
    head_dim: int
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    parameters: tuple[tuple[str, float], ...] = ()
    original_length: int = 0
    max_length: int = 0


@dataclasses.dataclass(frozen=True)
class AlibiSpec:
    """Attention with linear biases (https://arxiv.org/abs/2108.12409) in the place of rotary positions.

    A score loses its head's slope, one of `slopes`, for every position from query back to key. `max_length` is the
    context that the model is for.
    """

    slopes: tuple[float, ...]
    max_length: int


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What differs from layer to layer. `window` is the sliding window in tokens; None sees the whole past."""

    window: int | None = None


@dataclasses.dataclass(frozen=True)
class Stack:
    """`repeats` copies of a short pattern of layers, scanned over as one group."""

    pattern: tuple[LayerSpec, ...]
    repeats: int

    @property
    def layers(self) -> int:
        return len(self.pattern) * self.repeats


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, as pure data. `dtype` is the dtype the weights are kept in.

    A `scored` model gives every token one score instead of the next token's logits: a reward model. Positions are
    rotary (`rope`) or biases (`alibi`). With `packed_qkv` one projection makes queries, keys and values (see
    abstract_params). With `norm_head` the rows of the output head are divided by their length before logits are made
    of them; what is stored and trained are the rows as they are.
    """

    family: str
    vocab: int
    embed: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    stacks: tuple[Stack, ...]
    norm_eps: float
    dtype: str = "float32"
    activation: Literal["silu", "gelu_tanh", "gelu", "relu"] = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    init_std: float = 0.02
    scored: bool = False
    packed_qkv: bool = False
    norm_head: bool = False
    alibi: AlibiSpec | None = None

    @property
    def layers(self) -> int:
        """L, the number of decoder layers."""
        return sum(stack.layers for stack in self.stacks)

    @property
    def max_length(self) -> int:
        """The context that the model is for, in tokens; 0 where its config does not say."""
        places = self.alibi or self.rope
        return 0 if places is None else places.max_length

    @property
    def output(self) -> str:
        """Path of the weight that makes logits, or a scored model's score, of hidden states."""
        return "score/weight" if self.scored else "embed/weight" if self.tied else "head/weight"

    def positions(self) -> Iterator[tuple[str, int, LayerSpec, list[int]]]:
        """Yields (key in params["layers"], repeats, layer spec, the model's layer numbers in scan order).

        The key is "s.p": stack s, position p of its pattern. Row r of that stacked subtree is layer numbers[r].
        """
        first = 0
        for s, stack in enumerate(self.stacks):
            width = len(stack.pattern)
            for p, layer in enumerate(stack.pattern):
                yield f"{s}.{p}", stack.repeats, layer, [first + r * width + p for r in range(stack.repeats)]
            first += stack.layers


def stacks_of(layers: list[LayerSpec]) -> tuple[Stack, ...]:
    """Groups a list of layers into the stacks to scan: the shortest repeating pattern, or runs of equal layers."""
    assert layers
    n = len(layers)
    for width in range(1, min(n // 2, 16) + 1):
        pattern, whole = layers[:width], n // width * width
        if layers[:whole] == pattern * (n // width):
            rest = layers[whole:]
            head = (Stack(tuple(pattern), n // width),)
            return head + (stacks_of(rest) if rest else ())
    runs: list[Stack] = []
    for layer in layers:
        if runs and runs[-1].pattern == (layer,):
            runs[-1] = Stack((layer,), runs[-1].repeats + 1)
        else:
            runs.append(Stack((layer,), 1))
    return tuple(runs)


def split_stacks(spec: ModelSpec, at: int) -> ModelSpec:
    """The same model with a stack boundary before layer `at`, so that the layers on either side are separate arrays."""
    flat = [layer for stack in spec.stacks for _ in range(stack.repeats) for layer in stack.pattern]
    assert 0 <= at <= len(flat), (at, len(flat))
    parts = [part for part in (flat[:at], flat[at:]) if part]
    return dataclasses.replace(spec, stacks=tuple(s for part in parts for s in stacks_of(part)))


def abstract_params(spec: ModelSpec) -> Tree:
    """The tree of `ArraySpec` for a model. Linear weights are [out, in], as Hugging Face stores them.

    embed/weight [V, D]; layers/"s.p"/{attn_norm, attn/{q,k,v,o,q_norm,k_norm}, mlp_norm, mlp/{gate,up,down}} with a
    leading `layers` axis each; norm/weight [D]; head/weight [V, D] unless tied, or score/weight [1, D] if scored.

    With `packed_qkv` attn/qkv [3 H h, D] stands for q, k and v: for each head its h rows of queries, of keys and of
    values, so that tp, which splits the rows, gives every device whole heads (families.baichuan maps them to files).
    """
    D, F, Hh, Kh, h = spec.embed, spec.ffn, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.head_dim

    def array(
        *dims: tuple[int, str], role: Role, init: Literal["normal", "ones", "zeros"] = "normal", head_rows: int = 1
    ) -> ArraySpec:
        shape, axes = tuple(n for n, _ in dims), tuple(a for _, a in dims)
        return ArraySpec(shape, spec.dtype, axes, init, role=role, head_rows=head_rows)

    def layer(repeats: int) -> Tree:
        L = (repeats, "layers")

        def norm(n: int, axis: str) -> Tree:
            return {"weight": array(L, (n, axis), role="vector", init="ones")}

        def linear(out: tuple[int, str], into: tuple[int, str], bias: bool, head_rows: int = 1) -> Tree:
            tree = {"weight": array(L, out, into, role="matrix", head_rows=head_rows)}
            return tree | {"bias": array(L, out, role="vector", init="zeros")} if bias else tree

        d, f, heads, kv = (D, "embed"), (F, "ffn"), (Hh, "heads"), (Kh, "kv_heads")
        if spec.packed_qkv:
            assert spec.heads == spec.kv_heads, "packed queries, keys and values are of the same heads"
            attn = {"qkv": linear((3 * Hh, PACKED), d, spec.qkv_bias, h)}
        else:
            attn = {
                "q": linear(heads, d, spec.qkv_bias, h),
                "k": linear(kv, d, spec.qkv_bias, h),
                "v": linear(kv, d, spec.qkv_bias),
            }
        attn["o"] = linear(d, heads, spec.out_bias)
        if spec.qk_norm:
            attn |= {"q_norm": norm(h, "head_dim"), "k_norm": norm(h, "head_dim")}
        mlp = {
            "gate": linear(f, d, spec.mlp_bias),
            "up": linear(f, d, spec.mlp_bias),
            "down": linear(d, f, spec.mlp_bias),
        }
        return {"attn_norm": norm(D, "embed"), "attn": attn, "mlp_norm": norm(D, "embed"), "mlp": mlp}

    tree: Tree = {
        "embed": {"weight": array((spec.vocab, "vocab"), (D, "embed"), role="table")},
        "layers": {key: layer(repeats) for key, repeats, _, _ in spec.positions()},
        "norm": {"weight": array((D, "embed"), role="vector", init="ones")},
    }
    if spec.scored:
        tree["score"] = {"weight": array((1, "score"), (D, "embed"), role="head")}
    elif not spec.tied:
        tree["head"] = {"weight": array((spec.vocab, "vocab"), (D, "embed"), role="head")}
    return tree
