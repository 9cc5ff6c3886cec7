"""sentencepiece's unigram tokenizers (https://arxiv.org/abs/1804.10959) in GGUF, where they are of the kind 't5'."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from meshtune.errors import UserError

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
