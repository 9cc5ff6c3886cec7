"""adapter_config.json: read so that no field that matters is ever ignored, and written so that any peft reads it.

Fields as of peft 0.21 (https://huggingface.co/docs/peft/package_reference/lora).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from meshtune.adapters.config import ALL_LINEAR, AdapterName, LoraConfig
from meshtune.adapters.lora import plain
from meshtune.adapters.method import FIELD
from meshtune.adapters.peft_experts import VERSION, is_targeted, part_of
from meshtune.adapters.registry import ADAPTERS, PEFT_FIELDS
from meshtune.adapters.targets import Module
from meshtune.errors import UserError
from meshtune.families.tensors import View
from meshtune.patterns import pattern_problem

# Last parts of the names of modules that peft, in models with experts, takes to mean the experts' matrices.
TAKEN_FOR_EXPERTS = (".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3")
# Only said for information, or without effect unless another field (which is refused) is set.
INFORMATION = {
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version", "peft_type",
    "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "runtime_config", "ensure_weight_tying",
    "trainable_modules",
    "fan_in_fan_out",  # peft sets it by the kind of each layer, whatever the file says
}  # fmt: skip
READ = {
    "target_modules",
    "target_parameters",
    "modules_to_save",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    FIELD,
}
NEUTRAL: dict[str, Any] = {"bias": "none"}
TASKS = ("CAUSAL_LM", "SEQ_CLS")  # a reward model is a sequence classification model of one label


@dataclasses.dataclass(frozen=True)
class PeftConfig:
    """The fields of an adapter_config.json that say what the tensors of the adapter mean.

    `expert_parts` are the parts of a parameter of experts, such as gate and up, that have their own factors in equal
    shares of the ranks, where the file's metadata say so.
    """

    fields: dict[str, Any]
    kind: AdapterName
    config: LoraConfig
    expert_parts: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)

    @property
    def scored(self) -> bool:
        """Whether it is a reward model's."""
        return self.fields.get("task_type") == TASKS[True]

    def rank(self, name: str) -> int:
        """The rank of the adapter of an HF module."""
        return self._pattern("rank_pattern", name, self.config.rank)

    def alpha(self, name: str) -> float:
        """The alpha of the adapter of an HF module."""
        return float(self._pattern("alpha_pattern", name, self.config.alpha))

    def config_of(self, module: Module, views: Mapping[str, View] | None = None) -> LoraConfig:
        """The config of one module's adapter; `views` are those of tensors that hold the adapters of several experts;
        a part of them may have only some of the ranks."""
        if views is None:
            return dataclasses.replace(self.config, rank=self.rank(module.name), alpha=self.alpha(module.name))
        rank, alpha, part_rank = self.rank(module.parameter), self.alpha(module.parameter), views["a"].shape[1]
        scale = self.config.scale(rank, alpha)
        return dataclasses.replace(self.config, rank=part_rank, alpha=scale / self.config.scale(part_rank, 1.0))

    def targets_module(self, module: Module) -> bool:
        """Tells whether peft would put an adapter on this linear module."""
        targets, name = self.fields.get("target_modules"), module.name
        if module.role == "experts":  # what peft did before transformers 5 is told by the tensors alone
            parts = self.expert_parts.get(module.parameter.rpartition(".")[2], [part_of(module)])
            return (
                is_targeted(module.parameter, self.fields.get("target_parameters") or ()) and part_of(module) in parts
            )
        excluded = self.fields.get("exclude_modules") or []
        if isinstance(excluded, str):
            if re.fullmatch(excluded, name):
                return False
        elif any(f".{name}".endswith(f".{e}") for e in excluded):
            return False
        saved = self.fields.get("modules_to_save") or []
        if not module.linear or any(re.match(rf"(^|.*\.){m}($|\..*)", name) for m in saved):
            return False
        if isinstance(targets, str):
            return module.node != "head" if targets.lower() == ALL_LINEAR else bool(re.fullmatch(targets, name))
        if name in (targets or []) or is_targeted(f"{name}.weight", self.fields.get("target_parameters") or ()):
            return True
        layers = self.fields.get("layers_to_transform")
        if isinstance(layers, int):
            layers = [layers]
        return any(name.endswith(f".{w}") for w in targets or []) and (not layers or module.layer in layers)

    def rows(self, names: list[str]) -> dict[str, tuple[int, ...]]:
        """The rows that are trained by themselves, by HF module, of the modules `names`."""
        rows = self.fields.get(FIELD) or {}
        rows = rows if isinstance(rows, dict) else {"embed_tokens": rows}
        full_names = {
            short: next((name for name in names if f".{name}".endswith(f".{short}")), short) for short in rows
        }
        return {full_names[short]: tuple(ids) for short, ids in rows.items() if full_names[short] in names}

    def _pattern(self, field: str, name: str, default: Any) -> Any:
        """Of the first pattern that is the end of a module's name, or of that of its weight."""
        for key, value in (self.fields.get(field) or {}).items():
            if any(re.match(rf"(.*\.)?({key})$", full) for full in (name, f"{name}.weight")):
                return value
        return default


