"""TRL's arguments as a recipe: what one table entry alone cannot say."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from meshtune.config.foreign import models, trainer
from meshtune.config.foreign.adapted import put_targets
from meshtune.config.foreign.draft import OTHER_ORDER, Draft
from meshtune.config.foreign.model_layers import layers_of_model
from meshtune.config.foreign.rules import direct, number
from meshtune.config.foreign.streams import stream
from meshtune.config.foreign.targets import NotExpandableError, is_expression, names_of
from meshtune.config.foreign.trl import BALANCE, BALANCED, FIELDS, NAME, RATES, TRL

OF_TRAINER = {
    "kto": {"desirable_weight", "undesirable_weight"},
    "cpo": {"cpo_alpha", "simpo_gamma"},
    "reward": {"center_rewards_coefficient"},
    "dpo": {"ld_alpha", "rpo_alpha", "f_divergence_type", "beta", "precompute_ref_log_probs", "loss_weights"},
}
STAGES = {"sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "rm", "orpo": "orpo", "cpo": "cpo"}


def train(raw: dict[str, Any], devices: int, chosen: str | None) -> Draft:
    """The draft of TRL's arguments for its trainer `chosen`, or the one whose own arguments are among them."""
    raw = {key: value for name, entry in raw.items() for key, value in [_switch(name, entry)]}
    name = chosen or next((name for name, keys in OF_TRAINER.items() if keys & set(raw)), "sft")
    rate = direct("optimizer.learning_rate", number, RATES.get(name, RATES["sft"]))
    draft = Draft(NAME, raw, {**TRL, "learning_rate": rate}, devices)
    if chosen is None:
        draft.remark(f"The arguments do not name the trainer: taken to be {name} (--trainer)")
    _model(draft)
    _balance(draft, name)
    _stage(draft, name)
    _method(draft, name)
    validation = _data(draft, name)
    _precision(draft)
    trainer.trainer_settings(draft, validation=validation, kind=STAGES[name])
    _stream(draft)
    draft.remark(OTHER_ORDER)
    return draft


def _switch(key: str, value: object) -> tuple[str, object]:
    """--no_KEY, which turns a switch off, as the key itself."""
    plain = key.removeprefix("no_")
    return (plain, False) if plain != key and key not in TRL and plain in TRL and value is True else (key, value)


def _model(draft: Draft) -> None:
    path = draft.get("model_name_or_path")
    if path is None:
        draft.refuse("model_name_or_path", "no model is named", "add model_name_or_path")
        return
    models.check_model(draft, "model_name_or_path", path)
    draft.put("model.path", path, "model_name_or_path")
    if draft.get("model_revision") != "main":
        draft.put("model.revision", draft.get("model_revision"), "model_revision")
    if draft.get("chat_template_path"):
        draft.put("model.chat_template", draft.get("chat_template_path"), "chat_template_path")


def _balance(draft: Draft, name: str) -> None:
    """The loss that balances the load of experts, which two trainers add for every mixture."""
    layers = layers_of_model(str(draft.get("model_name_or_path")))
    if layers is not None and layers.is_mixture and name in BALANCED and "router_aux_loss_coef" not in draft.given:
        draft.put("model.router_aux_loss", BALANCE, "router_aux_loss_coef", note="of mixtures of experts")


def _stage(draft: Draft, name: str) -> None:
    draft.put("stage.kind", STAGES[name], note=f"the trainer {name}")
    losses = draft.get("loss_type")
    losses = losses if isinstance(losses, list) else [losses or {"sft": "nll", "kto": "kto"}.get(name, "sigmoid")]
    known = {
        "sft": ("nll", "dft"),
        "dpo": ("sigmoid", "hinge", "ipo", "robust"),
        "kto": ("kto",),
        "cpo": ("sigmoid", "hinge", "ipo", "simpo"),
    }.get(name, ("sigmoid",))
    if len(losses) != 1 or losses[0] not in known:
        draft.refuse("loss_type", f"{losses} is not computed here", f"use {' or '.join(known)}")
    elif name == "cpo" and losses[0] == "simpo":
        draft.put("stage.kind", "simpo", "loss_type")
        draft.put("stage.gamma", draft.get("simpo_gamma"), "simpo_gamma")
    elif name in ("sft", "dpo", "cpo"):
        draft.put("stage.loss", losses[0], "loss_type")
    else:
        draft.idle("loss_type", "it is the stage's own")
    if name in ("dpo", "kto", "orpo", "cpo"):
        draft.put("stage.beta", float(draft.get("beta")), "beta")
    if name == "orpo":
        draft.put("data.train_on_prompt", True, note="TRL's cross-entropy is that of prompt and chosen answer")
    if name == "cpo":
        draft.put("stage.sft_weight", draft.get("cpo_alpha"), "cpo_alpha")
        if draft.get("label_smoothing"):
            draft.put("stage.label_smoothing", draft.get("label_smoothing"), "label_smoothing")
    if name == "dpo":
        for key, ours in (
            ("label_smoothing", "label_smoothing"),
            ("ld_alpha", "ld_alpha"),
            ("rpo_alpha", "sft_weight"),
        ):
            if draft.get(key):
                draft.put(f"stage.{ours}", draft.get(key), key)
    if name in ("dpo", "kto") and draft.get("ref_model"):
        draft.put("stage.reference", draft.get("ref_model"), "ref_model")
    if name == "kto":
        for key in ("desirable_weight", "undesirable_weight"):
            draft.put(f"stage.{key}", draft.get(key), key)
    if name == "reward" and draft.get("center_rewards_coefficient"):
        draft.put("stage.centre", draft.get("center_rewards_coefficient"), "center_rewards_coefficient")


