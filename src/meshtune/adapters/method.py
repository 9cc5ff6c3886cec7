"""Splits a model into trainable and frozen parameters, as the training method says.

The two trees are separate before anything is differentiated, so that no gradient of a frozen parameter can exist.

Arrays are stacked over layers, so all layers of a stack must be trained, adapted and ranked alike. Where a choice
differs from layer to layer, the stacks are split at the boundaries; nothing else in the model changes.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, PyTree

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.kind import Adapter, InitializedAdapter, Original, Weight, not_of_quantised, only_of_quantised
from meshtune.adapters.model_modules import ModelModules
from meshtune.adapters.placement import cast, place_arrays
from meshtune.adapters.registry import ADAPTERS, PEFT_FIELDS
from meshtune.adapters.targets import modules
from meshtune.adapters.training_method import Method, Selection, VisionTraining
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Leaves, Tree, flatten, merge, stack_path, unflatten
from meshtune.errors import UserError
from meshtune.families.quantised import quantised_leaves
from meshtune.mesh.layout import Layout
from meshtune.model.inputs import ROWS, TokenRows
from meshtune.model.spec import ModelSpec, Stack, abstract_params, stacks_of
from meshtune.model.stacks import adjusted_buffers
from meshtune.quantize.config import UNQUANTISED, QuantizeConfig
from meshtune.quantize.weight import QuantisedWeight


def uniform(spec: ModelSpec, choice: Mapping[str, Hashable]) -> ModelSpec:
    """The spec with stacks split where needed, so that `choice` (by HF module name) is the same within a stack.

    A module that is not in `choice` differs from those that are.
    """
    split = spec
    for root, stacks in spec.roots.items():
        split = split.with_stacks(root, _uniform_stacks(spec, root, stacks, choice))
    return split


def _uniform_stacks(
    spec: ModelSpec, root: str, stacks: tuple[Stack, ...], choice: Mapping[str, Hashable]
) -> tuple[Stack, ...]:
    """The stacks below a root, split where the choice differs from layer to layer."""
    flat = [layer for stack in stacks for _ in range(stack.repeats) for layer in stack.pattern]
    signature: list[dict[str, Hashable]] = [{} for _ in flat]
    by_node: dict[str, set[Hashable]] = {}
    for name, module in modules(spec).items():
        place = stack_path(module.node)
        if module.layer is not None and place is not None and place.root == root:
            signature[module.layer][module.site] = choice.get(name)
            by_node.setdefault(module.node, set()).add(choice.get(name))
    if all(len(choices) == 1 for choices in by_node.values()):
        return stacks
    starts = [at for at in range(len(flat)) if at == 0 or signature[at] != signature[at - 1]]
    parts = [flat[start:end] for start, end in zip(starts, [*starts[1:], len(flat)], strict=True)]
    return tuple(stack for part in parts for stack in stacks_of(part))


def restack(params: Tree, old: ModelSpec, new: ModelSpec) -> Tree:
    """Converts parameters from the stacks of `old` to those of `new`. `params` is consumed: at most one stacked leaf
    exists twice."""
    if old == new:
        return params
    outside = dict(params)
    params.clear()
    for root in new.roots:
        owner = outside if root == "" else outside[root]
        owner["layers"] = _restacked_layers(owner.pop("layers"), old, new, root)
    return outside


def _restacked_layers(layers: Tree, old: ModelSpec, new: ModelSpec, root: str) -> Tree:
    """The stacked layers below a root, from the stacks of `old` to those of `new`. `layers` is consumed."""
    row_of = {n: (key, row) for key, _, _, numbers in old.positions(root) for row, n in enumerate(numbers)}
    sites: dict[str, None] = {}
    for key in list(layers):
        layers[key] = flatten(layers[key])
        sites |= dict.fromkeys(layers[key])
    moved: dict[str, Tree] = {key: {} for key, *_ in new.positions(root)}
    for site in sites:
        source = {key: leaves.pop(site) for key, leaves in layers.items() if site in leaves}
        for key, _, _, numbers in new.positions(root):
            moved[key][site] = _rows(source, [row_of[n] for n in numbers])
        jax.block_until_ready([leaves[site] for leaves in moved.values()])
    return {key: unflatten(leaves) for key, leaves in moved.items()}


def _rows(source: Leaves, positions: list[tuple[str, int]]) -> Any:
    """Rows of stacked leaves, as (stack, row), of each array where a leaf is a pytree."""
    if not isinstance(next(iter(source.values())), jax.Array):
        parts = {key: jax.tree.leaves(leaf) for key, leaf in source.items()}
        numbers = range(len(next(iter(parts.values()))))
        arrays = [_rows({key: leaves[n] for key, leaves in parts.items()}, positions) for n in numbers]
        return jax.tree.unflatten(jax.tree.structure(next(iter(source.values()))), arrays)
    keys = {key for key, _ in positions}
    if len(keys) == 1:
        rows = [row for _, row in positions]
        stack = source[keys.pop()]
        if rows == list(range(stack.shape[0])):
            return stack
        return stack[rows[0] : rows[-1] + 1] if rows == list(range(rows[0], rows[-1] + 1)) else stack[jnp.array(rows)]
    return jnp.stack([source[key][row] for key, row in positions])


# In PEFT: the tensor of a module's rows, and the field of an adapter_config.json that says which they are.
TENSOR, FIELD = "token_adapter.trainable_tokens_delta", "trainable_token_indices"


def rows_by_node(
    adapters: LoraConfig | None, spec: ModelSpec, nodes_in_full: set[str], adapted: set[str]
) -> dict[str, tuple[int, ...]]:
    """The rows that are trained by themselves, by node: of the embedding, and of an untied head.

    Raises UserError where an adapter on the same matrix, or its kind, does not go with them.
    """
    if adapters is None or not adapters.token_rows:
        return {}
    fix = "train the whole matrices instead: method.train_modules: [embed_tokens, lm_head]"
    tables = [node for node in ("embed", "head") if not (node == "head" and (spec.tied or spec.scored))]
    tables = [node for node in tables if node not in nodes_in_full]
    if tables and "head" in adapted:
        raise UserError(
            "the head is to have an adapter and the rows of new tokens",
            where="method.targets, model.new_tokens",
            fix=fix,
        )
    if tables and PEFT_FIELDS[adapters.adapter]["peft_type"] != "LORA":
        raise UserError(
            f"peft's format of {adapters.adapter} adapters has no place for the rows of new tokens",
            where="method.adapter, model.new_tokens",
            fix=fix,
        )
    return dict.fromkeys(tables, adapters.token_rows)


def abstract_rows(
    rows: Mapping[str, tuple[int, ...]], leaves: Mapping[str, ArraySpec], dtype: str
) -> dict[str, TokenRows]:
    """By path, with ArraySpecs for arrays; `leaves` are the model's."""
    return {f"{node}/{ROWS}": TokenRows.abstract(leaves[f"{node}/weight"], ids, dtype) for node, ids in rows.items()}


