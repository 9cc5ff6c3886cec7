"""Translations of other tools' files: values, defaults written out, reasons, and the files on disk."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import pytest
import yaml
from files import AXOLOTL, LLAMA_FACTORY, QLORA, finding_of, verdicts
from trl import GRPOConfig, RLOOConfig
from trl.experimental.online_dpo import OnlineDPOConfig

from meshtune.cli.main import main
from meshtune.config.foreign import trainer, trl
from meshtune.config.foreign.keys import TABLES, markdown
from meshtune.config.load import load_recipe
from meshtune.data.chat_templates import template_names
from meshtune.data.conversation import Origin
from meshtune.data.formats.alpaca import STANFORD_ALPACA
from meshtune.errors import UserError

SEES = {"model_name_or_path": "Qwen/Qwen2-VL-7B-Instruct", "template": "qwen2_vl"}


def test_what_is_frozen_of_a_model_that_sees(recipe_of, translate_file):
    vision = recipe_of(LLAMA_FACTORY | SEES).vision
    assert (vision.train, vision.freeze_language, vision.max_pixels, vision.min_pixels) == ([], False, 589824, 1024)
    assert (vision.crops, vision.media_dir) == (None, "data")
    full = LLAMA_FACTORY | SEES | {"finetuning_type": "full", "freeze_multi_modal_projector": False}
    vision = recipe_of(
        full | {"image_max_pixels": 262144, "media_dir": "pictures", "freeze_language_model": True}
    ).vision
    assert (vision.train, vision.freeze_language, vision.max_pixels) == (["projector"], True, 262144)
    assert vision.media_dir == "pictures"
    internvl = LLAMA_FACTORY | {"model_name_or_path": "OpenGVLab/InternVL3-1B-hf", "template": "intern_vl"}
    assert recipe_of(internvl).vision.crops == 1
    assert recipe_of(internvl | {"crop_to_patches": True}).vision.crops is None
    assert recipe_of(LLAMA_FACTORY | {"freeze_vision_tower": False}).vision is None
    seeing = AXOLOTL | {"base_model": "Qwen/Qwen2-VL-7B-Instruct", "processor_type": "AutoProcessor"}
    assert recipe_of(seeing).vision.train == ["projector", "tower"]
    assert recipe_of(seeing | {"freeze_mm_modules": True}).vision.train == []
    groups = [("a", ["visual.merger"], 1e-4), ("b", ["model.visual.blocks", "visual.patch_embed"], 2e-6)]
    rates = {"lr_groups": [{"name": name, "modules": modules, "lr": rate} for name, modules, rate in groups]}
    optimizer = recipe_of(seeing | rates).optimizer
    assert (optimizer.projector_learning_rate, optimizer.tower_learning_rate) == (1e-4, 2e-6)
    for case in (
        seeing | rates | {"freeze_mm_modules": True},  # nothing of a part that is not trained
        seeing | {"lr_groups": [{"name": "a", "modules": ["q_proj"], "lr": 1e-4}]},
        seeing | {"lr_groups": [{"name": "a", "modules": ["visual.merger", "visual.blocks"], "lr": 1e-4}]},
        AXOLOTL | rates,
    ):
        assert "lr_groups" in [finding.key for finding in translate_file(case).refused]


def test_llama_factory_defaults_are_written_out(recipe_of):
    recipe = recipe_of(LLAMA_FACTORY)
    assert (recipe.method.rank, recipe.method.alpha, recipe.method.targets) == (8, 16.0, "all-linear")
    assert (recipe.optimizer.learning_rate, recipe.optimizer.schedule) == (5e-5, "linear")
    assert (recipe.optimizer.warmup_ratio, recipe.optimizer.max_grad_norm, recipe.optimizer.eps) == (0.0, 1.0, 1e-8)
    assert (recipe.train.batch_size, recipe.train.epochs, recipe.seed) == (8, 3.0, 42)
    assert (recipe.data.max_length, recipe.data.packing, recipe.data.registry) == (2048, False, "data")
    assert [source.name for source in recipe.data.train] == ["first", "second"]
    assert recipe.model.chat_template == "chatml"
    assert "Alibaba" in recipe.data.system


def test_batches_are_counted_with_the_devices(recipe_of):
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    recipe = recipe_of(LLAMA_FACTORY | sizes, devices=4)
    assert (recipe.train.batch_size, recipe.train.micro_batch) == (24, 8)
    recipe = recipe_of(AXOLOTL | {"micro_batch_size": 2, "gradient_accumulation_steps": 3}, devices=4)
    assert (recipe.train.batch_size, recipe.train.micro_batch) == (24, 8)


def test_devices_that_share_a_row_have_one_batch_together(translate_file, recipe_of):
    sizes = {"micro_batch_size": 2, "gradient_accumulation_steps": 3}
    shared = {"tensor_parallel_size": 2, "context_parallel_size": 2}
    recipe = recipe_of(AXOLOTL | sizes | shared, devices=8)
    assert (recipe.train.batch_size, recipe.train.micro_batch) == (12, 4)
    refused = translate_file(AXOLOTL | sizes | shared, devices=6).refused
    assert ["groups of 4" in finding.note for finding in refused] == [True]


def test_axolotl_trains_all_weights_in_bfloat16_unless_they_are_sharded(recipe_of):
    assert recipe_of(AXOLOTL).compute.precision == "bfloat16"
    assert recipe_of(AXOLOTL | {"bf16": True, "deepspeed": "zero2.json"}).compute.precision == "mixed"
    assert recipe_of(AXOLOTL | QLORA | {"bf16": True}).compute.precision == "mixed"
    assert recipe_of(AXOLOTL | {"bf16": False}).compute.precision == "float32"


def test_axolotl_takes_the_best_checkpoint_where_every_save_has_an_evaluation(translate_file, recipe_of):
    """1 / (1 x 4) of the run between saves is four times 1 / (4 x 4) between evaluations."""
    often = {"val_set_size": 0.1, "num_epochs": 4, "saves_per_epoch": 1, "evals_per_epoch": 4}
    recipe = recipe_of(AXOLOTL | often)
    assert (recipe.checkpoint.keep_best, recipe.checkpoint.result, recipe.eval.at_start) == (True, "best", True)
    assert not recipe_of(AXOLOTL | often | {"evals_per_epoch": 3, "saves_per_epoch": 2}).checkpoint.keep_best
    assert not recipe_of(AXOLOTL | often | {"load_best_model_at_end": False}).checkpoint.keep_best


def test_axolotls_schedule_has_the_options_of_transformers(translate_file, recipe_of):
    least = {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 2e-6}}
    assert recipe_of(AXOLOTL | least).optimizer.min_lr_ratio == pytest.approx(0.1)
    cycles = {"lr_scheduler": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 3}}
    assert [finding.key for finding in translate_file(AXOLOTL | cycles).refused] == ["lr_scheduler_kwargs"]
    assert recipe_of(AXOLOTL | {"warmup_ratio": 0.1, "max_steps": 55}).optimizer.warmup_steps == 5  # rounded down


def test_prompts_of_axolotl_that_are_texts_are_written_in_its_words(recipe_of):
    """The expected texts are those that axolotl's prompters print."""
    record = {"instruction": "Add {input}.", "input": "1, 2", "output": "3"}

    def prompt(prompts, record=record):
        source = recipe_of(AXOLOTL | {"datasets": [{"path": "d", "type": prompts}]}).data.train[0]
        fields = STANFORD_ALPACA.resolve(source.columns)
        return STANFORD_ALPACA.convert(record, fields, source.tags, Origin("d", 0)).prompt

    below = "Below is an instruction that describes a task"
    write = "Write a response that appropriately completes the request."
    assert prompt("alpaca:chat") == (
        f"SYSTEM: {below}, paired with an input that provides further context. {write}\n"
        "USER: Add {input}.\n1, 2\nASSISTANT:"
    )
    assert prompt("alpaca:phi", {"instruction": "Hi", "output": "Ho"}) == (
        f"<|system|>\n{below}. {write}<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n"
    )
    written = {
        "system_prompt": "Be brief. ",
        "field_output": "answer",
        "format": "[INST] {instruction} {input} [/INST]",
    }
    assert prompt(written, record | {"answer": "3"}) == "Be brief. [INST] Add {input}. 1, 2 [/INST]"
    assert prompt(written, {"instruction": "Hi", "answer": "Ho"}) == "Be brief. Hi "


