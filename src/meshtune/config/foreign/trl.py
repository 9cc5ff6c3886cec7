"""TRL's arguments: the rule of each, the translation of arguments that belong together, and commands in scripts."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
from typing import Any

from meshtune.config import yaml_text
from meshtune.config.foreign import models, online, trainer
from meshtune.config.foreign.draft import (
    ABSENT,
    OTHER_ORDER,
    Draft,
    Table,
    anything,
    direct,
    entries,
    flag,
    idle,
    integer,
    names,
    number,
    part,
    parts,
    refused,
    refused_keys,
    text,
)
from meshtune.config.foreign.models import NotExpandableError, is_expression, layers_of_model, names_of
from meshtune.config.foreign.trainer import TRAINER, stream

NAME = "TRL"
TRAINERS = ("sft", "dpo", "kto", "reward", "orpo", "cpo", "grpo", "rloo", "online_dpo")
OTHER_TRAINERS = ("ppo", "gkd", "distillation", "prm", "xpo", "nash_md", "bco")
ADAPTERS = "lora dora"

TABLE: Table = {
    **TRAINER,
    "learning_rate": direct("optimizer.learning_rate", number),
    "logging_steps": part("log.every", number, 10),
    "model_name_or_path": part("model.path", text),
    "model_revision": part("model.revision", text, "main"),
    "model_init_kwargs": refused("a model is computed as its config.json says", "change that file", ({},)),
    "dtype": part("compute.precision", text, "float32"),
    "torch_dtype": part("compute.precision", text),
    "use_peft": part("method", flag, False),
    "lora_r": direct("method.rank", integer, 16, when=ADAPTERS),
    "lora_alpha": direct("method.alpha", number, 32, when=ADAPTERS),
    "lora_dropout": part("method.dropout", number, 0.05),
    **parts("method.targets", names, ABSENT, "lora_target_modules lora_target_parameters"),
    "lora_modules_to_save": direct("method.train_modules", names, when=ADAPTERS),
    "use_rslora": direct("method.rslora", flag, when=ADAPTERS),
    "use_dora": part("method.adapter", flag, False),
    **parts("quantize.format", flag, False, "load_in_4bit load_in_8bit"),
    "bnb_4bit_quant_type": part("quantize.format", text, "nf4"),
    "use_bnb_nested_quant": part("quantize.double", flag, False),
    "dataset_name": part("data.train", text),
    "datasets": part("data.train", entries),
    "dataset_config": part("data.train.N.subset", text),
    "dataset_train_split": part("data.train.N.split", text, "train"),
    "dataset_test_split": part("data.validation", text, "test"),
    **parts("data.streaming", flag, False, "dataset_streaming streaming"),
    "dataset_text_field": part("data.train.N.columns", text, "text"),
    "dataset_kwargs": refused("data are prepared by the recipe's own keys", "leave it out", ({},)),
    "max_length": part("data.max_length", integer, 1024),
    **parts("data.max_length", integer, ABSENT, "max_seq_length max_prompt_length max_completion_length"),
    "truncation_mode": refused("long records are cut at their end", "use keep_start", ("keep_start",)),
    "packing": part("data.packing", flag, False),
    "packing_strategy": part("data.packing", text, "bfd"),
    "completion_only_loss": part("data.train_on_prompt", flag),
    "assistant_only_loss": part("data.train_on_prompt", flag, False),
    "shuffle_dataset": part("data.shuffle", flag, False),
    "chat_template_path": direct("model.chat_template", text),
    "eos_token": part("model.chat_template", text),
    "router_aux_loss_coef": direct("model.router_aux_loss", number),
    "loss_type": part("stage.loss", anything),
    "beta": part("stage.beta", number, 0.1),
    "label_smoothing": part("stage.label_smoothing", number),
    "ld_alpha": direct("stage.ld_alpha", number, when="dpo"),
    "rpo_alpha": direct("stage.sft_weight", number, when="dpo"),
    "cpo_alpha": part("stage.sft_weight", number, 1.0),
    "simpo_gamma": direct("stage.gamma", number, 0.5, when="simpo"),
    "alpha": refused("the reference-free margin of AlphaPO is not computed here", "leave it out", (0, 0.0)),
    "ref_model": direct("stage.reference", text, when="dpo kto"),
    "desirable_weight": direct("stage.desirable_weight", number, 1.0, when="kto"),
    "undesirable_weight": direct("stage.undesirable_weight", number, 1.0, when="kto"),
    "center_rewards_coefficient": direct("stage.centre", number, when="rm"),
    "disable_dropout": part("method.dropout", flag, True),
    "f_divergence_type": refused("the reverse KL divergence is computed", "use reverse_kl", ("reverse_kl",)),
    **refused_keys("nothing here does that", "leave it out", "use_weighting sync_ref_model generate_during_eval"),
    "loss_weights": refused("one loss is computed", "leave it out", ([1.0],)),
    **idle(
        """activation_offloading attn_implementation bnb_4bit_quant_storage dataset_batch_size dataset_num_proc
        discopop_tau do_predict do_train eval_packing f_alpha_divergence_coef ignore_bias_buffers is_encoder_decoder
        lora_task_type pad_to_multiple_of pad_token padding_free padding_value precompute_ref_batch_size
        precompute_ref_log_probs ref_model_mixup_alpha ref_model_sync_steps trl_dataset_mixture trust_remote_code
        use_logits_to_keep"""
    ),
}
# The fields of hub data sets in TABLE's own examples, which say what SFT learns of them.
FIELDS = {
    "stanfordnlp/imdb": {"text", "label"},
    "trl-lib/Capybara": {"messages"},
    "HuggingFaceH4/Multilingual-Thinking": {"messages"},
    "trl-lib/tldr": {"prompt", "completion"},
}
# Trainers whose loss balances the load of experts, and by how much where the arguments do not say it.
BALANCED, BALANCE = ("sft", "dpo"), 0.001
# Learning rates where the arguments name none.
RATES = {
    "sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "reward": 1e-4, "orpo": 1e-6, "cpo": 1e-6, "grpo": 1e-6, "rloo": 1e-6,
    "online_dpo": 5e-7,
}  # fmt: skip
# The rules of keys that a trainer has, or has with another default.
RULES: dict[str, Table] = {
    "grpo": {**online.TABLE, "disable_dropout": part("method.dropout", flag, False)},
    "rloo": {**online.TABLE, **online.RLOO, "disable_dropout": part("method.dropout", flag, False)},
    "online_dpo": online.ONLINE_DPO,
}
OF_TRAINER = {
    "rloo": {"normalize_advantages", "reward_clip_range"},
    "grpo": {"num_generations", "reward_funcs", "reward_weights", "scale_rewards", "num_iterations"},
    "kto": {"desirable_weight", "undesirable_weight"},
    "cpo": {"cpo_alpha", "simpo_gamma"},
    "reward": {"center_rewards_coefficient"},
    "dpo": {"ld_alpha", "rpo_alpha", "f_divergence_type", "beta", "precompute_ref_log_probs", "loss_weights"},
}
STAGES = {
    "sft": "sft",
    "dpo": "dpo",
    "kto": "kto",
    "reward": "rm",
    "orpo": "orpo",
    "cpo": "cpo",
    "grpo": "grpo",
    "rloo": "rloo",
    "online_dpo": "online_dpo",
}


def commands(text: str) -> list[tuple[dict[str, Any], str]]:
    """The commands of TRL in a script, each as its arguments and its trainer."""
    joined = re.sub(r"\\\s*\n", " ", "\n".join(line for line in text.splitlines() if not line.strip().startswith("#")))
    read: list[tuple[dict[str, Any], str]] = []
    for line in joined.splitlines():
        if "--" not in line:
            continue
        try:
            arguments = shlex.split(line)
        except ValueError:  # a quotation that is not closed: no command
            continue
        for position, word in enumerate(arguments):
            following = arguments[position + 1 : position + 2]
            if word == "trl" and following and following[0] in (*TRAINERS, *OTHER_TRAINERS):
                read.append((_arguments(arguments[position + 2 :]), following[0]))
                break
            stem = word.rpartition("/")[2].removesuffix(".py")
            if word.endswith(".py") and stem in (*TRAINERS, *OTHER_TRAINERS):
                read.append((_arguments(arguments[position + 1 :]), stem))
                break
    return read


def _arguments(arguments: list[str]) -> dict[str, Any]:
    """--key value, --key=value and bare --key, which is true; several values are a list."""
    values: dict[str, list[str]] = {}
    key = ""
    for word in arguments:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            values[key] = [value] if equals else []
        elif key:
            values[key].append(word)
    return {key: _typed_value(entry) for key, entry in values.items()}


def _typed_value(entry: list[str]) -> Any:
    if not entry:
        return True
    read = [yaml_text.scalar(word, "the command") if not word.startswith("{") else word for word in entry]
    return read[0] if len(read) == 1 else read


def train(raw: dict[str, Any], devices: int, chosen: str | None) -> Draft:
    """The draft of TRL's arguments for its trainer `chosen`, or the one whose own arguments are among them."""
    raw = {key: value for name, entry in raw.items() for key, value in [_switch(name, entry)]}
    name = chosen or next((name for name, keys in OF_TRAINER.items() if keys & set(raw)), "sft")
    rate = direct("optimizer.learning_rate", number, RATES.get(name, RATES["sft"]))
    draft = Draft(NAME, raw, {**TABLE, **RULES.get(name, {}), "learning_rate": rate}, devices)
    if chosen is None:
        draft.remark(f"The arguments do not name the trainer: taken to be {name} (--trainer)")
    _model(draft)
    _balance(draft, name)
    _stage(draft, name)
    _method(draft, name)
    models.put_vision(draft, "model_name_or_path")
    validation = _data(draft, name)
    _precision(draft)
    trainer.trainer_settings(draft, validation=validation)
    _stream(draft)
    draft.remark(OTHER_ORDER)
    return draft


