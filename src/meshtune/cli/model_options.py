"""Options that `generate` and `chat` share: which model, how it is loaded, and when an answer ends."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from meshtune.options import option

if TYPE_CHECKING:
    from meshtune.generate.api import Model

ModelPath = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model directory, a hub id, an adapter, or a run.", show_default=False)
]


@dataclasses.dataclass(frozen=True)
class BaseLoading:
    """How a base is loaded."""

    revision: str | None = option(None, "Branch, tag or commit on the hub.")
    chat_template: str | None = option(None, "A Jinja file, or a template that ships with Meshtune.")
    dtype: str | None = option(None, "float32 or bfloat16; default: by device.")
    quantize: str = option("auto", "Of the base: nf4, int8, fp8, int4 or none; auto: as the adapter was trained.")


@dataclasses.dataclass(frozen=True)
class Loading(BaseLoading):
    """How a model is loaded."""

    adapter: str | None = option(None, "A PEFT adapter, or a run, to put on MODEL.")


@dataclasses.dataclass(frozen=True)
class Limits:
    """When an answer ends, apart from the model's own end tokens."""

    max_tokens: int | None = option(
        None, "New tokens at most; default 256.", ge=1, flags=("--max-tokens", "--max-new-tokens", "-n")
    )
    stop: tuple[str, ...] = option((), "Text that ends the answer; may be repeated.")


def load_model(path: str, loading: Loading) -> Model:
    """The model at `path`. Raises UserError as meshtune.load does."""
    from meshtune.generate.api import load

    return load(path, **vars(loading))
