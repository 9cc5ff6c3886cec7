"""How byte-level tokenizers divide text before merging: the names that llama.cpp has for it, and tokenizer.json's form.

llama.cpp computes each name with rules in its code, so that a wrong name gives other tokens without a word. Only
names whose rules are known here to be those of a tokenizer.json are written or read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from meshtune.errors import UserError

ORIGINAL = (
    "give the tokenizer of the model that it was made from, a folder or hub id: --tokenizer, or model.tokenizer in a "
    "recipe"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _word_pattern(digits: str, letters: str = r"\p{L}+", symbols: str = r"[^\s\p{L}\p{N}]+[\r\n]*") -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?{symbols}|{_SPACES}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_pattern(digits: str, contractions: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    cased = f"{start}{_UPPER}*{_LOWER}+{contractions}|{start}{_UPPER}+{_LOWER}*{contractions}"
    return rf"{cased}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)

# Of the splits before bytes: a regular expression, or several; "digits" for single digits; None for GPT-2's own.
PATTERNS: dict[str, str | tuple[str, ...] | None] = {
    "deepseek-v3": (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _PUNCTUATED),
    "llama3": _word_pattern(r"\p{N}{1,3}"),
    "qwen2": _word_pattern(r"\p{N}"),
    "qwen35": _word_pattern(r"\p{N}", r"[\p{L}\p{M}]+", r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
    "tekken": _cased_pattern(r"\p{N}", ""),
    "gpt-4o": _cased_pattern(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),
    "digits": "digits",
    "gpt-2": None,
}


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """A name's rules: the entry of PATTERNS, whether a word that is a token is never divided, and normalisation."""

    pattern: str
    ignore_merges: bool = False
    nfc: bool = False


# The first name of several with the same rules is the one that is written.
NAMES: dict[str, PreTokenizer] = {
    "llama-bpe": PreTokenizer("llama3", ignore_merges=True),
    "llama3": PreTokenizer("llama3", ignore_merges=True),
    "llama-v3": PreTokenizer("llama3", ignore_merges=True),
    "falcon3": PreTokenizer("llama3", ignore_merges=True),
    "falcon-h1": PreTokenizer("llama3", ignore_merges=True),
    "pixtral": PreTokenizer("llama3", ignore_merges=True),
    "lfm2": PreTokenizer("llama3", ignore_merges=True),
    "dbrx": PreTokenizer("llama3"),
    "smaug-bpe": PreTokenizer("llama3"),
    "glm4": PreTokenizer("llama3"),
    "qwen2": PreTokenizer("qwen2", nfc=True),
    "stablelm2": PreTokenizer("qwen2"),
    "hunyuan": PreTokenizer("qwen2"),
    "qwen35": PreTokenizer("qwen35", nfc=True),
    "tekken": PreTokenizer("tekken", ignore_merges=True),
    "gpt-4o": PreTokenizer("gpt-4o"),
    "smollm": PreTokenizer("digits"),
    "starcoder": PreTokenizer("digits"),
    "refact": PreTokenizer("digits"),
    "command-r": PreTokenizer("digits"),
    "deepseek-v3": PreTokenizer("deepseek-v3"),
    "hunyuan-dense": PreTokenizer("deepseek-v3"),
    "gpt-2": PreTokenizer("gpt-2"),
    "olmo": PreTokenizer("gpt-2"),
    "exaone4": PreTokenizer("gpt-2"),
}


def name_of(tokenizer: Mapping[str, Any], where: str) -> str:
    """llama.cpp's name for the rules of a tokenizer.json. Raises UserError where there is none that is known."""
    pattern = _pattern_of(tokenizer.get("pre_tokenizer"))
    ignore = bool(tokenizer["model"].get("ignore_merges"))
    for name, rules in NAMES.items():
        if pattern == _splits(rules) and rules.ignore_merges == ignore:
            nfc = (tokenizer.get("normalizer") or {}).get("type") == "NFC"
            return "stablelm2" if rules.pattern == "qwen2" and not nfc else name
    rules = json.dumps(tokenizer.get("pre_tokenizer"), ensure_ascii=False)
    raise UserError(
        f"llama.cpp has no name that is known to stand for this tokenizer's pre-tokenizer: {rules[:300]}",
        where=where,
        fix="export the model as safetensors and convert it with a converter that knows its tokenizer",
    )


def _splits(rules: PreTokenizer) -> tuple[str | None, ...]:
    pattern = PATTERNS[rules.pattern]
    return pattern if isinstance(pattern, tuple) else (pattern,)


def _pattern_of(pre_tokenizer: Mapping[str, Any] | None) -> tuple[str | None, ...] | None:
    """The patterns of a tokenizer.json's splits; None for a tokenizer that is not of bytes, or splits otherwise."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    *before, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    patterns: list[str | None] = []
    for step in before:
        if step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            expression = step["pattern"].get("Regex")
            # Ends of lines by themselves mean what their escapes do.
            patterns.append(expression and expression.replace("\r", r"\r").replace("\n", r"\n"))
        elif step.get("type") == "Digits" and step.get("individual_digits"):
            patterns.append("digits")
        else:
            return None
    if not patterns:
        return (None,) if last.get("use_regex", True) else None
    if (patterns[-1] == "digits") != bool(last.get("use_regex", True)):
        return None
    return tuple(patterns)


def rules_of(name: object, where: str) -> PreTokenizer:
    """The rules of a name. Raises UserError for one that is not known."""
    if name not in NAMES:
        shown = "has no tokenizer.ggml.pre" if name is None else f"says tokenizer.ggml.pre is '{name}'"
        raise UserError(
            f"the file {shown}: it is not known how its tokenizer divides text",
            where=where,
            fix=f"{ORIGINAL}; names that are known: {', '.join(NAMES)}",
        )
    return NAMES[str(name)]


def steps_of(rules: PreTokenizer) -> dict[str, Any]:
    """The pre_tokenizer of a tokenizer.json."""
    pattern = PATTERNS[rules.pattern]
    plain = pattern in (None, "digits")
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": plain}
    if pattern is None:
        return last
    if pattern == "digits":
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, last]}
    splits = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in _splits(rules)
    ]
    return {"type": "Sequence", "pretokenizers": [*splits, last]}
