"""Reading a Hugging Face config strictly: every field is used, known to be harmless, or an error that names it."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator
from typing import Any

from meshtune.errors import UserError, nearest

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


class ConfigFields:
    """A config being read; `finish` refuses the fields that nobody asked for."""

    def __init__(self, config: dict[str, Any], where: str):
        self._config, self._where, self._used = config, where, set[str]()
        self.notes: list[str] = []

    def with_values(self, part: str, **values: Any) -> ConfigFields:
        """The same config with other values for some fields, for a part of the model that errors name.

        What is read of it counts as read of the whole.
        """
        fields = ConfigFields(self._config | values, f"{self._where}, {part}")
        fields._used, fields.notes = self._used, self.notes
        return fields

    def error(self, field: str, what: str, fix: str | None = None) -> UserError:
        return UserError(what, where=f"{self._where}, field {field}", fix=fix)

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

    def number(self, field: str, default: float | None = None) -> float:
        value = self.get(field, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            problem = "is missing" if value is None else f"is {value!r}, not a positive number"
            raise self.error(field, f"{field} {problem}")
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