def test_trls_own_commands_are_translated(translate_file, recipe_of):
    """Of trl/scripts: another end of text than the tokenizer's, and an upload to the user's own account."""
    command = (
        "python trl/scripts/sft.py --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --packing "
    )
    command += "--eos_token '<|im_end|>' --output_dir SFT --push_to_hub --no_remove_unused_columns\n"
    translation = translate_file(command + command)
    assert not translation.refused
    assert any("holds 2 commands" in remark for remark in translation.draft.remarks)
    assert recipe_of(command).data.train_on_prompt
    moe = command.replace("Qwen2-0.5B", "Qwen3-30B-A3B")
    assert recipe_of(moe).model.router_aux_loss == 0.001  # TRL's own for every mixture
    pairs = "python cpo.py --model_name_or_path m --dataset_name d --loss_type simpo --beta 2.0 --simpo_gamma 1.0"
    stage = recipe_of(pairs).stage
    assert (stage.kind, stage.beta, stage.gamma, stage.sft_weight) == ("simpo", 2.0, 1.0, 1.0)


def test_axolotl_defaults_are_written_out(recipe_of):
    recipe = recipe_of(AXOLOTL | QLORA)
    assert (recipe.data.max_length, recipe.data.overlong, recipe.data.packing) == (512, "drop", False)
    assert recipe.data.train[0].format == "stanford_alpaca"
    assert (recipe.train.batch_size, recipe.train.epochs, recipe.optimizer.schedule) == (1, 1.0, "cosine")
    assert (recipe.optimizer.learning_rate, recipe.optimizer.warmup_ratio) == (2e-5, 0.03)
    assert (recipe.quantize.format, recipe.quantize.double, recipe.seed) == ("nf4", True, 42)
    assert recipe_of(AXOLOTL | {"max_steps": 50}).optimizer.warmup_steps == 2  # 1 becomes 2
    assert recipe_of(AXOLOTL).method.kind == "full"


