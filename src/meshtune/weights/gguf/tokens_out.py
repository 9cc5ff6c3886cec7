"""A tokenizer.json as the metadata of a GGUF file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.errors import UserError
from meshtune.weights.gguf.pre_tokenizers import name_of
from meshtune.weights.gguf.unigram import SPACE, unigram_metadata

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
