"""Tokenizers: loaded from their own files without remote code, and every way that can go wrong said clearly."""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest

from meshtune.data.chat_templates import template_names, template_text
from meshtune.data.tokenizer import check_vocabulary, load_tokenizer
from meshtune.errors import UserError
from meshtune.quickstart import MODEL


@pytest.mark.parametrize(
    ("folder", "text", "ids"),
    [
        # Ids from the published vocabularies: Llama 3's bos and "hi", Qwen's "hi", stories260K's own.
        ("tokenizers/hf-llama3_1", "hi", [128000, 6151]),
        ("tokenizers/hf-qwen3", "hi", [6023]),
        ("models/stories260K", "hi", [1, 270, 417]),
    ],
)
def test_tokenizers_load(shared, folder, text, ids):
    tokenizer = load_tokenizer(shared / "assets" / folder)
    assert tokenizer.is_fast
    assert tokenizer(text)["input_ids"] == ids


@pytest.mark.parametrize(("folder", "name"), [("hf-llama3_1", "llama-bpe"), ("hf-qwen3", "qwen2")])
def test_ids_are_those_of_llama_cpp(shared, folder, name):
    """llama.cpp's golden ids for its hard strings; exact. Its Qwen2 strings were made without normalisation to NFC."""
    goldens = shared / "assets/tokenizers/ggml-goldens"
    texts = (goldens / f"ggml-vocab-{name}.gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = (goldens / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    tokenizer = load_tokenizer(shared / "assets/tokenizers" / folder)
    wrong = [
        text
        for text, line in zip(texts, lines, strict=False)
        if tokenizer(text, add_special_tokens=False)["input_ids"] != [int(id_) for id_ in line.split()]
    ]
    assert len(texts) > 40
    assert wrong == []


def test_a_missing_path_names_the_nearest(tmp_path):
    (tmp_path / "SmolLM2").mkdir()
    with pytest.raises(UserError, match="SmolLM2"):
        load_tokenizer(tmp_path / "SmolLM3")


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="no tokenizer here"):
        load_tokenizer(tmp_path)


def test_a_file_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="give its folder"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_broken_tokenizer_json_is_refused(tmp_path, shared):
    source = shared / "assets/models/stories260K"
    shutil.copy(source / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text((source / "tokenizer.json").read_text()[:1000])
    with pytest.raises(UserError, match="cannot be read") as error:
        load_tokenizer(tmp_path)
    assert error.value.where == str(tmp_path)


def test_a_config_that_transformers_refuses_is_no_defect(tmp_path, shared):
    shutil.copytree(shared / "assets/tokenizers/smollm2", tmp_path, dirs_exist_ok=True)
    config = {"model_type": "llama", "hidden_size": 577, "num_attention_heads": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="not a multiple of the number of attention heads") as error:
        load_tokenizer(tmp_path)
    assert "config.json" in (error.value.fix or "")


def test_code_beside_a_tokenizer_is_not_run(tmp_path, shared):
    source = shared / "assets/models/stories260K"
    shutil.copy(source / "tokenizer.json", tmp_path)
    config = json.loads((source / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with contextlib.suppress(UserError):  # refusing is right, and so is reading tokenizer.json without the code
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_template_is_a_shipped_name_or_a_file(tmp_path, shared):
    assert {"chatml", "llama3", "mistral", "gemma", "plain", "alpaca"} <= set(template_names())
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    assert load_tokenizer(shared / "assets/models/stories260K", str(template)).chat_template == "{{ messages }}"
    assert load_tokenizer(shared / "assets/models/stories260K", "plain").chat_template == template_text("plain")


def test_an_unknown_template_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'chatml'"):
        template_text("chatlm")


def test_a_vocabulary_larger_than_the_embedding_is_refused(shared):
    tokenizer = load_tokenizer(shared / "assets/models/stories260K")
    check_vocabulary(tokenizer, 512)
    with pytest.raises(UserError, match="ids up to 511, but the model's embedding has 511 entries"):
        check_vocabulary(tokenizer, 511)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", '{"model_max_length": "x"}'),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": [["a"]]}}'),
        ("tokenizer.json", "[]"),
        ("special_tokens_map.json", '{"eos_token": [[1]]}'),
    ],
)
def test_a_damaged_file_of_a_tokenizer_is_a_sentence(tmp_path, name, content):
    for file in MODEL.iterdir():
        if file.name != name:
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).write_text(content)
    with contextlib.suppress(UserError):
        load_tokenizer(tmp_path).encode("a")
