"""Loads the tokenizer of a model from its own files, with its own chat template or another one."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING

from meshtune.config.model import ModelSection
from meshtune.data.baichuan_tokenizer import TEMPLATE, is_baichuan, load_baichuan
from meshtune.data.chat_templates import template_text
from meshtune.data.new_tokens import NewTokens, add_tokens
from meshtune.errors import UserError
from meshtune.json_text import read_json
from meshtune.weights.hub import TOKENIZER, locate
from meshtune.weights.safetensors_files import TOKENIZER_PROBLEM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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

    `chat_template` replaces the tokenizer's own: a Jinja file, or one of `chat_templates.template_names()`.
    Raises UserError if there is no tokenizer, if it has no fast (tokenizer.json) form, or if the template is unknown.
    """
    directory = _directory(path, revision)
    if is_baichuan(directory):
        tokenizer = load_baichuan(directory, template_text(TEMPLATE))
    else:
        tokenizer = _from_transformers(directory)
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
