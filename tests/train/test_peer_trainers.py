"""Files of LLaMA-Factory and axolotl, trained by these tools themselves and, imported, by Meshtune: the same losses.

The tools run in environments of their own (`make test-peers`), from the command line, as their users start them. A
tiny random Llama with Llama 3.1's tokenizer is trained in full, or from one adapter, in float32, on records in order.
Every loss of six updates agrees within 1e-3: float32 sums in other orders are within 1e-4, and
the tools print four decimals.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
import yaml
from test_imported_recipes import our_losses, phrases

from tiny_models import SMALL

pytestmark = pytest.mark.slow  # each trains twice, and starts two tools

PEERS = pathlib.Path(os.environ.get("MESHTUNE_PEERS", "absent"))
RUN_LLAMA_FACTORY = pathlib.Path(__file__).parent / "peers/run_llama_factory.py"
STEPS, CLOSE = 6, {"rtol": 1e-3, "atol": 1e-3}
SYSTEM = "you answer in short"
PAD = "<|finetune_right_pad_id|>"


def interpreter(tool: str) -> str:
    python = PEERS / tool / "bin/python"
    if not python.exists():
        pytest.skip(f"needs an environment with {tool}: make test-peers, or MESHTUNE_PEERS")
    return str(python)


def tiny_model(shared: pathlib.Path, root: pathlib.Path, tokenizer_name: str, kind: str) -> pathlib.Path:
    """A random model of two layers with the tokenizer and the chat template of a published one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(shared / "assets/tokenizers" / tokenizer_name))
    torch.manual_seed(0)
    changes = {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "max_position_embeddings": 512}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(kind, **SMALL | changes | special)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root)
    tokenizer.save_pretrained(root)
    return root


@pytest.fixture(scope="module")
def model_path(shared: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_model(shared, tmp_path_factory.mktemp("llama"), "hf-llama3_1", "llama")


@pytest.fixture(scope="module")
def qwen3_path(shared: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny_model(shared, tmp_path_factory.mktemp("qwen3"), "hf-qwen3", "qwen3")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Records for every stage, with LLaMA-Factory's registry."""
    root = tmp_path_factory.mktemp("data")
    records = phrases(4 * STEPS)
    columns = {"prompt": "instruction", "query": "input", "response": "output"}
    pairs = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    chats = [
        {
            "system": SYSTEM,
            "conversations": [
                {"from": "human", "value": record["instruction"]},
                {"from": "gpt", "value": record["output"]},
                {"from": "human", "value": record["chosen"]},
                {"from": "gpt", "value": record["rejected"]},
            ],
        }
        for record in records
    ]
    labelled = [record | {"kto_tag": index % 3 != 0} for index, record in enumerate(records)]
    contents = {
        "answers": (records, {}),
        "chats": (chats, {"formatting": "sharegpt", "columns": {"messages": "conversations", "system": "system"}}),
        "pairs": (records, {"ranking": True, "columns": pairs}),
        "labelled": (labelled, {"columns": columns | {"kto_tag": "kto_tag"}}),
        "texts": ([{"text": record["output"]} for record in records], {"columns": {"prompt": "text"}}),
    }
    registry = {}
    for name, (rows, entry) in contents.items():
        (root / f"{name}.json").write_text(json.dumps(rows))
        registry[name] = {"file_name": f"{name}.json", **entry}
    (root / "dataset_info.json").write_text(json.dumps(registry))
    return root


def run(command: list[str], log: pathlib.Path) -> None:
    """Runs another tool on the CPU; what it printed is in `log`."""
    offline = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | offline).returncode
    assert code == 0, log.read_text()[-3000:]


FACTORY = {
    "do_train": True,
    "finetuning_type": "full",
    "template": "llama3",
    "cutoff_len": 256,
    "disable_shuffling": True,
    "bf16": False,
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"stage": "sft", "dataset": "answers"}, id="sft"),
        pytest.param({"stage": "sft", "dataset": "chats", "mask_history": True}, id="last-turn"),
        pytest.param({"stage": "sft", "dataset": "answers,chats", "template": "default"}, id="default-template"),
        pytest.param({"stage": "sft", "dataset": "answers", "default_system": SYSTEM}, id="system"),
        pytest.param({"stage": "sft", "dataset": "answers", "use_dft_loss": True}, id="dft"),
        pytest.param({"stage": "sft", "dataset": "chats", "cutoff_len": 28}, id="long-chats"),
        pytest.param({"stage": "sft", "dataset": "chats", "cutoff_len": 24, "mask_history": True}, id="long-last-turn"),
        pytest.param({"stage": "dpo", "dataset": "pairs", "pref_beta": 0.3}, id="dpo"),
        pytest.param({"stage": "dpo", "dataset": "pairs", "cutoff_len": 14}, id="long-pairs"),
        pytest.param({"stage": "dpo", "dataset": "pairs", "pref_ftx": 0.5}, id="dpo-with-sft"),
        pytest.param({"stage": "dpo", "dataset": "pairs", "pref_loss": "orpo"}, id="orpo"),
        pytest.param({"stage": "dpo", "dataset": "pairs", "pref_loss": "simpo", "pref_beta": 2.0}, id="simpo"),
        pytest.param({"stage": "kto", "dataset": "labelled", "gradient_accumulation_steps": 1}, id="kto"),
    ],
)
def test_a_file_of_llama_factory_trains_as_it_does(model_path, data, tmp_path, changes: dict[str, Any]):
    python = interpreter("llamafactory")
    recipe = FACTORY | {"model_name_or_path": str(model_path), "dataset_dir": str(data)} | changes
    theirs = llama_factory_losses(python, recipe, tmp_path)
    ours = our_losses(recipe | {"output_dir": str(tmp_path / "run")}, tmp_path, "compute.precision=float32")
    np.testing.assert_allclose(ours, theirs, **CLOSE)


