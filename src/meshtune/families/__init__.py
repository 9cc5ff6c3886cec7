"""Architecture families: a Hugging Face config in, a `ModelSpec` and the table of its tensors out.

A new family is one module with `model_spec(config, where)`, `tensors(spec)` and DESCRIPTIONS (what people are told
about each model_type that it implements; see family.FamilyModule), and one line in FAMILIES.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from meshtune.arrays.tree import flatten
from meshtune.errors import UserError
from meshtune.families.balancing import has_experts, stored_as
from meshtune.families.composite import TEXT, module_name, tensor_name, text_config, tower_tensors
from meshtune.families.config_fields import HARMLESS, recorded_fields
from meshtune.families.family import Family, FamilyModule
from meshtune.families.tensors import TensorMap, validate
from meshtune.lazy import LazyFunction
from meshtune.model.spec import ModelSpec, abstract_params
from meshtune.quantize.published import FIELD, read_scheme

read_composite = LazyFunction("meshtune.families.wrappers:read_composite")
with_tower = LazyFunction("meshtune.families.vision:with_tower")
no_tower = LazyFunction("meshtune.families.vision:no_tower")
LANGUAGE, SCORED = "ForCausalLM", "ForSequenceClassification"
OLDER_LANGUAGE = "LMHeadModel"  # GPT-2's
BARE = frozenset({"gpt2"})  # families of which checkpoints were published as the base model alone
# model_type -> the module that implements it, imported when a config asks for it.
FAMILIES: dict[str, str] = {
    "afmoe": "afmoe",
    "apertus": "apertus",
    "arcee": "arcee",
    "baichuan": "baichuan",
    "cohere": "cohere",
    "cohere2": "cohere2",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "dots1": "dots1",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5_moe",
    "exaone4": "exaone4",
    "exaone_moe": "exaone_moe",
    "falcon": "falcon",
    "falcon_h1": "falcon_h1",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "glm": "glm",
    "glm4": "glm",
    "glm4_moe": "glm4_moe",
    "glm4_moe_lite": "deepseek",
    "gpt2": "gpt2",
    "gpt_neox": "gpt_neox",
    "gpt_oss": "gpt_oss",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitemoehybrid": "granitemoehybrid",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan",
    "hunyuan_v1_moe": "hunyuan_moe",
    "internlm2": "internlm2",
    "internlm3": "internlm3",
    "kimi_k2": "deepseek",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2_moe",
    "llama": "llama",
    "llama4_text": "llama4",
    "mamba2": "mamba2",
    "minimax_m2": "minimax_m2",
    "ministral": "ministral",
    "ministral3": "ministral",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "nemotron": "nemotron",
    "nemotron_h": "nemotron_h",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "olmoe": "olmoe",
    "phi": "phi",
    "phi3": "phi3",
    "phimoe": "phimoe",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_next",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}


def family_module(model_type: str) -> FamilyModule:
    """The module of a model_type of FAMILIES."""
    return cast(FamilyModule, importlib.import_module(f"{__name__}.{FAMILIES[model_type]}"))


def float16_obstacle(config: Mapping[str, Any]) -> str | None:
    """Why a model's activations are beyond float16's range, with the source; None where that is not known."""
    kind = str(text_config(config).get("model_type"))
    description = family_module(kind).DESCRIPTIONS.get(kind) if kind in FAMILIES else None
    return None if description is None else description.overflow


def model_spec(
    config: dict[str, Any],
    dtype: str = "float32",
    where: str = "config.json",
    names: Collection[str] = (),
    vision: bool = False,
) -> ModelSpec:
    """The spec of a Hugging Face config; of a composite's, that of its text model, with `vision` also of its tower.

    `names` are those of the tensors in the checkpoint, which say how a composite's are laid out (see read_composite).
    Raises UserError for a model without a tower where `vision` asks for one, for an unsupported model_type and for
    every field that would change the mathematics in a way that is not implemented; `where` names the config in the
    message.
    """
    check_kind(config, where)
    kind, published = config.get("model_type"), None
    if FIELD in config or TEXT in config:
        published, config = read_scheme(config, where)
    if kind not in FAMILIES:
        composite = read_composite(config, where, names)
        if composite is not None and composite[0]["model_type"] in FAMILIES:
            spec = model_spec(composite[0], dtype, f"{where}, {TEXT}")
            spec = dataclasses.replace(spec, composite=composite[1], published=published)
            return with_tower(spec, config, where) if vision else spec
    if vision:
        raise no_tower(kind, where)
    if scored := (config.get("architectures") or [""])[0].endswith(SCORED):
        config = _of_one_score(config, where)
    if kind not in FAMILIES:
        from meshtune.families.unsupported import unsupported_error

        raise unsupported_error(config, FAMILIES, where)
    try:
        spec = family_module(kind).model_spec(config, where)
    except UserError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"the fields of this {kind} do not fit together ({type(error).__name__}: {error})",
            where=where,
            fix="give the config.json that was published with the model",
        ) from error
    spec = dataclasses.replace(spec, dtype=dtype, published=published)
    return scored_spec(spec) if scored else spec


def check_kind(config: dict[str, Any], where: str) -> None:
    """Raises UserError where the fields that say which family a config is of are not what they should be."""
    kind, named = config.get("model_type"), config.get("architectures")
    if kind is not None and not isinstance(kind, str):
        raise UserError(f"model_type is {kind!r}, not text", where=f"{where}, field model_type")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise UserError(f"architectures is {named!r}, not a list of names", where=f"{where}, field architectures")


def mathematics(config: dict[str, Any], where: str = "config.json") -> dict[str, object]:
    """The fields of a config that its family reads, but for those that say nothing about the mathematics; those of a
    composite's text model are under text_config. Raises UserError as `model_spec` does."""
    with recorded_fields() as read:
        model_spec(config, where=where)
    text, quantised = text_config(config), {FIELD: config[FIELD]} if config.get(FIELD) else {}
    fields = {name: text[name] for name in {"model_type", *(read - HARMLESS)} if text.get(name) is not None}
    if text is config:
        return fields | quantised
    top = {name: config[name] for name in ("model_type", "tie_word_embeddings") if config.get(name) is not None}
    return {**top, **quantised, TEXT: fields}


