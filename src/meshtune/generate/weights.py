"""What the devices hold: the parameters that an engine computes with, replaced in one place and laid out for decoding,
and the caches of its batches.

A decode step of few rows reads every weight once, so the memory's bandwidth bounds it. Two things keep XLA away from
that bound. A scan over stacked layers copies each layer's slice before it computes with it, so each layer's weights are
arrays of their own and the layers are unrolled; see benchmarks/gpu_decode. On a CPU the same goes for caches, and a
product with a large matrix reads short pieces of its rows, so matrices lie in tiles that are each read from end to end
(model.linear); see benchmarks/cpu_serving.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meshtune.adapters.adapter_set import MultiLoRA, adapter_count, select
from meshtune.adapters.lora import LoRA
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Tree, flatten, unflatten
from meshtune.costs.decoding import COPIED_SHARE, LEAST_COPIED, fits_copy
from meshtune.errors import UserError
from meshtune.generate import programs
from meshtune.generate.long_context import by_long_factors
from meshtune.generate.pictures import PatchArrays
from meshtune.generate.programs import Counts, Decoded, Feed, Knobs, head_scale
from meshtune.generate.visual import Pictures, encode
from meshtune.model.compute import Compute
from meshtune.model.gather import is_any_offloaded
from meshtune.model.linear import TiledWeight
from meshtune.model.model_cache import cache_specs
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.model.vision import PictureFeatures
from meshtune.quantize.weight import QuantisedWeight

if TYPE_CHECKING:
    from meshtune.generate.driver import Driver

CPU_TOKENS = 256  # of prompts that a CPU reads at once: the products take most of the time from there on
PRODUCTS = (LoRA, MultiLoRA)  # adapters that add to the weight's product, and do not read the weight themselves


class Weights:
    """The parameters of an engine. Every scheduler and program reads them here, so a replacement reaches all of them.

    `version` counts replacements: a cache that another version computed is of no use. Where `params` hold several
    adapters that share a batch (adapters.multi_lora), `adapters` is their number. With `resident`, decode steps may
    read a second copy in the layout that suits them: `by_layer`, as their caches then are.
    """

    def __init__(self, params: Tree, spec: ModelSpec, compute: Compute, *, resident: bool = False):
        self._spec, self.by_layer = spec, resident and decodes_from_copy(params, compute)
        self._on_gpu = resident and compute.layout is None and _platform(compute) in ("gpu", "cuda", "rocm")
        self._changed = threading.Condition()
        self._users, self._replacing = 0, False
        self.version, self.adapters = 0, adapter_count(params)
        self._set(params)

    def _set(self, params: Tree) -> None:
        self.params, self.reading, self._decoding = params, params, None
        if self._spec.norm_head and not self._spec.scored:  # the norms of the head's rows, once for all tokens to come
            self.reading = params | {"head": params["head"] | {"scale": head_scale(params["head"], spec=self._spec)}}
        selections = np.eye(self.adapters, dtype=np.float32)[:, None]
        self._selected = [select(params, jnp.asarray(selection)) for selection in selections]
        self._base = select(params, jnp.zeros((1, self.adapters))) if self.adapters else params

    @property
    def decoding(self) -> Tree:
        """The parameters that decode steps read."""
        if self._decoding is None:
            if self.by_layer:
                self._decoding = decode_layout(self.reading, self._spec)
            else:
                copied = self._on_gpu and fits_copy(_size(self.params["layers"]), free_bytes())
                self._decoding = layers_apart(self.reading) if copied else self.reading
        return self._decoding

    def make_room(self, size: int) -> None:
        """Frees a GPU's copy of the weights, for good, where caches of `size` bytes might not fit beside it."""
        if self._on_gpu and self._decoding is not None and 2 * size > free_bytes():
            self._decoding = self.reading

    def select(self, adapter: int | None) -> Tree:
        """The parameters with one of the adapters for all rows of a batch (None: the base only)."""
        return self._base if adapter is None else self._selected[adapter]

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Keeps the parameters from being replaced while the block computes with them. Not to be nested."""
        with self._changed:
            self._changed.wait_for(lambda: not self._replacing)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Waits until nothing computes with the parameters, and lets nothing begin during the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._replacing)
            self._replacing = True
            self._changed.wait_for(lambda: not self._users)
        try:
            yield
        finally:
            with self._changed:
                self._replacing = False
                self._changed.notify_all()

    def changes(self, params: Tree) -> dict[str, Any]:
        """The arrays of `params` that are not those in use, by their number in the tree.

        Raises UserError for a tree of another structure, and for arrays of other shapes or dtypes.
        """
        check_same_form(self.params, params)
        pairs = zip(jax.tree.leaves(self.params), jax.tree.leaves(params), strict=True)
        return {str(number): new for number, (old, new) in enumerate(pairs) if new is not old}

    def replace(self, changes: Mapping[str, Any]) -> None:
        """Replaces arrays by their number; new ones lie on the devices as the old ones do."""
        leaves, tree = jax.tree.flatten(self.params)
        for number, new in changes.items():
            leaves[int(number)] = _placed_like(leaves[int(number)], new)
        self._set(jax.tree.unflatten(tree, leaves))
        self.version += 1


def check_same_form(old: Tree, new: Tree) -> None:
    """Raises UserError where two trees differ in structure, or in the shape or dtype of an array."""
    fix = "load the model again: compiled programs, adapters and caches are for parameters of one form"
    before, after = flatten(old), flatten(new)
    if before.keys() != after.keys():
        path = min(before.keys() ^ after.keys())
        raise UserError(f"the parameters {'lack' if path in before else 'add'} '{path}'", where="params", fix=fix)
    for path, leaf in before.items():
        forms = [(jax.tree.structure(x), [(a.shape, a.dtype) for a in jax.tree.leaves(x)]) for x in (leaf, after[path])]
        if forms[0] != forms[1]:
            raise UserError("an array of the parameters has another form than before", where=path, fix=fix)


def _placed_like(old: Any, new: Any) -> Any:
    """An array on the devices of another one, sharded alike."""
    if not isinstance(old, jax.Array) or (isinstance(new, jax.Array) and new.sharding == old.sharding):
        return new
    if len(old.sharding.device_set) == 1:
        return jnp.asarray(new)
    numbers = np.asarray(new)
    return jax.make_array_from_callback(old.shape, old.sharding, lambda index: numbers[index])


def decodes_from_copy(params: Tree, compute: Compute) -> bool:
    """Whether decoding on a CPU is worth a second copy of these weights: float32 ones of some size."""
    leaves = jax.tree.leaves(params)
    if compute.layout is not None or _platform(compute) != "cpu":
        return False
    if any(leaf.dtype != jnp.float32 for leaf in flatten(params).values() if isinstance(leaf, jax.Array)):
        return False
    if any(isinstance(leaf, QuantisedWeight) for leaf in flatten(params).values()):
        return False
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return LEAST_COPIED <= sum(leaf.nbytes for leaf in leaves) <= COPIED_SHARE * memory


def free_bytes() -> int:
    """Bytes that the allocator of the first device has left; 0 where it does not tell."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)