def read_config(fields: dict[str, Any], where: str) -> PeftConfig:
    """Raises UserError, naming the field, for whatever would change the mathematics and is not implemented."""

    def refuse(field: str, why: str, fix: str = "train or export the adapter without it") -> UserError:
        return UserError(f"{field} is {fields.get(field)!r}: {why}", where=f"{where}, field {field}", fix=fix)

    _check_types(fields, refuse)
    kinds: list[AdapterName] = [
        name for name, marks in PEFT_FIELDS.items() if all(_equal(fields, *mark) for mark in marks.items())
    ]
    if not kinds:
        known = {marks["peft_type"] for marks in PEFT_FIELDS.values()}
        field = "peft_type" if fields.get("peft_type") not in known else "use_dora"
        raise refuse(field, "this kind of adapter is not supported", f"supported: {', '.join(sorted(ADAPTERS))}")
    kind = max(kinds, key=lambda name: len(PEFT_FIELDS[name]))  # the one that is marked most closely
    known_fields = {*PEFT_FIELDS[kind], *ADAPTERS[kind].PEFT_READ}
    for field, value in fields.items():
        if field in INFORMATION or field in READ or field in known_fields or value == NEUTRAL.get(field):
            continue
        if field in NEUTRAL or value not in (False, [], {}, ""):
            raise refuse(field, "this is not implemented and would change the result")
    if fields.get("task_type") not in (None, *TASKS):
        raise refuse("task_type", "only adapters of causal language models and of reward models are supported")
    for field in PATTERNS:
        patterns = fields.get(field) or ()
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            if problem := pattern_problem(pattern):
                raise refuse(field, f"'{pattern}' {problem}", "mend the pattern")
    for field in ("target_modules", "exclude_modules"):
        if isinstance(pattern := fields.get(field), str) and (problem := pattern_problem(pattern)):
            raise refuse(field, f"it {problem}", "mend the pattern")
    targets = fields.get("target_modules")
    try:
        config = LoraConfig(
            **ADAPTERS[kind].options(fields, where),
            targets=targets if isinstance(targets, str) else tuple(targets or ()),
            train_modules=tuple(fields.get("modules_to_save") or ()),
            adapter=kind,
        )
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"the fields of this {fields['peft_type']} adapter do not fit together ({type(error).__name__}: {error})",
            where=where,
            fix="save the adapter again",
        ) from error
    return PeftConfig(fields, kind, config)


