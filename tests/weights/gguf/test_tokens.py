"""Tokenizers in GGUF: rebuilt ones, and llama.cpp's, on texts with known tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshtune.data.tokenizer import load_tokenizer
from meshtune.weights.gguf.pre_tokenizers import name_of
from meshtune.weights.gguf.tokens_in import tokenizer_files
from meshtune.weights.gguf.tokens_out import SpecialTokens, tokenizer_metadata

FILES = {"hf-llama3_1": ("llama-bpe", "llama-bpe"), "hf-qwen3": ("qwen2", "qwen2"), "smollm2": ("smollm", None)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_tokenizer_is_written_and_rebuilt_with_the_tokens_of_known_texts(shared: Path, tmp_path: Path, name: str):
    source = shared / "assets/tokenizers" / name
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    pre, golden = FILES[name]
    assert name_of(content, str(source)) == pre
    original = load_tokenizer(source)
    special = SpecialTokens(
        bos=original.bos_token_id,
        eos=original.eos_token_id,
        unknown=None,
        padding=original.pad_token_id,
        adds_bos=False,
        adds_eos=False,
        ends=(),
        chat_template=None,
    )
    rows = max(original.get_vocab().values()) + 9
    metadata = tokenizer_metadata(content, special, rows, str(source))
    assert metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{rows - 1}]"
    for file, fields in tokenizer_files(metadata, "m.gguf").items():
        (tmp_path / file).write_text(json.dumps(fields, ensure_ascii=False), encoding="utf-8")
    rebuilt = load_tokenizer(tmp_path)
    goldens = shared / "assets/tokenizers/ggml-goldens"
    known = goldens / f"ggml-vocab-{golden or 'qwen2'}.gguf.inp"
    texts = known.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    ids = [rebuilt.encode(text, add_special_tokens=False) for text in texts]
    assert ids == [original.encode(text, add_special_tokens=False) for text in texts]
    if golden == "llama-bpe":
        lines = known.with_suffix(".out").read_text(encoding="utf-8").splitlines()
        # The line of an empty text at the end is not in the file.
        assert [line for line in ids if line] == [[int(id_) for id_ in line.split()] for line in lines if line]