def begun_rows(abstract: TokenRows, weight: jax.Array, layout: Layout | None) -> TokenRows:
    """The rows as the weight has them; on a mesh where the layout says."""
    where = None if layout is None else layout.of(abstract.values)
    return dataclasses.replace(abstract, values=jax.jit(abstract.of, out_shardings=where)(weight))


SHARED = "shared"  # where what all adapters read in common lies in `frozen`


@dataclasses.dataclass(frozen=True)
class PreparedModel:
    """A model split for training: the model functions take `parameters` with `spec`.

    `spec` may stack the layers differently, where a method treats layers differently. Adapters are leaves of
    `trainable` at "<node>/adapter"; their frozen arrays are leaves of `frozen` at "<node>/fixed" or "shared". `buffers`
    are adjusted by every update without a gradient (model.buffers).
    """

    spec: ModelSpec
    trainable: Tree
    frozen: Tree
    buffers: Tree = dataclasses.field(default_factory=dict)

    @property
    def parameters(self) -> Tree:
        """One tree of all arrays."""
        return merge(merge(self.trainable, self.frozen), self.buffers)


@dataclasses.dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters."""

    adapters: int
    full: int
    frozen: int

    @property
    def trainable(self) -> int:
        return self.adapters + self.full

    @property
    def total(self) -> int:
        return self.trainable + self.frozen


def abstract(
    method: Method,
    spec: ModelSpec,
    trainable_dtype: str = "float32",
    quantize: QuantizeConfig | None = None,
    vision: VisionTraining | None = None,
) -> PreparedModel:
    """The result of `prepare` with an ArraySpec for every array: for shardings, memory estimates and loading.

    Weights loaded with this spec, and quantised like it, need no restacking. Raises UserError for a method that is not
    possible with this model, and for a quantised weight that it would train.
    """
    among = ModelModules.of(spec)
    selection = among.choose(method, vision)
    _fits_quantised(method, selection, quantize, spec)
    kinds: dict[str, Hashable] = dict.fromkeys(selection.trained, "full")
    for name, config in selection.adapted.items():
        kinds[name] = (kinds.get(name), "adapter", config.rank, config.alpha)
    adapters = {name: _abstract_adapter(config, trainable_dtype) for name, config in selection.adapted.items()}
    nodes = ({among.by_name[name].node for name in names} for names in (selection.trained, selection.adapted))
    rows = rows_by_node(method.adapters, spec, *nodes)
    model = arrange_model(uniform(spec, kinds), selection.trained, adapters, trainable_dtype, rows)
    if method.adapters is not None:
        fixed = _fixed_arrays(method.adapters, model, trainable_dtype)
        model = dataclasses.replace(model, frozen=merge(model.frozen, fixed))
    frozen = quantised_leaves(flatten(model.frozen), quantize, model.spec)
    return dataclasses.replace(model, frozen=unflatten(frozen))


def prepare(
    method: Method,
    spec: ModelSpec,
    params: Tree,
    key: Key[Array, ""],
    trainable_dtype: str = "float32",
    layout: Layout | None = None,
    original: Callable[[str], Original] | None = None,
    vision: VisionTraining | None = None,
) -> PreparedModel:
    """Splits the parameters of a model into trainable ones, in `trainable_dtype`, and frozen ones, unchanged.

    `params` is consumed (its dicts are emptied), so that restacking and casting duplicate one leaf at a time. An
    adapter's initial values depend on `key` and the HF name of its module alone: they are the same on every mesh.
    With a layout, on whose mesh `params` were loaded with `abstract(method, spec).spec`, all arrays are sharded by it;
    every process must then call this. `original(path)` returns a weight before quantisation, and the size of its inputs
    where that was measured, for adapters initialised from the quantisation error. `vision` says what is trained of a
    model that sees, beside what the method says of its language model.
    Raises UserError for a method that is not possible with this model.
    """
    plan = abstract(method, spec, trainable_dtype, QuantizeConfig(UNQUANTISED), vision)
    assert layout is None or spec == plan.spec, "on a mesh, load with abstract(method, spec).spec"
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    weights = used_up(restack(params, spec, plan.spec))
    names: dict[str, list[str]] = {}
    among = modules(plan.spec)
    for name, module in among.items():
        names.setdefault(module.node, []).append(name)
    trainable: Leaves = {}
    config = method.adapters
    frozen = flatten(plan.frozen)
    for path, leaf in flatten(plan.trainable).items():
        node, _, last = path.rpartition("/")
        if last == "adapter":
            weight_path = held_weight(node, plan.spec)
            keys = _keys(key, names[node], among[names[node][0]].row is not None)
            assert config is not None
            kind = ADAPTERS[config.adapter]
            coded = isinstance(weights[weight_path], QuantisedWeight)
            before = original(weight_path) if original and kind.ORIGINAL and coded else None
            begin = functools.partial(kind.start, leaf, config)
            fixed = frozen.get(f"{node}/fixed")
            started = _start(begin, (leaf, fixed), keys, weights[weight_path], before, layout)
            trainable[path], weights[weight_path] = started.adapter, started.weight
            if fixed is not None:
                weights[f"{node}/fixed"] = started.fixed
        elif last == ROWS:
            trainable[path] = begun_rows(leaf, weights[f"{node}/weight"], layout)
        else:
            trainable[path] = cast(weights.pop(path), leaf, layout)
    if SHARED in frozen:
        weights[SHARED] = place_arrays(frozen[SHARED].start(), frozen[SHARED], layout)
    buffers = {path: cast(weights.pop(path), leaf, layout) for path, leaf in flatten(plan.buffers).items()}
    return PreparedModel(plan.spec, unflatten(trainable), unflatten(weights), unflatten(buffers))


def _start(
    begin: Callable[..., InitializedAdapter],
    arrays: tuple[Adapter, PyTree],
    keys: Array,
    weight: Weight,
    before: Original | None,
    layout: Layout | None,
) -> InitializedAdapter:
    """An adapter with its initial values and the weight it adapts; on a mesh every device computes its own shards.

    `arrays` are the abstract adapter and its abstract frozen arrays.
    """
    if layout is None:
        return begin(keys, weight, before)
    data, kind = np.asarray(jax.random.key_data(keys)), jax.random.key_impl(keys)  # numbers that every process has

    def start(weight: Weight, before: Original | None) -> InitializedAdapter:
        return begin(jax.random.wrap_key_data(jnp.asarray(data), impl=kind), weight, before)

    adapter, fixed = (jax.tree.map(layout.of, array) for array in arrays)
    where = InitializedAdapter(adapter, jax.tree.map(lambda array: array.sharding, weight), fixed)
    return jax.jit(start, donate_argnums=0, out_shardings=where)(weight, before)


def held_weight(node: str, spec: ModelSpec) -> str:
    """The path of the weight that a node's adapter adapts: of a tied head, the embedding's."""
    return "embed/weight" if node == "head" and spec.tied else f"{node}/weight"


def count(prepared: PreparedModel) -> ParameterCounts:
    """The numbers of parameters of an abstract or concrete model."""
    adapters = full = 0
    for path, leaf in flatten(prepared.trainable).items():
        if path.rpartition("/")[2] in ("adapter", ROWS):
            adapters += sum(array.size for array in jax.tree.leaves(leaf))
        else:
            full += leaf.size
    fixed = flatten(merge(prepared.frozen, prepared.buffers))
    weights = (leaf for path, leaf in fixed.items() if not of_adapters(path))
    return ParameterCounts(adapters, full, sum(leaf.size for leaf in weights))


def of_adapters(path: str) -> bool:
    """Whether a leaf is an adapter or an adapter's frozen array, and no weight of the model."""
    return path == SHARED or path.rpartition("/")[2] in ("adapter", "fixed")


