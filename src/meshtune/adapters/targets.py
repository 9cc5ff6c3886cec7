"""The modules of a model that a training method chooses among, by name and pattern."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from meshtune.adapters.config import ALL_LINEAR, LoraConfig
from meshtune.adapters.registry import ADAPTERS
from meshtune.arrays.spec import PARAMETER_ROLES, ArraySpec, Role, unknown_role
from meshtune.arrays.tree import flatten, layer_site, stack_path
from meshtune.errors import UserError, nearest
from meshtune.families import module_names, tensors
from meshtune.families.composite import module_name
from meshtune.families.expert_layout import STRAIGHT, ExpertLayout
from meshtune.families.tensors import TensorMap, View
from meshtune.model.spec import PROJECTOR, VISION, ModelSpec, abstract_params


def check_experts(config: LoraConfig, chosen: Mapping[str, Module]) -> None:
    """Raises UserError where the shared expert is adapted and no routed one, for experts or a type of adapter that do
    not go together, and for dropout."""
    experts = [name for name, module in chosen.items() if module.role == "experts"]
    shared = [name for name, module in chosen.items() if "/shared/" in module.node]
    if shared and not experts:
        raise UserError(
            f"the targets match the shared expert alone ({shared[0]}), which is a small part of what computes a token",
            where="method.targets",
            fix="add 'experts', which are all routed experts, or take the shared expert's modules out",
        )
    if not experts:
        return
    if config.adapter != "lora":
        raise UserError(
            f"adapter {config.adapter} is not possible on experts, such as {experts[0]}",
            where="method.adapter, method.targets",
            fix="use method.adapter: lora, or name the linear layers outside the experts",
        )
    if config.dropout:
        raise UserError(
            "adapters on experts cannot have dropout: peft has none there, and would not read them",
            where="method.dropout",
            fix="set dropout to 0, or leave the experts out of method.targets",
        )


# The families in which peft accepts no adapter on the output of the mixer, for the sake of fused kernels.
REFUSED_IN_PEFT, REFUSED_MODULE = ("falcon_h1", "mamba2", "nemotron_h"), ".out_proj"


ModelPart = Literal["language", "tower", "projector"]
PARTS: dict[str, ModelPart] = {VISION: "tower", PROJECTOR: "projector"}  # by the root of the node
CONVOLUTIONS = (f"{VISION}/patches", f"{PROJECTOR}/convolution")  # linear layers here, and none in transformers


@dataclasses.dataclass(frozen=True)
class Module:
    """A Hugging Face module: its name, the tree node and row that hold it, its leaves (without a layers axis), and the
    views of its tensors in files.

    `plain` says that it multiplies by its weight itself, not by normalised rows of it, `in_peft` that peft accepts an
    adapter on it. `parameter` is the full name that the weight of experts has in transformers' memory,
    and `layout` how it lies there. With `bare` the name is that of a parameter, such as a class token, which no module
    in memory holds by itself. `layer` counts within the language model or within the tower.
    """

    name: str
    node: str
    row: int | None
    layer: int | None
    leaves: dict[str, ArraySpec]
    plain: bool = True
    views: dict[str, View] = dataclasses.field(default_factory=dict)
    in_peft: bool = True
    parameter: str = ""
    layout: ExpertLayout = STRAIGHT
    bare: bool = False

    @property
    def part(self) -> ModelPart:
        """The part of the model that it is in."""
        return PARTS.get(self.node.partition("/")[0], "language")

    @property
    def role(self) -> Role | None:
        """The role of its weight; None without a leaf of that name."""
        return self.leaves["weight"].role if "weight" in self.leaves else None

    @property
    def linear(self) -> bool:
        """Whether it can have an adapter: a matrix, all experts' matrices, or a head that is not normalised."""
        return self.plain and self.role in ("matrix", "experts", "head")

    @property
    def trained_leaves(self) -> list[str]:
        """The leaves that are trained where the module is: all but buffers."""
        return [name for name, leaf in self.leaves.items() if leaf.role != "buffer"]

    @property
    def transposed(self) -> bool:
        """Whether its weight is [in, out] in transformers and in files: a Conv1D."""
        return "weight" in self.views and self.views["weight"].rows_dimension == 1

    @property
    def site(self) -> str:
        """Where in a layer it is ("attn/q"), the same in every layer."""
        return layer_site(self.node)


