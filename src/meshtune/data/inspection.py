"""A recipe's data on a terminal: documents token by token with what is learned of them, then the report."""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.rule import Rule
from rich.text import Text

from meshtune.config.recipe import Recipe
from meshtune.data.loader import Loader
from meshtune.data.prepare import prepare_data
from meshtune.data.report import render
from meshtune.data.tokenizer import load_tokenizer
from meshtune.data.tokens import Example
from meshtune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Neighbouring tokens differ in shade, so that their edges are seen.
_LEARNED, _GIVEN, _SCALED = ("black on green", "black on bright_green"), ("grey62", "grey42"), ("black on yellow",) * 2


def inspect(recipe: Recipe, *, records: int = 3, tokens: int = 400, console: Console | None = None) -> None:
    """Print the first documents token by token and the report of every split. Raises UserError as `prepare` does."""
    console = console or Console(highlight=False)
    model = recipe.model
    tokenizer = load_tokenizer(model.tokenizer or model.path, model.chat_template, revision=_revision(recipe))
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("reading data", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        prepared = prepare_data(recipe, tokenizer, vocab=_vocabulary(model.path), progress=progress)
    if not isinstance(prepared.train, Loader):
        raise UserError(
            "a stream is tokenised while it is trained on, so there is nothing to inspect yet",
            where="data.streaming",
            fix="inspect with data.streaming=false and a cap on the source",
        )
    store = prepared.train.store
    if records and len(store):
        console.print(legend(console))
    for index in range(min(records, len(store))):
        example = store[index]
        console.print(Rule(f"{example.origin}: {len(example.ids)} tokens", style="dim", align="left"))
        console.print(coloured(tokenizer, example, tokens, brackets=console.color_system is None))
    console.print(Rule(style="dim"))
    console.print(render(prepared.report))
    if prepared.validation_report is not None:
        console.print(render(prepared.validation_report))


def legend(console: Console) -> Text:
    """What the colours mean; without colours, what the brackets mean."""
    if console.color_system is None:
        return Text(
            "⟦ learned ⟧ (⟦0.5: learned with a weight of 0.5⟧), the rest is given; ↵ is a newline, · ends a token"
        )
    parts = [(" learned ", _LEARNED[0]), "  ", (" learned with a weight other than 1 ", _SCALED[0]), "  "]
    return Text.assemble(*parts, (" given ", _GIVEN[0]), "  shades change at every token; ↵ is a newline")


def coloured(tokenizer: PreTrainedTokenizerFast, example: Example, most: int, *, brackets: bool = False) -> Text:
    """A document's tokens, coloured by whether they are learned; `brackets` also says it without colour."""
    text = Text()
    before, shade = 0.0, 0
    weights = example.weights.copy()
    weights[:1] = 0  # nothing predicts the first token
    for piece, weight in _pieces(tokenizer, example.ids[:most].tolist(), weights[:most].tolist()):
        if brackets and weight != before:
            text.append(("⟧" if before else "") + ("" if not weight else "⟦" if weight == 1 else f"⟦{weight:g}: "))
        styles = _GIVEN if not weight else _LEARNED if weight == 1 else _SCALED
        text.append(piece.replace("\n", "↵\n") + ("·" if brackets else ""), styles[shade % 2])
        before, shade = weight, shade + 1
    if brackets and before:
        text.append("⟧")
    if len(example.ids) > most:
        text.append(f"\n... {len(example.ids) - most} more tokens", "dim")
    return text


def _pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int], weights: list[float]) -> list[tuple[str, float]]:
    """The text of each token; tokens that only together make a character are one piece."""
    pieces, held, said = [], [], ""
    for place, (id_, weight) in enumerate(zip(ids, weights, strict=True)):
        held.append(id_)
        whole = str(tokenizer.decode(held, clean_up_tokenization_spaces=False))
        if whole.endswith("�") and place + 1 < len(ids):
            continue
        pieces.append((whole[len(said) :], weight))
        said = whole
        if len(held) > 64:  # a window is enough: decoders look back one token, for the space before a word
            held = held[-1:]
            said = str(tokenizer.decode(held, clean_up_tokenization_spaces=False))
    return pieces


def _revision(recipe: Recipe) -> str | None:
    return None if recipe.model.tokenizer else recipe.model.revision


def _vocabulary(path: str) -> int | None:
    """The rows of the embedding by the model's config, if the model is a local directory."""
    file = pathlib.Path(path).expanduser() / "config.json"
    try:
        vocab = json.loads(file.read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None  # a tokenizer alone can be inspected too
    return vocab if isinstance(vocab, int) else None