def _fixed_arrays(method: LoraConfig, model: PreparedModel, dtype: str) -> Tree:
    """The frozen arrays of the adapters of an abstract model, as ArraySpecs."""
    kind, leaves = ADAPTERS[method.adapter], flatten(abstract_params(model.spec))
    nodes = [path.rpartition("/")[0] for path in flatten(model.trainable) if path.rpartition("/")[2] == "adapter"]
    weights = {node: leaves[held_weight(node, model.spec)] for node in nodes}
    arrays = {f"{node}/fixed": kind.fixed(weight, method, dtype) for node, weight in weights.items()}
    arrays[SHARED] = kind.shared(list(weights.values()), method, dtype) if weights else None
    return unflatten({path: array for path, array in arrays.items() if array is not None})


def arrange_model(
    spec: ModelSpec,
    trained: list[str],
    adapters: Mapping[str, Callable[[ArraySpec], Adapter]],
    dtype: str,
    rows: Mapping[str, tuple[int, ...]] | None = None,
) -> PreparedModel:
    """The abstract trees of a spec whose stacks are uniform.

    `trained` and `adapters` are by HF module name; an adapter is a function of its weight's ArraySpec. `rows` are those
    trained by themselves, by node.
    """
    leaves = flatten(abstract_params(spec))
    among = modules(spec)
    first = {module.node: module for module in reversed(among.values())}
    full = {f"{among[name].node}/{leaf}" for name in trained for leaf in among[name].trained_leaves}
    trainable = {path: dataclasses.replace(leaf, dtype=dtype) for path, leaf in leaves.items() if path in full}
    for node, module in first.items():
        if module.name in adapters:
            weight = leaves[held_weight(node, spec)]
            role = module.leaves["weight"].role  # of a tied head, whose weight is a table elsewhere
            trainable[f"{node}/adapter"] = adapters[module.name](dataclasses.replace(weight, role=role))
    trainable |= abstract_rows(rows or {}, leaves, dtype)
    buffers = {path: leaves[path] for path in adjusted_buffers(spec)}
    frozen = {path: leaf for path, leaf in leaves.items() if path not in full and path not in buffers}
    return PreparedModel(spec, unflatten(trainable), unflatten(frozen), unflatten(buffers))


