"""Small models and tokenizers of Baichuan2's form, in files as the hub has them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import sentencepiece
from safetensors.numpy import save_file

from baichuan_in_torch import Baichuan

TEXTS = [
    "Once upon a time there was a little girl who went to the park 1234 times.",
    "百川模型可以说中文，也可以说英文。今天天气很好。",
    "def add(a, b):\n    return a + b  # 3.14159\n",
    "  two  spaces   three\ttabs\n\n\nlines ",
    "naïve café – “quoted” … 😀 🏳️‍🌈 \u00a0x",
    "",
    "a",
]
# As in Baichuan2: ids 195 and 196 are <reserved_106> and <reserved_107>.
RESERVED = [*(f"<extra_{n}>" for n in range(86)), *(f"<reserved_{n}>" for n in range(112))]


def train_tokenizer(folder: Path, *, dummy_prefix: bool = False, **settings) -> sentencepiece.SentencePieceProcessor:
    """A tokenizer's directory, with `settings` in its config, and sentencepiece's own reading of it."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:4] * 20), model_writer=written, model_type="bpe", vocab_size=620,
        byte_fallback=True, add_dummy_prefix=dummy_prefix, remove_extra_whitespaces=False, split_digits=True,
        normalization_rule_name="identity", user_defined_symbols=RESERVED, character_coverage=0.99,
        minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "add_bos_token": False,
                "add_eos_token": False,
                "auto_map": {"AutoTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None]},
                "tokenizer_class": "BaichuanTokenizer",
                "bos_token": {"__type": "AddedToken", "content": "<s>"},
                "eos_token": {"__type": "AddedToken", "content": "</s>"},
                "unk_token": {"__type": "AddedToken", "content": "<unk>"},
                "pad_token": {"__type": "AddedToken", "content": "<unk>"},
                "model_max_length": 4096,
                **settings,
            }
        )
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def directory(folder: Path, config: dict, seed: int = 0) -> tuple[Path, Baichuan]:
    """A model as the hub has it, and the same in torch."""
    model, folder = Baichuan(config, seed), folder / "base"
    folder.mkdir()
    save_file({name: w.detach().numpy().copy() for name, w in model.named_parameters()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model