def _platform(compute: Compute) -> str:
    return compute.platform or jax.default_backend()


def _size(tree: Tree) -> int:
    """Bytes of a tree's arrays; of one with arrays in the host's memory, more than any device has."""
    return 1 << 62 if is_any_offloaded(tree) else sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def layers_apart(params: Tree) -> Tree:
    """The parameters with every stacked node of layers as a tuple of each layer's node."""
    layers = {
        key: tuple(_row(node, number) for number in range(jax.tree.leaves(node)[0].shape[0]))
        for key, node in params["layers"].items()
    }
    return params | {"layers": layers}


def decode_layout(params: Tree, spec: ModelSpec) -> Tree:
    """The parameters with every stacked node of layers as a tuple of each layer's, and matrices as TiledWeight.

    A LoRA of a layer's matrix is merged into its copy. What is no matrix of a linear layer, or has another adapter
    that reads the weight itself, is not tiled. A tied head becomes another weight, tiled; the embedding stays, for its
    rows are looked up.
    """
    layers = {
        key: _layers(node, flatten(abstract_params(spec)["layers"][key])) for key, node in params["layers"].items()
    }
    return params | {"layers": layers} | _head(params, spec)


def _layers(node: Tree, specs: dict[str, ArraySpec]) -> tuple[Tree, ...]:
    """Each layer's node of a stacked one."""
    flat = flatten(node)
    repeats = jax.tree.leaves(node)[0].shape[0]

    def tiled(path: str) -> bool:
        owner, _, last = path.rpartition("/")
        adapter = flat.get(f"{owner}/adapter")
        matrix = last == "weight" and path in specs and specs[path].role == "matrix" and len(specs[path].shape) == 3
        return matrix and (adapter is None or isinstance(adapter, PRODUCTS))

    owners = {path.removesuffix("weight") for path in flat if tiled(path)}
    merged = {owner for owner in owners if isinstance(flat.get(f"{owner}adapter"), LoRA)}
    dropped = {f"{owner}{name}" for owner in merged for name in ("adapter", "fixed")}

    def leaf(path: str, value: Any, number: int) -> Any:
        owner = path.removesuffix("weight")
        if path == owner or owner not in owners:
            return _row(value, number)
        if owner in merged:
            return _tiled_row(value, number, flat[f"{owner}adapter"], flat.get(f"{owner}fixed"))
        return _tiled_row(value, number)

    return tuple(
        unflatten({path: leaf(path, value, n) for path, value in flat.items() if path not in dropped})
        for n in range(repeats)
    )