def _switch(key: str, value: object) -> tuple[str, object]:
    """--no_KEY, which turns a switch off, as the key itself."""
    plain = key.removeprefix("no_")
    known = {*TABLE, *online.TABLE, *online.ONLINE_DPO}
    return (plain, False) if plain != key and key not in known and plain in known and value is True else (key, value)


def _model(draft: Draft) -> None:
    path = draft.get("model_name_or_path")
    if path is None:
        draft.refuse("model_name_or_path", "no model is named", "add model_name_or_path")
        return
    models.check_model(draft, "model_name_or_path", path)
    draft.put("model.path", path, "model_name_or_path")
    if draft.get("model_revision") != "main":
        draft.put("model.revision", draft.get("model_revision"), "model_revision")


def _balance(draft: Draft, name: str) -> None:
    """The loss that balances the load of experts, which two trainers add for every mixture."""
    layers = layers_of_model(str(draft.get("model_name_or_path")))
    if layers is not None and layers.is_mixture and name in BALANCED and "router_aux_loss_coef" not in draft.given:
        draft.put("model.router_aux_loss", BALANCE, "router_aux_loss_coef", note="of mixtures of experts")


def _stage(draft: Draft, name: str) -> None:
    draft.put("stage.kind", STAGES[name], note=f"the trainer {name}")
    if name in RULES:
        online.put_online_dpo(draft) if name == "online_dpo" else online.put_stage(draft, name)
        return
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
    elif name in ("sft", "dpo", "cpo"):
        draft.put("stage.loss", losses[0], "loss_type")
    if name in ("dpo", "kto", "orpo", "cpo"):
        draft.put("stage.beta", float(draft.get("beta")), "beta")
    if name == "orpo":
        draft.put("data.train_on_prompt", True, note="TRL's cross-entropy is that of prompt and chosen answer")
    if name == "cpo":
        draft.put("stage.sft_weight", draft.get("cpo_alpha"), "cpo_alpha")
    if name in ("dpo", "cpo") and draft.get("label_smoothing"):
        draft.put("stage.label_smoothing", draft.get("label_smoothing"), "label_smoothing")


