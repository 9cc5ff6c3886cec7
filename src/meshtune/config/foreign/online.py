"""Arguments of TRL's GRPO and RLOO trainers, which axolotl's section `trl` has too."""

from __future__ import annotations

import dataclasses

from meshtune.config.foreign.draft import (
    ABSENT,
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

STAGES = "grpo rloo"


def numbers(value: object) -> list[int | float]:
    """A list of numbers; a command gives a list of one as the number."""
    return [number(entry) for entry in (value if isinstance(value, list) else [value])]


TABLE: Table = {
    "num_generations": part("rollout.samples", integer, 8),
    **parts("rollout.prompts", integer, ABSENT, "steps_per_generation generation_batch_size"),
    "num_generations_eval": part("rollout.eval_samples", integer),
    "num_iterations": direct("rollout.iterations", integer, 1, when=STAGES),
    "max_completion_length": direct("rollout.max_tokens", integer, 512, when=STAGES),
    "max_prompt_length": part("data.max_length", integer, 1024),
    "temperature": direct("rollout.temperature", number, 1.0, when=STAGES),
    "top_p": direct("rollout.top_p", number, 1.0, when=STAGES),
    "top_k": direct("rollout.top_k", integer, 0, when=STAGES),
    "min_p": direct("rollout.min_p", number, when=STAGES),
    "repetition_penalty": refused(
        "completions are drawn from the model's own probabilities, which a penalty changes", "leave it out", (1, 1.0)
    ),
    "generation_kwargs": refused("generation has the options of `rollout` only", "write them as keys", ({},)),
    "chat_template_kwargs": refused("a record's chat_template_kwargs are read instead", "put it into the data", ({},)),
    "loss_type": part("stage.loss", text, "dapo"),
    "beta": part("stage.beta", number, 0.0),
    "use_bias_correction_kl": part("stage.kl_correction", flag, True),
    "epsilon": direct("stage.epsilon", number, 0.2, when=STAGES),
    "epsilon_high": direct("stage.epsilon_high", number, when=STAGES),
    "delta": direct("stage.delta", number, when="grpo"),
    "importance_sampling_level": direct("stage.ratio", text, "token", when="grpo"),
    "scale_rewards": part("stage.scale", anything, "group"),
    "multi_objective_aggregation": part("stage.normalize_then_sum", text, "sum_then_normalize"),
    "mask_truncated_completions": direct("stage.mask_truncated_completions", flag, False, when=STAGES),
    "off_policy_mask_threshold": direct("stage.off_policy_mask_threshold", number, when="grpo"),
    "top_entropy_quantile": direct("stage.top_entropy_quantile", number, 1.0, when="grpo"),
    "entropy_coef": direct("stage.entropy_coef", number, 0.0, when="grpo"),
    "use_adaptive_entropy": refused("the weight of the entropy is constant here", "use entropy_coef"),
    **{
        name: direct(f"stage.{name}", number, when="grpo")
        for name in (
            "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
            "vespo_lambda_neg",
        )
    },
    "normalize_advantages": direct("stage.normalize_advantages", flag, False, when="rloo"),
    "reward_clip_range": direct("stage.reward_clip_range", entries, when="rloo"),
    "reward_weights": part("rewards.N.weight", numbers),
    "reward_funcs": part("rewards", names),
    "reward_model_name_or_path": part("rewards", text),
    "shuffle_dataset": part("data.shuffle", flag, True),
    "vllm_structured_outputs_regex": refused("completions are not constrained in training", "leave it out", ()),
    "cast_lm_head_to_fp32": part("compute.precision", flag, False),
    **refused_keys("the reference is the model that the run starts from", "leave it out", "sync_ref_model"),
    **idle(
        """cache_implementation ds3_gather_for_generation entropy_coef_delta entropy_coef_max entropy_coef_min
        entropy_target log_completions log_completions_hub_repo log_multimodal log_unique_prompts
        max_tool_calling_iterations num_completions_to_print ref_model_mixup_alpha ref_model_sync_steps
        transformers_continuous_batching_config use_transformers_continuous_batching use_transformers_paged use_vllm
        vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port vllm_importance_sampling_cap
        vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_correction
        vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl vllm_server_base_url
        vllm_server_host vllm_server_port vllm_server_timeout vllm_tensor_parallel_size"""
    ),
}  # fmt: skip
# Defaults of RLOO that are not GRPO's.
RLOO: Table = {
    "num_generations": part("rollout.samples", integer, 2),
    "beta": part("stage.beta", number, 0.05),
}
# Arguments of TRL's online DPO, which has its own names and defaults for many.
ONLINE_DPO: Table = {
    "max_new_tokens": direct("rollout.max_tokens", integer, 64),
    "max_length": part("data.max_length", integer, 512),
    "temperature": direct("rollout.temperature", number, 0.9),
    **{key: dataclasses.replace(TABLE[key], when="") for key in ("top_p", "top_k", "min_p")},
    "missing_eos_penalty": direct("stage.missing_eos_penalty", number),
    "beta": part("stage.beta", numbers, [0.1]),
    "loss_type": direct("stage.loss", text, "sigmoid"),
    "reward_model_path": part("rewards", text),
    "disable_dropout": part("method.dropout", flag, True),
    **{
        key: rule
        for key, rule in TABLE.items()
        if rule.kind == "idle"
        or key in ("reward_funcs", "reward_weights", "repetition_penalty", "generation_kwargs")
        or key in ("shuffle_dataset", "vllm_structured_outputs_regex")
    },
}
# TRL's own rewards, and ours that give the same values.
REWARDS: dict[str, dict[str, object]] = {
    "accuracy_reward": {"kind": "maths", "column": "solution"},
    "think_format_reward": {"kind": "pattern", "pattern": r"(?sm)^<think>(?!.*<think>)(.*?)</think>.*"},
    "get_soft_overlong_punishment": {"kind": "overlong", "buffer": 256, "max_tokens": 1280},
}
PROMPTS_SHARED = "TRL shuffles the completions of a rollout over its updates; here each has its part of the prompts"


def put_stage(draft: Draft, name: str) -> None:
    """Translates the options of the loss, those that are read together."""
    draft.put("stage.beta", float(draft.get("beta")), "beta")
    if name == "rloo":
        return
    draft.put("stage.loss", draft.get("loss_type"), "loss_type")
    scale = draft.get("scale_rewards")
    scale = {True: "group", False: "none", "True": "group", "False": "none"}.get(scale, scale)
    draft.put("stage.scale", scale, "scale_rewards")
    if draft.get("beta"):
        draft.put("stage.kl_correction", draft.get("use_bias_correction_kl"), "use_bias_correction_kl")
    if draft.get("multi_objective_aggregation") == "normalize_then_sum":
        draft.put("stage.normalize_then_sum", True, "multi_objective_aggregation")
    elif draft.get("multi_objective_aggregation") != "sum_then_normalize":
        note = "there is no such aggregation of rewards here"
        draft.refuse("multi_objective_aggregation", note, "use sum_then_normalize or normalize_then_sum")
    if draft.get("cast_lm_head_to_fp32"):
        draft.mention("cast_lm_head_to_fp32", "logits are float32 in any precision")


def put_online_dpo(draft: Draft) -> None:
    """Translates the options of online DPO's loss."""
    betas = draft.get("beta")
    draft.put("stage.beta", float(betas[0]), "beta")
    if len(betas) > 1:
        draft.refuse("beta", "one beta holds for the whole run", "give one, or make a run of each")


def put_pairs(draft: Draft, per_device: str = "per_device_train_batch_size") -> None:
    """Translates the prompts of an update of online DPO, with two completions each."""
    update = (draft.get(per_device) or 1) * (draft.get("gradient_accumulation_steps") or 1) * max(draft.devices, 1)
    draft.put("rollout.prompts", update, per_device, "gradient_accumulation_steps", note="pairs an update")
    draft.put("rollout.samples", 2)
    note = "longer prompts are left out; there they are cut at their beginning"
    draft.put("data.max_length", draft.get("max_length"), "max_length", note=note, differs=True)


def put_rollout(draft: Draft, per_device: str = "per_device_train_batch_size") -> None:
    """Translates the sizes of a rollout: completions of all devices, which TRL counts, to prompts and updates."""
    samples, accumulated = draft.get("num_generations"), draft.get("gradient_accumulation_steps") or 1
    at_once = (draft.get(per_device) or 1) * max(draft.devices, 1)
    size = draft.get("generation_batch_size") or (draft.get("steps_per_generation") or accumulated) * at_once
    update = at_once * accumulated
    if {"generation_batch_size", "steps_per_generation"} <= set(draft.given):
        draft.refuse("generation_batch_size", f"{draft.tool} stops where steps_per_generation is given too", "give one")
    keys = ("generation_batch_size", "steps_per_generation", per_device, "gradient_accumulation_steps")
    size = max(size, update)  # several generations for one update have the same weights
    if update % samples or size % update:
        draft.refuse(
            next((key for key in keys if key in draft.given), "num_generations"),
            f"an update of {update} completions and a generation of {size} are not whole groups of {samples}",
            f"make both multiples of num_generations, with {per_device}, gradient_accumulation_steps and --devices",
        )
        return
    updates = size // update
    draft.put("rollout.prompts", size // samples, *keys, note=f"{size} completions a rollout")
    draft.put("rollout.samples", samples, "num_generations")
    draft.put("rollout.updates", updates, *keys[:2], note=PROMPTS_SHARED if updates > 1 else "", differs=updates > 1)
    draft.put("rollout.eval_samples", draft.get("num_generations_eval") or samples, "num_generations_eval")
    room = draft.get("max_prompt_length") + draft.get("max_completion_length")
    note = (
        f"prompts of up to {draft.get('max_prompt_length'):,} tokens, and longer ones are left out; there they are read"
    )
    draft.put("data.max_length", room, "max_prompt_length", "max_completion_length", note=note, differs=True)


def put_rewards(draft: Draft, model: str = "reward_model_name_or_path") -> None:
    """Translates rewards by name: TRL's own become ours, others are functions of the user."""
    rewards: list[tuple[str, dict[str, object]]] = []
    if model in draft.table and draft.get(model):
        rewards.append((model, {"kind": "model", "model": draft.get(model)}))
    for name in draft.get("reward_funcs") or []:
        module, _, function = name.rpartition(".")
        if name == "reasoning_accuracy_reward":
            module, function = "trl.rewards", name
        if name not in REWARDS and not module:
            draft.refuse("reward_funcs", f"{draft.tool} has no reward {name}", "name a function as module.function")
            continue
        rewards.append(("reward_funcs", REWARDS.get(name, {"kind": "function", "function": f"{module}:{function}"})))
    if not rewards and "reward_funcs" not in draft.given:
        draft.refuse(
            "reward_funcs",
            "no rewards are named; those in a script's own code are not read",
            "add reward_funcs with the function as module.function",
        )
    weights = draft.get("reward_weights") or [1.0] * len(rewards)
    if len(weights) != len(rewards):
        draft.refuse("reward_weights", f"{len(weights)} weights, and {len(rewards)} rewards", "give one for each")
        return
    for index, ((key, reward), weight) in enumerate(zip(rewards, weights, strict=True)):
        for option, value in reward.items():
            draft.put(f"rewards.{index}.{option}", value, key)
        if "reward_weights" in draft.given:
            draft.put(f"rewards.{index}.weight", weight, "reward_weights")


# Keys of axolotl's section `trl` that are its own and change nothing here.
OF_AXOLOTL = {"use_liger_loss", "vllm_dtype", "vllm_max_model_len", "vllm_enable_prefix_caching"}


def put_section(draft: Draft, section: str, per_device: str, other_rules: Table) -> None:
    """Translates GRPO's arguments in a section of another tool's file, with its rules for other keys."""
    options = {key: value for key, value in (draft.get(section) or {}).items() if value is not None}
    if unknown := [key for key in options if key not in TABLE and key not in OF_AXOLOTL]:
        draft.refuse(section, f"{', '.join(unknown)}: nothing here does that", "leave it out")
    if options:
        draft.mention(section, "its keys are listed with the others")
    draft.given |= {key: value for key, value in options.items() if key in TABLE}
    draft.table = {**draft.table, **TABLE, **other_rules}
    put_stage(draft, "grpo")
    put_rollout(draft, per_device)
    put_rewards(draft)
