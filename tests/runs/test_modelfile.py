"""Ollama's templates of the chat templates that models ship with, run by Go's own text/template."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess

import pytest
from transformers import AutoTokenizer

from data.stock_templates import STOCK, tokenizer_of, tokenizer_of_trl
from meshtune.data.chat_templates import template_names
from meshtune.data.tokenizer import load_tokenizer
from meshtune.runs.modelfile import modelfile, turns_of

STOPS = ["<|im_end|>", 'END "now"']
# Of ../shared, what a template reads beyond roles: what was thought, switches within a system message, its absence.
NOT_SAID = {"Qwen-Qwen3-0.6B", "HuggingFaceTB-SmolLM3-3B", "google-gemma-2-2b-it"}
TRL = ["cohere", "cohere2", "gemma3", "gemma4", "lfm2", "llama3", "qwen2_5", "qwen2_5_vl", "qwen3_8", "qwen3_vl"]


def message(role, content):
    return {"role": role, "content": content}


BRIEF, QUESTION, AGAIN = (
    message("system", "Be brief, {{ .Role }}."),
    message("user", "Who?\n\nAnd why?"),
    message("user", "为什么?"),
)
ANSWER, LAST = message("assistant", 'A "quoted" word:\n1. <one>\n2. two & three'), message("assistant", "因为。")
CONVERSATIONS = [
    [QUESTION],
    [BRIEF, QUESTION],
    [QUESTION, ANSWER, AGAIN],
    [BRIEF, QUESTION, ANSWER, AGAIN],
    [QUESTION, ANSWER, AGAIN, LAST, QUESTION],
    [BRIEF, QUESTION, ANSWER, AGAIN, LAST, QUESTION],
]


def ollama_prompts(texts, folder):
    """For each Modelfile the prompts of `CONVERSATIONS`, and the texts at which an answer ends."""
    go = shutil.which("go")
    if go is None:
        pytest.skip("needs Go (apt install golang-go)")
    jobs = [{"modelfile": text, "conversations": CONVERSATIONS} for text in texts]
    program = pathlib.Path(__file__).parent / "ollama_prompts.go"
    environment = {**os.environ, "GO111MODULE": "off", "GOCACHE": str(folder), "GOFLAGS": ""}
    run = subprocess.run(
        [go, "run", str(program)], input=json.dumps(jobs), capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return [(answer["Prompts"], answer["Stops"]) for answer in json.loads(run.stdout)]


def expected_text(tokenizer):
    """The text that the model's own template writes, without the token that its tokenizer adds to every text by
    itself."""
    texts = [
        tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        for conversation in CONVERSATIONS
    ]
    if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id:
        return [text.removeprefix(tokenizer.bos_token) for text in texts]
    return texts


def with_template(shared, name):
    """A tokenizer of ../shared with one of our templates, with and without adding a token at the beginning."""
    return load_tokenizer(
        shared / "assets/tokenizers" / ("hf-llama3_1" if name in ("llama3", "plain") else "smollm2"), name
    )


@pytest.mark.slow
def test_ollama_writes_what_transformers_writes(shared, tmp_path):
    tokenizers = {name: tokenizer_of(name, shared) for name in STOCK if name not in NOT_SAID}
    tokenizers |= {name: with_template(shared, name) for name in template_names() if name != "baichuan2"}
    with contextlib.suppress(pytest.skip.Exception):  # where TRL is not installed
        tokenizers |= {f"trl {name}": tokenizer_of_trl(name, shared) for name in TRL}
    texts = [modelfile(["FROM ./m.gguf"], tokenizer, STOPS) for tokenizer in tokenizers.values()]
    answers = ollama_prompts(texts, tmp_path)
    for (name, tokenizer), (prompts, stops) in zip(tokenizers.items(), answers, strict=True):
        assert prompts == expected_text(tokenizer), name
        assert stops == STOPS


def test_a_template_of_equal_turns_is_said_in_ollama_s_language(shared):
    tokenizer = load_tokenizer(shared / "assets/tokenizers/smollm2")
    text = modelfile(["FROM ./m.gguf"], tokenizer, ["<|im_end|>"])
    assert text.startswith(
        'FROM ./m.gguf\nTEMPLATE """{{ range $index, $_ := .Messages }}{{ if and (eq $index 0) (ne .Role "system") }}'
        "<|im_start|>system\nYou are a helpful AI assistant"
    )
    assert '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n' in text
    assert text.endswith('<|im_start|>assistant\n"""\nPARAMETER stop "<|im_end|>"\n')
    assert "tools" not in text


def test_a_comment_says_that_tools_are_left_out(shared):
    tokenizer = load_tokenizer(shared / "assets/tokenizers/smollm2", "chatml")
    text = modelfile(["FROM ./m.gguf"], tokenizer, [])
    assert "\n# The chat template writes tools, this TEMPLATE does not" in text
    assert "Tools" not in text.split('TEMPLATE """')[1]


@pytest.mark.parametrize("name", STOCK)
def test_turns_give_the_text_of_the_template_or_none(shared, name):
    tokenizer = tokenizer_of(name, shared)
    turns = turns_of(tokenizer)
    assert (turns is None) == (name in NOT_SAID)
    if turns is not None:
        assert [turns.text(conversation, True) for conversation in CONVERSATIONS] == expected_text(tokenizer)


def test_a_day_s_date_and_spaces_that_the_template_removes_are_named(shared):
    text = modelfile([], tokenizer_of("meta-llama-Llama-3.2-3B-Instruct", shared), [])
    assert "# The chat template writes the day's date" in text
    assert "# The chat template removes spaces and line breaks around messages" in text
    comments = [
        line for line in modelfile([], tokenizer_of("Qwen-Qwen2.5-7B-Instruct", shared), []).split("\n") if "# " in line
    ]
    assert [line.partition(",")[0] for line in comments] == ["# The chat template writes tools"]


@pytest.mark.parametrize("part", ["{{ x }}", '"""', "\u00a0", "\u200b"])
def test_text_that_a_modelfile_cannot_hold_is_not_written_into_one(shared, part):
    tokenizer = AutoTokenizer.from_pretrained(shared / "assets/tokenizers/smollm2")
    tokenizer.chat_template = "{% for m in messages %}PART{{ m.role }} {{ m.content }};{% endfor %}"
    assert turns_of(tokenizer) is not None
    tokenizer.chat_template = (
        "{% for m in messages %}{{ " + json.dumps(part) + " }}{{ m.role }} {{ m.content }};{% endfor %}"
    )
    assert turns_of(tokenizer) is None