@jax.jit
def _row(stacked: Any, number: Int[Array, ""]) -> Any:
    """Row `number` of stacked arrays."""
    return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, number, keepdims=False), stacked)


_tiled = jax.jit(TiledWeight.of)


@jax.jit
def _tiled_row(
    stacked: Float[Array, "n o i"], number: Int[Array, ""], adapter: LoRA | None = None, fixed: LoRA | None = None
) -> TiledWeight:
    weight, adapter, fixed = _row((stacked, adapter, fixed), number)
    return TiledWeight.of(weight if adapter is None else adapter.merge(weight, fixed))


def _head(params: Tree, spec: ModelSpec) -> Tree:
    head = params.get("head", {})
    adapter = head.get("adapter")
    if (
        spec.scored
        or (spec.norm_head and "scale" not in head)
        or not (adapter is None or isinstance(adapter, PRODUCTS))
    ):
        return {}
    weight = params["embed"]["weight"] if spec.tied and "weight" not in head else head["weight"]
    return {"head": head | {"weight": _tiled(weight)}}


Numbers = Int[np.ndarray, "n"]
R = TypeVar("R")


def _announce_call(method: Callable[..., R]) -> Callable[..., R]:
    """The method, announced to other processes before it computes; its arguments are given by name."""

    @functools.wraps(method)
    def call(self: BatchCaches, **arguments: Any) -> R:
        if self.driver is None and jax.process_count() == 1:
            return method(self, **arguments)
        return _call_everywhere(self, method, arguments)

    return call


def _call_everywhere(caches: BatchCaches, method: Callable[..., R], arguments: dict[str, Any]) -> R:
    message = {"batch": caches.number, "call": method.__name__}
    with contextlib.nullcontext() if caches.driver is None else caches.driver.announce(message, arguments):
        result = method(caches, **arguments)
        if jax.process_count() > 1 and jax.default_backend() == "cpu":
            jax.block_until_ready(caches.layers)  # JAX's Gloo mixes up the messages of two programs at once
        return result


