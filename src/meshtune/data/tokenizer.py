"""The tokenizer a model ships with: loaded from its own files, with its own chat template or another one."""

from __future__ import annotations

import importlib.resources
import os
import pathlib
from typing import TYPE_CHECKING, Any

from meshtune.data.baichuan_tokenizer import TEMPLATE, is_baichuan, load_baichuan
from meshtune.errors import UserError, nearest
from meshtune.weights.hub import TOKENIZER, locate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Any of these makes a directory a tokenizer's; transformers reads the rest from beside it.
_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")


def load_tokenizer(
    path: str | os.PathLike[str], chat_template: str | None = None, *, revision: str | None = None
) -> PreTrainedTokenizerFast:
    """The tokenizer in a directory or of a hub id, without running any remote code.

    `chat_template` replaces the tokenizer's own: a Jinja file, or one of `template_names()`.
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
    from transformers import AutoTokenizer  # seconds to import: only when a tokenizer is wanted

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), use_fast=True, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as problem:
        first = str(problem).strip().splitlines() or [type(problem).__name__]
        raise UserError(
            f"the tokenizer cannot be read: {first[0]}",
            where=str(directory),
            fix="check tokenizer.json and tokenizer_config.json (half-downloaded?), or set model.tokenizer",
        ) from problem
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} has no fast form, which exact loss masks need",
            where=str(directory),
            fix="save it once with transformers as a fast tokenizer, so that there is a tokenizer.json",
        )
    return tokenizer


def _directory(path: str | os.PathLike[str], revision: str | None) -> pathlib.Path:
    file = pathlib.Path(path).expanduser()
    if file.is_file():
        raise UserError(
            "a tokenizer is a directory, this is a file", where=str(file), fix=f"give its folder, {file.parent}"
        )
    directory = locate(path, revision, allow=TOKENIZER)
    if not any((directory / name).is_file() for name in _FILES):
        raise UserError(
            "there is no tokenizer here (no tokenizer.json)",
            where=str(directory),
            fix="copy the model's tokenizer.json and tokenizer_config.json into it, or set model.tokenizer",
        )
    return directory


def template_names() -> list[str]:
    """Names of the chat templates that ship with Meshtune."""
    folder = importlib.resources.files("meshtune.data") / "templates"
    return sorted(file.name.removesuffix(".jinja") for file in folder.iterdir() if file.name.endswith(".jinja"))


def template_text(name_or_path: str) -> str:
    """The Jinja text of a template that ships with Meshtune, or of a file. Raises UserError if it is neither."""
    names = template_names()
    if name_or_path in names:
        folder = importlib.resources.files("meshtune.data") / "templates"
        return (folder / f"{name_or_path}.jinja").read_text(encoding="utf-8")
    file = pathlib.Path(name_or_path).expanduser()
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise UserError(f"the chat template cannot be read: {problem}", where=str(file)) from problem
    raise UserError(
        f"'{name_or_path}' is neither a file nor the name of a chat template",
        where="model.chat_template",
        fix=f"{nearest(name_or_path, names)}give a Jinja file, or one of: {', '.join(names)}",
    )


def padding_id(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """An id to pad with that ends no answer, so that the last token can be found by passing over it; None if there is
    no other special token than the one that ends text."""
    ends, own = tokenizer.eos_token_id, tokenizer.pad_token_id
    others: list[Any] = [own, tokenizer.unk_token_id, *sorted(tokenizer.added_tokens_decoder)]
    return next((one for one in others if one is not None and one not in (ends, tokenizer.bos_token_id)), own)  # pyright: ignore[reportReturnType] - ids, of one tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, vocab: int) -> None:
    """Raise UserError if the tokenizer can make ids that an embedding of `vocab` rows does not have."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab:
        raise UserError(
            f"the tokenizer makes ids up to {largest}, but the model's embedding has {vocab} rows",
            where=str(tokenizer.name_or_path),
            fix="use the tokenizer that belongs to this model; added tokens need a model whose embedding was enlarged",
        )
