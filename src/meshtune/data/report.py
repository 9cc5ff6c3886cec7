"""What became of the data: counts, a length histogram, and every warning, as a dataclass and as a picture of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshtune.data.documents import SkippedRecord
from meshtune.data.loader import Loader
from meshtune.data.stream import Stream
from meshtune.data.tokens import TokenCounts

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHARE_CUT, _SHARE_COPIES, _SHARE_LEARNED, _SHARE_FULL = 0.05, 0.05, 0.02, 0.8  # beyond which a warning is due


@dataclasses.dataclass(frozen=True)
class TemplateInfo:
    """What is known of the chat template; None of it for plain text."""

    end_of_turn: str
    end_is_token: bool
    writes_date: bool


@dataclasses.dataclass(frozen=True)
class DataReport:
    """Counts of one split. `tokens` are ids of kept documents, `learned` those with a weight above 0.

    `efficiency` is the share of the first epoch's positions that hold a token, padding rows of the last batch left
    out. `histogram` lists (tokens from, tokens to, documents), both inclusive. `copies` are documents whose tokens are
    those of an earlier one.
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

    @property
    def notes(self) -> list[str]:
        """What is good to know and no cause for worry."""
        counts, found = self.counts, []
        if counts.split:
            found.append(
                f"{counts.split} documents are tokenised apart at the edge of an answer, where the tokenizer would "
                "merge it with the prompt: this is how generation will see them"
            )
        if self.template and self.template.writes_date:
            found.append("the chat template writes today's date; in training it always writes 26 Jul 2024")
        return found

    @property
    def warnings(self) -> list[str]:
        """Everything that makes the result worse than it could be, each with its remedy."""
        return [*_lost(self), *_mistaught(self), *_wasted(self)]


def make_report(
    split: str,
    loader: Loader,
    counts: TokenCounts,
    skipped: Sequence[SkippedRecord],
    *,
    max_length: int,
    template: TemplateInfo | None = None,
) -> DataReport:
    """The report of a loader's store, its first epoch's rows included."""
    store, rows = loader.store, loader.rows(0)
    lengths = store.lengths
    every = [*skipped, *(SkippedRecord(origin, reason) for origin, reason in counts.skipped)]
    return DataReport(
        split=split,
        counts=counts,
        skipped=tuple(every),
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
    )


