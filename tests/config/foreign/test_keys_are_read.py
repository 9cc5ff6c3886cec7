"""No key of another tool is listed as read and then passed over: it changes the recipe, or the report names it.

Every importer is walked with every key that it lists, by itself and with the keys it belongs to. Every look
at a key is recorded as it happens.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from files import AXOLOTL, LLAMA_FACTORY, QLORA, finding_of

from meshtune.config.foreign import axolotl, axolotl_data, importer, llama_factory, online, trl
from meshtune.config.foreign.draft import Draft

# A value of each key of axolotl's data sets that is not its default.
ENTRY: dict[str, Any] = {
    "path": "other.jsonl", "name": "subset", "split": "test", "data_files": "files.jsonl", "type": "alpaca",
    "revision": "main", "field": "story", "text_column": "story", "field_messages": "talk", "field_chosen": "good",
    "field_rejected": "bad", "field_instruction": "ask", "field_input": "more", "field_output": "reply",
    "field_tools": "functions", "message_property_mappings": {"role": "who", "content": "words"},
    "message_field_role": "who", "message_field_content": "words", "roles": {"assistant": ["bot"]},
    "roles_to_train": ["user"], "train_on_eos": "none", "train_on_eot": "last", "drop_system_message": True,
    "chat_template": "llama3", "ds_type": "json", "trust_remote_code": True, "preprocess_shards": 4,
    "logprobs_field": "logs", "temperature": 0.5,
}  # fmt: skip
KINDS = {
    "chat_template": {},
    "alpaca": {},
    "alpaca:chat": {},
    "completion": {},
    "chat_template.default": {"rl": "dpo"},
    "llama3.ultra": {"rl": "dpo"},
    "llama3.argilla": {"rl": "kto"},
    "bradley_terry.chat_template": {"reward_model": True},
}


def outcome(translation) -> tuple[dict[str, Any], str]:
    """The recipe, and the whole report."""
    settings = {name: setting.value for name, setting in translation.draft.settings.items()}
    report = [*map(str, translation.findings), *translation.draft.remarks, str(settings)]
    return settings, "\n".join(report)


def test_the_values_are_those_of_every_key():
    assert set(ENTRY) == axolotl_data.READ | axolotl_data.IDLE


@pytest.mark.parametrize("prompts", KINDS)
@pytest.mark.parametrize("key", ENTRY)
def test_every_key_of_axolotls_data_sets_changes_the_recipe_or_is_named(translate_file, prompts, key):
    entry = {"path": "chats.jsonl", "type": prompts}
    before, _ = outcome(translate_file(AXOLOTL | KINDS[prompts] | {"datasets": [entry]}))
    translation = translate_file(AXOLOTL | KINDS[prompts] | {"datasets": [entry | {key: ENTRY[key]}]})
    after, report = outcome(translation)
    assert after != before or key in report or translation.refused or entry.get(key) == ENTRY[key]


def test_the_chat_template_of_a_data_set_is_that_of_the_run(translate_file, recipe_of):
    def file(*templates, **fields):
        entries = [
            {"path": "a.jsonl", "type": "chat_template"} | ({"chat_template": name} if name else {})
            for name in templates
        ]
        return AXOLOTL | {"datasets": entries} | fields

    assert recipe_of(file("llama3")).model.chat_template == "llama3"
    assert recipe_of(file("llama3", "llama3")).model.chat_template == "llama3"
    assert recipe_of(file("llama3", chat_template="llama3")).model.chat_template == "llama3"
    overridden = translate_file(file("llama3", chat_template="chatml"))
    assert overridden.draft.settings["model.chat_template"].value == "llama3"
    assert finding_of(overridden, "chat_template").verdict == "no effect"
    for mixed in (file("llama3", "chatml"), file("llama3", None), file("llama3", None, chat_template="chatml")):
        (finding,) = translate_file(mixed).refused
        assert "a run has one chat template" in finding.note
    assert recipe_of(file("llama3", None, chat_template="llama3")).model.chat_template == "llama3"
    texts = {"datasets": [{"path": "a.jsonl", "type": "alpaca", "chat_template": "llama3"}]}
    assert (
        "without an effect with this type: chat_template"
        in finding_of(translate_file(AXOLOTL | texts), "datasets").note
    )


def test_settings_that_a_walk_of_the_keys_found_are_read(recipe_of):
    plus = AXOLOTL | QLORA | {"loraplus_lr_ratio": 16, "loraplus_lr_embedding": 1e-5}
    assert recipe_of(plus).optimizer.lora_plus_embedding_rate == 1e-5
    assert recipe_of(AXOLOTL | {"noisy_embedding_alpha": 5}).stage.neftune_alpha == 5
    assert recipe_of(AXOLOTL | {"noisy_embedding_alpha": 5, "neftune_noise_alpha": 3}).stage.neftune_alpha == 3


class Looked(dict):
    """A dict that adds the keys that are looked at to `keys`."""

    keys_read: set[str] = set()  # noqa: RUF012 - shared on purpose

    def __getitem__(self, key):
        self.keys_read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.keys_read.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self.keys_read.add(key)
        return super().get(key, default)


LF_FILES = [
    LLAMA_FACTORY | {"stage": stage, "finetuning_type": method} | fields
    for stage, method, fields in itertools.product(
        ("sft", "pt", "dpo", "kto", "rm"),
        ("lora", "full", "freeze"),
        (
            {"val_size": 0.1, "eval_strategy": "steps"}, {"use_galore": True}, {"use_apollo": True},
            {"use_badam": True}, {"quantization_bit": 4}, {"streaming": True, "max_steps": 5},
            {"pref_loss": "simpo"}, {"pref_loss": "orpo"}, {"use_llama_pro": True},
            {"pissa_init": True, "push_to_hub": True, "hub_model_id": "a/b"},
            {"loraplus_lr_ratio": 4, "additional_target": "lm_head"},
            {"model_name_or_path": "OpenGVLab/InternVL3-1B-hf"},
        ),
    )
] + [
    LLAMA_FACTORY | fields
    for fields in (
        {"finetuning_type": "oft"}, {"adapter_name_or_path": "a"}, {"stage": "ppo", "max_steps": 5},
    )
]  # fmt: skip
AXOLOTL_FILES = [
    AXOLOTL | ({"rl": rl, "datasets": [{"path": "a", "type": "chat_template.default"}]} if rl else {}) | fields
    for rl, fields in itertools.product(
        (None, "dpo", "ipo", "orpo", "simpo", "kto", "grpo"),
        (
            QLORA | {"loraplus_lr_ratio": 4}, {"val_set_size": 0.1}, {"load_in_8bit": True, "adapter": "lora"},
            {"reward_model": True}, {"use_wandb": True, "wandb_project": "x"}, {"hub_model_id": "a/b"},
            {"lr_scheduler": "one_cycle"}, {"pretraining_dataset": "x", "max_steps": 5},
            {"unfrozen_parameters": ["a"]}, {"noisy_embedding_alpha": 5},
            {"streaming": True, "max_steps": 4, "datasets": [{"path": "a"}, {"path": "b"}]},
            {"model_quantization_config": "x"}, {"base_model": "HuggingFaceTB/SmolVLM-256M-Instruct"},
            {"datasets": [{"path": "a", "type": "chat_template"}], "chat_template": "jinja"},
        ),
    )
]  # fmt: skip
TRL_FILE = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "learning_rate": 1e-4}
TRL_FILES = [
    TRL_FILE | {"use_peft": peft} | fields
    for peft, fields in itertools.product(
        (True, False),
        (
            {"load_in_4bit": True}, {"load_in_8bit": True}, {"eval_strategy": "steps"}, {"packing": True},
            {"push_to_hub": True, "hub_model_id": "a/b"}, {"fp16": True}, {"loss_type": "simpo"},
            {"dataset_streaming": True, "max_steps": 4}, {"dataset_name": "stanfordnlp/imdb"},
            {"datasets": [{"path": "a"}], "streaming": True},
            {"scale_rewards": "batch", "beta": 0.1, "reward_funcs": ["a.b"]},
        ),
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "files", "options"),
    [
        (llama_factory.TABLE, LF_FILES, [{}]),
        (axolotl.TABLE, AXOLOTL_FILES, [{}]),
        (
            trl.TABLE | online.TABLE | online.ONLINE_DPO,
            TRL_FILES,
            [{"is_trl": True, "trainer": trainer} for trainer in trl.TRAINERS],
        ),
    ],
    ids=["LLaMA-Factory", "axolotl", "TRL"],
)
def test_every_key_that_takes_part_is_looked_at(monkeypatch, translate_file, table, files, options):
    Looked.keys_read = set()
    start, get = Draft.__init__, Draft.get

    def recording(self, *arguments, **named):
        start(self, *arguments, **named)
        self.given = Looked(self.given)

    monkeypatch.setattr(Draft, "__init__", recording)
    monkeypatch.setattr(Draft, "get", lambda self, key: Looked.keys_read.add(key) or get(self, key))
    monkeypatch.setattr(importer, "_invalid", lambda draft: [])
    for content, chosen in itertools.product(files, options):
        translate_file(content, **chosen)
    assert {key for key, rule in table.items() if rule.kind in ("direct", "part")} - Looked.keys_read == set()
