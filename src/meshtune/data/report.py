"""The report on prepared data: counts, a length histogram and warnings, as a dataclass and for a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshtune.data.checked_source import SkippedRecord
from meshtune.data.loader import Loader
from meshtune.data.stream import Stream
from meshtune.data.tokens import TokenCounts
from meshtune.data.window_rows import WindowRows
from meshtune.errors import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from meshtune.objectives.stages import DatasetType

# Shares beyond which there is a warning.
_SHARE_CUT, _SHARE_COPIES, _SHARE_TRAINED, _SHARE_FULL = 0.05, 0.05, 0.02, 0.8


@dataclasses.dataclass(frozen=True)
class TemplateInfo:
    """Properties of the chat template that was used."""

    end_of_turn: str
    end_is_token: bool
    writes_date: bool


@dataclasses.dataclass(frozen=True)
class DataReport:
    """The report on one split of the data.

    `efficiency` is the share of positions in the rows of the first epoch that hold a token, without the padding rows of
    its last batch. `histogram` lists (shortest, longest, documents) of each bin of lengths in tokens, both inclusive.
    `copies` counts documents with the same tokens as an earlier one; of a stream it is 0. With `sampled` the counts are
    estimates from that many samples, as of a stream. `template` is None for plain text. `cache_damage`
    describes a damaged store that was replaced. A sample of `dataset_type` pairs is two documents.
    """

    split: str
    counts: TokenCounts
    skipped: tuple[SkippedRecord, ...]
    rows: int
    row_length: int
    packing: bool
    steps_per_epoch: int
    batch_rows: int
    efficiency: float
    histogram: tuple[tuple[int, int, int], ...]
    longest: int
    copies: int
    max_length: int
    template: TemplateInfo | None = None
    cache_damage: str | None = None
    dataset_type: DatasetType = "documents"
    sampled: int | None = None

    @property
    def samples(self) -> int:
        """The number of documents, pairs or labelled answers to train on."""
        return self.counts.examples // 2 if self.dataset_type == "pairs" else self.counts.examples

    @property
    def samples_left_out(self) -> int:
        """The number of documents, pairs or labelled answers that were read and left out."""
        left_out = self.counts.documents - self.counts.examples
        return left_out // 2 if self.dataset_type == "pairs" else left_out

    @property
    def noun(self) -> str:
        """What `samples` counts: in the singular if it is 1."""
        noun = "labelled answers" if self.dataset_type == "labelled" else self.dataset_type
        return noun.removesuffix("s") if self.samples == 1 else noun

    @property
    def notes(self) -> list[str]:
        """Facts worth knowing that are no cause for concern."""
        counts, notes = self.counts, []
        if self.sampled is not None:
            notes.append(f"a stream: its numbers are estimated from {self.sampled:,} of its {self.noun}")
        if counts.split:
            notes.append(
                f"{counts.split} documents are tokenised in parts at the start of an answer, where the tokenizer would "
                "merge it with the prompt: generation will see the same tokens"
            )
        if self.template and self.template.writes_date:
            notes.append("the chat template writes today's date; in training it always writes 26 Jul 2024")
        return notes

    @property
    def warnings(self) -> list[str]:
        """Everything that makes the result worse than it could be, each with its remedy."""
        damage = [f"{self.cache_damage}; they were made anew"] if self.cache_damage else []
        return [*damage, *_losses(self), *_training_problems(self), *_inefficiencies(self)]


def make_report(
    split: str,
    loader: Loader,
    counts: TokenCounts,
    skipped: Sequence[SkippedRecord],
    *,
    max_length: int,
    template: TemplateInfo | None = None,
    dataset_type: DatasetType = "documents",
) -> DataReport:
    """The report on a loader's store and the rows of its first epoch."""
    store, rows = loader.store, loader.rows(0)
    lengths = store.lengths
    unrendered = (SkippedRecord(origin, reason) for origin, reason in counts.skipped)
    return DataReport(
        split=split,
        counts=counts,
        skipped=(*skipped, *unrendered),
        rows=len(rows),
        row_length=loader.row_length,
        packing=loader.packing,
        steps_per_epoch=loader.steps_per_epoch(0),
        batch_rows=loader.batch_size,
        efficiency=float((lengths - 1).sum() / (len(rows) * loader.row_length)),
        histogram=histogram(lengths),
        longest=int(lengths.max()),
        copies=len(store) - len(np.unique(store.digests)),
        max_length=max_length,
        template=template,
        cache_damage=store.damage,
        dataset_type=dataset_type,
    )


def stream_report(stream: Stream, counts: TokenCounts, lengths: np.ndarray) -> DataReport:
    """The report on a stream: counts and lengths of a sample of its documents, tokens and documents of the run."""
    rows = stream.steps * stream.batch_size
    tokens = rows * stream.row_length
    documents = len(stream.documents)
    counts = dataclasses.replace(counts, documents=documents, examples=documents, tokens=tokens, trained_tokens=tokens)
    return DataReport(
        split="train",
        counts=counts,
        skipped=(),
        rows=rows,
        row_length=stream.row_length,
        packing=True,
        steps_per_epoch=stream.steps,
        batch_rows=stream.batch_size,
        efficiency=1.0,
        histogram=histogram(lengths),
        longest=int(lengths.max()),
        copies=0,
        max_length=stream.row_length,
    )


