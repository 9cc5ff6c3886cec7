"""Tokenizers in GGUF: rebuilt ones, and llama.cpp's, on texts with known tokens."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import struct
import unicodedata
from pathlib import Path

import gguf
import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from families import case
from families.cases import BY_NAME
from llama_cpp import LlamaCpp
from meshtune.data.tokenizer import load_tokenizer
from meshtune.errors import UserError
from meshtune.generate.text import text_end
from meshtune.runs.export import export
from meshtune.runs.sources import find
from meshtune.weights.gguf.file import read_gguf
from meshtune.weights.gguf.pre_tokenizers import NAMES, PATTERNS, name_of, steps_of
from meshtune.weights.gguf.tokenizer import SpecialTokens, tokenizer_files, tokenizer_metadata
from meshtune.weights.hub import locate

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
        chat_templates={},
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
    assert rebuilt.get_vocab() == original.get_vocab()
    texts.append("".join(original.get_added_vocab()))
    ids = [rebuilt.encode(text, add_special_tokens=False) for text in texts]
    assert ids == [original.encode(text, add_special_tokens=False) for text in texts]
    if golden == "llama-bpe":
        lines = known.with_suffix(".out").read_text(encoding="utf-8").splitlines()
        # The line of an empty text at the end is not in the file.
        assert [line for line in ids[:-1] if line] == [[int(id_) for id_ in line.split()] for line in lines if line]


def test_another_tokenizer_takes_the_place_of_one_that_is_not_read(stories260k: Path, tmp_path: Path):
    file = tmp_path / "model.gguf"
    export(stories260k, file, gguf="Q8_0")
    key = b"tokenizer.ggml.model" + struct.pack("<IQ", 8, 5)
    content = file.read_bytes()
    assert content.count(key + b"llama") == 1
    file.write_bytes(content.replace(key + b"llama", key + b"plamo"))
    with pytest.raises(UserError, match="of the kind 'plamo'") as error:
        load_tokenizer(find(file).tokenizer)
    assert "--tokenizer" in (error.value.fix or "")
    replacement = load_tokenizer(find(file, tokenizer=str(stories260k)).tokenizer)
    assert replacement.get_vocab() == load_tokenizer(stories260k).get_vocab()


@pytest.mark.slow
def test_a_file_replaced_by_one_of_equal_size_and_time_is_read_anew(stories260k: Path, tmp_path: Path, monkeypatch):
    """This one has another epsilon in its header; the cache holds the files made of the first."""
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    export(stories260k, file, gguf="Q8_0")
    key = b"llama.attention.layer_norm_rms_epsilon" + struct.pack("<I", 6)
    before = json.loads((locate(file) / "config.json").read_text())["rms_norm_eps"]
    content = file.read_bytes()
    place = content.index(key) + len(key)
    os.utime(file, (1e9, 1e9))
    locate(file)
    file.write_bytes(content[:place] + struct.pack("<f", 2 * before) + content[place + 4 :])
    os.utime(file, (1e9, 1e9))
    after = json.loads((locate(file) / "config.json").read_text())["rms_norm_eps"]
    assert after == pytest.approx(2 * before)


def test_ends_of_an_answer_are_read(stories260k: Path, tmp_path: Path):
    base = tmp_path / "base"
    shutil.copytree(stories260k, base)
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 7]}', encoding="utf-8")
    export(base, tmp_path / "model.gguf", gguf="Q8_0")
    assert text_end(find(tmp_path / "model.gguf"), None) == {2, 7}


@pytest.mark.parametrize(
    ("ends", "written"),
    [
        (["</s>"], {"eos": "</s>"}),
        (["<|eot_id|>", "<|own|>"], {"eos": "</s>", "eot": "<|own|>", "eom": "<|eot_id|>"}),
        (
            ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
            {"eos": "</s>", "eot": "<|end_of_text|>", "eom": "<|eom_id|>"},
        ),
        (["<|a|>", "<|b|>", "<|eot_id|>"], {"eos": "</s>", "eot": "<|a|>", "eom": "<|b|>"}),
    ],
)
def test_several_ends_are_written_and_llama_cpp_stops_at_each(stories260k: Path, tmp_path: Path, ends, written):
    base = tmp_path / "base"
    shutil.copytree(stories260k, base)
    content = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    ids = {end: vocabulary.get(end, 500 + number) for number, end in enumerate(ends)}
    names = {id_: text for text, id_ in vocabulary.items()}
    for end, id_ in ids.items():
        if end not in vocabulary:
            old = names[id_]
            vocabulary[end] = vocabulary.pop(old)
            content["model"]["merges"] = [merge for merge in content["model"]["merges"] if old not in "".join(merge)]
            content["added_tokens"].append(content["added_tokens"][0] | {"id": id_, "content": end, "special": True})
    (base / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ids.values())}), encoding="utf-8")
    export(base, tmp_path / "model.gguf", gguf="F32")
    metadata = read_gguf(tmp_path / "model.gguf").metadata
    keys = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    tokens = metadata["tokenizer.ggml.tokens"]
    assert {name: tokens[id_] for name, id_ in keys.items() if id_ is not None} == written
    with LlamaCpp(tmp_path / "model.gguf") as model:
        assert [end for end, id_ in ids.items() if not model.ends_at(id_)] == []
    modelfile = (tmp_path / "model.Modelfile").read_text()
    assert all(f'PARAMETER stop "{end}"' in modelfile for end in ends)


def test_ends_beyond_the_vocabulary_are_left_out(stories260k: Path, tmp_path: Path):
    base = tmp_path / "base"
    shutil.copytree(stories260k, base)
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 32000]}', encoding="utf-8")
    export(base, tmp_path / "model.gguf", gguf="F32")
    metadata = read_gguf(tmp_path / "model.gguf").metadata
    assert [key for key in metadata if key.endswith(("eos_token_id", "eot_token_id", "eom_token_id"))] == [
        "tokenizer.ggml.eos_token_id"
    ]


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
TOOLS = "{% for m in messages %}[T {{ m.role }}]{{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize("form", ["list", "files", "alone"])
def test_chat_templates_are_written_by_name_and_read_back(stories260k: Path, tmp_path: Path, form: str):
    base = tmp_path / "base"
    shutil.copytree(stories260k, base)
    config = json.loads((base / "tokenizer_config.json").read_text(encoding="utf-8"))
    if form == "list":
        named = [{"name": "default", "template": PLAIN}, {"name": "tool-use", "template": TOOLS}]
        (base / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}), encoding="utf-8")
    else:
        (base / "chat_template.jinja").write_text(PLAIN, encoding="utf-8")
        (base / "additional_chat_templates").mkdir()
    if form == "files":
        (base / "additional_chat_templates/tool-use.jinja").write_text(TOOLS, encoding="utf-8")
    export(base, tmp_path / "model.gguf", gguf="F32")
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    assert fields["tokenizer.chat_template"] == PLAIN
    several = form != "alone"
    assert fields.get("tokenizer.chat_template.tool_use") == (TOOLS if several else None)
    assert fields.get("tokenizer.chat_templates") == (["tool_use"] if several else None)
    again = load_tokenizer(tmp_path / "model.gguf").chat_template
    assert again == ({"default": PLAIN, "tool_use": TOOLS} if several else PLAIN)
    assert 'TEMPLATE """' in (tmp_path / "model.Modelfile").read_text()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_added_tokens_keep_their_ids_wherever_they_are_in_the_vocabulary(tmp_path: Path, kind: str):
    """As SmolLM2's and Tekken's, which come first, and Gemma's, which are in the middle."""
    tokens, types = ["<s>", "a", "b", "<turn>", "ab", "<end>", "[PAD6]", "c", "[PAD8]"], [3, 1, 1, 4, 1, 3, 5, 1, 5]
    metadata = {"tokenizer.ggml.model": kind, "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["a b"]}
    metadata |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 9,
    }
    metadata |= {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    for file, fields in tokenizer_files(metadata, "m.gguf").items():
        (tmp_path / file).write_text(json.dumps(fields), encoding="utf-8")
    rebuilt = load_tokenizer(tmp_path)
    assert rebuilt.encode("<s>ab<turn>c<end>a") == [0, 4, 3, 7, 5, 1]
    assert rebuilt.decode([0, 4, 3, 7, 5, 1]) == "<s>ab<turn>c<end>a"
    # A new token is given the first id that no token has.
    assert rebuilt.add_tokens(["<new>"]) == 1
    assert rebuilt.convert_tokens_to_ids("<new>") == 8


TEXTS = [
    "Once upon a time there was a cat.",
    "  two  spaces   and more ",
    "a",
    "Größe 3.14 zoo",
    "unknown é 🚀 sign",
    "",
]
COLLAPSED = [
    {"type": "Strip", "strip_left": False, "strip_right": True},
    {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"},
]


def charsmap() -> str:
    """sentencepiece's own map of characters for NFKC, in base64."""
    from sentencepiece import sentencepiece_model_pb2

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["once upon a time there was a cat"] * 9),
        model_writer=written,
        vocab_size=20,
        normalization_rule_name="nmt_nfkc",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    proto = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
    return base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode()


@pytest.mark.slow
def test_a_map_of_characters_is_written_and_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    steps = [{"type": "Precompiled", "precompiled_charsmap": charsmap()}, *COLLAPSED]
    directory, file = unigram_model(tmp_path / "model", steps, "always"), tmp_path / "model.gguf"
    export(directory, file, gguf="F32")
    original, rebuilt = load_tokenizer(directory), load_tokenizer(file)
    for text in ("Ｏｎｃｅ ｕｐｏｎ", "a\tcat\u3000that", "①②③ ﬁ", *TEXTS):
        expected = original.encode(text)
        assert rebuilt.encode(text) == expected
        with LlamaCpp(file) as model:
            assert model.tokenize(text) == expected, text
    assert original.encode("Ｏｎｃｅ") == original.encode("Once")


def unigram_model(folder: Path, steps: list[dict], prepend: str, *, fallback: bool = False) -> Path:
    """A small Llama with a trained unigram tokenizer, whose normalizer has these steps."""
    directory = case.directory(BY_NAME["llama_tied"].changed(vocab_size=120, rms_norm_eps=3e-5))
    shutil.copytree(directory, folder)
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    trained.decoder = decoders.Metaspace(prepend_scheme=prepend)
    texts = ["Once upon a time there was a cat that sat on two spaces and more.", "a zoo of 3.14 Größe signs"] * 20
    trainer = trainers.UnigramTrainer(vocab_size=100, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    trained.train_from_iterator(texts, trainer)
    content = json.loads(trained.to_str())
    content["normalizer"] = {"type": "Sequence", "normalizers": steps} if steps else None
    content["model"]["byte_fallback"] = fallback
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("steps", "prepend"), [([], "never"), (COLLAPSED, "always")], ids=["kept", "collapsed"])
def test_a_unigram_tokenizer_divides_texts_as_llama_cpp_does_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[dict], prepend: str
):
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    directory, file = unigram_model(tmp_path / "model", steps, prepend), tmp_path / "model.gguf"
    export(directory, file, gguf="F32")
    original, rebuilt = load_tokenizer(directory), load_tokenizer(file)
    expected = [original.encode(text) for text in TEXTS]
    assert any(original.unk_token_id in ids for ids in expected)
    with LlamaCpp(file) as model:
        assert [model.tokenize(text) for text in TEXTS] == expected
    assert [rebuilt.encode(text) for text in TEXTS] == expected
    assert [rebuilt.decode(ids) for ids in expected] == [original.decode(ids) for ids in expected]


