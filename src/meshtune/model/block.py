"""The interface of the blocks of a layer (a mixer and a feed-forward network), and the side inputs that a layer is
given beside the residual stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
from jax import lax
from jaxtyping import Array, Float

from meshtune.arrays.tree import Tree
from meshtune.errors import UserError
from meshtune.kernels.attention import AttentionRequest
from meshtune.model.cache import LayerCache, MixerState
from meshtune.model.compute import Compute
from meshtune.model.inputs import SequenceInfo
from meshtune.model.linear import fold, site_key
from meshtune.model.rope import RopeSpec

Hidden = Float[Array, "B T D"]
Sums = Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class Context:
    """What a block reads besides its input and its parameters.

    `sequences` describes the tokens of the input; `side` is computed outside the layer and is differentiated:
    arrays [B, T, ..] that the model computes once for its layers (ModelSpec.side), and memories of earlier layers
    (see SharedMemory). `index` is the number of the layer in the model, `key` the source of dropout (None: no dropout).
    `memory` is what `Mixer.memory` returned for whole rows, with a description of these rows, where the input is only a
    chunk of each; `chunk` is the number of the chunk that a feed-forward network computes.
    """

    compute: Compute
    sequences: SequenceInfo
    side: Tree
    index: Array | int = 0
    key: Array | None = None
    memory: tuple[Tree, SequenceInfo] | None = None
    chunk: Array | None = None

    def for_block(self, name: str) -> Context:
        """The context of the block called `name`, whose dropout is the same whatever other blocks exist."""
        return dataclasses.replace(self, key=fold(site_key(self.key, name), self.chunk), chunk=None)


class Output(NamedTuple):
    """The result of a block or a layer: the next hidden state, the next cache, and sums over the tokens.

    `sums` are float32 arrays by name, in the shapes that `Block.sums` declares. They are added over chunks, layers of a
    model and devices, and are differentiated: router losses, loads of experts, statistics. `stored` is the memory that
    the block leaves for later layers, by name (see SharedMemory).
    """

    y: Hidden
    cache: MixerState
    sums: Sums
    stored: Mapping[str, Tree] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class RowParams:
    """The parameters of a block (top-level names of its node) by when they are read, where rows come in chunks.

    `memory` are read to compute what all later tokens need of each token (keys and values), for whole rows;
    `chunk` to compute the result for one chunk. A name may be in both.
    """

    memory: frozenset[str]
    chunk: frozenset[str]


class Carried(NamedTuple):
    """The state that a mixer carries from one chunk of a row to the next.

    `arrays` are ArraySpecs [B, ..] by the names of its cache; `tokens` is the number of earlier tokens whose segments
    it compares with those of the chunk.
    """

    arrays: Tree
    tokens: int


class Divisor(NamedTuple):
    """A size that a mesh axis must divide; with `replicate_axis`, that logical axis is replicated where it does not.

    `reason` explains to users why it must.
    """

    axis: str
    name: str
    size: int
    replicate_axis: str | None = None
    reason: str = ""


class Activation(NamedTuple):
    """An array [tokens, width] that a block computes.

    `units` is the number of parts that tp can split its width into; `kept` says that the remat policy `selective` keeps
    it for the backward pass. In the forward pass it is read or written by `products` matrix products and `elementwise`
    operations between them. With `whole_rows` it exists for whole rows even where a layer is computed by chunks, and
    goes round the ring over cp: keys and values. `itemsize` is in bytes, None for that of the compute dtype. A `routed`
    array has a row for every expert of a token, on the device of that expert.
    """

    axis: str
    width: int
    units: int
    kept: bool
    products: int = 2
    elementwise: int = 0
    whole_rows: bool = False
    itemsize: int | None = None
    routed: bool = False


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a block for one token, over all devices.

    `weights` are the multiplications with its weights in the forward pass (of experts: only the active ones), `pairs`
    the operations for each earlier token that is attended to; `window` limits their number (None: no limit).
    `dispatched` are the numbers that go to the `chosen` experts of a token, and as many come back.
    """

    weights: int
    activations: tuple[Activation, ...]
    pairs: int = 0
    window: int | None = None
    dispatched: int = 0
    chosen: int = 1


HEADROOM = 1.5  # slots of a round of the exchange with experts on other devices, over an even share of the rows


class BlockChoice(NamedTuple):
    """An automatic choice of a block: the option, the choice, and the reason."""

    name: str
    value: str
    reason: str