def _method(draft: Draft, name: str) -> None:
    if not draft.get("use_peft"):
        draft.put("method.kind", "full", "use_peft")
    else:
        draft.put("method.kind", "lora", "use_peft")
        draft.put("method.adapter", "dora" if draft.get("use_dora") else "lora", "use_dora")
        trainer.dropout(draft, compared=name != "sft" and bool(draft.get("disable_dropout")))
        _targets(draft)
    if draft.get("load_in_4bit"):
        if draft.get("bnb_4bit_quant_type") != "nf4":
            draft.refuse("bnb_4bit_quant_type", "fp4 is not written here", "use nf4")
        trainer.quantize(draft, "load_in_4bit", "bnb_4bit_quant_type", double="use_bnb_nested_quant")
    elif draft.get("load_in_8bit"):
        trainer.quantize_to_8_bits(draft, "load_in_8bit")


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
        models.put_targets(draft, names, *keys, by_class=False, converts=True, experts=bool(parameters))


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
    if name in RULES:
        _put_prompts(draft)
        return _put_validation(draft, path)
    length = draft.get("max_length") if "max_length" in draft.given else draft.get("max_seq_length")
    length = draft.get("max_length") if length is None else length
    draft.put("data.max_length", length, "max_length", "max_seq_length")
    for key in ("max_prompt_length", "max_completion_length"):
        if key in draft.given:
            draft.differ(key, "prompt and answer are cut together, by max_length")
    if name == "sft":
        _put_supervision(draft, path)
    else:
        draft.put("data.packing", False, note="one pair a row, as there")
    return _put_validation(draft, path)


def _put_prompts(draft: Draft) -> None:
    """The data of trainers that generate, with the rollouts and rewards."""
    for key in [key for key in draft.settings if key.startswith("data.train.") and key.endswith(".path")]:
        draft.put(key.replace(".path", ".format"), "prompt", note="the field prompt; all others go to the rewards")
    if not draft.get("shuffle_dataset"):
        draft.put("data.shuffle", False, "shuffle_dataset")
    if draft.value("stage.kind") == "online_dpo":
        online.put_pairs(draft)
        online.put_rewards(draft, "reward_model_path")
    else:
        online.put_rollout(draft)
        online.put_rewards(draft)


def _put_validation(draft: Draft, path: str | None) -> bool:
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
    for index, entry in enumerate(listed):
        entry = dict(entry) if isinstance(entry, dict) else {}
        for theirs, ours in (("path", "path"), ("name", "subset"), ("split", "split")):
            if (value := entry.pop(theirs, None)) is not None:
                draft.put(f"data.train.{index}.{ours}", value, "datasets")
        if entry:
            draft.refuse("datasets", f"{', '.join(entry)} of a data set: nothing here does that", "leave it out")


def _put_supervision(draft: Draft, path: str | None) -> None:
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
