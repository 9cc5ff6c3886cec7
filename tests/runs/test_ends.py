"""The token that a run teaches as the end of an answer ends texts in every program that reads what it wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

import meshtune
from llama_cpp import LlamaCpp
from meshtune.adapters.combine import combine
from meshtune.config.load import load_recipe
from meshtune.data.chat import ChatTemplate
from meshtune.data.chat_templates import template_names
from meshtune.data.tokenizer import load_tokenizer
from meshtune.hub.card import Subject, model_card
from meshtune.hub.push import _ends
from meshtune.quickstart import MODEL
from meshtune.runs.export import export
from meshtune.train.run import train
from meshtune.weights.ends import config_with_ends, generation_with_ends, read_ends
from meshtune.weights.export import export_model
from meshtune.weights.load import load_params, load_spec

BASE_END = 7  # where the base's own files end a text
MARKS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|start_header_id|>",
    "<start_of_turn>",
]
CHAT = [{"role": "user", "content": "Say hi."}]


def base_that_says(end: int | str, directory: Path, template: str | None = None) -> Path:
    """A model whose every answer is one token, and whose files end texts at OTHER."""
    tokenizer = load_tokenizer(MODEL, template)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    id_ = tokenizer.convert_tokens_to_ids(end) if isinstance(end, str) else end
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=1, eos_token_id=BASE_END,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
        model.lm_head.weight[id_] = 1.0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def transformers_stops(directory: Path, adapter: Path | None = None) -> bool:
    """Whether transformers' generate ends after the one token of an answer, by the files of `adapter` where given."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    if adapter is not None:
        model.generation_config = transformers.GenerationConfig.from_pretrained(adapter)
    return model.generate(torch.tensor([[1, 5]]), max_new_tokens=4, do_sample=False).shape[1] == 3


def llama_cpp_stops(file: Path, end: int) -> bool:
    with LlamaCpp(file) as model:
        return model.greedy([1, 5], 1) == [end] and model.ends_at(end)


FAST = ("chatml", "plain")  # one with a token of its own, one that ends at the tokenizer's


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in template_names()]
)
def test_the_end_of_every_shipped_template_ends_texts_of_what_is_written(tmp_path, name):
    tokenizer = load_tokenizer(base_that_says(2, tmp_path / "tokens", name))
    end = ChatTemplate(tokenizer).end_of_turn
    assert end.token is not None
    base = base_that_says(end.token, tmp_path / "base", name)
    assert not transformers_stops(base)
    spec, _ = load_spec(base)
    export_model(load_params(base, spec), spec, base, tmp_path / "model", ends=(end.token,))
    assert transformers_stops(tmp_path / "model")
    assert read_ends(tmp_path / "model") == (BASE_END, end.token)
    assert json.loads((tmp_path / "model/config.json").read_text())["eos_token_id"] == [BASE_END, end.token]
    export(tmp_path / "model", tmp_path / "model.gguf", gguf="F32")
    assert llama_cpp_stops(tmp_path / "model.gguf", end.token)
    stops = re.findall('PARAMETER stop "(.*)"', (tmp_path / "model.Modelfile").read_text())
    assert tokenizer.convert_ids_to_tokens(end.token) in stops
    assert set(read_ends(meshtune.runs.sources.find(tmp_path / "model.gguf").base)) >= {
        BASE_END,
        end.token,
    }  # and read back


def train_once(base: Path, data: Path, output: Path, *overrides: str) -> Path:
    fields = {"model": str(base), "data": {"train": str(data), "max_length": 64}, "output": str(output)}
    run = load_recipe(fields, ["train.steps=1", "train.batch_size=2", "optimizer.learning_rate=1e-9", *overrides])
    path = train(run).path
    assert path is not None
    return path


@pytest.fixture
def chats(tmp_path) -> Path:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [*CHAT, {"role": "assistant", "content": "Hi."}]}) + "\n")
    return file


def test_a_run_on_conversations_ends_where_its_template_does(tmp_path, chats):
    base = base_that_says("<|im_end|>", tmp_path / "base")
    end = load_tokenizer(base).convert_tokens_to_ids("<|im_end|>")
    adapter = train_once(base, chats, tmp_path / "lora", "method.rank=2", "model.chat_template=chatml")
    assert read_ends(adapter) == (BASE_END, end)
    assert transformers_stops(base, adapter)
    export(tmp_path / "lora", tmp_path / "merged", merge=True)
    assert transformers_stops(tmp_path / "merged")
    export(tmp_path / "lora", tmp_path / "merged.gguf", merge=True, gguf="F32")
    assert llama_cpp_stops(tmp_path / "merged.gguf", end)
    export(tmp_path / "lora", tmp_path / "alone.gguf", gguf="F32")
    assert 'PARAMETER stop "<|im_end|>"' in (tmp_path / "alone.Modelfile").read_text()
    combine([adapter, adapter], tmp_path / "both", [0.5, 0.5])
    assert transformers_stops(base, tmp_path / "both")
    assert end in meshtune.load(tmp_path / "lora").stop_ids
    card = model_card(
        Subject("ann/a", "adapter", None, None, [file.name for file in adapter.iterdir()], ends=_ends(adapter))
    )
    assert "`<|im_end|>`" in card
    assert 'model.generation_config = GenerationConfig.from_pretrained("ann/a")' in card


@pytest.mark.slow
def test_a_tuned_model_ends_where_its_template_does(tmp_path, chats):
    base = base_that_says("<|im_end|>", tmp_path / "base")
    assert transformers_stops(train_once(base, chats, tmp_path / "full", "method=full", "model.chat_template=chatml"))


@pytest.mark.slow
def test_a_run_on_plain_text_adds_no_end(tmp_path):
    base = base_that_says("<|im_end|>", tmp_path / "base", "chatml")
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "Once upon a time."}\n')
    model = train_once(base, texts, tmp_path / "full", "method=full")
    assert read_ends(model) == (BASE_END,)
    assert not transformers_stops(model)
    assert not (train_once(base, texts, tmp_path / "lora", "method.rank=2") / "generation_config.json").exists()


def test_ends_that_were_there_stay_and_nothing_is_written_twice(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}))
    assert generation_with_ends(tmp_path, (5,)) == {"bos_token_id": 1, "eos_token_id": [2, 5]}
    assert generation_with_ends(tmp_path, (2,)) is None
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4], "temperature": 0.6}))
    assert generation_with_ends(tmp_path, (4, 5)) == {"eos_token_id": [3, 4, 5], "temperature": 0.6}
    assert generation_with_ends(tmp_path, (4, 3)) is None
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))  # transformers never stops
    assert generation_with_ends(tmp_path, (2,)) == {"eos_token_id": [2], "temperature": 0.6}
    inner = {"model_type": "gemma3", "text_config": {"eos_token_id": 1}, "eos_token_id": [1, 106]}
    assert config_with_ends(inner, (9,)) == {
        **inner,
        "text_config": {"eos_token_id": [1, 9]},
        "eos_token_id": [1, 106, 9],
    }
    assert config_with_ends({"model_type": "llama"}, (9,)) == {"model_type": "llama"}
