"""torchtune's configs: the keys of its recipes, and what they come to here."""

from __future__ import annotations

from meshtune.config.foreign.rules import (
    ABSENT,
    Table,
    anything,
    direct,
    flag,
    idle,
    integer,
    mapping,
    number,
    part,
    refused,
    refused_keys,
    text,
)
from meshtune.config.foreign.trainer import LOGGING, MEMORY, MESH

NAME = "torchtune"
TORCHTUNE: Table = {
    "output_dir": direct("output", text),
    "model": part("method", mapping),
    "tokenizer": part("data.max_length", mapping),
    "checkpointer": part("model.path", mapping),
    "dataset": part("data.train", anything),
    "dataset_val": part("data.validation", mapping, ABSENT, "run_val_every_n_steps: null evaluates nothing"),
    "run_val_every_n_steps": part("eval.every", integer),
    "seed": direct("seed", integer),
    "shuffle": direct("data.shuffle", flag, True),
    "batch_size": part("train.micro_batch", integer, 1),
    "gradient_accumulation_steps": part("train.batch_size", integer, 1),
    "epochs": part("train.epochs", number, 1),
    "max_steps_per_epoch": part("train.steps", integer),
    "optimizer": part("optimizer", mapping),
    "lr_scheduler": part("optimizer.schedule", mapping),
    "loss": part("stage", mapping),
    "clip_grad_norm": part("optimizer.max_grad_norm", number),
    "dtype": part("compute.precision", text, "bf16"),
    "tensor_parallel_dim": part("train.batch_size", integer, 1, "1: a row is on one device"),
    "context_parallel_dim": part("train.batch_size", integer, 1, "1: a row is on one device"),
    "optimizer_in_bwd": part("optimizer.in_backward", flag, False, "false: after the backward pass"),
    "log_every_n_steps": direct("log.every", integer, 1),
    "metric_logger": part("log.trackers", mapping),
    "resume_from_checkpoint": refused("its checkpoints hold torch's own state", "start from its result"),
    **idle(
        MESH,
        "device tensor_parallel_plan data_parallel_shard_dim data_parallel_replicate_dim fsdp "
        "fsdp_cpu_offload fsdp_sharding_strategy custom_sharded_layers memory_efficient_fsdp_wrap low_cpu_ram "
        "context_parallel_rotate_method use_flex use_distributed_state_dict "
        "fsdp_reshard_after_forward use_loss_parallel_ctx_manager",
    ),
    **idle(
        MEMORY,
        "compile enable_activation_checkpointing enable_activation_offloading ac_mode ac_option batch_size_val "
        "enable_async_checkpointing cudnn_deterministic_mode",
    ),
    **idle(LOGGING, "name log_level log_peak_memory_stats profiler"),
    **idle(
        "run state is kept in Meshtune's own form", "save_every_n_epochs save_every_n_steps keep_last_n_checkpoints"
    ),
    **idle("adapters are written alone", "save_adapter_weights_only"),
    "collate_fn": part("data.train", anything, ABSENT, "rows are filled and masked here"),
    **refused_keys(
        "learning from a teacher is not here", "leave it out", "teacher_model teacher_checkpointer kd_loss kd_ratio"
    ),
    "quantizer": refused("training for a quantiser is not here", "train without, and quantise the result", ()),
    **refused_keys("layers are not skipped in training here", "leave it out", "early_exit_loss layer_dropout"),
    **refused_keys("data sets of one run are listed under dataset", "list them there", "datasets dataloader"),
    **refused_keys(
        "online reinforcement learning is not in recipes here",
        "use stage: dpo",
        "ppo_epochs ppo_batch_size policy_model reward_and_value_model reward_checkpointer value_checkpointer "
        "ref_policy_checkpointer grpo_samples reward_functions orchestration inference postprocessing training "
        "debug_logging_enabled debug_num_samples_per_step min_response_length penalise_no_eos reward_penalty "
        "stop_token_ids forward_batch_size num_steps kl_coeff whiten_rewards gamma lmbda "
        "base_model_path max_generated_tokens",
    ),
    "ref_checkpointer": part("stage.reference", mapping, ABSENT, "the reference is where the run starts"),
    **refused_keys(
        "it is a config of another verb",
        "use meshtune eval, meshtune generate or meshtune export",
        "tasks prompt max_new_tokens",
    ),
    **idle(
        "only another verb reads it",
        "limit max_seq_length temperature top_k enable_kv_cache chat_format apply_chat_template",
    ),
}
