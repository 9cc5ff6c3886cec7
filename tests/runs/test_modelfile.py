"""Ollama's templates of the chat templates that models ship with."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshtune.data.tokenizer import load_tokenizer
from meshtune.runs.modelfile import modelfile, turns_of


def test_a_template_of_equal_turns_is_said_in_ollama_s_language(shared: Path):
    tokenizer = load_tokenizer(shared / "assets/tokenizers/smollm2")
    text = modelfile(["FROM ./m.gguf"], tokenizer, ["<|im_end|>"])
    assert text.startswith(
        'FROM ./m.gguf\nTEMPLATE """{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n'
    )
    assert '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n' in text
    assert text.endswith('PARAMETER stop "<|im_end|>"\n')


@pytest.mark.parametrize("name", ["smollm2", "hf-llama3_1", "hf-qwen3"])
def test_turns_give_the_text_of_the_template_or_none(shared: Path, name: str):
    tokenizer = load_tokenizer(shared / "assets/tokenizers" / name)
    turns = turns_of(tokenizer)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {x}"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert turns is None or turns.text(messages, True) == str(rendered).removeprefix("<|begin_of_text|>")
    assert turns is not None or name != "smollm2"