def _method(draft: Draft, name: str) -> None:
    if not draft.get("use_peft"):
        draft.put("method.kind", "full", "use_peft")
    else:
        draft.put("method.kind", "lora", "use_peft")
        draft.put("method.adapter", "dora" if draft.get("use_dora") else "lora", "use_dora")
        draft.put("method.rank", draft.get("lora_r"), "lora_r")
        draft.put("method.alpha", float(draft.get("lora_alpha")), "lora_alpha")
        trainer.dropout(draft, compared=name != "sft" and bool(draft.get("disable_dropout")))
        _targets(draft)
        if draft.get("use_rslora"):
            draft.put("method.rslora", True, "use_rslora")
        if draft.get("lora_modules_to_save"):
            draft.put("method.train_modules", draft.get("lora_modules_to_save"), "lora_modules_to_save")
    if draft.get("load_in_4bit"):
        if draft.get("bnb_4bit_quant_type") != "nf4":
            draft.refuse("bnb_4bit_quant_type", "fp4 is not written here", "use nf4")
        draft.put("quantize.format", "nf4", "load_in_4bit", "bnb_4bit_quant_type")
        draft.put("quantize.block_size", 64, note="bitsandbytes' block")
        draft.put("quantize.double", draft.get("use_bnb_nested_quant"), "use_bnb_nested_quant")
    elif draft.get("load_in_8bit"):
        note = "8 bits in blocks in place of LLM.int8(), which keeps outliers apart"
        draft.put("quantize.format", "int8", "load_in_8bit", note=note, differs=True)


def _targets(draft: Draft) -> None:
    chosen, parameters = draft.get("lora_target_modules"), draft.get("lora_target_parameters") or []
    if chosen is None and not parameters:
        note = "peft's default for Llama, Mistral, Qwen and Gemma; another family's may be others"
        draft.put("method.targets", ["q_proj", "v_proj"], "lora_target_modules", note=note, differs=True)
    else:
        names = None if chosen == ["all-linear"] else chosen or []
        try:
            names = names_of(names[0]) if names and len(names) == 1 and is_expression(names[0]) else names
        except NotExpandableError as problem:
            draft.refuse("lora_target_modules", f"the expression: {problem}", "list the modules' names instead")
            return
        keys = ("lora_target_modules", "lora_target_parameters")
        put_targets(draft, names, *keys, by_class=False, converts=True, experts=bool(parameters))


def _stream(draft: Draft) -> None:
    """A stream, which TRL reads in its order unless shuffle_dataset draws it from a buffer."""
    key = "streaming" if draft.get("datasets") else "dataset_streaming"
    if not draft.get(key):
        return
    if draft.get("shuffle_dataset"):
        stream(draft, key, "shuffle_dataset")
    else:
        draft.put("data.shuffle", False, key, note="a stream is read in its order")
        stream(draft, key)


def _data(draft: Draft, name: str) -> bool:
    listed = draft.get("datasets")
    path = None if listed else draft.get("dataset_name")
    if listed:
        _mixture(draft, listed)
    elif path is not None:
        _source(draft, "data.train.0", path)
    else:
        draft.refuse("dataset_name", "no data set is named", "add dataset_name")
    length = draft.get("max_length") if "max_length" in draft.given else draft.get("max_seq_length")
    length = draft.get("max_length") if length is None else length
    draft.put("data.max_length", length, "max_length", "max_seq_length")
    for key in ("max_prompt_length", "max_completion_length"):
        if key in draft.given:
            draft.differ(key, "prompt and answer are cut together, by max_length")
    if name == "sft":
        _supervised(draft, path)
    else:
        draft.put("data.packing", False, note="one pair a row, as there")
    if str(draft.given.get("eval_strategy", "no")) == "no" or path is None:
        return False
    _source(draft, "data.validation.0", path, "dataset_test_split")
    return True