def modules(spec: ModelSpec) -> dict[str, Module]:
    """HF module name -> Module, in the tree's order. A tied head is a module whose weight is the embedding's."""
    numbers = spec.layer_numbers()
    leaves: dict[str, dict[str, ArraySpec]] = {}
    for path, leaf in flatten(abstract_params(spec)).items():
        node, _, name = path.rpartition("/")
        leaves.setdefault(node, {})[name] = leaf
    named = dict(module_names(spec))
    if spec.tied:
        leaves["head"] = {"weight": dataclasses.replace(leaves["embed"]["weight"], role="head")}
        named.setdefault("head", [module_name(spec, "lm_head")])
    by_name: dict[str, Module] = {}
    entries = {(entry.path, entry.index[:1]): entry for entry in tensors(spec)}

    def views_of(node: str, index: tuple[int, ...]) -> dict[str, View]:
        return {
            name: entries[f"{node}/{name}", index].view for name in leaves[node] if (f"{node}/{name}", index) in entries
        }

    for node, weights in leaves.items():
        place = stack_path(node)
        if place is None:
            plain = not (spec.norm_head and node == "head") and node not in CONVOLUTIONS
            within, name = views_of("embed" if spec.tied and node == "head" else node, ()), named[node][0]
            bare = _is_bare(entries.get((f"{node}/weight", ())))
            by_name[name] = Module(name, node, None, None, weights, plain and not bare, within, bare=bare)
            continue
        rows = numbers[place.root, place.key]
        one_layer = {name: leaf.layer for name, leaf in weights.items()}
        for row, (name, layer) in enumerate(zip(named[node], rows, strict=True)):
            in_peft = not (spec.family in REFUSED_IN_PEFT and name.endswith(REFUSED_MODULE))
            entry = entries.get((f"{node}/weight", (row,)))
            parameter = "" if entry is None or not entry.parameter else module_name(spec, entry.parameter)
            layout = STRAIGHT if entry is None else entry.layout
            views = views_of(node, (row,))
            bare = _is_bare(entry)
            by_name[name] = Module(name, node, row, layer, one_layer, True, views, in_peft, parameter, layout, bare)
    return by_name


def partial_layers(spec: ModelSpec, among: Mapping[str, Module]) -> str | None:
    """The tower's list of layers where transformers has more of them than are computed here, else None."""
    if spec.vision is None or not spec.vision.partial:
        return None
    layer = next(name for name, module in among.items() if module.part == "tower" and module.layer is not None)
    return re.split(r"\.\d+\.", layer, maxsplit=1)[0]


def _is_bare(entry: TensorMap | None) -> bool:
    """Whether the tensor of a tower is a parameter that is named as if it were a module."""
    if entry is None or entry.path.partition("/")[0] not in PARTS:
        return False
    return entry.module.rpartition(".")[2] == entry.name.rpartition(".")[2]


def matches(pattern: str, name: str) -> bool:
    """Whether a name or pattern selects the module `name`, or a module that contains it.

    A name matches whole dotted parts anywhere in the module's name: q_proj, mlp, layers.3. A pattern (with * ? or [) is
    compared with the whole name, with and without a leading 'model.'.
    """
    parts = name.split(".")
    if any(c in pattern for c in "*?["):
        prefixes = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        return any(fnmatch.fnmatchcase(p, pattern) or fnmatch.fnmatchcase(p, f"model.{pattern}") for p in prefixes)
    return f".{pattern}." in f".{name}."


