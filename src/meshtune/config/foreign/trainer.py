"""Keys and settings that several tools share: transformers' TrainingArguments, optimizers, streams, chat templates."""

from __future__ import annotations

import dataclasses

from meshtune.config.foreign.draft import (
    ABSENT,
    Draft,
    Table,
    anything,
    direct,
    flag,
    idle,
    integer,
    mapping,
    names,
    number,
    part,
    parts,
    refused,
    text,
)
from meshtune.config.sections import READERS
from meshtune.objectives.config import ONLINE_STAGES

TRAINER: Table = {
    "output_dir": direct("output", text, "trainer_output"),
    "per_device_train_batch_size": part("train.micro_batch", integer, 8),
    "gradient_accumulation_steps": part("train.batch_size", integer, 1),
    "num_train_epochs": part("train.epochs", number, 3.0),
    "max_steps": part("train.steps", integer, -1),
    "learning_rate": direct("optimizer.learning_rate", number, 5e-5),
    "lr_scheduler_type": part("optimizer.schedule", text, "linear"),
    "lr_scheduler_kwargs": part("optimizer.min_lr_ratio", mapping),
    "warmup_ratio": part("optimizer.warmup_ratio", number, 0.0),
    "warmup_steps": part("optimizer.warmup_steps", number, 0),
    "optim": part("optimizer.name", text, "adamw_torch_fused"),
    "optim_args": refused("optimizers take no free-form arguments here", "write them as keys of optimizer"),
    "optim_target_modules": refused("galore and apollo project all matrices here", "leave it out", ("all-linear",)),
    "weight_decay": direct("optimizer.weight_decay", number, 0.0),
    "adam_beta1": part("optimizer.beta1", number, 0.9),
    "adam_beta2": part("optimizer.beta2", number, 0.999),
    "adam_epsilon": part("optimizer.eps", number, 1e-8),
    "max_grad_norm": part("optimizer.max_grad_norm", number, 1.0),
    "neftune_noise_alpha": direct("stage.neftune_alpha", number, when="sft"),
    "label_smoothing_factor": direct("stage.label_smoothing", number, when="sft"),
    **parts("compute.precision", flag, ABSENT, "bf16 fp16"),
    "eval_strategy": part("eval.every", text, "no"),
    "evaluation_strategy": part("eval.every", text),
    "eval_steps": part("eval.every", number),
    "eval_on_start": part("eval.at_start", flag, False),
    "logging_steps": part("log.every", number, 500),
    "report_to": part("log.trackers", names),
    "project": direct("log.project", text),
    "save_strategy": part("checkpoint.every", text, "steps"),
    "save_steps": part("checkpoint.every", number, 500),
    "save_total_limit": direct("checkpoint.keep", integer),
    "load_best_model_at_end": part("checkpoint.result", flag, False),
    "resume_from_checkpoint": part("resume", anything),
    "overwrite_output_dir": part("overwrite", flag, False),
    "push_to_hub": part("hub.repository", flag, False),
    "hub_model_id": part("hub.repository", text),
    "hub_private_repo": part("hub.public", flag),
    "seed": direct("seed", integer, 42),
    "auto_find_batch_size": refused(
        "the size of a batch changes the result, and is never changed here",
        "leave it out; train.micro_batch: auto finds a size that fits",
    ),
    "group_by_length": refused("rows are not grouped by length", "leave it out: data are shuffled"),
    "train_sampling_strategy": part("data.shuffle", text, "random"),
    "dataloader_drop_last": part("train.epochs", flag, False),
    **idle(
        """accelerator_config activation_checkpointing activation_checkpointing_kwargs average_tokens_across_devices
        batch_eval_metrics bf16_full_eval data_seed dataloader_in_order dataloader_multiprocessing_context
        dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor
        ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout
        debug deepspeed disable_tqdm do_eval enable_jit_checkpoint eval_accumulation_steps eval_delay
        eval_do_concat_batches eval_use_gather_object fp16_backend fp16_full_eval fp16_opt_level fsdp fsdp_config
        fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap full_determinism gradient_checkpointing
        gradient_checkpointing_kwargs greater_is_better half_precision_backend hub_always_push hub_revision
        hub_strategy hub_token ignore_data_skip include_for_metrics include_inputs_for_metrics
        include_num_input_tokens_seen include_tokens_per_second jit_mode_eval label_names length_column_name
        liger_kernel_config local_rank log_level log_level_replica log_on_each_node logging_dir logging_first_step
        logging_nan_inf_filter logging_strategy metric_for_best_model no_cuda parallelism_config past_index
        per_device_eval_batch_size per_gpu_eval_batch_size per_gpu_train_batch_size prediction_loss_only
        push_to_hub_model_id push_to_hub_organization push_to_hub_token ray_scope remove_unused_columns
        restore_callback_states_from_checkpoint run_name save_on_each_node save_only_model save_safetensors
        skip_memory_metrics tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
        torchdynamo tpu_metrics_debug tpu_num_cores trackio_bucket_id trackio_space_id trackio_static_space_id
        use_cache use_cpu use_ipex use_liger_kernel use_mps_device xpu_backend"""
    ),
}
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


