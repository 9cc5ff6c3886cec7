"""A model as pure data: hyperparameters, the pattern of its layers, and the tree of its parameters."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array

from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, flatten, map_leaves, unflatten
from meshtune.model.block import ENTER, LEAVE, Block, Divisor
from meshtune.model.compute import Compute
from meshtune.model.inputs import Inputs
from meshtune.model.layer import LayerSpec
from meshtune.model.norm import NormSpec
from meshtune.model.rope import RopeSpec
from meshtune.quantize.published.scheme import Scheme

if TYPE_CHECKING:
    from meshtune.model.layer_extras import StreamsSpec
    from meshtune.model.vision import VisionSpec

WIDEST = 16  # layers of a pattern
VISION, PROJECTOR = "vision", "projector"  # the nodes of the tower and of what makes embeddings of its features


class Run(NamedTuple):
    """A pattern of `width` items that comes `repeats` times."""

    width: int
    repeats: int


def shortest_first(items: Sequence[Hashable]) -> list[Run]:
    """The shortest pattern that repeats through all items, but for a rest that is grouped likewise; where there is
    none, runs of equal items."""
    n = len(items)
    for width in range(1, min(n // 2, WIDEST) + 1):
        covered = n // width * width
        if all(items[place] == items[place - width] for place in range(width, covered)):
            rest = items[covered:]
            return [Run(width, n // width), *(shortest_first(rest) if rest else ())]
    runs: list[Run] = []
    for place, item in enumerate(items):
        if runs and items[place - 1] == item:
            runs[-1] = Run(1, runs[-1].repeats + 1)
        else:
            runs.append(Run(1, 1))
    return runs


def fewest_bodies(items: Sequence[Hashable]) -> list[Run]:
    """The runs with the fewest items in all patterns together, and of these the fewest runs."""
    n = len(items)
    best: list[tuple[int, int, list[Run]]] = [(0, 0, [])] * (n + 1)
    for start in reversed(range(n)):
        candidates = []
        for width in range(1, min(n - start, WIDEST) + 1):
            repeats = 1
            while _repeats_at(items, start, start + width * repeats, width):
                repeats += 1
            for count in range(1, repeats + 1):
                bodies, runs, after = best[start + width * count]
                candidates.append((bodies + width, runs + 1, [Run(width, count), *after]))
        best[start] = min(candidates, key=lambda candidate: candidate[:2])
    return best[0][2]


def group_items(items: Sequence[Hashable]) -> list[Run]:
    """`shortest_first`, or `fewest_bodies` where that leaves out a quarter of what would be compiled."""
    simple, fewest = shortest_first(items), fewest_bodies(items)
    return fewest if 4 * _bodies(fewest) <= 3 * _bodies(simple) else simple


def _bodies(runs: Sequence[Run]) -> int:
    return sum(run.width for run in runs)


def _repeats_at(items: Sequence[Hashable], first: int, second: int, width: int) -> bool:
    return items[first : first + width] == items[second : second + width]


class SideSpec(Protocol):
    """Inputs that a model computes from its tokens once, for all layers to read: per-layer embeddings, for example.

    `name` is the key of its parameters at the top of the tree.
    """

    @property
    def name(self) -> str: ...

    def params(self, embed: int) -> Tree:
        """Its parameters as ArraySpecs."""
        ...

    def apply(self, node: Tree, inputs: Inputs, embeds: Array, compute: Compute) -> Tree:
        """Arrays by name, as model.side describes them, from the tokens and their embeddings [B, T, D]."""
        ...

    def divisors(self) -> tuple[Divisor, ...]:
        """Sizes that mesh axes must divide."""
        ...


@dataclasses.dataclass(frozen=True)
class Stack:
    """`repeats` copies of a short pattern of layers, scanned over as one group; one where a layer stores its memory."""

    pattern: tuple[LayerSpec, ...]
    repeats: int

    @property
    def layers(self) -> int:
        return len(self.pattern) * self.repeats


@dataclasses.dataclass(frozen=True)
class Composite:
    """The checkpoint of several models that a text model is part of, with a vision tower for example.

    `model_type` is the composite's. `tensors` and `modules` are pairs (prefix of a name in the plain text model, prefix
    in the composite), of tensors in the checkpoint's files and of modules as transformers has them in memory.
    `transposed_experts` says that files have fused experts as [E, in, out], where that differs from one to another.
    """

    model_type: str
    tensors: tuple[tuple[str, str], ...]
    modules: tuple[tuple[str, str], ...]
    transposed_experts: bool = False


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder-only model, as pure data. `dtype` is the dtype the weights are kept in.

    `norm` normalises the last hidden state. `max_length` is the context that the model is for, in tokens (0: unknown).
    A `scored` model gives every token one score instead of the next token's logits: a reward model. Embeddings are
    multiplied by `embed_scale`, logits by `logit_scale` and squashed by tanh at `logit_softcap`. With
    `learned_positions` the row of a second table for a token's position in its document is added to its embedding. The
    head has a bias where `head_bias` says so. With `norm_head` the rows of the output head are divided by their length
    before logits are computed; the stored and trained rows are not divided. With `streams` several residual
    streams run through the layers. `side` computes inputs for all layers from the tokens (see SideSpec). `notes` are
    sentences about the model for a run's banner. `fused_experts` and `bare_names` are about files only: a tensor holds
    the matrices of all experts of a layer; names of tensors lack the prefix of the base model ("model."). `composite`
    is the checkpoint that the model is part of, if it is; `mtp_layers` more layers, which predict further tokens,
    follow the model's own in its checkpoint and are not computed; `published` says how the weights are quantised in its
    files, where they are. `vision` is the tower that reads pictures, where they are read.
    """

    family: str
    vocab: int
    embed: int
    stacks: tuple[Stack, ...]
    norm: NormSpec
    max_length: int = 0
    dtype: str = "float32"
    tied: bool = False
    init_std: float = 0.02
    scored: bool = False
    norm_head: bool = False
    head_bias: bool = False
    learned_positions: bool = False
    embed_scale: float | None = None
    logit_scale: float | None = None
    logit_softcap: float | None = None
    side: SideSpec | None = None
    streams: StreamsSpec | None = None
    fused_experts: bool = False
    bare_names: bool = False
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    composite: Composite | None = None
    mtp_layers: int = 0
    published: Scheme | None = None
    vision: VisionSpec | None = None

    @property
    def layers(self) -> int:
        """L, the number of decoder layers."""
        return sum(stack.layers for stack in self.stacks)

    @property
    def residual(self) -> int:
        """The numbers of a token that run through the layers."""
        return self.embed * (1 if self.streams is None else self.streams.count)

    @property
    def output(self) -> str:
        """Path of the weight that makes logits, or a scored model's score, of hidden states."""
        return "score/weight" if self.scored else "embed/weight" if self.tied else "head/weight"

    @property
    def before(self) -> frozenset[str]:
        """The top-level nodes of parameters that the input of the first layer, or the side inputs, depend on."""
        nodes = {"embed"} | ({"positions"} if self.learned_positions else set())
        nodes |= {self.side.name} if self.side is not None else set()
        nodes |= {VISION, PROJECTOR} if self.vision is not None else set()
        return frozenset(nodes | ({ENTER} if self.streams is not None else set()))

    @property
    def after(self) -> frozenset[str]:
        """The top-level nodes that are read after the last layer."""
        nodes = {"norm", "head", "score"} | ({"embed"} if self.tied else set())
        return frozenset(nodes | ({LEAVE} if self.streams is not None else set()))

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different rotary embeddings of its layers."""
        mixers = [kind.mixer for kind in self.layer_kinds if kind.mixer is not None]
        return tuple(dict.fromkeys(rope for mixer in mixers for rope in mixer.ropes))

    @property
    def layer_kinds(self) -> tuple[LayerSpec, ...]:
        """The different layers, in order of appearance."""
        return tuple(dict.fromkeys(layer for stack in self.stacks for layer in stack.pattern))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The different mixers and feed-forward networks."""
        blocks = (block for layer in self.layer_kinds for block in layer.blocks)
        return tuple(dict.fromkeys(blocks))

    @property
    def roots(self) -> dict[str, tuple[Stack, ...]]:
        """The stacks below each root of the tree (see arrays.tree.StackPath): "" are the decoder's."""
        return {"": self.stacks} | ({} if self.vision is None else {VISION: self.vision.stacks})

    def with_stacks(self, root: str, stacks: tuple[Stack, ...]) -> ModelSpec:
        """The spec with the layers below a root grouped otherwise."""
        if root == "":
            return dataclasses.replace(self, stacks=stacks)
        assert self.vision is not None
        return dataclasses.replace(self, vision=dataclasses.replace(self.vision, stacks=stacks))

    def positions(self, root: str = "") -> Iterator[tuple[str, int, LayerSpec, list[int]]]:
        """Yields (key in params["layers"], repeats, layer spec, the layer numbers in scan order) of the layers below
        a root.

        The key is "s.p": stack s, position p of its pattern. Row r of that stacked subtree is layer numbers[r].
        """
        first = 0
        for s, stack in enumerate(self.stacks if root == "" else self.roots[root]):
            width = len(stack.pattern)
            for p, layer in enumerate(stack.pattern):
                yield f"{s}.{p}", stack.repeats, layer, [first + r * width + p for r in range(stack.repeats)]
            first += stack.layers

    def layer_numbers(self) -> dict[tuple[str, str], list[int]]:
        """The numbers of the layers that are stacked together, by root and key."""
        return {(root, key): numbers for root in self.roots for key, _, _, numbers in self.positions(root)}