def choose(patterns: Sequence[str], among: dict[str, Module], where: str) -> list[str]:
    """The modules that names and patterns select, in the model's order.

    Raises UserError for one that selects none, with the nearest valid name.
    """
    chosen = set[str]()
    for name in patterns:
        selected = select(name, among)
        if not selected:
            raise _unknown(name, among, where)
        chosen.update(selected)
    return [module for module in among if module in chosen]


def select(pattern: str, among: Mapping[str, Module]) -> list[str]:
    """The modules that a name or pattern selects: of the language model where it has any, else of the tower and the
    projector, whose layers often have the same names."""
    selected = [name for name in among if matches(pattern, name)]
    return [name for name in selected if among[name].part == "language"] or selected


def adapter_targets(config: LoraConfig, among: dict[str, Module]) -> list[str]:
    """The linear modules to adapt. A pattern selects the linear layers among its matches, 'all-linear' every matrix
    of the language model that peft accepts one on, routed experts included.

    Raises UserError for unknown names, for modules that are not linear layers, for a shared expert without the routed
    ones, and where this type of adapter is not possible.
    """
    linear = {name: module for name, module in among.items() if module.linear}
    targets = (config.targets,) if isinstance(config.targets, str) else config.targets
    if not targets:
        raise UserError(
            "no targets for the adapters", where="method.targets", fix=f"give '{ALL_LINEAR}' or module names"
        )
    chosen: dict[str, Module] = {}
    for target in targets:
        if target.lower() == ALL_LINEAR:
            _check_roles(among.values())
            selected = [
                name
                for name, module in linear.items()
                if module.role in ("matrix", "experts") and module.in_peft and module.part == "language"
            ]
        else:
            _check_roles([module for name, module in among.items() if matches(target, name)])
            selected = select(target, linear)
        if not selected and any(matches(target, name) for name in among):
            raise UserError(
                f"'{target}' is not a linear layer, so it cannot have an adapter",
                where="method.targets",
                fix=f"train it in full instead: method.train_modules: ['{target}']",
            )
        if not selected:
            raise _unknown(target, linear, "method.targets")
        chosen |= {name: linear[name] for name in selected}
    if refused := [name for name, module in chosen.items() if not module.in_peft]:
        raise UserError(
            f"peft refuses adapters on {refused[0]}, the output of a Mamba mixer, and could not load them",
            where="method.targets",
            fix=f"leave out_proj out, or give '{ALL_LINEAR}', which does",
        )
    check_experts(config, chosen)
    kind = ADAPTERS[config.adapter]
    kind.check(config)
    for name, module in chosen.items():
        kind.check_weight(name, module.leaves["weight"], config.of(name))
    if config.dropout and any(module.node == "head" for module in chosen.values()):
        raise UserError(
            "adapters with dropout cannot target lm_head: its loss is computed in chunks without random numbers",
            where="method.dropout",
            fix="set dropout to 0, or leave lm_head out of method.targets",
        )
    return [name for name in among if name in chosen]


def _check_roles(modules: Iterable[Module]) -> None:
    """Raises UserError for a role that adapters do not know."""
    for module in modules:
        for name, leaf in module.leaves.items():
            if leaf.role not in PARAMETER_ROLES:
                fix = "name the modules to adapt in method.targets, without this one"
                raise unknown_role("lora", f"{module.node}/{name}", leaf, where="method.targets", fix=fix)


def _unknown(name: str, among: dict[str, Module], where: str) -> UserError:
    short = list(dict.fromkeys(part for module in among for part in reversed(module.split(".")) if not part.isdigit()))
    short = [part for part in short if part not in ("model", "layers")]
    pattern = any(c in name for c in "*?[")
    hint = nearest(name.rpartition(".")[2] if "." in name else name, short)
    example = next(iter(among))
    return UserError(
        f"{'the pattern' if pattern else 'the module'} '{name}' matches nothing in this model",
        where=where,
        fix=f"{hint}valid names: {', '.join(short)}; patterns are compared with names such as {example}",
    )
