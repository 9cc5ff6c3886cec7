"""Recipes of other tools, imported and run, lose what transformers' and trl's trainers lose with the same arguments.

Full tuning of a tiny random Llama, float32, data in order, warm-up, decay, weight decay, clipping, accumulation: every
loss of eight updates within 1e-3, which sums of float32 in other orders keep with ease, and a wrong batch, rate, mask
or prompt does not.
"""

from __future__ import annotations

import json
import pathlib

import datasets
import numpy as np
import pytest
import torch
import transformers
import yaml
from real_runs import train

import meshtune.quickstart
from meshtune.config.foreign.importer import translate
from tiny_models import SMALL

pytestmark = pytest.mark.slow  # five trainings of torch and five of ours: a minute of CPU time

TOKENIZER = pathlib.Path(meshtune.quickstart.__file__).parent / "model"
STEPS, ROWS, ACCUMULATION, RATE = 8, 2, 2, 2e-3
VOCABULARY = "the cat sat on a mat while seven birds sang of rain and old red boats near some hill".split()
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + (eos_token if m['role'] == 'assistant' else '\\n') }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> pathlib.Path:
    """A tiny random Llama with the quickstart's tokenizer and a chat template."""
    root = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(TOKENIZER))
    tokenizer.chat_template = TEMPLATE
    # transformers keeps the padding token's embedding at zero: no text may hold it.
    tokenizer.add_special_tokens({"pad_token": "<unused>"})
    changes = {"vocab_size": 520, "num_hidden_layers": 2, "max_position_embeddings": 512}
    config = transformers.AutoConfig.for_model("llama", **SMALL | changes | {"pad_token_id": tokenizer.pad_token_id})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root)
    tokenizer.save_pretrained(root)
    return root


def phrases(count: int, seed: int = 0) -> list[dict[str, str]]:
    rng = np.random.default_rng(seed)

    def phrase(low: int, high: int) -> str:
        return " ".join(rng.choice(VOCABULARY, rng.integers(low, high)))

    names = ("instruction", "input", "output", "chosen", "rejected")
    records = [{name: phrase(2, 6) for name in names} for _ in range(count)]
    return [record | ({"input": ""} if index % 2 else {}) for index, record in enumerate(records)]


def our_losses(recipe: dict, tmp_path: pathlib.Path, *overrides: str, **options) -> np.ndarray:
    """The losses of `meshtune train` with the recipe translated from another tool's file, and `overrides`."""
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(yaml.safe_dump(recipe))
    translation = translate(str(theirs), **options)
    assert not translation.refused, translation.refused
    for path, text in translation.written_files(tmp_path / "recipe.yaml").items():
        path.write_text(text)
    train(tmp_path / "recipe.yaml", *overrides)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines if "loss" in line and "step" in line])


ARGUMENTS = {
    "per_device_train_batch_size": ROWS,
    "gradient_accumulation_steps": ACCUMULATION,
    "max_steps": STEPS,
    "learning_rate": RATE,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "weight_decay": 0.01,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
}