@pytest.mark.parametrize(
    ("steps", "options", "reason"),
    [
        ([{"type": "Lowercase"}], {}, "its normalizer has Lowercase"),
        (COLLAPSED[1:], {}, "spaces within a text and at its end"),
        (COLLAPSED, {"fallback": True}, "byte_fallback"),
        ([], {}, "prepend_scheme is always"),
    ],
)
def test_a_unigram_tokenizer_that_llama_cpp_has_not_is_refused(
    tmp_path: Path, steps: list[dict], options: dict, reason: str
):
    with pytest.raises(UserError, match=reason):
        export(unigram_model(tmp_path / "model", steps, "always", **options), tmp_path / "x.gguf", gguf="F16")


FIRST = {rules.pattern: name for name, rules in reversed(NAMES.items())}  # pattern -> the name that is written


# llama.cpp's own expressions for these end a word at a combining mark, where the tokenizers' do not.
WITHOUT_MARKS = ("tekken", "gpt-4o")


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pre_tokenizer_divides_texts_as_llama_cpp_does_by_its_name(
    pattern: str, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A vocabulary trained on the texts, so that many a token goes as far as a division lets it."""
    monkeypatch.setenv("MESHTUNE_CACHE", str(tmp_path / "cache"))
    known = shared / "assets/tokenizers/ggml-goldens/ggml-vocab-qwen2.gguf.inp"
    texts = known.read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    texts += [
        "3.14159 12345 x=1;y[2]",
        "中文abc 123 ひらがなカタカナ mixed",
        "don't WE'LL naïve İstanbul",
        "a.b /path(x) #tag",
    ]
    if pattern in WITHOUT_MARKS:
        texts = [text for text in texts if not any(unicodedata.category(letter).startswith("M") for letter in text)]
    rules = NAMES[FIRST[pattern]]
    trained = Tokenizer(models.BPE(ignore_merges=rules.ignore_merges))
    trained.decoder = decoders.ByteLevel()
    content = json.loads(trained.to_str())
    content["pre_tokenizer"] = steps_of(rules)
    content["normalizer"] = {"type": "NFC"} if rules.nfc else None
    trained = Tokenizer.from_str(json.dumps(content))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(texts * 3, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet))
    vocab = 901
    directory = tmp_path / "model"
    shutil.copytree(case.directory(BY_NAME["llama_tied"].changed(vocab_size=vocab, rms_norm_eps=4e-5)), directory)
    trained.add_special_tokens(["</s>"])
    (directory / "tokenizer.json").write_text(trained.to_str(), encoding="utf-8")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    export(directory, tmp_path / "model.gguf", gguf="F32")
    original, rebuilt = load_tokenizer(directory), load_tokenizer(tmp_path / "model.gguf")
    with LlamaCpp(tmp_path / "model.gguf") as model:
        for text in texts:
            expected = original.encode(text)
            assert rebuilt.encode(text) == expected, text
            assert model.tokenize(text) == expected, text