def trainer_settings(draft: Draft, *, validation: bool, sharing: tuple[str, ...] = ()) -> None:
    """Translates what TrainingArguments say. `validation`: whether there are validation data;
    `sharing`: keys of how many devices one row is split over."""
    draft.apply()
    batch_settings(draft, sharing=sharing)
    length(draft, "num_train_epochs")
    optimizer(draft)
    _precision(draft)
    if validation:
        _evaluation(draft)
    _saving(draft)
    _starting(draft)
    draft.put("log.every", max(1, int(draft.get("logging_steps"))), "logging_steps")
    trackers(draft, "report_to", draft.get("report_to") or [])
    if draft.get("push_to_hub"):
        upload(draft, "push_to_hub")
    if draft.get("dataloader_drop_last"):
        draft.differ("dataloader_drop_last", "the last, smaller batch of an epoch is filled from the next one here")


def batch_settings(
    draft: Draft,
    per_device: str = "per_device_train_batch_size",
    sharing: tuple[str, ...] = (),
) -> None:
    """Rows an update, counted over devices and accumulation. Devices that one row is split over, whose numbers the keys
    `sharing` give, count as one."""
    accumulation = "gradient_accumulation_steps"
    rows, steps, split = draft.get(per_device) or 1, draft.get(accumulation) or 1, 1
    named = [key for key in sharing if (draft.get(key) or 1) > 1]
    for key in named:
        split *= draft.get(key)
    copies, remainder = divmod(draft.devices, split) if draft.devices > 1 else (1, 0)
    if remainder:
        why = f"{draft.devices} devices are not whole groups of {split}, over which a row is split there"
        draft.refuse(named[0], why, f"give --devices a multiple of {split}")
        return
    counted = f"{rows} a device x {steps} accumulated x {copies} device{'s' * (copies != 1)}"
    if split > 1:
        counted = f"{rows} a row's {split} devices x {steps} accumulated x {copies}"
    draft.put("train.batch_size", rows * steps * copies, per_device, accumulation, *named, note=counted)
    draft.put("train.micro_batch", rows * copies, per_device, note="rows at once over all devices")


def length(draft: Draft, epochs: str, steps: str = "max_steps") -> None:
    limit = draft.get(steps)
    if limit is not None and limit > 0:
        draft.put("train.steps", limit, steps)
    else:
        draft.put("train.epochs", float(draft.get(epochs)), epochs)


def _precision(draft: Draft) -> None:
    if draft.get("fp16"):
        draft.put("compute.precision", "float16", "fp16")
    elif draft.get("bf16") is not None:
        draft.put("compute.precision", "mixed" if draft.get("bf16") else "float32", "bf16")


def _evaluation(draft: Draft) -> None:
    strategy = str(draft.given.get("eval_strategy", draft.given.get("evaluation_strategy", "no"))).lower()
    key = "eval_strategy" if "eval_strategy" in draft.given else "evaluation_strategy"
    if strategy == "epoch":
        draft.put("eval.every", "epoch", key)
    elif strategy == "steps":
        steps = draft.get("eval_steps") or draft.get("logging_steps")
        interval = int(steps) if steps >= 1 else "epoch"
        note = "" if steps >= 1 else "a share of the run is not counted in steps here: once an epoch"
        draft.put("eval.every", interval, "eval_steps", key, note=note, differs=bool(note))
    else:
        draft.put("eval.every", None, key, note="evaluated at the end alone")
    if draft.get("eval_on_start"):
        draft.put("eval.at_start", True, "eval_on_start")