def test_trl_defaults_are_those_of_its_trainer(recipe_of, tmp_path):
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    arguments = {"model_name_or_path": "m", "dataset_name": str(data), "output_dir": "o", "beta": 0.2}
    recipe = recipe_of(arguments, is_trl=True)
    assert (recipe.stage.kind, recipe.stage.beta, recipe.optimizer.learning_rate) == ("dpo", 0.2, 1e-6)
    assert (recipe.method.kind, recipe.data.max_length, recipe.train.batch_size) == ("full", 1024, 8)
    recipe = recipe_of(arguments | {"use_peft": True}, is_trl=True, trainer="dpo")
    assert (recipe.method.rank, recipe.method.alpha, recipe.method.targets) == (16, 32.0, ("q_proj", "v_proj"))


def test_trainers_that_compare_answers_have_no_dropout(recipe_of):
    """TRL's disable_dropout, which LLaMA-Factory and axolotl leave on, reaches the adapters."""
    pairs = {"datasets": [{"path": "d", "type": "chat_template.default"}], "rl": "dpo", "lora_dropout": 0.05}
    assert recipe_of(AXOLOTL | QLORA | pairs).method.dropout == 0
    assert recipe_of(AXOLOTL | QLORA | {"lora_dropout": 0.05}).method.dropout == 0.05
    assert recipe_of(LLAMA_FACTORY | {"stage": "dpo", "lora_dropout": 0.1}).method.dropout == 0
    assert recipe_of(LLAMA_FACTORY | {"lora_dropout": 0.1}).method.dropout == 0.1


def test_a_command_of_trl_is_read(recipe_of):
    script = """# train
    accelerate launch --num_processes 8 trl/scripts/dpo.py \\
        --model_name_or_path Qwen/Qwen3-0.6B --dataset_name org/pairs \\
        --learning_rate 5.0e-7 --loss_type hinge --gradient_checkpointing \\
        --output_dir=out --lora_target_modules q_proj k_proj --use_peft
    """
    recipe = recipe_of(script)
    assert (recipe.stage.kind, recipe.stage.loss, recipe.optimizer.learning_rate) == ("dpo", "hinge", 5e-7)
    assert recipe.method.targets == ("q_proj", "k_proj")
    assert recipe_of("trl sft --model_name_or_path m --dataset_name d --completion_only_loss false").stage.kind == "sft"


