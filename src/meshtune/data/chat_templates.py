"""The chat templates that ship with Meshtune, by name."""

from __future__ import annotations

import functools
import importlib.resources
import pathlib
from typing import TYPE_CHECKING

from meshtune.errors import UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FOLDER = importlib.resources.files("meshtune.data") / "templates"


@functools.cache
def template_names() -> tuple[str, ...]:
    """Names of the chat templates that ship with Meshtune."""
    files = (file.name for file in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".jinja") for name in files if name.endswith(".jinja")))


# A token of a family's vocabulary -> the template that writes with it; the first that a tokenizer has decides.
BY_TOKEN = {
    "<｜tool▁calls▁begin｜>": "deepseek",
    "<|start_header_id|>": "llama3",
    "[TOOL_CALLS]": "mistral",
    "<loc0000>": "paligemma",  # whose tokenizer has Gemma's tokens too
    "<start_of_turn>": "gemma",
    "<reserved_106>": "baichuan2",
    "<|im_start|>": "chatml",
    "<|observation|>": "plain",
    "<|call|>": "plain",
    "<|end|>": "phi3",
}
OWN = ("paligemma",)  # templates of families whose tokenizers have none, since their processor writes prompts in code


def suggested_template(tokenizer: PreTrainedTokenizerFast) -> str:
    """The shipped template that fits the tokens of a tokenizer: that of its family, else plain, which also replaces
    the one that the tokenizer has already."""
    backend = tokenizer.backend_tokenizer
    name = next((name for token, name in BY_TOKEN.items() if backend.token_to_id(token) is not None), "plain")
    return "plain" if template_text(name) == tokenizer.chat_template else name


def template_text(name_or_path: str) -> str:
    """The Jinja text of a shipped template, or of a file. Raises UserError if it is neither."""
    if name_or_path in template_names():
        return (_FOLDER / f"{name_or_path}.jinja").read_text(encoding="utf-8")
    file = pathlib.Path(name_or_path).expanduser()
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise UserError(f"the chat template cannot be read: {problem}", where=str(file)) from problem
    names = template_names()
    raise UserError(
        f"'{name_or_path}' is neither a file nor the name of a chat template",
        where="model.chat_template",
        fix=f"{nearest(name_or_path, names)}give a Jinja file, or one of: {', '.join(names)}",
    )