def stacks_of(layers: list[LayerSpec]) -> tuple[Stack, ...]:
    """Groups layers, at least one, into the stacks to scan. A layer that others read, by a memory that it stores or as
    a tap, is a stack by itself."""
    alone = {layer for layer in layers if layer.tapped or layer.stores is not None}
    if len(set(layers)) == 1 and not alone:
        return (Stack((layers[0],), len(layers)),)
    for place, layer in enumerate(layers):
        if layer in alone:
            parts = layers[:place], [layer], layers[place + 1 :]
            before, after = (stacks_of(part) if part else () for part in (parts[0], parts[2]))
            return (*before, Stack((layer,), 1), *after)
    stacks, first = [], 0
    kinds: dict[LayerSpec, int] = {}
    for width, repeats in group_items([kinds.setdefault(layer, len(kinds)) for layer in layers]):
        stacks.append(Stack(tuple(layers[first : first + width]), repeats))
        first += width * repeats
    return tuple(stacks)


def abstract_params(spec: ModelSpec) -> Tree:
    """The tree of `ArraySpec` for a model. Linear weights are [out, in], as Hugging Face stores them.

    embed/weight [V, D]; layers/"s.p"/.. of every layer's blocks and norms, with a leading `layers` axis each; norm [D];
    head/weight [V, D] unless tied, or score/weight [1, D] if scored; positions/weight [max_length, D] where they are
    learned; what `side` has, and streams_in and streams_out of `streams`; vision/.. and projector/.. of `vision`.
    """
    table = ArraySpec((spec.vocab, spec.embed), "float32", ("vocab", "embed"), role="table")
    tree: Tree = {"embed": {"weight": table}}
    if spec.learned_positions:
        positions = dataclasses.replace(table, shape=(spec.max_length, spec.embed), axes=("whole", "embed"))
        tree["positions"] = {"weight": positions}
    if spec.side is not None:
        tree[spec.side.name] = spec.side.params(spec.embed)
    if spec.streams is not None:
        tree[ENTER] = spec.streams.params(spec.embed)
    if spec.vision is not None:
        outside, projector = spec.vision.params(spec.embed)
        tree |= {VISION: outside | {"layers": stacked_params(spec, VISION, spec.vision.width)}, PROJECTOR: projector}
    tree["layers"] = stacked_params(spec, "", spec.embed)
    if spec.streams is not None:
        tree[LEAVE] = spec.streams.params(spec.embed)
    if norm := spec.norm.params(spec.embed, "embed"):
        tree["norm"] = norm
    if spec.scored:
        score = dataclasses.replace(table, shape=(1, spec.embed), axes=("score", "embed"), role="head")
        tree["score"] = {"weight": score}
    elif not spec.tied:
        tree["head"] = {"weight": dataclasses.replace(table, role="head")}
        if spec.head_bias:
            tree["head"]["bias"] = ArraySpec((spec.vocab,), "float32", ("vocab",), "zeros", role="vector")
    # A buffer's small differences would be lost in a narrower dtype.
    return map_leaves(lambda leaf: leaf if leaf.role == "buffer" else dataclasses.replace(leaf, dtype=spec.dtype), tree)


def stacked_params(spec: ModelSpec, root: str, embed: int) -> Tree:
    """The ArraySpecs of all layers below a root, whose stream is `embed` wide, by key."""
    return {
        key: map_leaves(lambda leaf, repeats=repeats: leaf.stacked(repeats), kind.params(embed))
        for key, repeats, kind, _ in spec.positions(root)
    }


def init_params(spec: ModelSpec, key: jax.Array) -> Tree:
    """Normal weights with spec.init_std, norms one, biases zero. A leaf depends on the key and its own path only."""
    params: Tree = {}
    for path, leaf in flatten(abstract_params(spec)).items():
        if leaf.init == "normal":
            normal = jax.random.normal(jax.random.fold_in(key, zlib.crc32(path.encode())), leaf.shape)
            params[path] = (normal * spec.init_std).astype(leaf.dtype)
        else:
            params[path] = jnp.full(leaf.shape, 1 if leaf.init == "ones" else 0, leaf.dtype)
    return unflatten(params)