def used_up(params: Tree) -> Leaves:
    """The flat form of a tree, whose dicts are emptied, so that a leaf popped from the result is freed."""
    flat = flatten(params)
    _empty(params)
    return flat


def _empty(tree: Tree) -> None:
    for value in tree.values():
        if isinstance(value, dict):
            _empty(value)
    tree.clear()


def _fits_quantised(method: Method, selection: Selection, quantize: QuantizeConfig | None, spec: ModelSpec) -> None:
    """Raises UserError where a quantised weight would be trained itself, or where an adapter requires a quantised or an
    unquantised weight and has the other."""
    leaves = quantised_leaves(flatten(abstract_params(spec)), quantize, spec)
    if not any(isinstance(leaf, QuantisedWeight) for leaf in leaves.values()):
        return
    among = modules(spec)
    if method.trains_base and any(among[name].part == "language" for name in selection.trained):
        instead = "leave quantize out" if quantize is not None else "set quantize: none to read the checkpoint wide"
        raise UserError(
            "a quantised base cannot be trained itself: its codes have no gradient",
            where="quantize, method",
            fix=f"use method: lora, which trains adapters beside the quantised weights, or {instead}",
        )
    if method.adapters is None:  # layers that are added alone are trained, and plain
        return
    adapter = method.adapters.adapter
    if adapter == "pissa":
        raise not_of_quantised()
    for name, module in among.items():
        quantised = isinstance(leaves.get(f"{module.node}/weight"), QuantisedWeight)
        if adapter == "loftq" and name in selection.adapted and not quantised:
            raise only_of_quantised(name)
        if name in selection.trained and quantised:
            last = name.rpartition(".")[2]
            raise UserError(
                f"{name} is to be quantised and to be trained in full",
                where="quantize, method.train_modules",
                fix=f"train it through an adapter (method.targets: ['{last}']) or leave it whole (quantize.modules: "
                f"{{{last}: none}}); embed_tokens, lm_head and norms are not quantised and can be trained in full",
            )


def _abstract_adapter(config: LoraConfig, dtype: str) -> Callable[[ArraySpec], Adapter]:
    return lambda weight: ADAPTERS[config.adapter].abstract(weight, config, dtype)


def _keys(key: Array, names: list[str], stacked: bool) -> Array:
    numbers = np.array([zlib.crc32(name.encode()) for name in names], np.uint32)
    return _fold(key, numbers) if stacked else jax.random.fold_in(key, numbers[0])


_fold = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))