GRPO = """
    accelerate launch --config_file examples/accelerate_configs/deepspeed_zero3.yaml trl/scripts/grpo.py \\
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name trl-lib/DeepMath-103K \\
        --reward_funcs accuracy_reward think_format_reward get_soft_overlong_punishment my_lib.rewards.mine \\
        --reward_weights 1.0 0.5 0.1 2 --output_dir grpo --use_vllm --vllm_mode colocate --log_completions \\
        --max_completion_length 1024 --gradient_accumulation_steps 4 --steps_per_generation 8 --use_peft \\
        --loss_type dr_grpo --scale_rewards False --beta 0.04 --no_use_bias_correction_kl --bf16
"""


def test_a_command_of_trls_grpo_is_read(recipe_of, translate_file):
    recipe = recipe_of(GRPO)
    stage, rollout = recipe.stage, recipe.rollout
    assert (stage.kind, stage.loss, stage.scale, stage.beta, stage.kl_correction) == (
        "grpo", "dr_grpo", "none", 0.04, False,
    )  # fmt: skip
    # 8 a device x 8 steps a generation are 64 completions: 8 groups, of which an update of 4 x 8 has half.
    assert (rollout.prompts, rollout.samples, rollout.updates, rollout.max_tokens) == (8, 8, 2, 1024)
    assert (recipe.train.batch_size, recipe.train.micro_batch) == (32, 8)
    rewards = [(reward.kind, reward.weight) for reward in recipe.rewards]
    assert rewards == [("maths", 1.0), ("pattern", 0.5), ("overlong", 0.1), ("function", 2.0)]
    assert recipe.rewards[3].function == "my_lib.rewards:mine"
    assert recipe.data.train[0].format == "prompt"
    verdict_of = verdicts(translate_file(GRPO))
    assert (verdict_of["use_vllm"], verdict_of["steps_per_generation"]) == ("no effect", "differs")


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_defaults_of_online_trainers_are_trls(recipe_of, name):
    config = {"grpo": GRPOConfig, "rloo": RLOOConfig}[name](output_dir="o", use_cpu=True, bf16=False)
    recipe = recipe_of(f"trl {name} --model_name_or_path m --dataset_name d --reward_funcs accuracy_reward")
    stage, rollout = recipe.stage, recipe.rollout
    assert (rollout.samples, rollout.iterations) == (config.num_generations, config.num_iterations)
    assert rollout.prompts * rollout.samples == config.generation_batch_size
    assert (rollout.max_tokens, rollout.temperature) == (config.max_completion_length, config.temperature)
    assert (rollout.top_p, rollout.top_k, rollout.min_p) == (config.top_p, config.top_k, config.min_p or 0)
    assert (stage.beta, stage.epsilon, stage.epsilon_high) == (config.beta, config.epsilon, config.epsilon_high)
    assert stage.mask_truncated_completions == config.mask_truncated_completions
    assert (recipe.optimizer.learning_rate, recipe.log.every) == (config.learning_rate, config.logging_steps)
    assert recipe.method.kind == "full"
    if name == "grpo":
        assert (stage.loss, stage.ratio, stage.scale) == (
            config.loss_type, config.importance_sampling_level, config.scale_rewards,
        )  # fmt: skip
        assert (stage.delta, stage.entropy_coef) == (config.delta, config.entropy_coef)
        assert stage.top_entropy_quantile == config.top_entropy_quantile
    else:
        assert stage.normalize_advantages == config.normalize_advantages
        assert stage.reward_clip_range == config.reward_clip_range


def test_every_argument_of_trls_online_trainers_is_known():
    for name, config in (("grpo", GRPOConfig), ("rloo", RLOOConfig), ("online_dpo", OnlineDPOConfig)):
        fields = {field.name for field in dataclasses.fields(config)}
        assert fields - {*trl.TABLE, *trl.RULES[name]} == set()


@pytest.mark.parametrize(
    ("arguments", "key", "reason"),
    [
        ("--reward_funcs a.b --num_generations 3", "num_generations", "not whole groups of 3"),
        ("", "reward_funcs", "no rewards are named"),
        ("--reward_funcs a.b c.d --reward_weights 1", "reward_weights", "1 weights, and 2 rewards"),
        ("--reward_funcs mine", "reward_funcs", "no reward mine"),
        ("--reward_funcs a.b --repetition_penalty 1.2", "repetition_penalty", "a penalty changes"),
        ("--reward_funcs a.b --sync_ref_model", "sync_ref_model", "the model that the run starts from"),
    ],
)
def test_what_online_trainers_cannot_do_is_refused(translate_file, arguments, key, reason):
    translation = translate_file(f"trl grpo --model_name_or_path m --dataset_name d {arguments}")
    assert reason in finding_of(translation, key).note
    assert finding_of(translation, key).fix