def stream_report(stream: Stream, counts: TokenCounts, lengths: np.ndarray) -> DataReport:
    """The report of a stream of which only a sample is known: its counts and lengths are the sample's, its tokens and
    documents those of the run."""
    rows = stream.steps * stream.batch_size
    whole = dataclasses.replace(counts, examples=len(stream.documents), tokens=rows * stream.row_length)
    return DataReport(
        split="train",
        counts=dataclasses.replace(whole, learned=whole.tokens),
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


def histogram(lengths: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """(from, to, documents) in bins that double, from the shortest document's to the longest's; both ends inclusive."""
    powers = np.floor(np.log2(np.maximum(lengths, 1))).astype(int)
    found = np.bincount(powers)
    return tuple((2**p, 2 ** (p + 1) - 1, int(found[p])) for p in range(int(powers.min()), int(powers.max()) + 1))


def _lost(report: DataReport) -> list[str]:
    counts, found = report.counts, []
    if report.skipped:
        found.append(f"{len(report.skipped)} records were skipped; the first: {_first(report)}")
    if counts.truncated:
        share = counts.truncated / max(counts.documents, 1)
        cut = f"{counts.truncated} of {counts.documents} documents ({share:.1%}) are cut at max_length "
        cut += f"{report.max_length}, {counts.tokens_cut} tokens in all: cut answers do not teach the end of turn"
        found.append(cut + ("; raise data.max_length" if share > _SHARE_CUT else ""))
    if counts.nothing_after_truncation:
        found.append(
            f"{counts.nothing_after_truncation} documents are left out: nothing to learn after truncation (their "
            f"prompts alone fill {report.max_length} tokens); raise data.max_length"
        )
    if counts.dropped:
        found.append(f"{counts.dropped} documents are dropped for being longer than {report.max_length} tokens")
    if counts.nothing_to_learn:
        found.append(f"{counts.nothing_to_learn} documents are left out: nothing in them is learned")
    return found


def _mistaught(report: DataReport) -> list[str]:
    counts, found = report.counts, []
    if counts.unended:
        found.append(f"{counts.unended} answers have no end of turn in the chat template: they do not teach to stop")
    if report.template and not report.template.end_is_token and report.template.end_of_turn:
        found.append(
            f"the chat template ends turns with the text {report.template.end_of_turn!r}, which is no token of this "
            "tokenizer: generation will not know where to stop; choose a template that writes eos_token, such as plain"
        )
    if counts.without_eos:
        found.append("the tokenizer has no end-of-sequence token: the model does not learn to stop")
    if counts.prompts_differ:
        found.append(
            f"{counts.prompts_differ} answers follow a prompt that the template writes differently when generating "
            "(such as a system prompt shown only with the last message)"
        )
    if counts.tools_unseen:
        found.append(
            f"{counts.tools_unseen} conversations offer tools that the chat template does not show to the model"
        )
    if counts.double_bos:
        found.append(f"{counts.double_bos} conversations begin with two beginning-of-sequence tokens: see the template")
    if counts.straddling:
        found.append(
            f"in {counts.straddling} documents a token spans the edge between prompt and answer, and is learned whole"
        )
    if counts.special_in_text:
        found.append(
            f"{counts.special_in_text} documents hold special tokens in their own text, such as an end of turn"
        )
    return found


def _wasted(report: DataReport) -> list[str]:
    counts, found = report.counts, []
    if counts.examples and report.copies / counts.examples > _SHARE_COPIES:
        found.append(
            f"{report.copies} of {counts.examples} documents ({report.copies / counts.examples:.0%}) are copies of "
            "others"
        )
    if counts.tokens and counts.learned / counts.tokens < _SHARE_LEARNED:
        found.append(f"only {counts.learned / counts.tokens:.1%} of the tokens are learned: prompts dwarf the answers")
    if report.efficiency < _SHARE_FULL:
        remedy = "a shorter data.max_length wastes less" if report.packing else "data.packing=true would fill the rows"
        found.append(f"{1 - report.efficiency:.0%} of the positions are padding; {remedy}")
    if report.split == "train" and report.rows < report.batch_rows:
        found.append(
            f"an epoch has {report.rows} rows, fewer than the {report.batch_rows} of a batch: a smaller "
            "train.batch_size wastes less"
        )
    return found


def _first(report: DataReport) -> str:
    return f"{report.skipped[0].origin}: {report.skipped[0].reason}"


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
    left_out = counts.documents - counts.examples
    table.add_row("documents", f"{counts.examples:,}", f"{left_out:,} left out" if left_out else "")
    if report.skipped:
        table.add_row("skipped records", f"{len(report.skipped):,}", "")
    table.add_row("tokens", f"{counts.tokens:,}", f"longest document {report.longest:,}")
    table.add_row("learned tokens", f"{counts.learned:,}", f"{counts.learned / max(counts.tokens, 1):.1%} of all")
    kind = "packed" if report.packing else "padded"
    table.add_row("rows", f"{report.rows:,}", f"{kind}, {report.row_length:,} positions each")
    table.add_row("packing efficiency" if report.packing else "positions used", f"{report.efficiency:.1%}", "")
    table.add_row("steps an epoch", f"{report.steps_per_epoch:,}", f"{report.batch_rows:,} rows each")
    bars = Table(title="tokens a document", title_justify="left", show_header=False, box=None, pad_edge=False)
    bars.add_column(justify="right", style="cyan")
    bars.add_column(justify="right")
    bars.add_column()
    most = max(number for *_, number in report.histogram)
    for low, high, number in report.histogram:
        bars.add_row(f"{low:,} to {high:,}", f"{number:,}", Text("█" * -(-number * 40 // most), style="green"))
    lines = [Text(f"note: {note}", style="dim") for note in report.notes]
    lines += [Text.assemble(("warning: ", "bold yellow"), warning) for warning in report.warnings]
    for one in report.skipped[:10]:
        lines.append(Text(f"  skipped {one.origin}: {one.reason}", style="dim"))
    if len(report.skipped) > 10:
        lines.append(Text(f"  ... and {len(report.skipped) - 10} more", style="dim"))
    return Group(table, Text(), bars, Text(), *lines)
