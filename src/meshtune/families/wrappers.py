"""The composites around text models that are known: how their configs and files are laid out.

Only those are here whose forward pass of text alone is their text model's. Models that stand alone never import this.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from meshtune.errors import UserError
from meshtune.families.composite import BEFORE, SINCE, TEXT, Prefixes, passed_through
from meshtune.families.config_fields import ConfigFields
from meshtune.model.spec import Composite, ModelSpec

LAYERS = "model.layers."
PLAIN: Prefixes = (("model.", "model."), ("lm_head", "lm_head"))
IDEFICS: Prefixes = (("model.", "model.text_model."), ("lm_head", "lm_head"))


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """Describes a composite model_type: the model_types that its text model may have (the first is that of a
    text_config without one), and the prefixes of the tensors of its other parts, behind an optional "model.".

    A checkpoint may lack the parts that are `optional`. `ignored` are fields of text_config that the text model would
    read and the composite does not; `tied` is the default of the composite's tie_word_embeddings in transformers,
    `in_memory` how modules of its text model are named there. Files are in one of `layouts`. `tower` says how prefixes
    of modules of the tower and the projector in memory are written in files, the first that is there. `fields` are
    further fields of the config that say nothing of the text model, `text_fields` those of text_config that it does not
    read. `families` are those of text models whose model_type is of the composite only. Published configs of a `flat`
    one have the text model's fields outside. `defaults` are fields, by the text model's model_type, that published
    configs leave out.
    """

    title: str
    architecture: str
    texts: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    ignored: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    tied: bool = True
    in_memory: Prefixes = SINCE
    layouts: tuple[Prefixes, ...] = (BEFORE, SINCE)
    tower: tuple[tuple[str, tuple[str, ...]], ...] = ()
    fields: tuple[str, ...] = ()
    text_fields: tuple[str, ...] = ()
    families: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flat: bool = False
    defaults: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


VISION = {"vision tower": ("vision_tower.",), "projector": ("multi_modal_projector.",)}
# Files of models that were made from a config lack the module "vision_model" which published ones have.
TOWER = (
    (
        "model.vision_tower.",
        (
            "vision_tower.vision_model.",
            "vision_tower.",
            "model.vision_tower.vision_model.",
            "model.vision_tower.",
        ),
    ),
    ("model.multi_modal_projector.", ("multi_modal_projector.", "model.multi_modal_projector.")),
)
VISUAL = (("model.visual.", ("visual.", "model.visual.")),)
_PROJECTION = ("embed_vision.embedding_projection", "embed_vision.multimodal_embedder.embedding_projection")
UNIFIED = tuple(
    (f"model.{names[-1]}", tuple(prefix + name for name in names for prefix in ("", "model.")))
    for names in (_PROJECTION, ("vision_embedder.", "embed_vision."))
)
MULTIMODAL = {"vision tower": ("vision_tower.", "embed_vision."), "audio tower": ("audio_tower.", "embed_audio.")}
# Of transformers' LlamaConfig and MistralConfig.
SEVEN = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048}
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**SEVEN, "intermediate_size": 11008, "rope_theta": 10_000.0, "vocab_size": 32000},
    "mistral": {**SEVEN, "intermediate_size": 14336, "rope_theta": 10_000.0, "vocab_size": 32000}
    | {"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32},
}
# Of transformers' Glm4vTextConfig and Glm4vMoeTextConfig, where they are not those of GLM-4.
GLM_DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4v_text": {"head_dim": None, "rms_norm_eps": 1e-5},  # heads divide the width
    "glm4v_moe_text": {"attention_bias": True},
}
# Of transformers' GemmaConfig and Gemma2Config.
GEMMA_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma": {"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"num_key_value_heads": 16, "max_position_embeddings": 8192, "vocab_size": 256_000},
    "gemma2": {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
    | {"num_key_value_heads": 4, "max_position_embeddings": 8192, "vocab_size": 256_000},
}
WRAPPERS: dict[str, Wrapper] = {
    "gemma3": Wrapper(
        "Gemma 3 with vision",
        "Gemma3ForConditionalGeneration",
        ("gemma3_text",),
        VISION,
        ignored=("final_logit_softcapping",),
        tower=TOWER,
    ),
    "gemma3n": Wrapper(
        "Gemma 3n with vision and audio", "Gemma3nForConditionalGeneration", ("gemma3n_text",), MULTIMODAL
    ),
    "gemma4": Wrapper(
        "Gemma 4 with vision and audio",
        "Gemma4ForConditionalGeneration",
        ("gemma4_text",),
        MULTIMODAL,
        optional=("audio tower",),
        tower=tuple((f"model.{part}.", (f"{part}.", f"model.{part}.")) for part in ("vision_tower", "embed_vision")),
    ),
    "gemma4_unified": Wrapper(
        "Gemma 4 12B with vision and audio",
        "Gemma4UnifiedForConditionalGeneration",
        ("gemma4_unified_text",),
        {"vision embedder": ("embed_vision.", "vision_embedder."), "audio embedder": ("embed_audio.",)},
        optional=("audio embedder",),
        tower=UNIFIED,
    ),
    **{
        kind: Wrapper(
            title,
            f"{name}ForConditionalGeneration",
            texts,
            {"vision tower": ("visual.",)},
            tied=False,
            layouts=(SINCE,),
            tower=VISUAL,
            families={"glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe"},
            defaults=GLM_DEFAULTS,
        )
        for kind, name, title, texts in (
            ("glm4v", "Glm4v", "GLM-4.1V", ("glm4v_text",)),
            ("glm4v_moe", "Glm4vMoe", "GLM-4.5V and 4.6V", ("glm4v_moe_text",)),
            ("glm46v", "Glm46V", "GLM-4.6V", ("glm4v_text", "glm4v_moe_text")),
        )
    },
    **{
        kind: Wrapper(
            title,
            f"{name}ForConditionalGeneration",
            ("llama", "qwen2", "mistral"),
            {"vision tower": ("vision_model.",), "projector": ("connector.",)},
            tied=kind == "smolvlm",
            in_memory=IDEFICS,
            layouts=(IDEFICS,),
            tower=tuple((prefix, (prefix,)) for prefix in ("model.vision_model.", "model.connector.")),
            fields=("scale_factor", "use_cache", "pad_token_id"),
        )
        for kind, name, title in (("idefics3", "Idefics3", "Idefics 3"), ("smolvlm", "SmolVLM", "SmolVLM and SmolVLM2"))
    },
    "internvl": Wrapper(
        "InternVL 2.5 to 3.5",
        "InternVLForConditionalGeneration",
        ("qwen2", "qwen3", "qwen3_moe", "llama", "gpt_oss"),
        VISION,
        tower=TOWER,
        fields=("downsample_ratio",),
    ),
    "lfm2_vl": Wrapper(
        "LFM2-VL",
        "Lfm2VlForConditionalGeneration",
        ("lfm2",),
        VISION,
        tower=TOWER,
        # Of published configs, which the processor has too; and an older name of tie_word_embeddings.
        fields=(
            *("downsample_factor", "do_image_splitting", "encoder_patch_size", "max_image_tokens", "max_num_patches"),
            *("max_pixels_tolerance", "max_tiles", "min_image_tokens", "min_tiles", "tile_size", "use_thumbnail"),
            *("use_image_special_tokens", "tie_embedding"),
        ),
    ),
    "llama4": Wrapper(
        "Llama 4 with vision",
        "Llama4ForConditionalGeneration",
        ("llama4_text",),
        {"vision tower": ("vision_model.",), "projector": ("multi_modal_projector.",)},
        tied=False,
        in_memory=BEFORE,
    ),
    "llava": Wrapper(
        "LLaVA 1.5",
        "LlavaForConditionalGeneration",
        ("llama", "mistral", "qwen2"),
        VISION,
        tied=False,
        tower=TOWER,
        fields=("ignore_index",),
        defaults=TEXT_DEFAULTS,
    ),
    "llava_next": Wrapper(
        "LLaVA-NeXT",
        "LlavaNextForConditionalGeneration",
        ("llama", "mistral", "qwen2"),
        VISION | {"newline": ("image_newline",)},
        tied=False,
        tower=(*TOWER, ("model.image_newline", ("image_newline", "model.image_newline"))),
        fields=("ignore_index", "use_image_newline_parameter"),
        defaults=TEXT_DEFAULTS,
    ),
    "mistral3": Wrapper(
        "Mistral Small 3, Ministral 3, Devstral with vision",
        "Mistral3ForConditionalGeneration",
        ("mistral", "ministral3"),
        VISION,
        tower=TOWER,
    ),
    "paligemma": Wrapper(
        "PaliGemma and PaliGemma 2",
        "PaliGemmaForConditionalGeneration",
        ("gemma", "gemma2"),
        VISION,
        tower=TOWER,
        fields=("_vocab_size", "hidden_size", "ignore_index", "num_hidden_layers", "projection_dim", "vocab_size"),
        text_fields=("num_image_tokens", "use_bidirectional_attention"),
        defaults=GEMMA_DEFAULTS,
    ),
    **{
        kind: Wrapper(
            title,
            f"{name}ForConditionalGeneration",
            (f"{kind}_text",),
            {"vision tower": ("visual.",)},
            tied=False,
            layouts=layouts,
            tower=VISUAL,
            families={f"{kind}_text": family},
            defaults={"qwen3_vl_moe_text": {"norm_topk_prob": True}},  # which is no field: it always does
            flat=layouts != (SINCE,),
        )
        for kind, name, title, family, layouts in (
            ("qwen2_vl", "Qwen2VL", "Qwen2-VL", "qwen2", (PLAIN, SINCE)),
            ("qwen2_5_vl", "Qwen2_5_VL", "Qwen2.5-VL", "qwen2", (PLAIN, SINCE)),
            ("qwen3_vl", "Qwen3VL", "Qwen3-VL", "qwen3", (SINCE,)),
            ("qwen3_vl_moe", "Qwen3VLMoe", "Qwen3-VL MoE", "qwen3_moe", (SINCE,)),
        )
    },
    "qwen3_5": Wrapper(
        "Qwen3.5 with vision",
        "Qwen3_5ForConditionalGeneration",
        ("qwen3_5_text",),
        {"vision tower": ("visual.",)},
        tied=False,
        tower=VISUAL,
    ),
    "qwen3_5_moe": Wrapper(
        "Qwen3.5 MoE with vision",
        "Qwen3_5MoeForConditionalGeneration",
        ("qwen3_5_moe_text",),
        {"vision tower": ("visual.",)},
        tied=False,
        tower=VISUAL,
    ),
}
# Fields of a composite's config that say nothing of its text model.
OUTER_FIELD = re.compile(
    r"^((vision|image|video|audio|projector|multimodal|multi_modal|mm|boi|eoi|boa|eoa|spatial)_.*|.*_token_(id|index)"
    r"|language_model_only)$"
)

# Fields of a flat config that are the composite's.
OF_BOTH = ("architectures", "model_type", "tie_word_embeddings", "dtype", "torch_dtype", "transformers_version")


def is_wrapper(model_type: object) -> bool:
    """Whether a model_type is a composite's."""
    return isinstance(model_type, str) and model_type in WRAPPERS