def test_axolotls_grpo_is_read(recipe_of, translate_file):
    trl_section = {
        "beta": 0.001, "max_completion_length": 256, "use_vllm": True, "vllm_server_port": 8000, "num_generations": 4,
        "reward_funcs": ["rewards.number", "rewards.form"], "reward_weights": [1.0, 0.5], "temperature": 0.7,
    }  # fmt: skip
    sizes = {"micro_batch_size": 4, "gradient_accumulation_steps": 2, "datasets": [{"path": "prompts.jsonl"}]}
    content = AXOLOTL | QLORA | sizes | {"rl": "grpo", "trl": trl_section}
    recipe = recipe_of(content)
    assert (recipe.stage.kind, recipe.stage.beta, recipe.data.max_length) == ("grpo", 0.001, 1280)
    rollout = recipe.rollout
    assert (rollout.prompts, rollout.samples, rollout.updates, rollout.temperature) == (2, 4, 1, 0.7)
    rewards = [(reward.function, reward.weight) for reward in recipe.rewards]
    assert rewards == [("rewards:number", 1.0), ("rewards:form", 0.5)]
    assert recipe.data.train[0].format == "prompt"
    changed = content | {"trl": trl_section | {"rollout_func": "a.b"}}
    assert "rollout_func: nothing here" in finding_of(translate_file(changed), "trl").note
    transformed = content | {"datasets": [{"path": "openai/gsm8k", "type": "rewards.transform"}]}
    assert "code of recipes is not run" in finding_of(translate_file(transformed), "datasets").note


def test_llama_factorys_ppo_is_read(recipe_of, translate_file):
    """Its numbers are those of its trainer: a step there is a buffer of completions, with all updates of it."""
    content = LLAMA_FACTORY | {
        "stage": "ppo", "reward_model": "saves/rm", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
        "ppo_buffer_size": 2, "max_steps": 10, "cutoff_len": 512, "max_new_tokens": 128, "ppo_whiten_rewards": True,
        "ppo_target": 5,
    }  # fmt: skip
    recipe = recipe_of(content)
    rollout, stage = recipe.rollout, recipe.stage
    assert (rollout.prompts, rollout.samples, rollout.updates, rollout.iterations) == (16, 1, 2, 4)
    assert (recipe.train.batch_size, recipe.train.steps, recipe.data.max_length) == (8, 10 * 2 * 4, 640)
    assert (rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k) == (128, 0.95, 0.7, 50)
    assert (stage.kl_coef, stage.whiten_rewards, stage.cliprange, stage.vf_coef, stage.lam) == (
        0.2,
        True,
        0.2,
        0.1,
        0.95,
    )
    assert [(reward.kind, reward.model) for reward in recipe.rewards] == [("model", "saves/rm")]
    findings = verdicts(translate_file(content))
    assert (findings["reward_model"], findings["ppo_buffer_size"]) == ("differs", "translated")
    assert (stage.kl_target, stage.kl_horizon, stage.kl_mean) == (5.0, 10000, "completions")
    assert findings["ppo_target"] == "translated"


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"ppo_score_norm": True}, "ppo_score_norm", "running deviation"),
        ({"reward_model_type": "api", "reward_model": "http://localhost:8000"}, "reward_model_type", "not chats"),
        ({"reward_model": None}, "reward_model", "names none"),
        ({"val_size": 0.1}, "val_size", "evaluates nothing"),
    ],
)
def test_what_llama_factorys_ppo_has_and_recipes_have_not_is_refused(translate_file, changes, key, reason):
    content = LLAMA_FACTORY | {"stage": "ppo", "reward_model": "saves/rm"} | changes
    finding = finding_of(translate_file({name: value for name, value in content.items() if value is not None}), key)
    assert finding.verdict == "refused"
    assert reason in finding.note
    assert finding.fix


