"""The tokenizer of a GGUF file as the files that transformers reads: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.errors import UserError
from meshtune.weights.gguf.pre_tokenizers import ORIGINAL, rules_of, steps_of
from meshtune.weights.gguf.tokens_out import (
    BYTE,
    CONTROL,
    DEFAULT,
    NORMAL,
    TEMPLATE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from meshtune.weights.gguf.unigram import KEY, KIND, SPACE, unigram_parts

NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def tokenizer_files(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """{"tokenizer.json": .., "tokenizer_config.json": ..} of a file's metadata.

    Raises UserError for a kind of tokenizer or a pre-tokenizer that is not known, and for what does not fit together.
    """
    kind = metadata.get(f"{KEY}model")
    if kind not in ("gpt2", "llama", KIND):
        raise UserError(
            f"the file's tokenizer is of the kind {kind!r}; read are 'gpt2' (byte level), 'llama' (sentencepiece) and "
            f"'{KIND}' (sentencepiece's unigram model)",
            where=where,
            fix=ORIGINAL,
        )
    tokens: list[str] = metadata.get(f"{KEY}tokens", [])
    types: list[int] = metadata.get(f"{KEY}token_type", [NORMAL] * len(tokens))
    if not tokens or len(types) != len(tokens):
        raise UserError(f"the file has {len(tokens)} tokens and {len(types)} types of tokens", where=where)
    ids = {name: metadata.get(f"{KEY}{name}_token_id") for name in NAMES}
    for name, id_ in ids.items():
        if id_ is not None and not 0 <= id_ < len(tokens):
            raise UserError(f"{KEY}{name}_token_id is {id_}, and there are {len(tokens)} tokens", where=where)
    if kind == KIND:
        tokenizer = _tokenizer(tokens=tokens, types=types, **unigram_parts(metadata, tokens, ids["unknown"], where))
    else:
        tokenizer = _bytes(metadata, tokens, types, where) if kind == "gpt2" else _pieces(metadata, tokens, types, ids)
    add_bos = bool(metadata.get(f"{KEY}add_bos_token", kind == "llama"))
    add_eos = bool(metadata.get(f"{KEY}add_eos_token", kind == KIND))
    tokenizer["post_processor"] = _template(tokens, ids["bos"] if add_bos else None, ids["eos"] if add_eos else None)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        **{NAMES[name]: tokens[id_] for name, id_ in ids.items() if id_ is not None},
    }
    if templates := _read_templates(metadata):
        config["chat_template"] = templates
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _read_templates(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """The chat template, or all of them by name where there are several, as transformers reads them."""
    named = {
        DEFAULT if key == TEMPLATE else key.removeprefix(f"{TEMPLATE}."): text
        for key, text in metadata.items()
        if (key == TEMPLATE or key.startswith(f"{TEMPLATE}.")) and isinstance(text, str) and text
    }
    if set(named) <= {DEFAULT}:
        return named.get(DEFAULT)
    return [{"name": name, "template": text} for name, text in named.items()]


def _bytes(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], where: str) -> dict[str, Any]:
    rules = rules_of(metadata.get(f"{KEY}pre"), where)
    merges = [merge.split(" ", 1) for merge in metadata.get(f"{KEY}merges", [])]
    model = {"type": "BPE", "vocab": _vocabulary(tokens, types), "merges": merges, "ignore_merges": rules.ignore_merges}
    model |= {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    return _tokenizer(
        model,
        tokens,
        types,
        normalizer={"type": "NFC"} if rules.nfc else None,
        pre_tokenizer=steps_of(rules),
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )


def _pieces(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], ids: Mapping[str, int | None]
) -> dict[str, Any]:
    scores: list[float] = metadata.get(f"{KEY}scores", [0.0] * len(tokens))
    vocab = _vocabulary(tokens, types)
    mergeable = {text for text, id_ in vocab.items() if types[id_] == NORMAL}
    unknown = tokens[ids["unknown"]] if ids["unknown"] is not None else None
    model = {"type": "BPE", "vocab": vocab, "merges": _merges(vocab, mergeable, scores), "ignore_merges": False}
    model |= {"dropout": None, "unk_token": unknown, "fuse_unk": True, "byte_fallback": BYTE in types}
    prefix = bool(metadata.get(f"{KEY}add_space_prefix", True))
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoding = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
    ]
    return _tokenizer(
        model,
        tokens,
        types,
        normalizer={"type": "Sequence", "normalizers": steps},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoding},
    )


def _vocabulary(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    """The ids of all tokens up to the last that is in use: an added token that a vocabulary lacks is given the number
    of its tokens as its id, whatever tokenizer.json says."""
    used = max((id_ + 1 for id_, kind in enumerate(types) if kind != UNUSED), default=0)
    return {text: id_ for id_, text in enumerate(tokens[:used])}


def _merges(vocab: Mapping[str, int], mergeable: set[str], scores: Sequence[float]) -> list[list[str]]:
    """Every division of a piece into two others, those of the piece with the highest score first."""
    pairs: list[tuple[float, int, int, str, str]] = []
    for text in mergeable:
        id_ = vocab[text]
        for cut in range(1, len(text)):
            first, second = text[:cut], text[cut:]
            if first in mergeable and second in mergeable:
                pairs.append((-scores[id_], vocab[first], vocab[second], first, second))
    return [[first, second] for *_, first, second in sorted(pairs)]


def _tokenizer(
    model: dict[str, Any],
    tokens: list[str],
    types: Sequence[int],
    *,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
) -> dict[str, Any]:
    added = [
        {
            "id": id_,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for id_, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _template(tokens: list[str], bos: int | None, eos: int | None) -> dict[str, Any] | None:
    """The post-processor that begins and ends a text with tokens; None where there are none."""
    if bos is None and eos is None:
        return None

    def single(sequence: str, number: int) -> list[dict[str, Any]]:
        before = [] if bos is None else [{"SpecialToken": {"id": tokens[bos], "type_id": number}}]
        after = [] if eos is None else [{"SpecialToken": {"id": tokens[eos], "type_id": number}}]
        return [*before, {"Sequence": {"id": sequence, "type_id": number}}, *after]

    used = {tokens[id_]: id_ for id_ in (bos, eos) if id_ is not None}
    return {
        "type": "TemplateProcessing",
        "single": single("A", 0),
        "pair": [*single("A", 0), *single("B", 1)],
        "special_tokens": {text: {"id": text, "ids": [id_], "tokens": [text]} for text, id_ in used.items()},
    }
