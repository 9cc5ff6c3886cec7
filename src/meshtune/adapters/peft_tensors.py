"""The tensors of an adapter_model.safetensors <-> trees: names, which belong together, which shape they need."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jaxtyping import PyTree

from meshtune.adapters.config import LoraConfig
from meshtune.adapters.kind import Adapter
from meshtune.adapters.lora import LoRA
from meshtune.adapters.method import FIELD, TENSOR
from meshtune.adapters.peft_config import PeftConfig
from meshtune.adapters.peft_experts import PREFIX, read_experts, written_experts
from meshtune.adapters.peft_misfits import OF_EMBEDDINGS, check_layers, check_shape, misfit, missing, on_embedding
from meshtune.adapters.placement import place_arrays
from meshtune.adapters.registry import ADAPTERS
from meshtune.adapters.targets import Module, modules, partial_layers
from meshtune.arrays.spec import ArraySpec
from meshtune.arrays.tree import Leaves, Tree, flatten, unflatten
from meshtune.errors import UserError
from meshtune.families.composite import module_name
from meshtune.families.tensors import View
from meshtune.mesh.layout import Layout
from meshtune.model.inputs import ROWS
from meshtune.model.linear import LIMITS
from meshtune.model.spec import ModelSpec
from meshtune.weights.safetensors_files import Tensor


@dataclasses.dataclass(frozen=True)
class Content:
    """Tensor names by HF module: those of adapters by array field, those of modules saved in full by leaf.

    `copies` are the base's own weights, which peft writes along with an adapted lm_head; `shared` are, by array field,
    those of what all adapters share, and `rows` those of rows trained by themselves, by HF module. `views` are those of
    the adapters' tensors that hold several experts.
    """

    adapted: dict[str, dict[str, str]]
    full: dict[str, dict[str, str]]
    copies: dict[str, str]
    shared: dict[str, str] = dataclasses.field(default_factory=dict)
    rows: dict[str, str] = dataclasses.field(default_factory=dict)
    views: dict[str, dict[str, View]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Written:
    """What an adapter's file will hold: tensors by name, the adapted HF modules, ranks and alphas of those that have
    them, modules in full, and the rows trained by themselves of others. `parameters` are the adapted parameters of
    experts, by full name, and `expert_parts` the parts of each whose factors follow one another."""

    tensors: list[Tensor]
    adapted: list[str]
    ranks: dict[str, int]
    alphas: dict[str, float]
    trained: list[str]
    rows: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    parameters: list[str] = dataclasses.field(default_factory=list)
    expert_parts: dict[str, list[str]] = dataclasses.field(default_factory=dict)


def collect(trainable: Tree, spec: ModelSpec, config: LoraConfig, shared: PyTree = None) -> Written:
    """The tensors of a trainable tree, and of what its adapters share. In a tied model a trained embedding is there as
    embed_tokens and as lm_head."""
    names, among = names_of_nodes(spec), modules(spec)
    out = Written([], [], {}, {}, [])
    on_experts: dict[str, tuple[Module, int, LoRA]] = {}

    def add(array: jax.Array, suffix: str, owners: list[str], stacked: bool, view: View | None = None) -> None:
        for row, name in enumerate(owners):
            index, full_name = (row,) if stacked else (), f"{PREFIX}{name}"
            full_name += "" if among[name].bare else f".{suffix}"
            out.tensors.append(Tensor.of(full_name, array, str(array.dtype), index, view))

    for path, leaf in flatten(trainable).items():
        node, _, last = path.rpartition("/")
        owners = names[node] + (names["head"] if node == "embed" and spec.tied else [])
        module = among[owners[0]]
        stacked = module.layer is not None
        if last == ROWS:  # a tied head follows the embedding's
            add(leaf.values, TENSOR, owners[:1], False)
            out.rows[owners[0]] = leaf.ids
            continue
        if last != "adapter":
            add(leaf, last, owners, stacked, module.views[last])
            out.trained.extend(name for name in owners if name not in out.trained)
            continue
        if module.role == "experts":
            on_experts |= {name: (among[name], row, leaf) for row, name in enumerate(owners)}
            continue
        views = _views_of(leaf, module, config)
        for field, suffix in leaf.PEFT_TENSORS.items():
            add(getattr(leaf, field), suffix, owners, stacked, views.get(field))
        out.adapted.extend(owners)
        if hasattr(leaf, "scale"):
            for name in owners:
                out.ranks[name] = leaf.rank
                out.alphas[name] = float(f"{leaf.scale * config.alpha / config.scale(leaf.rank):.12g}")
    out.trained[:] = _in_parts(out.trained, among, spec)
    experts = written_experts(on_experts)
    out.tensors.extend(experts.tensors)
    for name, rank in experts.ranks.items():
        out.ranks[name] = rank
        out.alphas[name] = float(f"{experts.scales[name] * config.alpha / config.scale(rank):.12g}")
    out.parameters.extend(experts.ranks)
    out.expert_parts.update(experts.parts)
    for field, name in ADAPTERS[config.adapter].PEFT_SHARED.items():
        array = getattr(shared, field)
        out.tensors.append(Tensor.of(name, array, str(array.dtype)))
    out.tensors.sort(key=lambda tensor: tensor.name)
    return out


def _in_parts(trained: list[str], among: Mapping[str, Module], spec: ModelSpec) -> list[str]:
    """Names for modules_to_save: of a tower and a projector the largest modules of which all is trained, so that
    parameters which no module inside holds by itself are saved too.

    Raises UserError for such a parameter of a module that is not trained as a whole, which peft could not save.
    """
    names = set(trained)
    others = [name for name in among if name not in names]
    if (partial := partial_layers(spec, among)) is not None:
        others.append(f"{partial}.not_computed")
    # Limits of a tower's linear layers, which the module around each holds, are not trained.
    clipped = (name for name, module in among.items() if module.part == "tower" and LIMITS[0] in module.leaves)
    others += [f"{name.rpartition('.')[0]}.{LIMITS[0]}" for name in clipped]

    def largest(name: str) -> str:
        parts = name.split(".")
        prefixes = [".".join(parts[:n]) for n in range(2, len(parts))]
        return next((p for p in prefixes if not any(other.startswith(f"{p}.") for other in others)), name)

    modules = [name if among[name].part == "language" else largest(name) for name in trained]
    if bare := [name for name in modules if name in among and among[name].bare]:
        raise UserError(
            f"{bare[0]} is no module of transformers, and peft could not save it by itself",
            where="method.train_modules",
            fix="leave it out, or train the whole tower: vision.train: [tower]",
        )
    return list(dict.fromkeys(modules))


def sort(shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec, peft: PeftConfig, where: str) -> Content:
    """Sorts tensors by their meaning, checked against the base's spec and the adapter's config.

    Raises UserError naming the tensor that is unknown, missing, or of a shape that does not fit.
    """
    among = modules(spec)
    check_layers(shapes, among, spec, peft, where)
    suffixes = {f".{suffix}": field for field, suffix in ADAPTERS[peft.kind].PEFT_TENSORS.items()}
    routers = {m.parameter.removesuffix(".weight"): name for name, m in among.items() if m.role == "router"}
    experts, of_experts = read_experts(shapes, among, peft, where)
    content = Content(dict(experts.tensors), {}, {}, views=experts.views)
    for name in shapes.keys() - of_experts - _not_computed(shapes, spec, among):
        field = next((field for field, known in ADAPTERS[peft.kind].PEFT_SHARED.items() if known == name), None)
        if field is not None:
            content.shared[field] = name
            continue
        inner = name.removeprefix(PREFIX).replace(".modules_to_save.", ".").replace(".default.", ".")
        inner = module_name(spec, inner)
        suffix = next((s for s in suffixes if inner.endswith(s)), None)
        if suffix is not None and inner.removesuffix(suffix) in routers:  # by its name in transformers' memory
            inner = f"{routers[inner.removesuffix(suffix)]}{suffix}"
        if inner.endswith(OF_EMBEDDINGS):
            raise on_embedding(inner.rpartition(".")[0], where, tied=spec.tied)
        module, leaf = (inner, "weight") if inner in among and among[inner].bare else tuple(inner.rsplit(".", 1))
        if suffix is not None and inner.removesuffix(suffix) in among:
            module = inner.removesuffix(suffix)
            adaptable = among[module].linear or among[module].role == "router"  # which peft's all-linear means too
            if not adaptable or among[module].role == "experts":
                raise misfit(name, where, f"{module} is not a linear layer of this model")
            content.adapted.setdefault(module, {})[suffixes[suffix]] = name
        elif inner.endswith(f".{TENSOR}") and inner.removesuffix(f".{TENSOR}") in among:
            content.rows[inner.removesuffix(f".{TENSOR}")] = name
        elif inner.endswith(".base_layer.weight") and inner.removesuffix(".base_layer.weight") in among:
            content.copies[name] = inner.removesuffix(".base_layer.weight")
        elif module in among and leaf in among[module].leaves:
            content.full.setdefault(module, {})[leaf] = name
        else:
            raise misfit(name, where, "this model has no place for it")
    for module, tensors in content.adapted.items():
        if module in experts.tensors:
            continue
        _check_adapter(among[module], tensors, shapes, peft, where)
    for module, tensors in content.full.items():
        for leaf in among[module].trained_leaves:
            if leaf not in tensors:
                raise missing(f"{PREFIX}{module}.{leaf}", where)
            check_shape(tensors[leaf], shapes, among[module].views[leaf].tensor, where)
    for module in among.values():
        if peft.targets_module(module) and module.name not in content.adapted:
            raise missing(f"{PREFIX}{module.name}.{next(iter(suffixes))[1:]}", where)
    for module in peft.config.train_modules:
        if not any(name.endswith(module) for name in (*content.full, *_containers(content.full))):
            raise missing(f"{PREFIX}{module}.weight", where)
    rows = peft.rows(list(among))
    if spec.tied:  # peft saves the rows that both have once, under the embedding's name
        of_table = [ids for name, ids in rows.items() if among[name].node == "embed"]
        shared = {name for name, ids in rows.items() if among[name].node == "head" and ids in of_table}
        rows = {name: ids for name, ids in rows.items() if name in content.rows or name not in shared}
    for module in {*content.rows, *rows}:
        _check_rows(among[module], content, rows, shapes, where)
    if not content.adapted and not content.full and not content.rows:
        raise UserError("the adapter holds no tensors", where=where, fix="write the adapter again")
    _check_shared(among, content, shapes, peft, where)
    return content


def _not_computed(shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec, among: Mapping[str, Module]) -> set[str]:
    """The tensors of layers of a tower that no feature depends on."""
    if (partial := partial_layers(spec, among)) is None:
        return set()
    computed = {name.removeprefix(f"{partial}.").split(".")[0] for name in among if name.startswith(f"{partial}.")}
    layers = re.compile(rf"{re.escape(PREFIX + partial)}\.(\d+)\.")
    return {name for name in shapes if (match := layers.match(name)) and match[1] not in computed}


def read_shared(
    spec: ModelSpec, file: safetensors.safe_open, content: Content, peft: PeftConfig, layout: Layout | None
) -> PyTree:
    """Reads the arrays that the adapters of a file share, float32: stored, or drawn again where left out; or None."""
    among = modules(spec)
    form = ADAPTERS[peft.kind].shared([among[name].leaves["weight"] for name in content.adapted], peft.config)
    if form is None:
        return None
    numbers = form.start()
    if content.shared:
        arrays = {field: file.get_tensor(name).astype(np.float32) for field, name in content.shared.items()}
        numbers = dataclasses.replace(numbers, **arrays)
        specs = {field: dataclasses.replace(getattr(form, field), shape=array.shape) for field, array in arrays.items()}
        form = dataclasses.replace(form, **specs)
    return place_arrays(numbers, form, layout)


def read(
    abstract: Tree, spec: ModelSpec, file: safetensors.safe_open, content: Content, layout: Layout | None = None
) -> Tree:
    """The arrays of an abstract trainable tree: adapters in float32, modules in full in the dtype of the file.

    With a layout each process reads what its devices hold.
    """
    names, among = names_of_nodes(spec), modules(spec)

    def load(
        node: str,
        tensors: dict[str, dict[str, str]],
        part: str,
        array: ArraySpec,
        dtype: str | None,
        view: View | None = None,
    ) -> jax.Array:
        stacked = array.is_stacked

        def read_one(name: str, within: tuple[slice, ...]) -> np.ndarray:
            if "{}" in name:
                return np.stack([file.get_tensor(name.format(n)) for n in range(array.shape[-3])])[within]
            if view is None or view.is_identity:
                return _cut(file, name, within)
            return view.read(file.get_tensor(name))[within]

        def cut(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            within = index[1:] if stacked else index
            rows = [read_one(tensors[name][part], within) for name in names[node][index[0] if stacked else slice(1)]]
            numbers = np.stack(rows) if stacked else rows[0]
            return numbers if dtype is None else numbers.astype(dtype)

        if layout is None:
            return jnp.asarray(cut((slice(None),) * len(array.shape)))
        return jax.make_array_from_callback(array.shape, layout.of(array), cut)

    leaves: Leaves = {}
    for path, leaf in flatten(abstract).items():
        node, _, last = path.rpartition("/")
        module = among[names[node][0]]
        if last == "adapter":
            parts = {part: getattr(leaf, part) for part in leaf.PEFT_TENSORS}
            views = content.views.get(module.name) or _views_of(leaf, module, None)
            arrays = {
                part: load(node, content.adapted, part, array, array.dtype, views.get(part))
                for part, array in parts.items()
            }
            leaves[path] = dataclasses.replace(leaf, **arrays)
        elif last == ROWS:
            name = content.rows[names[node][0]]
            values = load(node, {names[node][0]: {ROWS: name}}, ROWS, leaf.values, leaf.values.dtype)
            leaves[path] = dataclasses.replace(leaf, values=values)
        else:
            leaves[path] = load(node, content.full, last, leaf, None, module.views[last])
    return unflatten(leaves)


def _views_of(adapter: Adapter, module: Module, config: LoraConfig | None) -> dict[str, View]:
    """Where files have the rows of a weight in another order: the views of the adapter's arrays that have these rows.

    The axes of an adapter that holds arrays are those of its abstract form, which `config` describes.
    """
    weight, view = module.leaves["weight"], module.views["weight"]
    if view.is_identity or module.role == "experts":
        return {}
    form = adapter
    if config is not None:
        module_config = dataclasses.replace(config, rank=getattr(adapter, "rank", config.rank))
        form = ADAPTERS[config.adapter].abstract(weight, module_config)
    views: dict[str, View] = {}
    for field in adapter.PEFT_TENSORS:
        array = getattr(form, field)
        lead = int(array.is_stacked)
        if array.axes[lead] == weight.axes[0]:
            views[field] = view.of_rows(*array.shape[lead + 1 :])
    return views


def _cut(file: safetensors.safe_open, name: str, within: tuple[slice, ...]) -> np.ndarray:
    if all(part == slice(None) for part in within):
        return file.get_tensor(name)
    return file.get_slice(name)[within]


def names_of_nodes(spec: ModelSpec) -> dict[str, list[str]]:
    """Node path -> HF module names, row by row, the head of a tied model included."""
    names: dict[str, list[str]] = {}
    for name, module in modules(spec).items():
        names.setdefault(module.node, []).append(name)
    return names


def _check_adapter(
    module: Module, tensors: dict[str, str], shapes: Mapping[str, tuple[int, ...]], peft: PeftConfig, where: str
) -> None:
    kind, rank = ADAPTERS[peft.kind], peft.rank(module.name)
    form = kind.abstract(module.leaves["weight"], dataclasses.replace(peft.config, rank=rank))
    for field, suffix in kind.PEFT_TENSORS.items():
        if field not in tensors:
            raise missing(f"{PREFIX}{module.name}.{suffix}", where)
        check_shape(tensors[field], shapes, getattr(form, field).shape, where, f" for rank {rank}")


def _check_rows(
    module: Module,
    content: Content,
    rows: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
) -> None:
    if module.name not in content.rows:
        raise missing(f"{PREFIX}{module.name}.{TENSOR}", f"{where}, field {FIELD}")
    name, (vocab, width) = content.rows[module.name], module.leaves["weight"].shape
    if module.name not in rows or module.node not in ("embed", "head"):
        raise misfit(name, where, f"{FIELD} does not say which rows these are of the embedding or the head")
    ids = rows[module.name]
    check_shape(name, shapes, (len(ids), width), where)
    if not all(0 <= token < vocab for token in ids):
        raise UserError(
            f"the adapter has rows of tokens up to {max(ids)}, and the base has {vocab}",
            where=f"{where}, {FIELD}",
            fix="give the base with the new tokens (the run's base/), or one that was enlarged as that was",
        )


def _check_shared(
    among: Mapping[str, Module], content: Content, shapes: Mapping[str, tuple[int, ...]], peft: PeftConfig, where: str
) -> None:
    """Checks that shared arrays are as large as the largest weight needs, or larger."""
    kind = ADAPTERS[peft.kind]
    weights = [among[name].leaves["weight"] for name in content.adapted]
    form = kind.shared(weights, peft.config) if weights else None
    for field, name in kind.PEFT_SHARED.items() if content.shared or peft.fields.get("save_projection") else ():
        if field not in content.shared:
            raise missing(name, where)
        needed = getattr(form, field).shape
        if len(shapes[name]) != 2 or any(has < need for has, need in zip(shapes[name], needed, strict=True)):
            check_shape(name, shapes, needed, where)


def _containers(names: Mapping[str, object]) -> set[str]:
    return {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 1)}