def _saving(draft: Draft) -> None:
    strategy, steps = draft.get("save_strategy"), draft.get("save_steps")
    if strategy == "steps" and steps >= 1:
        draft.put("checkpoint.every", int(steps), "save_steps", "save_strategy")
    else:
        draft.differ("save_strategy", "checkpoints are about ten a run and one at the end; the result is the same")
    if draft.get("load_best_model_at_end"):
        draft.put("checkpoint.keep_best", True, "load_best_model_at_end")
        if "eval.every" in draft.settings and draft.settings["eval.every"].value is not None:
            note = "the best of all evaluations"
            draft.put("checkpoint.result", "best", "load_best_model_at_end", note=note)
    else:
        draft.put("checkpoint.keep_best", False, "load_best_model_at_end")


def _starting(draft: Draft) -> None:
    resume = draft.get("resume_from_checkpoint")
    if resume not in (None, False, "false"):
        if resume in (True, "true"):
            draft.put("resume", True, "resume_from_checkpoint", note="from a checkpoint of Meshtune's in output")
        else:
            draft.refuse(
                "resume_from_checkpoint",
                f"a checkpoint of {draft.tool} holds torch's own state, which is not read here",
                "leave it out and start from its adapter (model.adapter) or model (model.path)",
            )
    elif draft.get("overwrite_output_dir"):
        draft.put("overwrite", True, "overwrite_output_dir", note="the old run is moved aside")
    if draft.get("train_sampling_strategy") == "sequential":
        draft.put("data.shuffle", False, "train_sampling_strategy")
    elif draft.get("train_sampling_strategy") != "random":
        draft.refuse("train_sampling_strategy", "rows are drawn at random here, or in order", "leave it out")


def trackers(draft: Draft, key: str, chosen: list[str]) -> None:
    """Trackers that are here; unsupported are named."""
    known = [name for name in chosen if name in TRACKERS]
    unsupported = [name for name in chosen if name not in (*TRACKERS, "none")]
    if known:
        draft.put("log.trackers", known, key)
    if unsupported:
        draft.differ(key, f"there is no tracker {', '.join(unsupported)} here; metrics.jsonl has every number")


def upload(draft: Draft, *keys: str) -> None:
    """The repository of the hub to which the result goes; private, unless the file says public."""
    repository = draft.get("hub_model_id")
    if not repository:
        folder = str(draft.get("output_dir")).rstrip("/").rpartition("/")[2]
        note = (
            f"nothing is pushed without the name of an account: meshtune push {draft.get('output_dir')} USER/{folder}"
        )
        draft.differ("push_to_hub", note)
        return
    draft.put("hub.repository", repository, "hub_model_id", *keys, note="at the end of the run")
    if "hub_private_repo" in draft.given:
        draft.put("hub.public", not draft.get("hub_private_repo"), "hub_private_repo")
    else:
        draft.remark(f"The repository is private unless hub.public says otherwise; {draft.tool} makes it public.")


def dropout(draft: Draft, *, compared: bool) -> None:
    """The dropout of adapters. TRL's trainers that compare answers (`compared`) set every dropout of the model to 0."""
    rate = 0.0 if compared else float(draft.get("lora_dropout"))
    note = "the trainer of this stage switches dropout off, that of adapters too" if compared else ""
    draft.put("method.dropout", rate, "lora_dropout", note=note)


def quantize(draft: Draft, four_bits: str, *keys: str, double: str) -> None:
    """Writes bitsandbytes' NF4 for the key `four_bits` and what belongs to it, `keys`, with the key `double`."""
    draft.put("quantize.format", "nf4", four_bits, *keys)
    draft.put("quantize.block_size", 64, note="bitsandbytes' block")
    draft.put("quantize.double", draft.get(double), double)


def quantize_to_8_bits(draft: Draft, *keys: str) -> None:
    note = "8 bits in blocks in place of LLM.int8(), which keeps outliers apart"
    draft.put("quantize.format", "int8", *keys, note=note, differs=True)


IN_8_BITS = "its state is in 8 bits in both, rounded by other code"
# Name -> (ours, what differs).
OPTIMIZERS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        "adamw adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_anyprecision adamw_torch_xla "
        "adamw_torch_npu_fused paged_adamw paged_adamw_32bit adamw_bnb_32bit".split(),
        ("adamw", ""),
    ),
    **dict.fromkeys("adamw_8bit adamw_bnb_8bit adamw_torch_8bit paged_adamw_8bit".split(), ("adamw8bit", IN_8_BITS)),
    "adamw_torch_4bit": ("adamw8bit", "8 bits in place of 4: more memory, closer to AdamW"),
    "adafactor": ("adafactor", ""),
    "sgd": ("sgd", ""),
    **dict.fromkeys("lion_32bit lion paged_lion_32bit lion_pytorch".split(), ("lion", "")),
    **dict.fromkeys("lion_8bit paged_lion_8bit".split(), ("lion", "state of 32 bits in place of 8: closer to Lion")),
    **dict.fromkeys("galore_adamw galore_adamw_8bit galore_adafactor".split(), ("galore", "AdamW in the subspace")),
    "apollo_adamw": ("apollo", ""),
    "schedule_free_adamw": ("schedule_free", ""),
    "muon": ("muon", "matrices by Muon, all else by AdamW, scaled to the RMS of AdamW's updates"),
    "lomo": ("sgd", ""),
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "cosine_with_min_lr": "cosine",
}


