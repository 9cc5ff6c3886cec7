"""Shows a recipe's data on a terminal: documents token by token, with the trained ones marked, and the report."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.rule import Rule
from rich.text import Text

from meshtune import terminal
from meshtune.config.recipe import Recipe
from meshtune.data.conversation import Picture
from meshtune.data.loader import Loader
from meshtune.data.pictures.expansion import read_pictures
from meshtune.data.pictures.files import load_picture
from meshtune.data.prepare import prepare_data
from meshtune.data.prompts import PromptLoader
from meshtune.data.report import DataReport
from meshtune.data.store import Store
from meshtune.data.stream import Stream
from meshtune.data.tokenizer import tokenizer_of
from meshtune.data.tokens import Example
from meshtune.errors import UserError, amount
from meshtune.json_text import read_json

if TYPE_CHECKING:
    from rich.console import RenderableType
    from transformers import PreTrainedTokenizerFast

    from meshtune.data.pictures.reader import PictureReader

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
    pictures = getattr(prepared.train, "pictures", None)
    reader = None if pictures is None else pictures.reader
    if examples:
        console.print(legend(console))
    for example in examples:
        console.print(Rule(f"{example.origin}: {amount(len(example.ids), 'token')}", style="dim", align="left"))
        if reader is not None and example.extra:
            for line, item in zip(picture_lines(reader, example), read_pictures(example.extra), strict=True):
                console.print(line)
                if console.color_system in ("truecolor", "256"):
                    console.print(thumbnail(item.picture, str(example.origin)))
            example = without_repeats(reader, example)
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
    of_sources = data.store.firsts() if count else []
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


def picture_lines(reader: PictureReader, example: Example) -> Iterator[str]:
    """The sizes of each picture of a document, its patches and tokens."""
    for item in read_pictures(example.extra):
        layout = reader.layout(*item.picture.size)
        tiles = f"{amount(len(layout.tiles), 'tile')}, " if reader.tile_patches else ""
        yield (
            f"{item.picture.path}: {item.picture.width} x {item.picture.height} pixels, {tiles}"
            f"{amount(layout.patches, 'patch', 'patches')}, {amount(len(layout.ids), 'token')}"
        )


def thumbnail(picture: Picture, where: str, columns: int = 32) -> Text:
    """A picture in half blocks of colour, `columns` wide at most. Raises UserError where it cannot be read."""
    image = load_picture(picture, where)
    image.thumbnail((columns, columns))
    pixels, text = np.asarray(image), Text()
    for row in range(0, len(pixels) - 1, 2):
        for upper, lower in zip(pixels[row].tolist(), pixels[row + 1].tolist(), strict=True):
            text.append("▀", f"rgb({','.join(map(str, upper))}) on rgb({','.join(map(str, lower))})")
        text.append("\n")
    return text


def without_repeats(reader: PictureReader, example: Example) -> Example:
    """The document with one token in place of each run of features."""
    visual = np.zeros(len(example.ids), np.int32)
    for item in read_pictures(example.extra):
        layout = reader.layout(*item.picture.size)
        visual[item.start : item.start + len(layout.ids)] = layout.visual
    kept = (visual == 0) | np.concatenate([[True], visual[:-1] == 0])
    return dataclasses.replace(example, ids=example.ids[kept], weights=example.weights[kept])


def render(report: DataReport) -> RenderableType:
    """The report for a terminal: a table, the histogram, notes and warnings."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    counts = report.counts
    table = Table(title=f"{report.split} data", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan")
    table.add_column(justify="right")
    table.add_column(style="dim")
    left_out = report.samples_left_out
    table.add_row(report.noun, f"{report.samples:,}", f"{left_out:,} left out" if left_out else "")
    if report.skipped:
        table.add_row("skipped records", f"{len(report.skipped):,}", "")
    table.add_row("tokens", f"{counts.tokens:,}", f"longest document {report.longest:,}")
    if report.dataset_type == "prompts":
        table.add_row("steps per epoch", f"{report.steps_per_epoch:,}", "")
    else:
        share = counts.trained_tokens / max(counts.tokens, 1)
        table.add_row("trained tokens", f"{counts.trained_tokens:,}", f"{share:.1%} of all")
        layout = "packed" if report.packing else "padded"
        table.add_row("rows", f"{report.rows:,}", f"{layout}, {amount(report.row_length, 'position')} each")
        table.add_row("packing efficiency" if report.packing else "positions used", f"{report.efficiency:.1%}", "")
        table.add_row("steps per epoch", f"{report.steps_per_epoch:,}", f"{amount(report.batch_rows, 'row')} each")
    if (counted := report.pictures) is not None:
        patches, tokens = counted.patches / counted.pictures, counted.tokens / counted.pictures
        each = f"{patches:,.0f} patches and {tokens:,.0f} tokens each"
        table.add_row("pictures", f"{counted.pictures:,}", each)
        sizes = f"of {' or '.join(f'{size:,}' for size in counted.sizes)} patches"
        table.add_row("rows with pictures", f"{counted.rows:,}", f"{sizes}, {counted.fill:.1%} of them used")
    bars = Table(title="tokens per document", title_justify="left", show_header=False, box=None, pad_edge=False)
    bars.add_column(justify="right", style="cyan")
    bars.add_column(justify="right")
    bars.add_column()
    largest = max(count for *_, count in report.histogram)
    for shortest, longest, count in report.histogram:
        bar = Text("█" * -(-count * 40 // largest), style="green")
        bars.add_row(f"{shortest:,} to {longest:,}", f"{count:,}", bar)
    lines = [Text(f"note: {note}", style="dim") for note in report.notes]
    lines += [Text.assemble(("warning: ", "bold yellow"), warning) for warning in report.warnings]
    for skipped in report.skipped[:10]:
        lines.append(Text(f"  skipped {skipped.origin}: {skipped.reason}", style="dim"))
    if len(report.skipped) > 10:
        lines.append(Text(f"  ... and {len(report.skipped) - 10} more", style="dim"))
    return Group(table, Text(), bars, Text(), *lines)