def _check_types(fields: dict[str, Any], refuse: Callable[..., UserError]) -> None:
    """Raises UserError for a field that is read and has a value of another type, or a number beyond every bound."""
    for field, value in fields.items():
        kind = KINDS.get(field)
        if field == "r" and fields.get("peft_type") == "OFT":
            kind = "a whole number"  # 0 where oft_block_size says how large blocks are
        if kind is not None and value is not None and not FITS[kind](value):
            raise refuse(field, f"it must be {kind}", "save the adapter again")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_index(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _all(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _by_name(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


LARGEST = 1 << 31
FITS: dict[str, Callable[[Any], bool]] = {
    "text": _is_text,
    "true or false": lambda value: isinstance(value, bool),
    "a whole number above zero": lambda value: _is_index(value) and value > 0,
    "a whole number": _is_index,
    "a number": _is_number,
    "a name, or a list of names": lambda value: _is_text(value) or _all(_is_text)(value),
    "a list of names": _all(_is_text),
    "a layer's number, or a list of them": lambda value: _is_index(value) or _all(_is_index)(value),
    "ranks by name": _by_name(lambda value: _is_index(value) and value > 0),
    "numbers by name": _by_name(_is_number),
    "a list of ids, or one for each module": lambda value: _all(_is_index)(value) or _by_name(_all(_is_index))(value),
}
KINDS: dict[str, str] = {
    **dict.fromkeys("peft_type task_type base_model_name_or_path".split(), "text"),
    **dict.fromkeys("use_rslora use_dora fan_in_fan_out save_projection".split(), "true or false"),
    **dict.fromkeys(("r",), "a whole number above zero"),
    **dict.fromkeys("projection_prng_key oft_block_size num_cayley_neumann_terms".split(), "a whole number"),
    **dict.fromkeys("lora_alpha lora_dropout vera_dropout d_initial module_dropout eps".split(), "a number"),
    **dict.fromkeys("target_modules exclude_modules".split(), "a name, or a list of names"),
    **dict.fromkeys("modules_to_save target_parameters".split(), "a list of names"),
    "layers_to_transform": "a layer's number, or a list of them",
    "rank_pattern": "ranks by name",
    "alpha_pattern": "numbers by name",
    FIELD: "a list of ids, or one for each module",
}
# Fields whose texts are matched as regular expressions; lists of target_modules and exclude_modules are plain names.
PATTERNS = ("rank_pattern", "alpha_pattern", "modules_to_save")


def write_config(
    config: LoraConfig,
    base: str,
    adapted: list[str],
    ranks: dict[str, int],
    alphas: dict[str, float],
    trained: list[str],
    names: list[str],
    *,
    scored: bool = False,
    rows: Mapping[str, tuple[int, ...]] | None = None,
    parameters: list[str] | None = None,
    transposed: bool = False,
    composite: bool = False,
    partial: str | None = None,
) -> dict[str, Any]:
    """The fields for adapters of the modules `adapted`, with `trained` modules saved in full and `rows` of others;
    `ranks` and `alphas` are by HF module, empty for kinds that have neither. `parameters` are the adapted ones of
    experts; besides, modules whose names peft takes to mean experts are named by their parameter too.

    `names` are all modules of the model: short names are used where they select exactly the right ones. `transposed`
    says that the adapted weights are [in, out] in transformers. In a `composite` there are other modules, which are
    excluded, and so are those of the list of layers `partial` that are not among `names`.
    """
    for_experts = [name for name in adapted if parameters and name.endswith(TAKEN_FOR_EXPERTS)]
    weights = {name: f"{name}.weight" for name in for_experts}
    adapted = [name for name in adapted if name not in weights]
    ranks = {weights.get(name, name): rank for name, rank in ranks.items()}
    alphas = {weights.get(name, name): alpha for name, alpha in alphas.items()}
    rank_pattern = {name: rank for name, rank in ranks.items() if rank != config.rank}
    alpha_pattern = {name: plain(a) for name, a in alphas.items() if not math.isclose(a, config.alpha, rel_tol=1e-9)}
    kind = ADAPTERS[config.adapter]
    patterns = {"rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern} if ranks else {}
    return {
        **kind.fields(config),
        **PEFT_FIELDS[config.adapter],
        "task_type": TASKS[scored],
        "base_model_name_or_path": base,
        "revision": None,
        "inference_mode": True,
        "target_modules": _shortest(adapted, names, "."),
        "modules_to_save": (sorted(trained) if composite else _shortest(trained, names, "")) or None,
        **({"exclude_modules": _all_but(names, partial)} if composite else {}),
        "bias": "none",
        "fan_in_fan_out": transposed,
        **patterns,
        "layers_to_transform": None,
        "layers_pattern": None,
        **({"target_parameters": sorted([*parameters, *weights.values()])} if parameters else {}),
        **({"peft_version": VERSION} if parameters else {}),
        **({FIELD: {name.rpartition(".")[2]: list(ids) for name, ids in rows.items()}} if rows else {}),
    }


def _equal(fields: dict[str, Any], field: str, value: object) -> bool:
    return (fields.get(field) or False) == value if value is False else fields.get(field) == value


def _all_but(names: list[str], partial: str | None) -> str:
    """A pattern of the modules that are none of `names`, nor inside or around one of these."""
    roots = sorted({re.split(r"\.[^.]+\.\d+\.", name, maxsplit=1)[0] for name in names})
    inside = "|".join(re.escape(root) for root in roots)
    others = rf"(?!({inside})(\.|$)).*"
    if partial is None:
        return others
    numbers = {name.removeprefix(f"{partial}.").split(".")[0] for name in names if name.startswith(f"{partial}.")}
    return rf"{others}|{re.escape(partial)}\.(?!({'|'.join(sorted(numbers, key=int))})\.).*"


def _shortest(chosen: list[str], names: list[str], before: str) -> list[str]:
    """Last parts of names where those select the chosen modules and no other, else whole names.

    peft compares target_modules with the whole name or what follows a dot (`before` "."), modules_to_save with any
    ending ("").
    """
    containers = {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 2)}
    chosen_set, short = set(chosen), []
    for name in chosen:
        last = name.rpartition(".")[2]
        selected = {module for module in containers if module == last or module.endswith(before + last)}
        short.append(last if selected <= chosen_set else name)
    return sorted(set(short))