@pytest.mark.parametrize("template", ["qwen3", "qwen3_nothink"])
def test_the_line_break_after_a_turn_is_learned_as_in_llama_factory(qwen3_path, data, tmp_path, template: str):
    """Qwen3 with the empty thought that its template puts before an answer, and without."""
    python = interpreter("llamafactory")
    recipe = FACTORY | {"model_name_or_path": str(qwen3_path), "dataset_dir": str(data), "template": template}
    recipe |= {"stage": "sft", "dataset": "answers"}
    theirs = llama_factory_losses(python, recipe, tmp_path)
    ours = our_losses(recipe | {"output_dir": str(tmp_path / "run")}, tmp_path, "compute.precision=float32")
    np.testing.assert_allclose(ours, theirs, **CLOSE)


def test_an_adapter_goes_on_as_in_llama_factory(model_path, data, tmp_path):
    """LoRA from one adapter, since the two draw a new one from other generators."""
    python = interpreter("llamafactory")
    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_pretrained(model_path)
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    peft.get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    recipe = FACTORY | {
        "model_name_or_path": str(model_path), "dataset_dir": str(data), "stage": "sft", "dataset": "answers",
        "finetuning_type": "lora", "lora_rank": 4, "lora_target": "all",
        "adapter_name_or_path": str(tmp_path / "adapter"),
    }  # fmt: skip
    theirs = llama_factory_losses(python, recipe, tmp_path)
    ours = our_losses(recipe | {"output_dir": str(tmp_path / "run")}, tmp_path, "compute.precision=float32")
    np.testing.assert_allclose(ours, theirs, **CLOSE)


def llama_factory_losses(python: str, recipe: dict[str, Any], tmp_path: pathlib.Path) -> list[float]:
    """The losses that its own trainer logs."""
    file = tmp_path / "llama-factory.yaml"
    file.write_text(yaml.safe_dump(recipe | {"output_dir": str(tmp_path / "llama-factory")}))
    run([python, str(RUN_LLAMA_FACTORY), str(file)], tmp_path / "llama-factory.log")
    lines = map(json.loads, (tmp_path / "llama-factory/trainer_log.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


AXOLOTL = {
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 1,  # with more it weighs micro-batches alike, whatever their tokens
    "max_steps": STEPS,
    "num_epochs": 1,
    "optimizer": "adamw_torch",
    "lr_scheduler": "cosine",
    "learning_rate": 2e-3,
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "max_grad_norm": 0.5,
    "sequence_len": 256,
    "sample_packing": False,
    "curriculum_sampling": True,
    "val_set_size": 0,
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "logging_steps": 1,
    "attn_implementation": "sdpa",
    "special_tokens": {"pad_token": PAD},
}


@pytest.mark.parametrize(
    "dataset",
    [
        pytest.param({"file": "answers.json", "type": "alpaca"}, id="alpaca"),
        pytest.param(
            {
                "file": "chats.json",
                "type": "chat_template",
                "field_messages": "conversations",
                "message_property_mappings": {"role": "from", "content": "value"},
            },
            id="chat-template",
        ),
        pytest.param({"file": "texts.json", "type": "completion", "field": "text"}, id="completion"),
    ],
)
def test_a_file_of_axolotl_trains_as_it_does(model_path, data, tmp_path, dataset: dict[str, Any]):
    python = interpreter("axolotl")
    source = {"path": str(data / dataset["file"]), "ds_type": "json"} | {
        k: v for k, v in dataset.items() if k != "file"
    }
    recipe = AXOLOTL | {
        "base_model": str(model_path),
        "datasets": [source],
        "dataset_prepared_path": str(tmp_path / "prepared"),
        "output_dir": str(tmp_path / "axolotl"),
    }
    file = tmp_path / "axolotl.yaml"
    file.write_text(yaml.safe_dump(recipe))
    run([python, "-m", "axolotl.cli.train", str(file)], tmp_path / "axolotl.log")
    state = json.loads((tmp_path / f"axolotl/checkpoint-{STEPS}/trainer_state.json").read_text())
    theirs = [float(entry["loss"]) for entry in state["log_history"] if "loss" in entry]
    ours = our_losses(recipe | {"output_dir": str(tmp_path / "run")}, tmp_path, "compute.precision=float32")
    np.testing.assert_allclose(ours, theirs, **CLOSE)