def _source(draft: Draft, to: str, path: str, split: str = "dataset_train_split") -> None:
    draft.put(f"{to}.path", path, "dataset_name")
    if draft.get("dataset_config"):
        draft.put(f"{to}.subset", draft.get("dataset_config"), "dataset_config")
    draft.put(f"{to}.split", draft.get(split), split)


def _mixture(draft: Draft, listed: list[Any]) -> None:
    for number_of, entry in enumerate(listed):
        entry = dict(entry) if isinstance(entry, dict) else {}
        for theirs, ours in (("path", "path"), ("name", "subset"), ("split", "split")):
            if (value := entry.pop(theirs, None)) is not None:
                draft.put(f"data.train.{number_of}.{ours}", value, "datasets")
        if entry:
            draft.refuse("datasets", f"{', '.join(entry)} of a data set: nothing here does that", "leave it out")


def _supervised(draft: Draft, path: str | None) -> None:
    """Which tokens are learned: of prompt and completion the completion, else all, where no argument says it."""
    answers, completions = draft.get("assistant_only_loss"), draft.get("completion_only_loss")
    if answers:
        draft.put("data.train_on_prompt", False, "assistant_only_loss")
    elif completions is not None:
        draft.put("data.train_on_prompt", not completions, "completion_only_loss")
    elif (fields := _fields(path)) is None:
        draft.refuse(
            "dataset_name",
            "TRL learns completions alone where records have a prompt and a completion, and all tokens otherwise, and "
            "the records are not on this disk",
            "say which: completion_only_loss: true or false",
        )
    else:
        pairs = {"prompt", "completion"} <= fields
        note = "records have a prompt and a completion" if pairs else "TRL learns every token of messages and of text"
        draft.put("data.train_on_prompt", not pairs, "completion_only_loss", note=note)
        column = draft.get("dataset_text_field")
        if column in fields and column != "text":
            draft.put("data.train.0.columns", {"text": column}, "dataset_text_field")
    _end_of_text(draft, _fields(path) or set())
    strategy = draft.get("packing_strategy")
    if draft.get("packing") and strategy == "wrapped":
        note = "documents stay whole and do not see each other; there they are cut at the ends of rows"
        draft.put("data.packing", True, "packing", "packing_strategy", note=note, differs=True)
    elif draft.get("packing"):
        note = "rows are filled in another order"
        draft.put("data.packing", True, "packing", "packing_strategy", note=note, differs=True)
    else:
        draft.put("data.packing", False, "packing", note="one document a row, so that a batch holds as many")


def _end_of_text(draft: Draft, fields: set[str]) -> None:
    """Another end of text, which TRL adds to plain texts and completions, and not to conversations."""
    token = draft.get("eos_token")
    if token and "messages" in fields:
        draft.differ(
            "eos_token",
            f"turns end as the chat template ends them, as there; a tokenizer that names {token} is not saved",
        )
    elif token:
        draft.refuse("eos_token", "texts end with the tokenizer's own end of text", "save a tokenizer that says so")


def _fields(path: str | None) -> set[str] | None:
    """The names of the fields of a JSON file's first record, or of a data set of TRL's examples."""
    if path in FIELDS:
        return FIELDS[path]
    file = pathlib.Path(path).expanduser() if path else None
    if file is None or not file.is_file() or file.suffix not in (".json", ".jsonl"):
        return None
    try:
        text = file.read_text(encoding="utf-8").lstrip()
        record = json.loads(text)[0] if text.startswith("[") else json.loads(text.partition("\n")[0])
    except (OSError, ValueError, IndexError, RecursionError):
        return None
    return set(record) if isinstance(record, dict) else None


def _precision(draft: Draft) -> None:
    bf16, dtype = draft.get("bf16"), draft.given.get("dtype", draft.given.get("torch_dtype", "float32"))
    if draft.get("fp16"):
        return
    if bf16 is None:
        bf16 = not draft.given.get("use_cpu")
    pure = dtype == "bfloat16" and not draft.get("use_peft")
    precision = "bfloat16" if pure else "mixed" if bf16 else "float32"
    draft.put("compute.precision", precision, "bf16", *(["dtype", "torch_dtype"] if pure else []))