def test_trls_online_dpo_is_read(recipe_of, translate_file):
    command = "trl online_dpo --model_name_or_path m --dataset_name d --reward_model_path rm --output_dir o"
    config, recipe = OnlineDPOConfig(output_dir="o", use_cpu=True, bf16=False), recipe_of(command)
    rollout, stage = recipe.rollout, recipe.stage
    assert (rollout.prompts, rollout.samples) == (config.per_device_train_batch_size, 2)
    assert (rollout.max_tokens, rollout.temperature) == (config.max_new_tokens, config.temperature)
    assert (rollout.top_p, rollout.top_k, rollout.min_p) == (config.top_p, config.top_k, config.min_p or 0)
    assert (stage.beta, stage.loss) == (config.beta, config.loss_type)
    assert (stage.missing_eos_penalty, recipe.data.max_length) == (config.missing_eos_penalty, config.max_length)
    assert recipe.optimizer.learning_rate == config.learning_rate
    assert [(reward.kind, reward.model) for reward in recipe.rewards] == [("model", "rm")]
    several = finding_of(translate_file(f"{command} --beta 0.1 0.05"), "beta")
    assert (several.verdict, "one beta" in several.note) == ("refused", True)


def test_every_key_of_a_file_gets_one_verdict(translate_file):
    content = LLAMA_FACTORY | {"plot_loss": True, "ddp_timeout": 1, "packing": True, "bogus": 1, "shift_attn": True}
    translation = translate_file(content)
    verdict_of = verdicts(translation)
    assert set(verdict_of) == set(content)
    assert verdict_of["bogus"] == "unknown"
    assert verdict_of["shift_attn"] == "refused"
    assert verdict_of["plot_loss"] == "no effect"
    assert verdict_of["packing"] == "differs"
    assert {finding.key for finding in translation.refused} == {"bogus", "shift_attn"}
    explained = [finding for finding in translation.findings if finding.verdict not in ("translated", "no effect")]
    assert all(finding.note for finding in explained)


COMPUTED = {"compute_dtype", "model_max_length", "block_diag_attn"}  # fields that no file can give
OF_ITS_EVAL = "EvaluationArguments"  # of another command, whose files are refused


def test_every_field_of_llama_factorys_arguments_has_a_rule(shared):
    """The appendix lists them by dataclass, with default, uses and meaning."""
    text = (shared / "design/DOORS.md").read_text(encoding="utf-8")
    appendix = text[text.index("# Appendix A:") : text.index("# Appendix C:")]
    sections = re.split(r"^\*\*(\w+)\*\*", appendix, flags=re.MULTILINE)
    fields = {
        key
        for name, body in zip(sections[1::2], sections[2::2], strict=True)
        if name != OF_ITS_EVAL
        for key in re.findall(r"^\| ([a-z]\w*) \| .*? \| \d+ \|", body, flags=re.MULTILINE)
    }
    assert len(fields) > 200
    assert fields - COMPUTED <= set(TABLES["LLaMA-Factory"])


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_a_refusal_says_why_and_what_to_do(table):
    assert [key for key, rule in table.items() if rule.kind == "refused" and not (rule.note and rule.fix)] == []


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("model.language_model.layers.[\\d]+.(mlp|cross_attn|self_attn).(up|q)_proj", ["up_proj", "q_proj"]),
        (".*\\.layers\\.(3|7)\\.self_attn\\.q_proj|.*\\.mlp\\.(gate|up)_proj", None),
        ("model.layers.[\\d]+.(mlp|self_attn).(_checkpoint_wrapped_module.)?(o|v)_proj", ["o_proj", "v_proj"]),
    ],
)
def test_expressions_over_modules_become_names(recipe_of, expression, names):
    recipe = recipe_of(AXOLOTL | {"adapter": "lora", "lora_r": 8, "lora_alpha": 8, "lora_target_modules": expression})
    if names is not None:
        assert list(recipe.method.targets) == names
    else:
        assert list(recipe.method.targets) == [
            "layers.3.self_attn.q_proj", "layers.7.self_attn.q_proj", "gate_proj", "up_proj",
        ]  # fmt: skip