def torch_arguments(kind, tmp_path: pathlib.Path, **options):
    fixed = {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    return kind(output_dir=str(tmp_path / "torch"), **ARGUMENTS | fixed | options)


def in_order(kind):
    class InOrder(kind):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder


def logged_losses(trainer) -> np.ndarray:
    trainer.train()
    return np.array([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


def trainer_losses(model_path, tmp_path, documents: list[tuple[list[int], list[int]]]) -> np.ndarray:
    """transformers' Trainer on (ids, labels), padded."""

    def collate(rows):
        longest = max(len(ids) for ids, _ in rows)

        def pad_rows(column, value):
            return torch.tensor([row[column] + [value] * (longest - len(row[0])) for row in rows])

        mask = torch.tensor([[1] * len(row[0]) + [0] * (longest - len(row[0])) for row in rows])
        return {"input_ids": pad_rows(0, 0), "attention_mask": mask, "labels": pad_rows(1, -100)}

    arguments = torch_arguments(transformers.TrainingArguments, tmp_path, remove_unused_columns=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    kind = in_order(transformers.Trainer)
    return logged_losses(kind(model=model, args=arguments, train_dataset=documents, data_collator=collate))


def label_tokens(tokenizer, prompt: str, answer: str, *, bos: bool = True) -> tuple[list[int], list[int]]:
    """(ids, labels) of a prompt and an answer that are tokenised as one text."""
    encoded = tokenizer(prompt + answer, return_offsets_mapping=True, add_special_tokens=bos)
    ids, starts = encoded["input_ids"], [start for start, end in encoded["offset_mapping"]]
    is_answer = [start >= len(prompt) and position > 0 for position, start in enumerate(starts)]
    return ids, [token if learned else -100 for token, learned in zip(ids, is_answer, strict=True)]


def test_a_llama_factory_file_trains_as_transformers_does(model_path, tmp_path):
    records = phrases(STEPS * ROWS * ACCUMULATION)
    (tmp_path / "data.json").write_text(json.dumps(records))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "data.json"}}))
    recipe = ARGUMENTS | {
        "model_name_or_path": str(model_path), "stage": "sft", "do_train": True, "finetuning_type": "full",
        "dataset": "tiny", "dataset_dir": str(tmp_path), "cutoff_len": 128, "disable_shuffling": True, "bf16": False,
        "output_dir": str(tmp_path / "run"), "plot_loss": True, "template": "default",
    }  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model_path))
    end = tokenizer.eos_token
    documents = []
    for record in records:
        user = "\n".join(filter(None, (record["instruction"], record["input"])))
        documents.append(label_tokens(tokenizer, f"Human: {user}{end}\nAssistant:", record["output"] + end, bos=False))
    np.testing.assert_allclose(
        our_losses(recipe, tmp_path), trainer_losses(model_path, tmp_path, documents), rtol=1e-3, atol=1e-3
    )


def test_an_axolotl_file_trains_as_transformers_does(model_path, tmp_path):
    records = phrases(STEPS * ROWS * ACCUMULATION)
    (tmp_path / "data.json").write_text(json.dumps(records))
    recipe = {
        "base_model": str(model_path), "datasets": [{"path": str(tmp_path / "data.json"), "type": "alpaca"}],
        "micro_batch_size": ROWS, "gradient_accumulation_steps": ACCUMULATION, "max_steps": STEPS,
        "learning_rate": RATE, "warmup_steps": 3, "weight_decay": 0.01, "max_grad_norm": 0.5, "sequence_len": 384,
        "curriculum_sampling": True, "bf16": False, "output_dir": str(tmp_path / "run"), "logging_steps": 1,
    }  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(model_path))
    below = "Below is an instruction that describes a task"
    with_input = ", paired with an input that provides further context"
    documents = []
    for record in records:
        extra = f"### Input:\n{record['input']}\n\n" if record["input"] else ""
        prompt = (
            f"{below}{with_input if extra else ''}. Write a response that appropriately completes the request.\n\n"
            f"### Instruction:\n{record['instruction']}\n\n{extra}### Response:\n"
        )
        ids, labels = label_tokens(tokenizer, prompt, record["output"])
        documents.append(([*ids, tokenizer.eos_token_id], [*labels, tokenizer.eos_token_id]))
    np.testing.assert_allclose(
        our_losses(recipe, tmp_path), trainer_losses(model_path, tmp_path, documents), rtol=1e-3, atol=1e-3
    )


