"""Tokenizers with chat templates as models ship them: those of ../shared, and others that TRL keeps."""

from __future__ import annotations

import functools
import pathlib
import re

import numpy as np
import pytest
from transformers import AutoTokenizer

from meshtune.config.data_options import LossPolicy, TokenOptions
from meshtune.data.tokens import TokenCounts, Tokenize

GEMMA = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
MISTRAL = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"]
MISTRAL += ["[/AVAILABLE_TOOLS]"]
# template: tokenizer it runs with, its end of turn, special tokens to add, and bos, eos
STOCK = {
    "meta-llama-Llama-3.1-8B-Instruct": ("hf-llama3_1", "<|eot_id|>", [], None),
    "meta-llama-Llama-3.2-3B-Instruct": ("hf-llama3_1", "<|eot_id|>", [], None),
    "Qwen-Qwen2.5-7B-Instruct": ("hf-qwen3", "<|im_end|>", [], None),
    "Qwen-Qwen3-0.6B": ("hf-qwen3", "<|im_end|>", [], None),
    "google-gemma-2-2b-it": ("hf-qwen3", "<end_of_turn>", GEMMA, ("<bos>", "<eos>")),
    "mistralai-Mistral-Nemo-Instruct-2407": ("hf-qwen3", "</s>", MISTRAL, ("<s>", "</s>")),
    "HuggingFaceTB-SmolLM3-3B": ("hf-llama3_1", "<|im_end|>", ["<|im_start|>", "<|im_end|>"], None),
    "SmolLM2": ("smollm2", "<|im_end|>", [], None),
}
_tokenizers: dict = {}
# Of the templates that TRL keeps: what models' tokenizers hold as special tokens.
SPECIAL = re.compile(
    r"<[|｜][^<>\s{}]*?[|｜]>|\[gMASK\]|<sop>|<turn\|>|<\|turn>|<tool_call\|>|<\|tool_(?:call|response)>"
)


def tokenizer_of(name, shared):
    if name not in _tokenizers:
        folder, _, special, ends = STOCK[name]
        tokenizer = AutoTokenizer.from_pretrained(shared / "assets/tokenizers" / folder)
        if special:
            tokenizer.add_special_tokens({"additional_special_tokens": special})
        if ends:
            tokenizer.bos_token, tokenizer.eos_token = ends
        file = shared / "assets/tokenizers/chat_templates" / f"{name}.jinja"
        if file.exists():
            tokenizer.chat_template = file.read_text()
        _tokenizers[name] = tokenizer
    return _tokenizers[name]


def trl_template(name):
    """The text of a template that TRL keeps."""
    trl = pytest.importorskip("trl")
    return (pathlib.Path(trl.__file__).parent / f"chat_templates/{name}.jinja").read_text()


def stock_text(name, shared):
    """The text of a template of ../shared, or of one that TRL keeps."""
    file = shared / f"assets/tokenizers/chat_templates/{name}.jinja"
    return file.read_text() if file.exists() else trl_template(name)


def tokenizer_with(template, folder):
    """The tokenizer in `folder` with the special tokens of a template, and that template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(SPECIAL.findall(template)))})
    tokenizer.chat_template = template
    if "<｜end▁of▁sentence｜>" in template:
        tokenizer.eos_token = "<｜end▁of▁sentence｜>"
    return tokenizer


def tokenizer_of_trl(name, shared):
    """SmolLM2's tokenizer with the special tokens of a template that TRL keeps, and that template."""
    if name not in _tokenizers:
        _tokenizers[name] = tokenizer_with(trl_template(name), shared / "assets/tokenizers/smollm2")
    return _tokenizers[name]


@functools.lru_cache(maxsize=16)
def _tokenize_of(tokenizer, template, policy):
    """Returns the Tokenize of a tokenizer that has this chat template: reading a large vocabulary takes a third of a
    second."""
    return Tokenize(tokenizer, TokenOptions(1 << 20, policy))


def encode_conversation(tokenizer, conversation, policy=None):
    tokenize = _tokenize_of(tokenizer, tokenizer.chat_template, policy or LossPolicy())
    tokenize.counts = TokenCounts()
    (example,) = tokenize([conversation])
    return example, tokenize.counts


def learned_pieces(tokenizer, example):
    """The decoded runs of learned tokens."""
    on = example.weights > 0
    edges = np.flatnonzero(np.diff(np.concatenate([[0], on.astype(int), [0]])))
    return [
        tokenizer.decode(example.ids[start:end].tolist(), clean_up_tokenization_spaces=False)
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]