def part_of(model_type: str, name: str) -> str | None:
    """The part other than the text model of a composite of this type that a tensor belongs to."""
    for part, prefixes in WRAPPERS[model_type].parts.items():
        if name.removeprefix("model.").startswith(prefixes):
            return part
    return None


def read_composite(
    config: Mapping[str, Any], where: str, names: Collection[str]
) -> tuple[dict[str, Any], Composite] | None:
    """(the text model's config, with the composite's tied embeddings; how names are prefixed); None for a config that
    is no composite of WRAPPERS around one of its text models.

    `names` are those of the tensors in the checkpoint's files; without any the newer layout is assumed. Raises
    UserError where text_config is no mapping, for a field of the composite that is not known, and for files in both
    layouts.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in WRAPPERS:
        return None
    wrapper, inner = WRAPPERS[kind], config.get(TEXT)
    if inner is None and wrapper.flat:
        config, inner = _nested(config, wrapper)
    if not isinstance(inner, Mapping):
        raise UserError(
            f"{TEXT} of this {kind} is {inner!r}, not a mapping",
            where=f"{where}, field {TEXT}",
            fix="give the config.json that was published with the model",
        )
    inner = {"model_type": wrapper.texts[0], **inner}
    if inner.get("model_type") not in wrapper.texts:
        return None
    inner = {**_defaults(inner, wrapper), **inner}
    inner = {field: value for field, value in inner.items() if field not in wrapper.text_fields}
    inner["model_type"] = wrapper.families.get(inner["model_type"], inner["model_type"])
    for field in wrapper.ignored:
        if inner.get(field) is not None:
            raise UserError(
                f"{TEXT}.{field} is {inner[field]!r}: {wrapper.architecture} of transformers ignores it, and the text "
                "model by itself does not",
                where=f"{where}, field {TEXT}",
                fix="set it to null, or give the text model alone",
            )
    fields = ConfigFields(dict(config), where)
    fields.get(TEXT)
    tied = fields.get("tie_word_embeddings")
    for field in config:
        if OUTER_FIELD.match(field) or field in wrapper.fields:
            fields.get(field)
    fields.finish(wrapper.architecture)
    if tied is None and names:
        tied = wrapper.tied  # where that is so, spec_of looks whether the files have a head of their own
    if tied is not None:
        inner["tie_word_embeddings"] = bool(tied)
    tower = tuple((own, _first_prefix(names, candidates)) for own, candidates in wrapper.tower)
    in_memory = tuple((own, own) for own, _ in wrapper.tower)
    layout = _layout(names, where, wrapper)
    return inner, Composite(kind, (*tower, *layout), (*in_memory, *wrapper.in_memory))


def _defaults(inner: Mapping[str, Any], wrapper: Wrapper) -> Mapping[str, Any]:
    fields = wrapper.defaults.get(str(inner.get("model_type")), {})
    return {name: value for name, value in fields.items() if name != "rope_theta" or "rope_parameters" not in inner}


def _nested(config: Mapping[str, Any], wrapper: Wrapper) -> tuple[dict[str, Any], dict[str, Any]]:
    """(a flat config without the fields of its text model, these)."""
    outer = {
        field: value
        for field, value in config.items()
        if OUTER_FIELD.match(field) or field in (*wrapper.fields, *OF_BOTH)
    }
    return outer, {field: value for field, value in config.items() if field not in outer}


def _first_prefix(names: Collection[str], candidates: tuple[str, ...]) -> str:
    """The first of some prefixes that a name has; where none has, the last, which is that of modules in memory."""
    return next((prefix for prefix in candidates if any(n.startswith(prefix) for n in names)), candidates[-1])


def _layout(names: Collection[str], where: str, wrapper: Wrapper) -> Prefixes:
    there: list[tuple[Prefixes, str]] = []
    for layout in wrapper.layouts:
        prefix = dict(layout)["model."]
        prefix = LAYERS if prefix == "model." else prefix  # which parts of the tower begin with too
        there += [(layout, name) for name in names if name.startswith(prefix)][:1]
    if len(there) > 1:
        raise UserError(
            f"the text model is there twice: tensors '{there[0][1]}' and '{there[1][1]}' have the prefixes of two "
            "layouts",
            where=where.removesuffix("/config.json"),
            fix="remove the stale files, or download the model again into an empty folder",
        )
    return there[0][0] if there else wrapper.in_memory


def incomplete_parts(spec: ModelSpec, names: Collection[str]) -> list[str]:
    """Lists gaps in the parts that are passed through: parts without a tensor, and layers that lack a tensor which
    other layers of the same part have."""
    if spec.composite is None or spec.vision is not None:  # what a tower reads is checked by its table
        return []
    wrapper = WRAPPERS[spec.composite.model_type]
    parts = wrapper.parts
    in_parts = {part: [name for name in names if passed_through(spec, name) == part] for part in parts}
    required = [part for part in parts if part not in wrapper.optional]
    problems = [f"the {part} of this {spec.composite.model_type} is missing" for part in required if not in_parts[part]]
    for part, inside in in_parts.items():
        layers: dict[str, dict[int, set[str]]] = {}
        for name in inside:
            if match := re.match(r"(.*?\.layers\.)(\d+)\.(.*)", name):
                layers.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
        for prefix, endings in layers.items():
            all_endings = set[str]().union(*endings.values())
            for number in range(max(endings) + 1):
                lacking = sorted(all_endings - endings.get(number, set()))
                problems += [f"tensor '{prefix}{number}.{ending}' of the {part} is missing" for ending in lacking]
    return problems