class Block(Protocol):
    """A mixer or a feed-forward network. `name` is the key of its parameters in the node of a layer, `side_inputs` are
    the names of the side inputs that `apply` reads.

    Blocks inherit from `Mixer` or `FeedForward` and define what has no default here.
    """

    name: ClassVar[str]
    side_inputs: ClassVar[frozenset[str]] = frozenset()

    def params(self, embed: int) -> Tree:
        """Its parameters as ArraySpecs of one layer, without the axis of stacked layers, in float32."""
        ...

    def apply(self, x: Hidden, node: Tree, context: Context, cache: LayerCache | None) -> Output:
        """Its result for normalised input, not yet added to the residual stream."""
        ...

    def divisors(self) -> tuple[Divisor, ...]:
        """Sizes that mesh axes must divide."""
        ...

    def cost(self, embed: int) -> Cost: ...

    def sums(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the sums that `apply` returns; padding (segment 0) must have no part in them."""
        return {}

    def choices(self, compute: Compute) -> tuple[BlockChoice, ...]:
        """Automatic choices of the block for `compute`, shown in the banner of a run."""
        return ()

    def loss(self, sums: Sums) -> Array | None:
        """A float32 scalar to add to the mean loss, from the sums of the whole model; None where there is none."""
        return None


@runtime_checkable
class Measured(Protocol):
    """A block that has metrics."""

    def metrics(self, sums: Sums) -> Mapping[str, tuple[Array, Array]]:
        """Metrics by name, each a total and its weight, from the sums of the whole model."""
        ...


@runtime_checkable
class Adjusted(Protocol):
    """A block with buffers that every update adjusts by the sums of its layers, and that no gradient trains."""

    def adjusted_buffers(self) -> frozenset[str]:
        """The paths of these buffers in the block's node."""
        ...

    def adjust(self, buffers: Mapping[str, Array], sums: Sums, layers: Sequence[int]) -> Mapping[str, Array]:
        """The buffers after an update, by path, from those before it, stacked over the model's `layers`, and from the
        sums of the whole model over the whole update."""
        ...


class Mixer(Block, Protocol):
    """A block that lets tokens see earlier ones of their segment."""

    def cache(self, batch: int, slots: int, dtype: str) -> Tree:
        """An empty cache for one layer, as ArraySpecs: `slots` tokens a row, or less where it needs no more."""
        ...

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary embeddings whose angles it reads in the context's rows."""
        return ()

    def row_params(self) -> RowParams | None:
        """Which parameters are read when rows come in chunks; None for a mixer without a memory of every token."""
        return None

    def carried(self, batch: int, dtype: str) -> Carried | None:
        """The state between chunks of rows, given to `apply` as a RowState; None for a mixer without a state."""
        return None

    def memory(self, x: Hidden, node: Tree, context: Context) -> Tree:
        """Keys and values, or the like, as arrays [B, T, ..]. Called only if `row_params` is not None."""
        raise AssertionError(f"{self.name} takes whole rows")

    def attention_request(self, rows: int, q_length: int, kv_length: int, compute: Compute) -> AttentionRequest | None:
        """The request of `apply` to the attention kernels for rows in training; None for a mixer without attention."""
        return None


@runtime_checkable
class SharedMemory(Protocol):
    """A mixer whose memory (keys and values) is shared between layers.

    It leaves its memory under the name `stores` for later layers, or reads that of the name `reads`, of an earlier
    layer, in place of one that it computes; both may be None.
    """

    @property
    def stores(self) -> str | None: ...

    @property
    def reads(self) -> str | None: ...


class FeedForward(Block, Protocol):
    """A block that computes every token separately."""


BY_LAYER, SHARED = "by_layer", "shared_memory"
CHOICE = "expert_choice"  # a name that a rematerialisation policy may keep: the experts of every token
STREAMS = "streams"  # the node of a layer's prediction and correction of several residual streams
ENTER, LEAVE = "streams_in", "streams_out"  # the nodes of their projections at the top of the tree


def layer_side(side: Tree, index: Array | int) -> Tree:
    """The side inputs of layer number `index`."""
    parts = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), side.get(BY_LAYER, {}))
    return {name: array for name, array in side.items() if name != BY_LAYER} | parts


def with_stored(side: Tree, stored: Mapping[str, Any]) -> Tree:
    """Adds the memories that a layer has stored."""
    return side | {SHARED: {**side.get(SHARED, {}), **stored}} if stored else side


def without_memories(side: Tree) -> Tree:
    """Side inputs that belong to the tokens of a layer's input: those that enter the first layer."""
    return {name: array for name, array in side.items() if name != SHARED}


def without_memory(side: Tree, name: str) -> Tree:
    """The side inputs of the layer that stored the memory `name`."""
    memories = {stored: memory for stored, memory in side[SHARED].items() if stored != name}
    return without_memories(side) | ({SHARED: memories} if memories else {})


def check_side(side: Tree, read: frozenset[str], family: str) -> None:
    """Raises: UserError where what enters the first layer is not what layers `read`, by name."""
    given = (side.keys() - {BY_LAYER}) | side.get(BY_LAYER, {}).keys()
    if given != read:
        unread, missing = sorted(given - read), sorted(read - given)
        problem = f"side input '{unread[0]}' is read by no layer" if unread else f"side input '{missing[0]}' is missing"
        raise UserError(f"{problem} of this {family}", where="Inputs.side", fix=f"it takes: {sorted(read) or 'none'}")
