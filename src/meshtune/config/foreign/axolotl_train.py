"""An axolotl file as a recipe: what one table entry alone cannot say."""

from __future__ import annotations

from meshtune.config.foreign import axolotl_data, axolotl_method, axolotl_progress, models, optimizers
from meshtune.config.foreign.draft import ONE_TEXT, OTHER_ORDER, Draft
from meshtune.config.foreign.streams import stops, stream
from meshtune.config.foreign.trainer import batch_settings, length

PACKED = "an update has as many rows of sequence_len tokens as the batch; axolotl fills its rows in another order"
SHARDED = ("deepspeed", "fsdp", "fsdp_config", "dp_shard_size")
CONTEXT_PARALLEL = ("context_parallel_size", "context_parapllel_size", "sequence_parallel_degree")
KNOWN_PLUGINS = ("cut_cross_entropy", "liger", "kernels", "expert_parallel", "swanlab", "lm_eval")
HARMLESS_CONFIG = {"output_router_logits"}


def train(draft: Draft) -> None:
    """Translates an axolotl file. Raises nothing: what cannot be done is refused in `draft`."""
    _model(draft)
    kind = _stage(draft)
    axolotl_method.method(draft)
    axolotl_method.quantize(draft)
    validation = _data(draft, kind)
    draft.apply()
    _plugins(draft)
    _batch(draft)
    length(draft, "num_epochs")
    _stream(draft)
    optimizers.named(draft, "optimizer")
    _schedule(draft)
    optimizers.moments(draft, ("adam_beta1", "beta1"), ("adam_beta2", "beta2"), ("adam_epsilon", "eps"))
    optimizers.clipping(draft, "max_grad_norm")
    _precision(draft)
    axolotl_progress.evaluation(draft, validation)
    axolotl_progress.saving(draft)
    axolotl_progress.logging(draft)
    if "optimizer.learning_rate" not in draft.settings:
        draft.refuse("learning_rate", "the file names no learning rate", "add learning_rate")
    draft.remark(OTHER_ORDER)
    draft.remark(ONE_TEXT)


def _model(draft: Draft) -> None:
    path = draft.get("base_model")
    if path is None:
        draft.refuse("base_model", "the file names no model", "add base_model")
        return
    models.check_model(draft, "base_model", path)
    draft.put("model.path", path, "base_model")
    tokens = draft.get("tokens")
    if isinstance(tokens, list) and tokens:
        draft.put("model.new_tokens", [str(token) for token in tokens], "tokens")
    special = {**(tokens if isinstance(tokens, dict) else {}), **(draft.get("special_tokens") or {})}
    extra = special.pop("additional_special_tokens", None)
    if extra:
        draft.put("model.new_special_tokens", extra, "special_tokens")
    renamed = {name: token for name, token in special.items() if name != "pad_token" and token is not None}
    for key in ("special_tokens", "tokens"):
        if renamed and isinstance(draft.given.get(key), dict):
            listed = ", ".join(f"{name} {token}" for name, token in renamed.items())
            draft.differ(
                key, f"the tokenizer's own are used: see that they are {listed}, or save a tokenizer that says so"
            )
        draft.idle(key, "padding is masked, whatever its token")
    if draft.get("resize_token_embeddings_to_32x"):
        draft.put("model.pad_vocab_to", 32, "resize_token_embeddings_to_32x")
    for key in ("model_config", "overrides_of_model_config"):
        changes = set(draft.get(key) or {}) - HARMLESS_CONFIG
        if changes:
            draft.refuse(key, f"{', '.join(changes)}: a model is computed as its config.json says", "change that file")
        elif draft.get(key):
            draft.differ(key, "no loss balances the load of experts unless model.router_aux_loss asks for one")
    quantised = draft.get("model_quantization_config")
    if quantised is not None:
        if (draft.get("model_quantization_config_kwargs") or {}).get("dequantize"):
            draft.put("quantize.format", "none", "model_quantization_config", "model_quantization_config_kwargs")
        else:
            draft.idle("model_quantization_config", "codes in which a model is published are read as they are")


def _stage(draft: Draft) -> str:
    rl = draft.get("rl")
    if draft.get("reward_model"):
        draft.put("stage.kind", "rm", "reward_model", "num_labels")
        if draft.get("center_rewards_coefficient"):
            draft.put("stage.centre", draft.get("center_rewards_coefficient"), "center_rewards_coefficient")
        return "rm"
    if rl is None:
        texts = [entry.get("type") for entry in draft.get("datasets") or [] if isinstance(entry, dict)]
        plain = draft.get("pretraining_dataset") is not None or (
            texts and all(prompts == "completion" for prompts in texts)
        )
        draft.put("stage.kind", "pt" if plain else "sft", "" if plain else "rl")
        return "pt" if plain else "sft"
    if rl not in ("dpo", "ipo", "orpo", "simpo", "kto"):
        draft.refuse("rl", f"there is no stage {rl} in recipes here", "use dpo, ipo, orpo, simpo or kto")
        return "dpo"
    kind = "dpo" if rl == "ipo" else rl
    draft.put("stage.kind", kind, "rl")
    beta = "orpo_alpha" if kind == "orpo" and not draft.given.get("rl_beta") else "rl_beta"
    beta = "dpo_beta" if "dpo_beta" in draft.given and kind == "dpo" else beta
    note = "the answers' loss is weighed by token here, by pair there" if kind == "orpo" else ""
    draft.put("stage.beta", float(draft.get(beta)), beta, note=note, differs=bool(note))
    _stage_options(draft, kind, rl)
    return kind