def optimizer(draft: Draft) -> None:
    """The optimizer of `optim`, its schedule and moments. Methods that bring their own optimizer have set its name."""
    if "optimizer.name" not in draft.settings:
        optimizer_name(draft, "optim")
    schedule(draft, "lr_scheduler_type")
    moments(draft, ("adam_beta1", "beta1"), ("adam_beta2", "beta2"), ("adam_epsilon", "eps"))
    clipping(draft, "max_grad_norm")


def optimizer_name(draft: Draft, key: str) -> None:
    name = draft.get(key)
    if name not in OPTIMIZERS:
        known = ", ".join(dict.fromkeys(ours for ours, _ in OPTIMIZERS.values()))
        draft.refuse(key, f"there is no optimizer {name} here", f"choose one of: {known}")
        return
    ours, note = OPTIMIZERS[name]
    draft.put("optimizer.name", ours, key, note=note, differs=bool(note))
    if name == "lomo":
        draft.put("optimizer.in_backward", True, key)


def schedule(draft: Draft, key: str) -> None:
    """The schedule and its warm-up. transformers' `constant` has no warm-up, whatever is asked for."""
    name = str(draft.get(key))
    if draft.value("optimizer.name") == "schedule_free":
        draft.put("optimizer.schedule", "constant", key, note="schedule_free averages instead of decaying")
    elif name not in SCHEDULES:
        draft.refuse(key, f"there is no schedule {name} here", f"choose one of: {', '.join(SCHEDULES)}")
        return
    else:
        draft.put("optimizer.schedule", SCHEDULES[name], key)
    schedule_options(draft, name)
    if name == "constant":
        draft.put("optimizer.warmup_steps", 0, note="transformers' constant schedule has no warm-up")
    else:
        warmup(draft)


def schedule_options(draft: Draft, name: str) -> bool:
    """Translates lr_scheduler_kwargs of the schedule `name`. Returns whether all of them could be."""
    options = dict(draft.get("lr_scheduler_kwargs") or {}) if "lr_scheduler_kwargs" in draft.table else {}
    if name == "cosine_with_min_lr" and {"min_lr_rate", "min_lr"} & set(options):
        ratio = options.pop("min_lr_rate", None)
        least = options.pop("min_lr", None)
        ratio = number(least) / draft.get("learning_rate") if ratio is None else ratio
        draft.put("optimizer.min_lr_ratio", ratio, "lr_scheduler_kwargs")
    if options:
        draft.refuse("lr_scheduler_kwargs", f"{', '.join(options)}: the schedule has no such setting", "leave it out")
    return not options


def warmup(draft: Draft) -> None:
    steps, ratio = draft.get("warmup_steps") or 0, draft.get("warmup_ratio") or 0.0
    if steps >= 1:
        draft.put("optimizer.warmup_steps", int(steps), "warmup_steps")
    elif steps > 0:
        draft.put("optimizer.warmup_ratio", steps, "warmup_steps", note="below 1 it is a share of the steps")
    else:
        draft.put("optimizer.warmup_ratio", ratio, "warmup_ratio")


def moments(draft: Draft, *pairs: tuple[str, str]) -> None:
    name = draft.value("optimizer.name")
    for key, ours in pairs:
        if name in READERS[ours] and draft.get(key) is not None:
            draft.put(f"optimizer.{ours}", draft.get(key), key)


def clipping(draft: Draft, key: str) -> None:
    norm = draft.get(key)
    if draft.value("optimizer.in_backward"):
        draft.put("optimizer.max_grad_norm", None, note="updates in the backward pass are not clipped")
    else:
        draft.put("optimizer.max_grad_norm", norm or None, key, note="" if norm else "0: never clipped")


BEFORE = "data are tokenised before training here, and read from disk in another order"
BUFFER = "shuffled as a whole, not by a buffer"


