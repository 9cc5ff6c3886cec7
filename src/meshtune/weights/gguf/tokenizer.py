"""Converts tokenizers: a tokenizer.json to the metadata of a GGUF file, and the metadata to the files that transformers
reads.

sentencepiece's unigram tokenizers (https://arxiv.org/abs/1804.10959) in GGUF, where they are of the kind 't5'.
"""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.errors import UserError
from meshtune.weights.gguf.pre_tokenizers import ORIGINAL, name_of, rules_of, steps_of

SPACE = "\u2581"
KIND = "t5"
KEY = "tokenizer.ggml."
CHARSMAP, COLLAPSE = f"{KEY}precompiled_charsmap", f"{KEY}remove_extra_whitespaces"
SPACES = {"Regex": " {2,}"}


def unigram_metadata(tokenizer: Mapping[str, Any], tokens: Sequence[str], where: str) -> dict[str, Any]:
    """The keys of a tokenizer.json's unigram model, but for its tokens. Raises UserError for one that llama.cpp would
    divide texts by in another way."""
    model = tokenizer["model"]
    if model.get("byte_fallback"):
        raise _refusal_error(
            "unknown characters become bytes (byte_fallback), where llama.cpp has the unknown token", where
        )
    fields = _normalizer_fields(tokenizer.get("normalizer"), where)
    pre = tokenizer.get("pre_tokenizer") or {}
    if pre.get("type") != "Metaspace" or pre.get("replacement", SPACE) != SPACE:
        raise _refusal_error(f"its pre-tokenizer is {pre.get('type')}, and not Metaspace", where)
    scheme = pre.get("prepend_scheme", "always")
    if scheme != ("always" if fields[COLLAPSE] else "never"):
        raise _refusal_error(
            f"prepend_scheme is {scheme}: llama.cpp puts one space before a text where it makes one of several, and "
            "none at the right place where it keeps them",
            where,
        )
    pieces = model["vocab"]
    if pre.get("split", True) and any(SPACE in piece[1:] for piece, _ in pieces):
        raise _refusal_error("texts are divided at spaces, and it has pieces that go beyond one", where)
    scores = [float(score) for _, score in pieces]
    unknown = model.get("unk_id")
    if unknown is None:
        raise _refusal_error("it has no unknown token", where)
    return {
        f"{KEY}model": KIND,
        f"{KEY}pre": "default",
        f"{KEY}scores": [*scores, *[0.0] * (len(tokens) - len(scores))][: len(tokens)],
        f"{KEY}add_space_prefix": scheme == "always",
        f"{KEY}unknown_token_id": unknown,
        **fields,
    }


def _normalizer_fields(normalizer: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    fields: dict[str, Any] = {COLLAPSE: False}
    collapses = strips = False
    for step in steps:
        kind = step.get("type")
        if kind == "Precompiled" and CHARSMAP not in fields:
            fields[CHARSMAP] = base64.b64decode(step["precompiled_charsmap"])
        elif kind == "Replace" and step["pattern"] == SPACES and step["content"] in (" ", SPACE):
            collapses = True
        elif kind == "Strip" and step.get("strip_right"):
            strips = True
        else:
            raise _refusal_error(f"its normalizer has {kind}, which llama.cpp has not", where)
    if collapses != strips:
        raise _refusal_error("spaces within a text and at its end are treated differently", where)
    return fields | {COLLAPSE: collapses}


def _refusal_error(reason: str, where: str) -> UserError:
    return UserError(
        f"this unigram tokenizer cannot be written as GGUF: {reason}",
        where=where,
        fix="export the model as safetensors",
    )


def unigram_parts(
    metadata: Mapping[str, Any], tokens: Sequence[str], unknown: int | None, where: str
) -> dict[str, Any]:
    """The model, normalizer, pre_tokenizer and decoder of a tokenizer.json."""
    scores: list[float] = metadata.get(f"{KEY}scores", [])
    if len(scores) != len(tokens):
        raise UserError(f"the file has {len(tokens)} tokens and {len(scores)} scores", where=where)
    steps: list[dict[str, Any]] = []
    if charsmap := metadata.get(CHARSMAP):
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(charsmap)).decode()})
    if metadata.get(COLLAPSE, True):
        steps += [
            {"type": "Strip", "strip_left": False, "strip_right": True},
            {"type": "Replace", "pattern": SPACES, "content": " "},
        ]
    scheme = "always" if metadata.get(f"{KEY}add_space_prefix", True) else "never"
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
    vocab = [[token, score] for token, score in zip(tokens, scores, strict=True)]
    return {
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": False},
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
    }


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TEMPLATE, DEFAULT = "tokenizer.chat_template", "default"
# Tokens at which llama.cpp ends a text whatever a file says.
END_OF_MESSAGE = "<|eom_id|>"
KNOWN_ENDS = frozenset(
    """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <|endoftext|> <EOT> _<EOT> [EOT] [EOS]
    <|end_of_text|> <end_of_utterance> <|eom_id|>""".split()
)
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """Facts about a tokenizer that its tokenizer.json does not have: ids, whether it begins and ends a text with them,
    and its chat templates by name, the usual one under DEFAULT. `ends` are further ids at which an answer ends."""

    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    adds_bos: bool
    adds_eos: bool
    ends: tuple[int, ...]
    chat_templates: Mapping[str, str]


