"""Reads a Hugging Face config strictly: every field is used, known to be harmless, or an error that names it."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from meshtune.errors import UserError, nearest
from meshtune.model.mlp import ActivationName
from meshtune.model.rope import LONGROPE_FACTORS, RopeAxes, RopeKind, RopeSpec

# Fields that say nothing about the mathematics of a forward pass: names, token ids, generation defaults, bookkeeping.
HARMLESS = frozenset(
    """
    model_type architectures dtype torch_dtype transformers_version use_cache name_or_path pretraining_tp
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id
    initializer_range is_decoder is_encoder_decoder output_attentions output_hidden_states return_dict
    return_dict_in_generate torchscript use_bfloat16 use_return_dict tokenizer_class task_specific_params
    problem_type id2label label2id num_labels finetuning_task prefix max_length min_length do_sample temperature
    top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size num_beams num_beam_groups
    num_return_sequences early_stopping diversity_penalty bad_words_ids forced_bos_token_id forced_eos_token_id
    remove_invalid_values suppress_tokens begin_suppress_tokens exponential_decay_length_penalty
    encoder_no_repeat_ngram_size output_scores chunk_size_feed_forward tf_legacy_loss attn_implementation
    unsloth_version unsloth_fixed is_llama_config model_max_length
    """.split()
)

# Dropout of the model's own, which is part of how it was trained and not of what it computes: not applied, and said.
DROPOUTS = frozenset(
    """
    attention_dropout hidden_dropout residual_dropout embedding_dropout resid_pdrop embd_pdrop attn_pdrop
    classifier_dropout summary_first_dropout mlp_dropout
    """.split()
)

# Fields whose listed values change nothing; any other value would, and is refused.
ONLY = {
    "partial_rotary_factor": (1, 1.0, None),
    "auto_map": (None, {}),
    "is_causal": (True, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": (None, {}),
    "rope_interleaved": (False, None),
}
REASONS = {
    "auto_map": "this model needs code of its own, which is never run",
}


# The type of fields that families read without a default; elsewhere the default says it. A number may be whole.
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        """
        attention_chunk_size first_k_dense_replace hidden_size_per_layer_input initial_context_length
        max_position_embeddings max_window_layers moe_latent_size moe_num_experts n_routed_experts num_experts
        num_global_key_value_heads num_ln_in_parallel_attn num_local_experts num_nextn_predict_layers
        original_max_position_embeddings q_lora_rank sliding_window
        """.split(),
        (int,),
    ),
    **dict.fromkeys(
        """
        altup_coef_clip clip_qkv final_logit_softcapping input_jitter_noise partial_rotary_factor rope_local_base_freq
        rope_theta rotary_pct router_aux_loss_coef router_jitter_noise swa_rope_theta global_rope_theta
        local_rope_theta
        """.split(),
        (float,),
    ),
    **dict.fromkeys("attention_bias tie_embedding tie_word_embeddings output_router_logits".split(), (bool,)),
    **dict.fromkeys("hidden_act hidden_activation hybrid_override_pattern position_embedding_type".split(), (str,)),
    **dict.fromkeys(
        """
        activation_sparsity_pattern full_attn_idxs layer_types layers_block_type mlp_layer_types no_rope_layers
        """.split(),
        (list,),
    ),
    **dict.fromkeys("per_layer_config rope_parameters rope_scaling text_config".split(), (dict,)),
    "intermediate_size": (int, list),  # Gemma 3n has one for each layer
    "mamba_d_head": (int, str),
    "moe_layers": (list,),
    "sliding_window_pattern": (int, str),
}
TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
LARGEST = (1 << 31) - 1
# Fields of which every one becomes something to be read or built.
LARGEST_COUNTS = {
    "num_hidden_layers": 2000,
    "n_layer": 2000,
    "num_layers": 2000,
    **dict.fromkeys("altup_num_inputs mtp_layers num_mtp_layers num_nextn_predict_layers".split(), 100),
} | dict.fromkeys("moe_num_experts n_routed_experts num_experts num_local_experts".split(), 10_000)


_RECORD: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar("record", default=None)


@contextlib.contextmanager
def recorded_fields() -> Iterator[set[str]]:
    """Gives a set to which the names of all fields are added that are read of configs inside the block."""
    record = set[str]()
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


@dataclasses.dataclass
class ConfigFields:
    """A config being read, from the file `where`; `finish` refuses what nobody read. `notes` are for users."""

    _config: dict[str, Any]
    _where: str
    _used: set[str] = dataclasses.field(default_factory=set)
    notes: list[str] = dataclasses.field(default_factory=list)

    def with_values(self, part: str, **values: Any) -> ConfigFields:
        """The same config with other values for some fields, for a part of the model that errors name.

        Fields read of it count as read of the whole.
        """
        return ConfigFields(self._config | values, f"{self._where}, {part}", self._used, self.notes)

    def error(self, field: str, problem: str, fix: str | None = None) -> UserError:
        return UserError(problem, where=f"{self._where}, field {field}", fix=fix)

    def get(self, field: str, default: Any = None) -> Any:
        """The field's value; its default where it is absent or null."""
        self._used.add(field)
        if (record := _RECORD.get()) is not None:
            record.add(field)
        value = self._config.get(field)
        if value is None:
            return default
        self._check_type(field, value, default)
        return value

    def _check_type(self, field: str, value: Any, default: Any) -> None:
        """Raises UserError for a value of another type than the field has, and a number that is none or beyond every
        bound."""
        types = TYPES.get(field)
        if types is None:
            if default is None:
                return
            types = (list,) if isinstance(default, tuple) else (type(default),)
        kinds = types + (int,) * (float in types)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in types):
            names = " or ".join(TYPE_NAMES[kind] for kind in types)
            raise self.error(field, f"{field} must be {names}, found {value!r}")
        if isinstance(value, int | float):
            largest = sys.float_info.max if float in types else LARGEST_COUNTS.get(field, LARGEST)
            if not abs(value) <= largest:
                raise self.error(field, f"{field} is {value:,}, and must be finite and at most {largest:,}")

    def integer(self, field: str, default: int | None = None) -> int:
        """A positive whole number, required unless there is a default."""
        value = self.get(field, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problem = "is missing" if value is None else f"is {value!r}, not a positive whole number"
            raise self.error(field, f"{field} {problem}")
        if value > (largest := LARGEST_COUNTS.get(field, LARGEST)):
            raise self.error(field, f"{field} is {value:,}, and at most {largest:,} can be")
        return value

    def number(self, field: str, default: float | None = None, fix: str | None = None) -> float:
        value = self.get(field, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            problem = "is missing" if value is None else f"is {value!r}, not a positive number"
            raise self.error(field, f"{field} {problem}", fix if value is None else None)
        return float(value)

    def layer_types(self, known: tuple[str, ...], default: Callable[[int], str]) -> list[str]:
        """The kind of every layer: `layer_types`, or by the layer's index where the config does not list them."""
        count, kinds = self.integer("num_hidden_layers"), self.get("layer_types")
        if kinds is None:
            return [default(index) for index in range(count)]
        if not isinstance(kinds, list) or len(kinds) != count or any(kind not in known for kind in kinds):
            raise self.error(
                "layer_types", f"layer_types must list one of {sorted(known)} for each of the {count} layers"
            )
        return kinds

    def only(self, field: str, *values: Any) -> None:
        """Refuses any other value of a field that this family does not implement otherwise."""
        value = self.get(field, values[0])
        if value not in values:
            raise self.error(field, f"{field} = {value!r} is not implemented for this family")

    def harmless(self, *names: str) -> None:
        """Accepts any value of fields that change nothing in this family: leftovers of pretraining, names of code."""
        self._used.update(names)

    def finish(self, *architectures: str) -> None:
        """Refuses unread fields that may matter, and any architecture but the family's causal language model.

        The first of `architectures` is the name of transformers; the others are names of the same model elsewhere.
        """
        named = self._config.get("architectures") or [architectures[0]]
        if not isinstance(named, list) or len(named) != 1 or named[0] not in architectures:
            raise self.error(
                "architectures", f"architecture {named!r} is not supported", f"expected ['{architectures[0]}']"
            )
        for field, value in self._config.items():
            if field in self._used or field in HARMLESS or field.startswith(("_", "transformers.js")):
                continue
            if field in DROPOUTS:
                if value:
                    self.notes.append(f"{field} = {value} of the model's config is not applied")
                continue
            if field in ONLY:
                if value not in ONLY[field]:
                    reason = REASONS.get(field, "it would change the mathematics and is not implemented")
                    raise self.error(field, f"{field} = {value!r}: {reason}")
                continue
            if value is None:
                continue
            raise self.error(
                field,
                f"{field} = {value!r} is a field that Meshtune does not know, so it might change the mathematics",
                f"{nearest(field, self._used)}if it has no effect on the model's numbers, remove it from the config",
            )


ROPE_NUMBERS: dict[RopeKind, tuple[set[str], set[str]]] = {  # kind -> (required, optional)
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": ({"factor"}, {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, set()),
    "longrope": (set(LONGROPE_FACTORS), {"attention_factor", "factor"}),
    "proportional": (set(), {"factor", "partial_rotary_factor"}),
    "ntk": ({"alpha"}, {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),
}
POSITIVE = {"alpha", "factor", "original_max_position_embeddings", "rope_theta", *LONGROPE_FACTORS}
ALWAYS = {"rope_type", "type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"}


def _rope_block(fields: ConfigFields) -> tuple[str, dict[str, Any]]:
    """(the field's name, its value): rope_parameters, or rope_scaling of older configs; both only where they agree."""
    blocks = {name: block for name in ("rope_parameters", "rope_scaling") if (block := fields.get(name)) is not None}
    if blocks:
        _check_blocks(fields, blocks)
    return next(iter(blocks.items()), ("rope_scaling", {}))


def _check_blocks(fields: ConfigFields, blocks: dict[str, Any]) -> None:
    """Raises UserError for blocks that are no mappings, have two kinds or contradict each other: transformers 5 lets
    rope_scaling win where a config has both, so that to ignore either would change the logits."""
    for name, block in blocks.items():
        if not isinstance(block, dict):
            raise fields.error(name, f"{name} must be a mapping, found {block!r}")
        if block.get("type", block.get("rope_type")) != block.get("rope_type", block.get("type")):
            raise fields.error(name, f"{name} has rope_type {block['rope_type']!r} and type {block['type']!r}")
    if len(blocks) == 2:
        new, old = (normalised_rope(block) for block in blocks.values())
        differing = sorted(key for key in old if old[key] != new.get(key))
        if differing or new.keys() - old.keys() - {"rope_theta"}:
            raise fields.error(
                "rope_scaling",
                f"rope_parameters is {blocks['rope_parameters']!r} and rope_scaling is {blocks['rope_scaling']!r}: "
                "only one of them can hold",
                "put the block that is meant, with its rope_theta, under rope_parameters and remove rope_scaling",
            )


def normalised_rope(block: Mapping[str, Any]) -> dict[str, Any]:
    """A rope block with its kind under one name, without keys that are null."""
    kind = block.get("rope_type", block.get("type", "default"))
    return {"rope_type": kind} | {k: v for k, v in block.items() if k not in ("type", "rope_type") and v is not None}


def read_rope(
    fields: ConfigFields,
    head_dim: int,
    *,
    theta: float | None = None,
    rotated: float | None = None,
    interleaved: bool = False,
    mrope: RopeAxes | None = None,
) -> RopeSpec:
    """rope_parameters (transformers 5), or rope_theta and rope_scaling (before), as a RopeSpec.

    `theta` is the family's base where the config has none. `rotated` is the share of a head that is rotated where the
    config does not say; None for a family that has no such field, and rotates whole heads. `mrope` says how the family
    shares the frequencies between positions where the block has an mrope_section.
    """
    source, block = _rope_block(fields)
    sections, block = _mrope_sections(fields, source, block, mrope) if mrope else ((), block)
    if block:
        theta = _rope_theta(fields, source, block, theta)
    elif theta is None or fields.get("rope_theta") is not None:
        theta = fields.number("rope_theta", fix="add it; the family's published value is in its model card")
    longest, outside = fields.integer("max_position_embeddings"), fields.get("original_max_position_embeddings")
    if outside is not None:
        _check_number(fields, source, "original_max_position_embeddings", outside)
    width = head_dim if rotated is None else int(head_dim * _rotated_share(fields, source, block, rotated))
    if width % 2 or not width:
        raise fields.error(source, f"{width} of a head's {head_dim} numbers are rotated; rotary embedding needs pairs")
    assert theta is not None
    if sections and 2 * sum(sections) != width:
        raise fields.error(source, f"mrope_section {list(sections)} is not half of the {width} numbers that turn")
    rope = RopeSpec(
        theta,
        width,
        original_length=longest,
        max_length=longest,
        interleaved=interleaved,
        sections=sections,
        axes=mrope or "blocks",
    )
    return _extended_rope(fields, source, block, rope, outside, rotated is None) if block else rope


def _mrope_sections(
    fields: ConfigFields, source: str, block: dict[str, Any], mrope: RopeAxes
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """(the pairs that turn by each position, the block without what says so); () for a block without sections."""
    sections = block.get("mrope_section")
    if sections is None:
        return (), block
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(n) is int and n >= 0 for n in sections):
        raise fields.error(source, f"mrope_section is {sections!r}, not three whole numbers")
    by_turns = block.get("mrope_interleaved")
    if by_turns is not None and by_turns != (mrope == "interleaved"):
        raise fields.error(source, f"mrope_interleaved = {by_turns!r} is not implemented for this family")
    rest = {key: value for key, value in block.items() if key not in ("mrope_section", "mrope_interleaved")}
    kinds = {key: "default" for key in ("type", "rope_type") if rest.get(key) == "mrope"}
    return tuple(sections), rest | kinds


def _extended_rope(
    fields: ConfigFields, source: str, block: dict[str, Any], rope: RopeSpec, outside: int | None, whole_heads: bool
) -> RopeSpec:
    """`rope` with the kind and the numbers of a block. `outside` is the original context of the config itself; with
    `whole_heads` the family rotates whole heads only."""
    kind = _rope_kind(fields, source, block)
    required, optional = ROPE_NUMBERS[kind]
    for key, value in block.items():
        if key not in required | optional | ALWAYS and value is not None:
            raise fields.error(source, f"{source}.{key} = {value!r} is not known for rope type '{kind}'")
    if missing := sorted(k for k in required if block.get(k) is None):
        raise fields.error(source, f"rope type '{kind}' needs {', '.join(missing)}")
    original = block.get("original_max_position_embeddings")
    if original is not None:
        _check_number(fields, source, "original_max_position_embeddings", original)
    if kind in ("llama3", "yarn", "longrope"):  # without scaling it has no part in anything
        original = outside or original
    if whole_heads and kind != "proportional" and block.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise fields.error(source, "partial_rotary_factor other than 1 is not implemented for this family")
    parameters = _rope_parameters(fields, source, block, required | optional, rope.dim)
    length = int(original or rope.max_length)
    return dataclasses.replace(rope, kind=kind, parameters=parameters, original_length=length)


def _check_number(fields: ConfigFields, source: str, name: str, value: Any) -> None:
    """Raises UserError for what is no finite number, or none above zero where the name is POSITIVE."""
    least = 0 if name in POSITIVE else -sys.float_info.max
    if not isinstance(value, int | float) or not least <= value <= sys.float_info.max or (not value and not least):
        raise fields.error(source, f"{name} is {value!r}, not a number" + " above zero" * (not least))


def _rope_kind(fields: ConfigFields, source: str, block: dict[str, Any]) -> RopeKind:
    kind = block.get("rope_type", block.get("type", "default"))
    if kind == "su" or (kind in ("yarn", "longrope") and "short_factor" in block):
        return "longrope"  # older names of Phi-3's
    if kind == "dynamic" and block.get("alpha"):
        return "ntk"  # Hunyuan's: whatever the length
    if not isinstance(kind, str) or kind not in ROPE_NUMBERS or kind == "ntk":
        known = ", ".join(name for name in ROPE_NUMBERS if name != "ntk")
        raise fields.error(
            source, f"rope type {kind!r} is not implemented", f"{nearest(str(kind), ROPE_NUMBERS)}known: {known}"
        )
    return kind


def _rope_theta(fields: ConfigFields, source: str, block: dict[str, Any], default: float | None) -> float:
    """The base of a config with a block, in either place; the family's `default` where neither has one."""
    theta, inner = fields.get("rope_theta"), block.get("rope_theta")
    if theta is not None and block.get("rope_theta", theta) != theta:
        raise fields.error(
            "rope_theta",
            f"rope_theta is {theta!r}, and {inner!r} in {source}",
            f"keep the one the model was trained with, in {source}",
        )
    theta = block.get("rope_theta", theta)
    if theta is not None:
        _check_number(fields, source, "rope_theta", theta)
    elif default is None:
        raise fields.error(
            "rope_theta", "rope_theta is missing", "add it; the family's published value is in its model card"
        )
    else:
        theta = default
    return float(theta)


def _rotated_share(fields: ConfigFields, source: str, block: dict[str, Any], default: float) -> float:
    """The share of a head that is rotated: of the block, or of the config itself."""
    outside = {name: fields.get(name) for name in ("partial_rotary_factor", "rotary_pct")}
    outside = {name: value for name, value in outside.items() if value is not None}
    inside = block.get("partial_rotary_factor")
    for name, value in outside.items():
        if inside is not None and value != inside:
            raise fields.error(name, f"{name} is {value!r}, and partial_rotary_factor is {inside!r} in {source}")
    share = inside if inside is not None else next(iter(outside.values()), default)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise fields.error(source, f"the share of a head that is rotated is {share!r}, not a number from 0 to 1")
    return float(share)


def _rope_parameters(
    fields: ConfigFields, source: str, block: dict[str, Any], names: set[str], width: int
) -> tuple[tuple[str, float | tuple[float, ...]], ...]:
    numbers: dict[str, float | tuple[float, ...]] = {}
    for name in sorted(names):
        value = block.get(name)
        if value is None:
            continue
        if name not in LONGROPE_FACTORS:
            _check_number(fields, source, name, value)
            numbers[name] = float(value)
            continue
        if not isinstance(value, list) or len(value) != width // 2:
            raise fields.error(source, f"{source}.{name} must list {width // 2} numbers, one for each rotated pair")
        for number in value:
            _check_number(fields, source, name, number)
        numbers[name] = tuple(map(float, value))
    return tuple(numbers.items())


ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_pytorch": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


def read_activation(fields: ConfigFields, field: str = "hidden_act", default: str = "silu") -> ActivationName:
    """The activation that a field names. Raises: UserError where it is not implemented."""
    name = fields.get(field, default)
    if name not in ACTIVATIONS:
        raise fields.error(field, f"{field} {name!r} is not implemented", f"known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def read_ropes(
    fields: ConfigFields,
    head_dim: int | Mapping[str, int],
    thetas: Mapping[str, tuple[str, float | None]],
    scaled: Collection[str] | None = None,
    *,
    rotated: float | None = None,
    interleaved: bool = False,
) -> dict[str, RopeSpec]:
    """The RopeSpec of every layer type; a type whose block is null has no rotary embedding and is left out.

    `thetas` maps every layer type of the family to the field that holds its base frequency in configs from before
    transformers 5 and to its default (None: it must be given). transformers 5 writes one block for each layer type into
    rope_parameters. Of older configs `rope_scaling` holds only for the layer types in `scaled`, None: for all; where
    it holds for some, transformers 5 gives a type without a block its default, and ignores a block that is not keyed by
    layer type, which is refused here. `head_dim` may differ between layer types; `rotated` and `interleaved` are those
    of `read_rope`.
    """
    blocks = _blocks(fields, list(thetas), scaled)
    ropes: dict[str, RopeSpec] = {}
    for kind, (theta_field, default) in thetas.items():
        block = blocks[kind]
        if block is None:
            continue
        theta = fields.get(theta_field)
        if theta is None and block.get("rope_theta") is None:
            theta = default
        part = fields.with_values(
            f"{kind} layers", rope_parameters=block, rope_scaling=None, rope_theta=theta, rope_local_base_freq=None
        )
        size = head_dim if isinstance(head_dim, int) else head_dim[kind]
        ropes[kind] = read_rope(part, size, rotated=rotated, interleaved=interleaved)
    return ropes


def _blocks(
    fields: ConfigFields, kinds: list[str], scaled: Collection[str] | None
) -> Mapping[str, Mapping[str, Any] | None]:
    """The rope block of each layer type, {} for the default, None for none."""
    nested, scaling = fields.get("rope_parameters"), fields.get("rope_scaling")
    for name, block in (("rope_parameters", nested), ("rope_scaling", scaling)):
        if block is not None and not isinstance(block, Mapping):
            raise fields.error(name, f"{name} must be a mapping, found {block!r}")
    if not nested:
        return {kind: (scaling or {}) if scaled is None or kind in scaled else {} for kind in kinds}
    if nested.keys().isdisjoint(kinds):
        if scaled is None:
            return dict.fromkeys(kinds, _agreeing_block(fields, nested, scaling))
        raise fields.error(
            "rope_parameters",
            f"rope_parameters {dict(nested)!r} does not say which layers it is for",
            f"key it by layer type: {', '.join(kinds)}",
        )
    if unknown := sorted(nested.keys() - set(kinds)):
        raise fields.error(
            "rope_parameters", f"rope_parameters.{unknown[0]} is no layer type of this family", f"known: {kinds}"
        )
    if scaled is None and (missing := [kind for kind in kinds if kind not in nested]):
        raise fields.error("rope_parameters", f"rope_parameters has no block for {missing[0]} layers")
    for kind, block in nested.items():
        if block is not None and not isinstance(block, Mapping):
            raise fields.error("rope_parameters", f"rope_parameters.{kind} must be a mapping, found {block!r}")
    absent = None if scaled is None else {}
    blocks = {kind: absent if nested.get(kind) is None else nested[kind] for kind in kinds}
    for kind in kinds if scaled is None else scaled:
        if (block := blocks[kind]) is not None:
            _agreeing_block(fields, block, scaling)
    return blocks


def _agreeing_block(
    fields: ConfigFields, block: Mapping[str, Any], scaling: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """A block of rope_parameters, if rope_scaling does not contradict it."""
    if scaling:
        old, new = normalised_rope(scaling), normalised_rope(block)
        if any(new.get(key) != value for key, value in old.items()):
            raise fields.error(
                "rope_scaling",
                f"rope_parameters has {dict(block)!r} and rope_scaling is {dict(scaling)!r}: only one of them can hold",
                "keep the block that is meant under rope_parameters and remove rope_scaling",
            )
    return block