def _stage_options(draft: Draft, kind: str, rl: str) -> None:
    if kind == "dpo":
        losses = draft.get("dpo_loss_type") or ("ipo" if rl == "ipo" else "sigmoid")
        losses = losses if isinstance(losses, list) else [losses]
        if len(losses) > 1 or losses[0] not in ("sigmoid", "hinge", "ipo", "robust"):
            draft.refuse("dpo_loss_type", f"{losses} is not computed here", "use sigmoid, hinge, ipo or robust")
            return
        draft.put("stage.loss", losses[0], "dpo_loss_type", *(["rl"] if rl == "ipo" else []))
        if draft.get("dpo_label_smoothing"):
            draft.put("stage.label_smoothing", draft.get("dpo_label_smoothing"), "dpo_label_smoothing")
        if draft.get("rpo_alpha"):
            draft.put("stage.sft_weight", draft.get("rpo_alpha"), "rpo_alpha")
    elif kind == "simpo":
        draft.put("stage.gamma", draft.get("simpo_gamma"), "simpo_gamma")
        draft.put("stage.sft_weight", draft.get("cpo_alpha"), "cpo_alpha")
    elif kind == "kto":
        draft.put("stage.desirable_weight", draft.get("kto_desirable_weight"), "kto_desirable_weight")
        draft.put("stage.undesirable_weight", draft.get("kto_undesirable_weight"), "kto_undesirable_weight")


def _data(draft: Draft, kind: str) -> bool:
    key = "pretraining_dataset" if draft.get("pretraining_dataset") is not None else "datasets"
    if draft.get(key) is None:
        draft.refuse("datasets", "the file names no data", "add datasets")
    types = axolotl_data.sources(draft, key, "data.train", kind)
    types += axolotl_data.sources(draft, "test_datasets", "data.validation", kind)
    axolotl_data.chat_template(draft, types)
    draft.put("data.max_length", draft.get("sequence_len"), "sequence_len")
    strategy = {"drop": "drop", "truncate": "truncate", "raise": "error"}.get(
        draft.get("excess_length_strategy").lower()
    )
    if strategy is None:
        draft.refuse("excess_length_strategy", "it is not one of drop, truncate and raise", "use one of them")
    streamed = key == "pretraining_dataset"
    draft.put("data.overlong", "truncate" if streamed else strategy, "excess_length_strategy")
    packed = bool(draft.get("sample_packing")) or streamed
    draft.put("data.packing", packed, "sample_packing", note=PACKED if packed else "", differs=packed)
    for unequal in ("max_prompt_len", "eval_sequence_len"):
        if unequal in draft.given:
            draft.differ(unequal, "prompts, answers and validation records are cut by sequence_len alone")
    if draft.get("train_on_inputs"):
        draft.put("data.train_on_prompt", True, "train_on_inputs")
    if draft.get("rl") is None:
        _order(draft, streamed or bool(draft.get("streaming")))
    share = draft.get("val_set_size")
    if draft.get("test_datasets"):
        draft.idle("val_set_size", "test_datasets are given")
    elif share:
        draft.put("data.validation", share if share < 1 else int(share), "val_set_size")
    noise = "neftune_noise_alpha" if "neftune_noise_alpha" in draft.given else "noisy_embedding_alpha"
    if kind == "sft" and draft.get(noise):
        draft.put("stage.neftune_alpha", draft.get(noise), noise)
    return bool(share or draft.get("test_datasets"))


def _order(draft: Draft, streamed: bool) -> None:
    """The order of the data: drawn at random, but for curriculum_sampling, or a stream's own."""
    merged, curriculum = draft.get("shuffle_merged_datasets"), draft.get("curriculum_sampling")
    several = len(draft.get("datasets") or []) > 1
    if several and draft.get("shuffle_before_merging_datasets") and not merged and (streamed or curriculum):
        draft.refuse(
            "shuffle_before_merging_datasets",
            "data sets are shuffled together here, or each is read in its order",
            "shuffle the files, or leave it out",
        )
    if streamed and not merged:
        draft.put("data.shuffle", False, "shuffle_merged_datasets")
    elif curriculum and not (streamed and draft.get("sample_packing")):
        note = "there they are shuffled once, and read in that order every epoch" if several and merged else ""
        draft.put(
            "data.shuffle", False, "curriculum_sampling", "shuffle_merged_datasets", note=note, differs=bool(note)
        )