def tokenizer_metadata(tokenizer: Mapping[str, Any], special: SpecialTokens, rows: int, where: str) -> dict[str, Any]:
    """The keys of a tokenizer for a model with `rows` rows of embeddings; tokens that there are not are called [PADi].

    Raises UserError for a vocabulary that is larger than the embedding, for a model that llama.cpp has not, and for a
    pre-tokenizer that it has no known name for.
    """
    model = tokenizer["model"]
    if model.get("type", "BPE") not in ("BPE", "Unigram"):
        raise UserError(
            f"llama.cpp's tokenizers are byte pair encoding or unigram models, this one is {model.get('type')}",
            where=where,
            fix="export the model as safetensors",
        )
    tokens, types = _tokens(tokenizer, rows, where)
    fields: dict[str, Any]
    if model.get("type") == "Unigram":
        fields = unigram_metadata(tokenizer, tokens, where)
    elif _is_sentencepiece(tokenizer):
        fields = _sentencepiece(tokenizer, tokens)
    else:
        fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name_of(tokenizer, where)}
        fields["tokenizer.ggml.merges"] = [" ".join(_pair(merge)) for merge in model["merges"]]
    fields |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    ids = {"bos": special.bos, "unknown": special.unknown, "padding": special.padding}
    ids |= _ends(special, tokens)
    fields |= {f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in ids.items() if id_ is not None}
    fields |= {"tokenizer.ggml.add_bos_token": special.adds_bos, "tokenizer.ggml.add_eos_token": special.adds_eos}
    return fields | _template_metadata(special.chat_templates)


def _ends(special: SpecialTokens, tokens: Sequence[str]) -> dict[str, int | None]:
    """The ends by the three names that a file has for them, first those that llama.cpp does not know by their texts."""
    named = special.ends if special.eos is None else (special.eos, *special.ends)
    ids: list[int] = [id_ for id_ in dict.fromkeys(named) if id_ < len(tokens)]
    further = sorted(ids[1:], key=lambda id_: tokens[id_] in KNOWN_ENDS)
    message = next((id_ for id_ in further if tokens[id_] == END_OF_MESSAGE), None)
    if message is not None:
        further.remove(message)
    eot, *remaining = further or [None]
    eom = next(iter(remaining), None) if message is None else message
    return {"eos": next(iter(ids), None), "eot": eot, "eom": eom}


def _template_metadata(templates: Mapping[str, str]) -> dict[str, Any]:
    """The keys of chat templates, as llama.cpp's converter names them."""
    named = {re.sub(r"[^A-Za-z0-9]", "_", name): text for name, text in templates.items() if name != DEFAULT}
    fields: dict[str, Any] = {f"{TEMPLATE}.{name}": text for name, text in named.items()}
    if named:
        fields["tokenizer.chat_templates"] = list(named)
    return fields | ({TEMPLATE: templates[DEFAULT]} if DEFAULT in templates else {})


def _tokens(tokenizer: Mapping[str, Any], rows: int, where: str) -> tuple[list[str], list[int]]:
    model = tokenizer["model"]
    if model.get("type") == "Unigram":
        by_id = {id_: (text, NORMAL) for id_, (text, _) in enumerate(model["vocab"])}
    else:
        by_id = {id_: (text, NORMAL) for text, id_ in model["vocab"].items()}
    if model.get("byte_fallback"):
        by_id |= {id_: (text, BYTE) for id_, (text, _) in by_id.items() if BYTE_TOKEN.fullmatch(text)}
    for added in tokenizer.get("added_tokens", ()):
        kind = CONTROL if added["special"] else USER_DEFINED
        by_id[added["id"]] = (added["content"], UNKNOWN if added["content"] == model.get("unk_token") else kind)
    if (unknown := model.get("unk_id")) is not None:
        by_id[unknown] = (by_id[unknown][0], UNKNOWN)
    if by_id and max(by_id) >= rows:
        raise UserError(
            f"the tokenizer has ids up to {max(by_id)}, and the model's embedding has {rows} rows",
            where=where,
            fix="give the tokenizer of this model, or resize its embedding",
        )
    named = [by_id.get(id_, (f"[PAD{id_}]", UNUSED)) for id_ in range(rows)]
    return [text for text, _ in named], [kind for _, kind in named]


def _is_sentencepiece(tokenizer: Mapping[str, Any]) -> bool:
    """Whether pieces are of characters with spaces marked, as of sentencepiece, and not of bytes."""
    return bool(tokenizer["model"].get("byte_fallback")) or SPACE in str(tokenizer.get("normalizer"))


def _sentencepiece(tokenizer: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Of two neighbours sentencepiece merges those with the highest score: the earlier of two merges."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(tokenizer["model"]["merges"]):
        ranks.setdefault("".join(_pair(merge)), rank)
    last = float(len(tokenizer["model"]["merges"]) + 1)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": [-float(ranks.get(token, last)) for token in tokens],
        "tokenizer.ggml.add_space_prefix": _adds_space(tokenizer),
    }


def _adds_space(tokenizer: Mapping[str, Any]) -> bool:
    normalizer, pre = tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    prepends = any(step.get("type") == "Prepend" for step in steps)
    metaspace = pre.get("type") == "Metaspace" and pre.get("prepend_scheme", "always") != "never"
    return prepends or metaspace


def _pair(merge: Any) -> tuple[str, str]:
    """The two parts of a merge, which is a list of them or, in older files, one text."""
    if isinstance(merge, str):
        first, _, second = merge.partition(" ")
        return first, second
    return merge[0], merge[1]


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
