"""Loads the tokenizer of a model, with its own chat template or another one, and with new tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshtune.config.sections import ModelSection
from meshtune.data.chat_templates import OWN, suggested_template, template_text
from meshtune.errors import UserError
from meshtune.json_text import read_json
from meshtune.lazy import LazyFunction
from meshtune.weights.hub import TOKENIZER, locate
from meshtune.weights.safetensors_files import TOKENIZER_PROBLEM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

load_baichuan = LazyFunction("meshtune.data.baichuan:load_baichuan")
BAICHUAN = ("BaichuanTokenizer", "BaiChuanTokenizer")


def _is_baichuan(directory: pathlib.Path) -> bool:
    """Whether a model directory has Baichuan's own tokenizer."""
    if not (directory / "tokenizer.model").is_file():
        return False
    names = []
    for file in ("tokenizer_config.json", "config.json"):
        with contextlib.suppress(UserError):  # reported by the code that requires the file
            names.append(read_json(directory / file).get("tokenizer_class"))
    return next(filter(None, names), None) in BAICHUAN


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """The ids of new tokens, and for each the ids that its text was tokenised to before (`pieces`)."""

    ids: tuple[int, ...] = ()
    pieces: tuple[tuple[int, ...], ...] = ()

    def padded_vocab(self, vocab: int, multiple: int | None = None) -> int:
        """The size that an embedding of `vocab` tokens needs with the new ones, rounded up to a multiple."""
        size = max(vocab, *(id_ + 1 for id_ in self.ids)) if self.ids else vocab
        return size if multiple is None else -(-size // multiple) * multiple


def add_tokens(tokenizer: PreTrainedTokenizerFast, plain: Sequence[str], special: Sequence[str]) -> NewTokens:
    """Adds tokens to a tokenizer: plain ones are text; special ones can be left out when decoding.

    Raises UserError for a token that exists already, is given twice, or is blank.
    """
    tokens = [*plain, *special]
    known = tokenizer.get_vocab()
    for index, token in enumerate(tokens):
        where = "model.new_tokens" if index < len(plain) else "model.new_special_tokens"
        if not token.strip():
            raise UserError(f"a new token is {token!r}", where=where, fix="give text that is not blank")
        if token in tokens[:index]:
            raise UserError(f"the new token {token!r} is given twice", where=where, fix="give it once")
        if token in known:
            raise UserError(
                f"{token!r} is a token already, with id {known[token]}", where=where, fix="leave it out: it can be used"
            )
    pieces = tuple(tuple(tokenizer(token, add_special_tokens=False)["input_ids"]) for token in tokens)
    tokenizer.add_tokens(list(plain))
    tokenizer.add_tokens(list(special), special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(tokens) if tokens else []
    return NewTokens(tuple(ids), pieces)  # pyright: ignore[reportArgumentType] - a list of ids


# A directory with any of these has a tokenizer; transformers reads its other files.
_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")


def tokenizer_of(
    model: ModelSection, source: str | os.PathLike[str] | None = None
) -> tuple[PreTrainedTokenizerFast, NewTokens]:
    """The tokenizer of a recipe's run, with its chat template and its new tokens, and the ids of those.

    Everything that shows, counts or trains on a recipe's tokens has it from here. `source` is the model's directory,
    where it has been located. Raises UserError as `load_tokenizer` and `add_tokens` do.
    """
    revision = None if model.tokenizer else model.revision
    tokenizer = load_tokenizer(model.tokenizer or source or model.path, model.chat_template, revision=revision)
    return tokenizer, add_tokens(tokenizer, model.new_tokens, model.new_special_tokens)


def load_tokenizer(
    path: str | os.PathLike[str], chat_template: str | None = None, *, revision: str | None = None
) -> PreTrainedTokenizerFast:
    """Loads the tokenizer in a directory or of a hub id, without running any remote code.

    `chat_template` replaces the tokenizer's own: a Jinja file, or one of `chat_templates.template_names()`. Without one
    of either, tokenizers of families whose processor writes prompts in code get the shipped template that does so.
    Raises UserError if there is no tokenizer, if it has no fast (tokenizer.json) form, or if the template is unknown.
    """
    directory = _directory(path, revision)
    if _is_baichuan(directory):
        tokenizer = load_baichuan(directory, template_text("baichuan2"))
    else:
        tokenizer = _from_transformers(directory)
    if chat_template is None and not tokenizer.chat_template and suggested_template(tokenizer) in OWN:
        chat_template = suggested_template(tokenizer)
    if chat_template is not None:
        tokenizer.chat_template = template_text(chat_template)
    return tokenizer


def _from_transformers(directory: pathlib.Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer  # imported here because it takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), use_fast=True, trust_remote_code=False, local_files_only=True
        )
        if not isinstance(tokenizer.chat_template, str | dict | None):
            raise TypeError(f"its chat_template is {tokenizer.chat_template!r}, which is no text")
        if tokenizer.is_fast:
            tokenizer.encode("a")  # fields of tokenizer_config.json are first used here
    except BaseException as problem:  # transformers validates config.json too, with exceptions of several libraries
        if not isinstance(problem, Exception) and type(problem).__name__ != "PanicException":  # of a library in Rust
            raise
        cause = problem.__cause__ or problem
        first = str(cause).strip().splitlines() or [type(cause).__name__]
        raise UserError(
            f"the tokenizer cannot be read: {first[0]}",
            where=str(directory),
            fix="check tokenizer.json, tokenizer_config.json and config.json, or set model.tokenizer",
        ) from problem
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} has no fast version, which exact loss masks need",
            where=str(directory),
            fix="save it once with transformers as a fast tokenizer, so that there is a tokenizer.json",
        )
    return tokenizer