def window_report(
    stream: Stream, rows: WindowRows, template: TemplateInfo | None, dataset_type: DatasetType
) -> DataReport:
    """The report on a stream of samples: estimates from its first window, for all samples (documents that are left out,
    cut and so on) and for the rows of the run (tokens)."""
    window, total = rows.window(0, 0), len(rows.documents)
    sampled, run_rows = min(total, rows.window_size), stream.steps * stream.batch_size
    used = int((window.lengths - 1).sum())
    share = used / (len(window.rows) * rows.row_length)
    trained = window.counts.trained_tokens / max(1, window.counts.tokens)
    tokens = round(share * run_rows * rows.row_length)
    scaled = {
        field.name: round(getattr(window.counts, field.name) * total / sampled)
        for field in dataclasses.fields(TokenCounts)
        if field.name != "skipped"
    }
    counts = TokenCounts(**{**scaled, "tokens": tokens, "trained_tokens": round(trained * tokens)})
    return DataReport(
        split="train",
        counts=counts,
        skipped=tuple(SkippedRecord(origin, reason) for origin, reason in window.counts.skipped),
        rows=run_rows,
        row_length=rows.row_length,
        packing=rows.packing,
        steps_per_epoch=stream.steps,
        batch_rows=rows.batch_size,
        efficiency=share,
        histogram=histogram(window.lengths),
        longest=int(window.lengths.max()),
        copies=0,
        max_length=rows.row_length // rows.unit_size,
        template=template,
        dataset_type=dataset_type,
        sampled=sampled,
    )


def histogram(lengths: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """(shortest, longest, documents) of bins that double in width, from the shortest document to the longest."""
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(powers)
    return tuple((2**p, 2 ** (p + 1) - 1, int(counts[p])) for p in range(int(powers.min()), int(powers.max()) + 1))


def _losses(report: DataReport) -> list[str]:
    """Warnings about data that are left out."""
    counts, warnings = report.counts, []
    if report.skipped:
        first = report.skipped[0]
        warnings.append(f"{len(report.skipped)} records were skipped; the first: {first.origin}: {first.reason}")
    if counts.truncated:
        share = counts.truncated / max(counts.documents, 1)
        warnings.append(
            f"{counts.truncated} of {counts.documents} documents ({share:.1%}) are cut at max_length "
            f"{report.max_length}, {counts.tokens_cut} tokens in all: cut answers do not teach the end of turn"
            + ("; raise data.max_length" if share > _SHARE_CUT else "")
        )
    if counts.nothing_after_truncation:
        warnings.append(
            f"{counts.nothing_after_truncation} documents are left out: nothing to train on after truncation (their "
            f"prompts alone fill {report.max_length} tokens); raise data.max_length"
        )
    if counts.dropped:
        warnings.append(f"{counts.dropped} documents are dropped because they exceed {report.max_length} tokens")
    if counts.nothing_to_train:
        warnings.append(f"{counts.nothing_to_train} documents are left out: they contain nothing to train on")
    return warnings


def _training_problems(report: DataReport) -> list[str]:
    """Warnings about documents that do not teach what they should."""
    counts, warnings = report.counts, []
    if counts.unended:
        warnings.append(f"{counts.unended} answers have no end of turn in the chat template: they do not teach to stop")
    if report.template and not report.template.end_is_token and report.template.end_of_turn:
        warnings.append(
            f"the chat template ends turns with the text {report.template.end_of_turn!r}, which is not a token of this "
            "tokenizer: generation will not know where to stop; choose a template that writes eos_token, such as plain"
        )
    if counts.without_eos:
        warnings.append("the tokenizer has no end-of-sequence token: the model does not learn to stop")
    if counts.prompts_differ:
        warnings.append(
            f"{counts.prompts_differ} answers follow a prompt that the template writes differently in generation (such "
            "as a system prompt shown only with the last message)"
        )
    if counts.double_bos:
        warnings.append(
            f"{counts.double_bos} conversations begin with two beginning-of-sequence tokens: check the chat template"
        )
    if counts.straddling:
        warnings.append(
            f"in {counts.straddling} documents a token spans the end of a prompt and the start of an answer, and is "
            "trained on as part of the answer"
        )
    if counts.special_in_text:
        warnings.append(
            f"{counts.special_in_text} documents contain special tokens in their own text, such as an end of turn"
        )
    return warnings


def _inefficiencies(report: DataReport) -> list[str]:
    """Warnings about wasted computation."""
    counts, warnings = report.counts, []
    if counts.examples and report.copies / counts.examples > _SHARE_COPIES:
        share = report.copies / counts.examples
        warnings.append(f"{report.copies} of {counts.examples} documents ({share:.0%}) are copies of others")
    if counts.tokens and counts.trained_tokens / counts.tokens < _SHARE_TRAINED:
        share = counts.trained_tokens / counts.tokens
        warnings.append(f"only {share:.1%} of the tokens are trained on: prompts are much longer than answers")
    if report.efficiency < _SHARE_FULL:
        remedy = "a shorter data.max_length wastes less" if report.packing else "data.packing=true would fill the rows"
        warnings.append(f"{1 - report.efficiency:.0%} of the positions are padding; {remedy}")
    if report.split == "train" and report.rows < report.batch_rows:
        warnings.append(
            f"an epoch has {counted(report.rows, 'row')}, fewer than the {report.batch_rows} of a batch: a smaller "
            "train.batch_size wastes less"
        )
    return warnings


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
    share = counts.trained_tokens / max(counts.tokens, 1)
    table.add_row("trained tokens", f"{counts.trained_tokens:,}", f"{share:.1%} of all")
    layout = "packed" if report.packing else "padded"
    table.add_row("rows", f"{report.rows:,}", f"{layout}, {report.row_length:,} positions each")
    table.add_row("packing efficiency" if report.packing else "positions used", f"{report.efficiency:.1%}", "")
    table.add_row("steps per epoch", f"{report.steps_per_epoch:,}", f"{report.batch_rows:,} rows each")
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