def stream(draft: Draft, key: str, *related: str) -> None:
    """Translates the flag (or list of data) `key` and what goes with it, `related`, once stage, method and length of
    the run are in the draft."""
    if not draft.get(key):
        return
    if "train.steps" not in draft.settings:
        draft.refuse(key, f"{draft.tool} stops: the length of a stream is unknown without max_steps", "add max_steps")
        return
    shuffled = "data.shuffle" not in draft.settings
    obstacle = _obstacle(draft)
    if obstacle is None:
        notes = [BUFFER] * shuffled + ["documents go on in the next row"] * (draft.settings["stage.kind"].value == "pt")
        draft.put("data.streaming", True, key, *related, note="; ".join(notes), differs=shuffled)
    else:
        for name in (key, *(name for name in related if name in draft.given)):
            draft.differ(
                name, f"{BEFORE}: {obstacle}" if shuffled else f"data are tokenised before training: {obstacle}"
            )


def stops(draft: Draft, key: str, without: str) -> None:
    """Refuses a key with which the tool does not stream either."""
    draft.refuse(key, f"{draft.tool} stops where data are a stream", f"{without}, or leave streaming out")


def _obstacle(draft: Draft) -> str | None:
    """Why a stream is not possible here; None if it is."""
    values = {name: setting.value for name, setting in draft.settings.items()}
    kind, adapted = values.get("stage.kind"), values.get("method.kind") == "lora"
    if kind in ("dpo", "kto") and ("stage.reference" in values or not adapted):
        return "the reference's log-probabilities are computed before training"
    if kind in ONLINE_STAGES:
        return "prompts are read before training"
    if kind == "pt" and values.get("data.packing") is False:
        return "a stream of plain text fills its rows, and packing is off"
    return None


TOKENIZERS_OWN = "the tokenizer's own template is used: compare what is trained with `meshtune data inspect`"
NEWLINE = "LLaMA-Factory also learns the line break after the end of a turn"
TRIMMED = "blanks at both ends of a text are dropped"
DEFAULT_JINJA = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- message['content'] + eos_token + '\\n' -}}
{%- elif message['role'] == 'user' -%}
{{- 'Human: ' + message['content'] + eos_token + '\\nAssistant:' -}}
{%- else -%}
{{- 'System: ' + message['content'] + eos_token + '\\n' -}}
{%- endif -%}
{%- endfor -%}
"""


@dataclasses.dataclass(frozen=True)
class Template:
    """Our equivalent of another tool's template: one that ships with Meshtune or a Jinja text, and a system prompt.

    `name` None is the tokenizer's own template.
    """

    name: str | None
    note: str = ""
    system: str = ""
    jinja: str = ""

    @property
    def differs(self) -> bool:
        return bool(self.note)


QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
ALPACA_SYSTEM = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)
LLAMA_FACTORY: dict[str, Template] = {
    "llama3": Template("llama3", TRIMMED),
    "qwen3_nothink": Template("chatml", NEWLINE),
    "chatml": Template("chatml", NEWLINE),
    "qwen": Template("chatml", NEWLINE, QWEN_SYSTEM),
    "gemma": Template("gemma", f"{TRIMMED}; {NEWLINE}"),
    "gemma2": Template("gemma", f"{TRIMMED}; {NEWLINE}"),
    "baichuan2": Template("baichuan2"),
    "alpaca": Template(
        "alpaca",
        "LLaMA-Factory also learns the blank lines after an answer, and writes no beginning of text",
        ALPACA_SYSTEM,
    ),
    "default": Template("", "LLaMA-Factory also learns the line break after an answer", jinja=DEFAULT_JINJA),
}
AXOLOTL: dict[str, Template] = {
    "tokenizer_default": Template(None),
    "chatml": Template("chatml"),
    "alpaca": Template("alpaca", "only its words are the same: compare with `meshtune data inspect`"),
    "llama3": Template("llama3"),
    "gemma": Template("gemma"),
}


def template(draft: Draft, key: str, name: str, known: dict[str, Template]) -> Template | None:
    """Writes the template that `key` names. Returns its entry in `known`, or None."""
    entry = known.get(name)
    if entry is None:
        draft.differ(key, TOKENIZERS_OWN)
        return None
    if entry.jinja:
        draft.files[".jinja"] = entry.jinja
        draft.put("model.chat_template", ".jinja", key, note=entry.note, differs=entry.differs)
    elif entry.name is None:
        pass  # the tokenizer's own is the default
    else:
        draft.put("model.chat_template", entry.name, key, note=entry.note, differs=entry.differs)
    return entry