def test_trl_arguments_train_as_its_dpo_trainer_does(model_path, tmp_path):
    from trl import DPOConfig, DPOTrainer

    records = phrases(STEPS * ROWS * ACCUMULATION)
    pairs = [
        {"prompt": [{"role": "user", "content": record["instruction"]}]}
        | {side: [{"role": "assistant", "content": record[side]}] for side in ("chosen", "rejected")}
        for record in records
    ]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    recipe = ARGUMENTS | {
        "model_name_or_path": str(model_path), "dataset_name": str(tmp_path / "pairs.json"), "beta": 0.3,
        "output_dir": str(tmp_path / "run"), "bf16": False, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    ours = our_losses(recipe, tmp_path, is_trl=True, trainer="dpo")
    arguments = torch_arguments(DPOConfig, tmp_path, beta=0.3, bf16=False, gradient_checkpointing=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    trainer = in_order(DPOTrainer)(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=transformers.AutoTokenizer.from_pretrained(str(model_path)),
    )
    np.testing.assert_allclose(ours, logged_losses(trainer), rtol=1e-3, atol=1e-3)


def test_trl_arguments_train_as_its_sft_trainer_does(model_path, tmp_path):
    from trl import SFTConfig, SFTTrainer

    records = [
        {"prompt": f"{record['instruction']} ", "completion": record["output"]}
        for record in phrases(STEPS * ROWS * ACCUMULATION)
    ]
    (tmp_path / "answers.json").write_text(json.dumps(records))
    recipe = ARGUMENTS | {
        "model_name_or_path": str(model_path), "dataset_name": str(tmp_path / "answers.json"), "max_length": 64,
        "output_dir": str(tmp_path / "run"), "bf16": False, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    ours = our_losses(recipe, tmp_path, is_trl=True, trainer="sft")
    arguments = torch_arguments(SFTConfig, tmp_path, max_length=64, bf16=False, gradient_checkpointing=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    trainer = in_order(SFTTrainer)(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=transformers.AutoTokenizer.from_pretrained(str(model_path)),
    )
    np.testing.assert_allclose(ours, logged_losses(trainer), rtol=1e-3, atol=1e-3)


def test_a_stream_of_trls_trains_in_its_order(model_path, tmp_path):
    from trl import SFTConfig, SFTTrainer

    records = [
        {"prompt": f"{record['instruction']} ", "completion": record["output"]}
        for record in phrases(STEPS * ROWS * ACCUMULATION)
    ]
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe = ARGUMENTS | {
        "model_name_or_path": str(model_path), "dataset_name": str(file), "dataset_streaming": True, "max_length": 64,
        "output_dir": str(tmp_path / "run"), "bf16": False,
    }  # fmt: skip
    ours = our_losses(recipe, tmp_path, is_trl=True, trainer="sft")
    assert "streaming: true" in (tmp_path / "recipe.yaml").read_text()
    trainer = SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        args=torch_arguments(SFTConfig, tmp_path, max_length=64, bf16=False, gradient_checkpointing=False),
        train_dataset=datasets.load_dataset("json", data_files=str(file), split="train", streaming=True),
        processing_class=transformers.AutoTokenizer.from_pretrained(str(model_path)),
    )
    np.testing.assert_allclose(ours, logged_losses(trainer), rtol=1e-3, atol=1e-3)


def test_an_axolotl_file_of_pairs_trains_as_trls_dpo_trainer_does(model_path, tmp_path):
    from trl import DPOConfig, DPOTrainer

    records = phrases(STEPS * ROWS * ACCUMULATION)
    pairs = [
        {"messages": [{"role": "user", "content": record["instruction"]}]}
        | {side: {"role": "assistant", "content": record[side]} for side in ("chosen", "rejected")}
        for record in records
    ]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    recipe = {
        "base_model": str(model_path), "rl": "dpo", "rl_beta": 0.3,
        "datasets": [{"path": str(tmp_path / "pairs.json"), "type": "chat_template.default", "split": "train"}],
        "micro_batch_size": ROWS, "gradient_accumulation_steps": ACCUMULATION, "max_steps": STEPS,
        "learning_rate": RATE, "lr_scheduler": "cosine", "warmup_steps": 3, "weight_decay": 0.01, "max_grad_norm": 0.5,
        "sequence_len": 128, "bf16": False, "output_dir": str(tmp_path / "run"), "logging_steps": 1,
    }  # fmt: skip
    ours = our_losses(recipe, tmp_path, "data.shuffle=false")
    arguments = torch_arguments(DPOConfig, tmp_path, beta=0.3, bf16=False, gradient_checkpointing=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    conversations = [
        {"prompt": pair["messages"], "chosen": [pair["chosen"]], "rejected": [pair["rejected"]]} for pair in pairs
    ]
    trainer = in_order(DPOTrainer)(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(conversations),
        processing_class=transformers.AutoTokenizer.from_pretrained(str(model_path)),
    )
    np.testing.assert_allclose(ours, logged_losses(trainer), rtol=1e-3, atol=1e-3)