def description(model_type: str) -> Family:
    """Describes a model_type of FAMILIES to people."""
    return family_module(model_type).DESCRIPTIONS[model_type]


def as_stored(spec: ModelSpec, names: Callable[[], Collection[str]], where: str) -> ModelSpec:
    """The spec for a checkpoint with the tensors `names()`, which is called only where that can make a difference: the
    matrices of experts may be stored by themselves or fused (UserError where they are both), and the names of a family
    in BARE may lack the base model's prefix."""
    if spec.family in BARE:
        bare = dataclasses.replace(spec, bare_names=True)
        return bare if tensors(bare)[0].name in names() else spec
    if not has_experts(spec):
        return spec
    single, fused = (
        {entry.name for entry in tensors(dataclasses.replace(spec, fused_experts=is_fused))}
        for is_fused in (False, True)
    )
    return spec if single == fused else stored_as(spec, names(), (single, fused), where)


def scored_spec(spec: ModelSpec) -> ModelSpec:
    """The same model with its head replaced by one of a single score: a reward model. Raises UserError for a text model
    inside a composite."""
    if spec.composite is not None:
        raise UserError(
            f"a reward model cannot be made of the text model inside a {spec.composite.model_type}",
            where="model.path, stage",
            fix=f"give a model of type '{spec.family}' that stands alone",
        )
    return dataclasses.replace(spec, scored=True, tied=False)


def scored_fields(config: dict[str, Any], pad: int | None) -> dict[str, Any]:
    """Fields of a scored model's config besides its language model's; `pad` is the padding token's id."""
    architecture = (config.get("architectures") or [f"{config['model_type'].capitalize()}{LANGUAGE}"])[0]
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1}
    scored = architecture.replace(OLDER_LANGUAGE, LANGUAGE).replace(LANGUAGE, SCORED)
    return {"architectures": [scored], **labels, "pad_token_id": pad}


def _of_one_score(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The config of the language model that a sequence classification model of one label was made from."""
    labels = len(config.get("id2label") or {}) or config.get("num_labels", 2)
    if labels != 1:
        raise UserError(
            f"a model with {labels} labels: only a reward model, with one, is supported",
            where=f"{where}, field id2label",
            fix="give a model with one label, or a causal language model",
        )
    language = config["architectures"][0].replace(SCORED, LANGUAGE)
    return {name: value for name, value in config.items() if name != "tie_word_embeddings"} | {
        "architectures": [language]
    }


@functools.lru_cache(maxsize=16)
def tensors(spec: ModelSpec) -> tuple[TensorMap, ...]:
    """Every tensor of a model and where it lives in the parameter tree, in the order in which models are written.

    Raises AssertionError where the family's table leaves part of a tensor or of a leaf out, or has it twice.
    """
    return tuple(dataclasses.replace(entry, name=tensor_name(spec, entry.name)) for entry in _own_tensors(spec))


def _own_tensors(spec: ModelSpec) -> tuple[TensorMap, ...]:
    """The table with the names that tensors have in the model by itself."""
    table = tuple(family_module(spec.family).tensors(dataclasses.replace(spec, vision=None)))
    table += () if spec.vision is None else tuple(tower_tensors(spec))
    validate(table, flatten(abstract_params(spec)))
    return tuple(map(_bare, table)) if spec.bare_names else table


def _bare(entry: TensorMap) -> TensorMap:
    """The same part of a tensor that is named without the prefix of the base model, in the module that has it."""
    prefix, _, name = entry.name.partition(".")
    if prefix in ("lm_head", "score"):
        return entry
    return dataclasses.replace(entry, name=name, owner=entry.module)


def module_names(spec: ModelSpec) -> dict[str, list[str]]:
    """Path of a node (a linear layer, a norm, the embedding) -> the Hugging Face modules that it is made of, in the
    order of its rows. A composite's are named as transformers has them in memory, whatever its files say."""
    names: dict[str, dict[str, None]] = {}
    for entry in sorted(tensors(spec), key=lambda entry: entry.index):
        names.setdefault(entry.path.rpartition("/")[0], {})[module_name(spec, entry.module)] = None
    order = {path.rpartition("/")[0]: None for path in flatten(abstract_params(spec))}
    return {node: list(names[node]) for node in order}