BAD = {
    "rank of text": (LLAMA_FACTORY | {"lora_rank": "eight"}, "lora_rank", "must be a number"),
    "flag of text": (LLAMA_FACTORY | {"packing": "perhaps"}, "packing", "must be true or false"),
    "a list as a name": (AXOLOTL | {"rl": ["dpo"]}, "rl", "must be text"),
    "parts of another type": (
        AXOLOTL | {"datasets": [{"path": "p", "type": "chat_template", "message_property_mappings": "role"}]},
        "datasets",
        "message_property_mappings must be a mapping",
    ),
    "no number at all": (AXOLOTL | {"learning_rate": float("nan")}, "learning_rate", "finite"),
    "no data": ({k: v for k, v in AXOLOTL.items() if k != "datasets"} | {"sequence_len": 8}, "datasets", "no data"),
    "an expression with a lookahead": (
        AXOLOTL | {"adapter": "lora", "lora_target_modules": "(?!lm_head).*proj$"},
        "lora_target_modules",
        "not a name",
    ),
    "an environment variable": (LLAMA_FACTORY | {"output_dir": "${HOME}/x"}, "output_dir", "environment"),
    "jinja in a value": (AXOLOTL | {"output_dir": "runs/{{ name }}"}, "output_dir", "Jinja"),
    "ppo without a reward": (LLAMA_FACTORY | {"stage": "ppo"}, "reward_model", "names none"),
    "vision": (LLAMA_FACTORY | {"model_name_or_path": "mistralai/Pixtral-12B"}, "model_name_or_path", "images"),
    "adapters on a tower": (LLAMA_FACTORY | SEES | {"freeze_vision_tower": False}, "freeze_vision_tower", "in full"),
    "lengths that our schema refuses": (LLAMA_FACTORY | {"cutoff_len": 0}, "", "data.max_length"),
    "a data set with code": (AXOLOTL | {"datasets": [{"path": "p", "type": "my.code"}]}, "datasets", "Python file"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_done_is_refused_with_its_reason(translate_file, case):
    content, key, reason = BAD[case]
    refused = {finding.key: finding for finding in translate_file(content).refused}
    assert key in refused, refused
    assert reason in refused[key].note
    assert refused[key].fix


NOT_RECIPES = {
    "keys of no tool": ({"epochs": 3, "net": "resnet"}, "keys of no tool that is known: epochs, net"),
    "ours": ({"model": "m", "data": "d", "output": "o"}, "a recipe of Meshtune's"),
    "processes": ({"compute_environment": "LOCAL_MACHINE", "num_processes": 8}, "accelerate's configuration"),
    "a list": ("[1, 2]", "a mapping of keys to values"),
    "two documents": ("base_model: a\n---\nbase_model: b\n", "more than one YAML document"),
    "nothing": ("", "holds nothing"),
    "comments": ("# a recipe\n", "nothing but comments"),
    "a text": ("train the model\n", "holds one text"),
    "a trainer without a stage": (
        "trl gkd --model_name_or_path m --dataset_name d",
        "no stage for TRL's trainer 'gkd'",
    ),
    "torchtune": ("optimizer: {_component_: torch.optim.AdamW}\n", "recipes of torchtune are not translated"),
    "LLaMA-Factory's v1": ("model: m\ntrain_dataset: d\n", "v1 format are not translated"),
    "a template": ("base_model: {{ model }}\n{% if x %}\nadapter: lora\n{% endif %}\n", "Jinja template"),
}


@pytest.mark.parametrize("case", NOT_RECIPES)
def test_a_file_that_is_no_recipe_is_an_error(translate_file, case):
    content, reason = NOT_RECIPES[case]
    with pytest.raises(UserError, match=reason) as caught:
        translate_file(content)
    assert caught.value.fix


def test_a_place_for_anchors_is_no_key(translate_file):
    translation = translate_file(
        "x-data: &d {path: d, type: alpaca}\nbase_model: m\nlearning_rate: 1e-4\ndatasets: [*d]\n"
    )
    assert not translation.refused
    assert verdicts(translation)["x-data"] == "no effect"


def test_a_trainer_that_trl_does_not_have_is_named(translate_file):
    with pytest.raises(UserError, match="no trainer 'sftt'") as caught:
        translate_file(AXOLOTL, trainer="sftt")
    assert "sft" in (caught.value.fix or "")


def test_anchors_and_yaml_of_version_1_1_are_read(recipe_of):
    recipe = recipe_of(
        "defaults: &size 64\nbase_model: m\nsequence_len: *size\nlearning_rate: 1e-4\nsample_packing: yes\n"
        "datasets: [{path: d, type: alpaca}]\n".replace("defaults: &size 64\n", "lora_r: &size 64\n")
    )
    assert (recipe.data.max_length, recipe.data.packing, recipe.optimizer.learning_rate) == (64, True, 1e-4)


def test_a_chat_template_in_a_recipe_is_written_beside_ours(translate_file, recipe_of, tmp_path):
    turns = {"path": "d", "type": "chat_template"}
    jinja = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    content = AXOLOTL | {"datasets": [turns], "chat_template": "jinja", "chat_template_jinja": jinja}
    with pytest.raises(UserError, match="beside it"):
        translate_file(content).written_files(None)
    assert recipe_of(content).model.chat_template.endswith("ours.jinja")
    assert (tmp_path / "ours.jinja").read_text() == jinja


def test_a_line_of_what_is_written_has_a_comment(translate_file):
    (text,) = translate_file(LLAMA_FACTORY).written_files(None).values()
    lines = text.splitlines()
    for number, line in enumerate(lines):
        is_value = not line.startswith("#") and ": " in line and not line.lstrip().startswith("#")
        assert not is_value or "  # " in line or lines[number - 1].lstrip().startswith("#"), line


@pytest.mark.parametrize(
    ("more", "command"),
    [
        ({"export_dir": "out"}, "meshtune export a --merge --base m --to out"),
        ({"adapter_name_or_path": None, "export_dir": "out"}, "meshtune export m --to out"),
        ({"infer_backend": "huggingface"}, "meshtune chat m --adapter a"),
        ({"do_predict": True, "dataset": "d"}, "meshtune predict m --adapter a --data FILE.json"),
    ],
)
def test_a_file_that_does_not_train_names_our_command(translate_file, more, command):
    with pytest.raises(UserError, match="trains nothing") as caught:
        translate_file({"model_name_or_path": "m", "adapter_name_or_path": "a", "template": "llama3"} | more)
    assert caught.value.fix == command


def test_the_report_names_keys_without_effect_in_one_line(tmp_path, capsys):
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(LLAMA_FACTORY | {"plot_loss": True, "ddp_timeout": 1}))
    with pytest.raises(SystemExit) as stopped:
        main(["import", str(file)])
    assert stopped.value.code == 0
    assert "without effect here: ddp_timeout, do_train, plot_loss\n" in capsys.readouterr().err


def test_training_with_a_file_of_another_tool_says_what_to_type(tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(AXOLOTL))
    with pytest.raises(UserError, match="this is a recipe of axolotl") as caught:
        load_recipe(str(file))
    assert "meshtune import" in (caught.value.fix or "")
    file.write_text("optimizer: {_component_: torch.optim.AdamW}\n")
    with pytest.raises(UserError, match="this is a recipe of torchtune") as caught:
        load_recipe(str(file))
    assert "write a recipe" in (caught.value.fix or "")


def test_the_printed_table_has_every_key_that_is_translated_or_refused():
    keys = {key for table in TABLES.values() for key, rule in table.items() if rule.to or rule.kind == "refused"}
    assert keys <= set(re.findall("`([^`]+)`", markdown()))


def test_the_page_has_the_importers_own_templates():
    page = pathlib.Path(__file__).resolve().parents[3] / "docs/coming-from.md"
    for name, template in trainer.LLAMA_FACTORY.items():
        assert f"| `{name}` | {f'`{template.name}`' if template.name else 'a Jinja file'}" in page.read_text()


def test_templates_that_files_name_ship_with_meshtune():
    used = {**trainer.LLAMA_FACTORY, **trainer.AXOLOTL}.values()
    assert {template.name for template in used if template.name} <= set(template_names())


def test_a_flag_that_is_off_asks_for_nothing(translate_file):
    translation = translate_file(AXOLOTL | QLORA | {"load_in_8bit": False, "s2_attention": False})
    assert not translation.refused
    assert [verdicts(translation)[key] for key in ("load_in_8bit", "s2_attention")] == ["no effect"] * 2


def test_a_template_that_is_the_tokenizer_s_own_must_write_the_tools_of_the_data(translate_file):
    finding = finding_of(translate_file(LLAMA_FACTORY | {"template": "smollm2"}), "template")
    assert finding.verdict == "differs"
    assert "must also write the tools and calls of the data" in finding.note
    assert "tools" not in finding_of(translate_file(LLAMA_FACTORY), "template").note