def _directory(path: str | os.PathLike[str], revision: str | None) -> pathlib.Path:
    file = pathlib.Path(path).expanduser()
    if file.is_file() and file.suffix != ".gguf":
        raise UserError(
            "a tokenizer is a directory, this is a file", where=str(file), fix=f"give its folder, {file.parent}"
        )
    directory = locate(path, revision, allow=TOKENIZER)
    if (directory / TOKENIZER_PROBLEM).is_file():
        problem = read_json(directory / TOKENIZER_PROBLEM)
        raise UserError(problem["what"], where=problem["where"], fix=problem["fix"])
    if not any((directory / name).is_file() for name in _FILES):
        raise UserError(
            "there is no tokenizer here (no tokenizer.json)",
            where=str(directory),
            fix="copy the model's tokenizer.json and tokenizer_config.json into it, or set model.tokenizer",
        )
    return directory


def chat_templates(tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """The tokenizer's chat templates by name, the usual one under "default"."""
    templates = tokenizer.chat_template or {}
    return {"default": templates} if isinstance(templates, str) else dict(templates)


def padding_id(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """An id for padding that never ends a text, so that the last token of a sequence can be found; the tokenizer's own
    padding id, which may be None, if it has no other special token."""
    reserved, default = (tokenizer.eos_token_id, tokenizer.bos_token_id), tokenizer.pad_token_id
    candidates = [default, tokenizer.unk_token_id, *sorted(tokenizer.added_tokens_decoder)]
    ids = (id_ for id_ in candidates if isinstance(id_, int) and id_ not in reserved)
    return next(ids, default if isinstance(default, int) else None)


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, vocab: int) -> None:
    """Raises UserError if the tokenizer has ids beyond the `vocab` tokens of the model's embedding."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab:
        raise UserError(
            f"the tokenizer has ids up to {largest}, but the model's embedding has {vocab} entries",
            where=str(tokenizer.name_or_path),
            fix="use the tokenizer of this model; for added tokens the model's embedding must be enlarged",
        )
