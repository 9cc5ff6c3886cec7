"""Shows a recipe's data on a terminal: documents token by token, with the trained ones marked, and the report."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.rule import Rule
from rich.text import Text

from meshtune import terminal
from meshtune.config.recipe import Recipe
from meshtune.data.loader import Loader
from meshtune.data.prepare import prepare_data
from meshtune.data.prompts import PromptLoader
from meshtune.data.report import render
from meshtune.data.store import Store
from meshtune.data.stream import Stream
from meshtune.data.tokenizer import tokenizer_of
from meshtune.data.tokens import Example
from meshtune.errors import UserError, amount
from meshtune.json_text import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Neighbouring tokens differ in shade, so that their boundaries are visible.
_TRAINED, _PROMPT, _SCALED = ("black on green", "black on bright_green"), ("grey62", "grey42"), ("black on yellow",) * 2


def inspect_data(recipe: Recipe, *, records: int = 3, tokens: int = 400, console: Console | None = None) -> None:
    """Prints the first documents token by token and the report on every split. Raises UserError as `prepare_data`."""
    console = console or terminal.console()
    tokenizer, tokens_added = tokenizer_of(recipe.model)
    vocab = _vocabulary(recipe.model.path)
    if vocab is not None:
        vocab = tokens_added.padded_vocab(vocab, recipe.model.pad_vocab_to)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("reading data", total=None)

        def progress(activity: str, done: int, total: int) -> None:
            bar.update(task, description=activity, completed=done, total=total)

        prepared = prepare_data(recipe, tokenizer, vocab=vocab, progress=progress)
    examples = _first_examples(prepared.train, records)
    if examples:
        console.print(legend(console))
    for example in examples:
        console.print(Rule(f"{example.origin}: {amount(len(example.ids), 'token')}", style="dim", align="left"))
        console.print(coloured_tokens(tokenizer, example, tokens, brackets=console.color_system is None))
    console.print(Rule(style="dim"))
    console.print(render(prepared.report))
    if prepared.validation_report is not None:
        console.print(render(prepared.validation_report))


def _first_examples(data: Loader | Stream | PromptLoader, count: int) -> Sequence[Example]:
    """The first examples of a store and the first of each further source, or those that a stream begins with, in its
    order."""
    if isinstance(data, Stream):
        return data.rows.first_examples(count)
    if not isinstance(data.store, Store):
        return [data.store[index] for index in range(min(count, len(data.store)))]
    first = range(min(count, len(data.store)))
    of_sources = np.unique(data.store.sources, return_index=True)[1].tolist() if count else []
    return [data.store[index] for index in sorted({*first, *of_sources})]


def legend(console: Console) -> Text:
    """The meaning of the colours or, without colours, of the brackets."""
    if console.color_system is None:
        return Text(
            "⟦ trained on ⟧ (⟦0.5: trained on with a weight of 0.5⟧), the rest is prompt; ↵ is a newline, "
            "· separates tokens"
        )
    parts = [(" trained on ", _TRAINED[0]), "  ", (" trained on with a weight other than 1 ", _SCALED[0]), "  "]
    return Text.assemble(*parts, (" prompt ", _PROMPT[0]), "  shades change at every token; ↵ is a newline")


def coloured_tokens(
    tokenizer: PreTrainedTokenizerFast, example: Example, limit: int, *, brackets: bool = False
) -> Text:
    """The first `limit` tokens of a document, coloured by loss weight; with `brackets` also marked without colour."""
    text = Text()
    previous, shade = 0.0, 0
    for piece, weight in weighted_pieces(tokenizer, example, limit):
        if brackets and text.plain and not text.plain.endswith("\n"):
            text.append("·")
        if brackets and weight != previous:
            text.append(("⟧" if previous else "") + ("" if not weight else "⟦" if weight == 1 else f"⟦{weight:g}: "))
        styles = _PROMPT if not weight else _TRAINED if weight == 1 else _SCALED
        text.append(piece.replace("\n", "↵\n"), styles[shade % 2])
        previous, shade = weight, shade + 1
    if brackets and previous:
        text.append("⟧")
    if len(example.ids) > limit:
        text.append(f"\n... {amount(len(example.ids) - limit, 'more token')}", "dim")
    return text


def weighted_pieces(tokenizer: PreTrainedTokenizerFast, example: Example, limit: int) -> list[tuple[str, float]]:
    """(text, loss weight) of the first `limit` tokens of a document."""
    weights = example.weights.copy()
    weights[:1] = 0  # nothing predicts the first token
    return _pieces(tokenizer, example.ids[:limit].tolist(), weights[:limit].tolist())


def _pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int], weights: list[float]) -> list[tuple[str, float]]:
    """The text of each token. Tokens that only together make a character are one piece."""
    pieces, window, decoded = [], [], ""
    for index, (id_, weight) in enumerate(zip(ids, weights, strict=True)):
        window.append(id_)
        text = str(tokenizer.decode(window, clean_up_tokenization_spaces=False))
        if text.endswith("�") and index + 1 < len(ids):
            continue
        pieces.append((text[len(decoded) :], weight))
        decoded = text
        if len(window) > 64:  # decoders look back one token at most, for the space before a word
            window = window[-1:]
            decoded = str(tokenizer.decode(window, clean_up_tokenization_spaces=False))
    return pieces


def _vocabulary(path: str) -> int | None:
    """The vocabulary size in the model's config; None unless the model is a local directory with one."""
    file = pathlib.Path(path).expanduser() / "config.json"
    try:
        vocab = read_json(file).get("vocab_size")
    except UserError:
        return None  # a tokenizer can be inspected without a model
    return vocab if isinstance(vocab, int) else None
