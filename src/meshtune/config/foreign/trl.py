"""TRL's arguments: those of its scripts, models and trainers beside transformers' own, and commands that hold them."""

from __future__ import annotations

import re
import shlex
from typing import Any

from meshtune.config import yaml_text
from meshtune.config.foreign.rules import (
    ABSENT,
    Table,
    anything,
    direct,
    entries,
    flag,
    idle,
    integer,
    mapping,
    names,
    number,
    part,
    refused,
    refused_keys,
    text,
)
from meshtune.config.foreign.trainer import LOADER, MEMORY, TRAINER

NAME = "TRL"
TRAINERS = ("sft", "dpo", "kto", "reward", "orpo", "cpo")
OTHER_TRAINER = "another trainer reads it"
NO_PEFT = "without use_peft"
OTHER_TRAINERS = ("grpo", "rloo", "online_dpo", "ppo", "gkd", "distillation", "prm", "xpo", "nash_md", "bco")

TRL: Table = {
    **TRAINER,
    "learning_rate": direct("optimizer.learning_rate", number),
    "logging_steps": part("log.every", number, 10),
    "report_to": part("log.trackers", names, ABSENT, "no tracker is asked for"),
    "model_name_or_path": part("model.path", text),
    "model_revision": part("model.revision", text, "main", "main: the default"),
    "trust_remote_code": part("model.path", flag, False, "no code of a repository is ever run"),
    "model_init_kwargs": refused("a model is computed as its config.json says", "change that file", ({},)),
    "dtype": part("compute.precision", text, "float32", "bf16 says what is computed in"),
    "torch_dtype": part("compute.precision", text, ABSENT, "bf16 says what is computed in"),
    "attn_implementation": part("compute.attention", text, ABSENT, "kernels are chosen here by what the device has"),
    "use_peft": part("method", flag, False),
    "lora_r": part("method.rank", integer, 16, NO_PEFT),
    "lora_alpha": part("method.alpha", number, 32, NO_PEFT),
    "lora_dropout": part("method.dropout", number, 0.05, NO_PEFT),
    "lora_target_modules": part("method.targets", names, ABSENT, NO_PEFT),
    "lora_target_parameters": part("method.targets", names, ABSENT, NO_PEFT),
    "lora_modules_to_save": part("method.train_modules", names, ABSENT, NO_PEFT),
    "lora_task_type": part("method", text, ABSENT, "the stage says it"),
    "use_rslora": part("method.rslora", flag, False, NO_PEFT),
    "use_dora": part("method.adapter", flag, False, NO_PEFT),
    "load_in_4bit": part("quantize.format", flag, False),
    "load_in_8bit": part("quantize.format", flag, False),
    "bnb_4bit_quant_type": part("quantize.format", text, "nf4", "without load_in_4bit"),
    "use_bnb_nested_quant": part("quantize.double", flag, False, "without load_in_4bit"),
    **idle(MEMORY, "bnb_4bit_quant_storage activation_offloading padding_free pad_to_multiple_of ignore_bias_buffers"),
    "dataset_name": part("data.train", text, ABSENT, "datasets is given"),
    "datasets": part("data.train", entries),
    "dataset_config": part("data.train.N.subset", text, ABSENT, "datasets is given"),
    "dataset_train_split": part("data.train.N.split", text, "train", "datasets is given"),
    "dataset_test_split": part("data.validation", text, "test", "nothing is evaluated while training"),
    "dataset_streaming": part("data.streaming", flag, False, "only dataset_name reads it, and true asks for a stream"),
    "streaming": part("data.streaming", flag, False, "only a list of datasets reads it, and true asks for a stream"),
    "dataset_text_field": part("data.train.N.columns", text, "text", "no column of plain text is renamed"),
    "dataset_kwargs": refused("data are prepared by the recipe's own keys", "leave it out", ({},)),
    **idle(LOADER, "dataset_num_proc dataset_batch_size"),
    "max_length": part("data.max_length", integer, 1024),
    "max_seq_length": part("data.max_length", integer, ABSENT, "max_length is given"),
    "max_prompt_length": part("data.max_length", integer, ABSENT, "prompt and answer are cut together, by max_length"),
    "max_completion_length": part("data.max_length", integer, ABSENT, "prompt and answer are cut together"),
    "truncation_mode": refused("long records are cut at their end", "use keep_start", ("keep_start",)),
    "packing": part("data.packing", flag, False, OTHER_TRAINER),
    "packing_strategy": part("data.packing", text, "bfd", "without packing"),
    "eval_packing": part("data.packing", flag, ABSENT, "validation rows are packed like training rows"),
    "completion_only_loss": part("data.train_on_prompt", flag, ABSENT, OTHER_TRAINER),
    "assistant_only_loss": part("data.train_on_prompt", flag, False, OTHER_TRAINER),
    "shuffle_dataset": part("data.shuffle", flag, False, "the trainer shuffles data that are no stream in any case"),
    "chat_template_path": part("model.chat_template", text),
    "eos_token": part("model.chat_template", text),
    "pad_token": part("model.tokenizer", text, ABSENT, "padding is masked, whatever its token"),
    "padding_value": part("model.tokenizer", integer, ABSENT, "padding is masked, whatever its token"),
    "router_aux_loss_coef": direct("model.router_aux_loss", number),
    "loss_type": part("stage.loss", anything, ABSENT, OTHER_TRAINER),
    "beta": part("stage.beta", number, 0.1, OTHER_TRAINER),
    "label_smoothing": part("stage.label_smoothing", number, 0.0, OTHER_TRAINER),
    "ld_alpha": part("stage.ld_alpha", number, ABSENT, OTHER_TRAINER),
    "rpo_alpha": part("stage.sft_weight", number, ABSENT, OTHER_TRAINER),
    "cpo_alpha": part("stage.sft_weight", number, 1.0, OTHER_TRAINER),
    "simpo_gamma": part("stage.gamma", number, 0.5, OTHER_TRAINER),
    "alpha": refused("the reference-free margin of AlphaPO is not computed here", "leave it out", (0, 0.0)),
    "ref_model": part("stage.reference", text, ABSENT, OTHER_TRAINER),
    "desirable_weight": part("stage.desirable_weight", number, 1.0, OTHER_TRAINER),
    "undesirable_weight": part("stage.undesirable_weight", number, 1.0, OTHER_TRAINER),
    "center_rewards_coefficient": part("stage.centre", number, ABSENT, OTHER_TRAINER),
    "disable_dropout": part("method.dropout", flag, True, "models have no dropout of their own here"),
    "precompute_ref_log_probs": part("stage.reference", flag, False, "auto: chosen by the method"),
    **idle(MEMORY, "precompute_ref_batch_size use_logits_to_keep"),
    "f_divergence_type": refused("the reverse KL divergence is computed", "use reverse_kl", ("reverse_kl",)),
    **idle("only another divergence or loss reads it", "f_alpha_divergence_coef discopop_tau"),
    **refused_keys("nothing here does that", "leave it out", "use_weighting sync_ref_model generate_during_eval"),
    "loss_weights": refused("one loss is computed", "leave it out", ([1.0],)),
    **idle("without sync_ref_model", "ref_model_mixup_alpha ref_model_sync_steps"),
    **idle("models here are decoders", "is_encoder_decoder"),
    "neftune_noise_alpha": part("stage.neftune_alpha", number, ABSENT, OTHER_TRAINER),
    "trl_dataset_mixture": part("data.train", mapping, ABSENT, "dataset_name is given"),
}
# The fields of hub data sets in TRL's own examples, which say what SFT learns of them.
FIELDS = {
    "stanfordnlp/imdb": {"text", "label"},
    "trl-lib/Capybara": {"messages"},
    "HuggingFaceH4/Multilingual-Thinking": {"messages"},
    "trl-lib/tldr": {"prompt", "completion"},
}
# Trainers whose loss balances the load of experts, and by how much where the arguments do not say it.
BALANCED, BALANCE = ("sft", "dpo"), 0.001
# Learning rates where the arguments name none.
RATES = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "reward": 1e-4, "orpo": 1e-6, "cpo": 1e-6}


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
    return {key: _typed(entry) for key, entry in values.items()}


def _typed(entry: list[str]) -> Any:
    if not entry:
        return True
    read = [yaml_text.scalar(word, "the command") if not word.startswith("{") else word for word in entry]
    return read[0] if len(read) == 1 else read