def _stream(draft: Draft) -> None:
    key = "pretraining_dataset" if draft.get("pretraining_dataset") is not None else "streaming"
    if draft.get("rl") is not None:
        draft.idle("streaming", f"{draft.tool} reads data of rl whole")
        return
    if not draft.get(key):
        return
    if draft.get("val_set_size"):
        stops(draft, "val_set_size", "give test_datasets")
    if key == "streaming" and draft.get("sample_packing") and len(draft.get("datasets") or []) > 1:
        stops(draft, "datasets", "give one data set, or turn sample_packing off")
    buffers = ("streaming_multipack_buffer_size", "pretrain_multipack_buffer_size")
    stream(draft, key, *(("streaming",) if draft.get("streaming") and key != "streaming" else ()), *buffers)


def _plugins(draft: Draft) -> None:
    unknown = [
        str(name) for name in draft.get("plugins") or [] if not any(known in str(name) for known in KNOWN_PLUGINS)
    ]
    if unknown:
        draft.refuse("plugins", f"{', '.join(unknown)}: what it does is not here", "leave it out")
    draft.idle("plugins", "kernels and layouts are chosen here by the device")


def _batch(draft: Draft) -> None:
    """Rows an update. Devices that share a row (tensor or context parallelism) have one batch together."""
    batch_settings(draft, "micro_batch_size", sharing=("tensor_parallel_size", *CONTEXT_PARALLEL))
    total, rows = draft.get("batch_size"), (draft.get("micro_batch_size") or 1)
    if draft.get("gradient_accumulation_steps") > 1 and not draft.get("rl"):
        note = "axolotl weighs the micro-batches of an update alike, whatever their tokens; here each token counts once"
        draft.differ("gradient_accumulation_steps", note)
    if total and "gradient_accumulation_steps" not in draft.given and total != rows:
        note = f"an update has {rows} a device there too, whose run ends after 1/{total // rows} of num_epochs"
        draft.differ("batch_size", f"gradient_accumulation_steps is 1 where left out: {note}")


def _schedule(draft: Draft) -> None:
    key = "lr_scheduler"
    ratio, name = draft.get("cosine_min_lr_ratio"), draft.get(key)
    if not optimizers.schedule_options(draft, name):
        return
    if name not in optimizers.SCHEDULES:
        draft.refuse(key, f"there is no schedule {name} here", f"use {', '.join(optimizers.SCHEDULES)}")
        return
    draft.put("optimizer.schedule", optimizers.SCHEDULES[name], key)
    if ratio and name == "cosine":
        draft.put("optimizer.min_lr_ratio", ratio, "cosine_min_lr_ratio")
    if name == "constant":
        draft.put("optimizer.warmup_steps", 0, note="transformers' constant schedule has no warm-up")
        return
    steps, share, total = draft.get("warmup_steps"), draft.get("warmup_ratio"), draft.get("max_steps")
    if steps is None and share is not None and total:
        warm = int(share * total)
        note = f"of {total} steps, as axolotl rounds it"
        draft.put("optimizer.warmup_steps", 2 if warm == 1 else warm, "warmup_ratio", note=note)
    elif steps is not None and steps >= 1:
        draft.put("optimizer.warmup_steps", max(2, int(steps)), "warmup_steps", note="" if steps > 1 else "1 becomes 2")
    elif steps:
        draft.put("optimizer.warmup_ratio", steps, "warmup_steps", note="below 1 it is a share of the steps")
    elif steps is not None or share is not None:
        note = "rounded up to whole steps, there down" if share else ""
        draft.put("optimizer.warmup_ratio", share or 0.0, "warmup_ratio", "warmup_steps", note=note)
    elif total:
        warm = min(int(0.03 * total), 100)
        draft.put("optimizer.warmup_steps", 2 if warm == 1 else warm, note="3% of max_steps, at most 100")
    else:
        draft.put("optimizer.warmup_ratio", 0.03, note="axolotl stops at 100 steps: see the run's number of steps")


def _precision(draft: Draft) -> None:
    bf16 = draft.given.get("bf16", "auto")
    if draft.get("fp16") or draft.get("float16"):
        note = "bfloat16 in place of float16, which needs no scaled loss"
        key = "fp16" if draft.get("fp16") else "float16"
        draft.put("compute.precision", "mixed", key, note=note, differs=True)
    elif draft.get("bfloat16"):
        draft.put("compute.precision", "bfloat16", "bfloat16")
    elif draft.get("float32") or bf16 in (False, "false"):
        draft.put("compute.precision", "float32", "float32", "bf16")
    elif draft.get("adapter") is None and not any(draft.given.get(key) for key in SHARDED):
        note = "weights and optimizer are in bfloat16 there without deepspeed or fsdp"
        draft.put("compute.precision", "bfloat16", "bf16", note=note)
    elif bf16 == "auto":
        draft.put("compute.precision", "auto", "bf16")
    else:
        draft.put("compute.precision", "mixed", "bf16")