class BatchCaches:
    """The caches and token counts of the rows of one batch, changed by the compiled programs.

    Everything else that a step needs comes from the host as small arguments, so that several processes which are told
    the same arguments in the same order run the same programs. With a `driver` every call is announced to the other
    processes that share this model, number `model` of theirs.
    """

    def __init__(
        self, weights: Weights, spec: ModelSpec, compute: Compute, driver: Driver | None = None, model: int = 0
    ):
        self.weights, self._spec, self._compute = weights, spec, compute
        self.driver = driver
        self.number = 0 if driver is None else driver.new_batch(self, model)
        self.layers: dict[str, Tree] = {}
        self.counts: Counts | None = None
        self.features: dict[int, PictureFeatures] = {}

    @property
    def on_cpu(self) -> bool:
        return _platform(self._compute) == "cpu"

    @property
    def most_tokens(self) -> int | None:
        """Tokens of one row that a call of `read` computes at most; None: any number, of several rows. On a CPU more
        of them save no time, and padding takes as long as tokens."""
        return CPU_TOKENS if self.weights.by_layer else None

    @_announce_call
    def create(self, rows: int, slots: int) -> None:
        """Makes empty caches of `rows` rows of `slots` tokens."""
        self._make_room(rows, slots)
        options = {"by_layer": self.weights.by_layer}
        self.layers = programs.empty_layers(self._spec, self._compute, rows, slots, **options)

    @_announce_call
    def move(self, source: Numbers, slots: int) -> None:
        """Keeps the caches of the rows `source` only, in this order, with room for `slots` tokens."""
        self._make_room(len(source), slots)
        self.layers = programs.move_rows(self.layers, source, spec=self._spec, compute=self._compute, slots=slots)

    def _make_room(self, rows: int, slots: int) -> None:
        specs = cache_specs(self._spec, rows, slots, self._compute.dtype, self._compute.cache)
        self.weights.make_room(sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in flatten(specs).values()))

    @_announce_call
    def copy(self, source: Numbers, target: Numbers) -> None:
        """Copies the caches of rows `source` to rows `target` (beyond the end: nowhere)."""
        self.layers = programs.copy_rows(self.layers, source, target)

    @_announce_call
    def read(self, long: bool, pictures: Mapping[str, np.ndarray] | None = None, **arrays: Any) -> None:
        """See programs.read and its arrays; `long`: the texts are longer than the original context
        (generate.long_context). `pictures` are arrays of `visual.Pictures`, for features of the rows `pictures_of`."""
        spec = by_long_factors(self._spec) if long else self._spec
        if pictures is not None:
            arrays["pictures"] = self._pictures(pictures, arrays.pop("pictures_of", None))
        self.layers = programs.read(self.weights.reading, self.layers, **arrays, spec=spec, compute=self._compute)

    def _pictures(self, arrays: Mapping[str, Any], rows: Numbers | None) -> Pictures:
        return Pictures(() if rows is None else tuple(self.features[int(row)] for row in rows), **arrays)

    @_announce_call
    def encode(
        self, row: int, patches: np.ndarray, segments: Numbers, grid: np.ndarray, adapters: np.ndarray | None
    ) -> int:
        """Computes the features of the pictures of a row's request; returns the places for features."""
        arrays, options = PatchArrays(patches, segments, grid), {"spec": self._spec, "compute": self._compute}
        self.features[row] = encode(self.weights.reading, arrays, adapters, **options)
        return self.features[row].features.shape[1]

    @_announce_call
    def forget(self, rows: Numbers) -> None:
        """Frees the features of the pictures of these rows' requests."""
        for row in rows:
            self.features.pop(int(row), None)

    def holds_every_token(self, slots: int) -> bool:
        """See programs.holds_every_token, of these caches with `slots` tokens a row."""
        return programs.holds_every_token(self._spec, self._compute, slots)

    @_announce_call
    def count(self, prompts: Sequence[Sequence[int]], generated: Sequence[Sequence[int]], vocab: int) -> None:
        """Counts the tokens of all rows, those of prompts and those generated since."""
        in_prompt: Any = np.zeros((len(prompts), vocab), bool)
        times: Any = np.zeros((len(prompts), vocab), np.int32)
        for row, (prompt, ids) in enumerate(zip(prompts, generated, strict=True)):
            in_prompt[row, list(prompt)] = True
            np.add.at(times[row], list(ids), 1)
        self.counts = Counts(in_prompt, times)

    @_announce_call
    def decode(self, feed: Feed, knobs: Knobs, steps: int, leave: bool, **options: Any) -> Decoded:
        """See programs.decode; `options` are its switches, alternatives and adapters. `count` comes before where the
        switches need counts."""
        counts = Counts.empty(feed.token.shape[0]) if self.counts is None else self.counts
        arrays: Any = (self.layers, counts, feed, knobs, np.int32(steps), np.bool_(leave))
        options |= {"spec": self._spec, "compute": self._compute}
        self.layers, self.counts, decoded = programs.decode(self.weights.decoding, *arrays, **options)
        return decoded
